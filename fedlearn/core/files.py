"""Files that a crash leaves whole: as they shall be, or as they were.

Content is written under another name beside its place, synchronised, and takes its name in
one step; then the folder is synchronised, since fsync of a file does not cover its name.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Protocol

from fedlearn.core.clock import SystemClock
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import DeploymentError, FedlearnError, NoSpace, StoreError

if sys.platform == "darwin":
    from fcntl import F_FULLFSYNC, fcntl

_FOR_ALL, _PRIVATE = 0o666, 0o600
_SUFFIX_BYTES = 8
_WINDOWS_TRIES, _WINDOWS_PAUSE_S = 50, 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class HasFileno(Protocol):
    """An open file of any kind."""

    def fileno(self) -> int:
        """Return its descriptor."""


def write_durably(
    path: Path, content: bytes, *, raises: type[FedlearnError], mode: int = _FOR_ALL
) -> None:
    """Write a file, replacing one that is there; return once it is durable.

    Args:
        path: In a folder that exists.
        content: All of it.
        raises: What a caller expects instead of an OSError.
        mode: Less what the process' umask takes away.

    Raises:
        FedlearnError: Of the class ``raises``: it cannot be written (disk full, folder missing
            or read-only); nothing half-written is left.
    """
    with disk_errors(path, raises=raises):
        temporary = _temporary(path, content, mode=mode)
        try:
            put_in_place(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def require_writable(path: Path, *, raises: type[FedlearnError]) -> None:
    """Make sure, before there is anything to lose, that :func:`write_durably` finds a place.

    Raises:
        FedlearnError: Of the class ``raises``: the folder is missing or read-only, or the path is
            a folder.
    """
    with disk_errors(path, raises=raises):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _temporary(path, b"", mode=_PRIVATE).unlink()


def write_private(path: Path, content: bytes) -> None:
    """Write as :func:`write_durably` does, mode 0600; raises DeploymentError."""
    write_durably(path, content, raises=DeploymentError, mode=_PRIVATE)


def create_private(path: Path, content: bytes) -> bool:
    """Write as :func:`write_private` does unless ``path`` is there; return whether it was not.

    Of several processes that do so at once, one succeeds, and the others find its file whole.

    Raises:
        DeploymentError: It cannot be written; nothing half-written is left.
    """
    with disk_errors(path, raises=DeploymentError):
        temporary = _temporary(path, content, mode=_PRIVATE)
        try:
            os.link(temporary, path)  # unlike a rename, it fails where the name is taken
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    return True


def make_private_folder(folder: Path) -> None:
    """Make ``folder`` and its parents; its owner alone may look into it.

    Raises:
        DeploymentError: It cannot be made, or is another's.
    """
    with disk_errors(folder, raises=DeploymentError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)


def put_in_place(source: Path, path: Path) -> None:
    """Rename ``source`` to ``path``, replacing the file there in one step.

    Windows refuses while another process has that file open. Processes of one client read each
    other's files for a moment, so it is tried again there for a second.

    Raises:
        OSError: It cannot be renamed.
    """
    if sys.platform == "win32":
        clock = SystemClock()
        for _ in range(_WINDOWS_TRIES):
            with suppress(PermissionError):
                source.replace(path)
                return
            clock.sleep(_WINDOWS_PAUSE_S)
    source.replace(path)


def sync_file(file: HasFileno) -> None:
    """Return once what was written to an open file is on the disk.

    Raises:
        OSError: The disk fails.
    """
    if sys.platform == "darwin":
        fcntl(file.fileno(), F_FULLFSYNC)  # fsync leaves it in the disk's cache
    else:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable; Windows has no way to ask for that.

    Raises:
        OSError: The folder cannot be opened or synchronised.
    """
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def disk_errors(path: Path, *, raises: type[FedlearnError], doing: str = "write") -> Iterator[None]:
    """Say in our words what the disk refuses the block.

    Args:
        path: What it is about.
        raises: The class of the error instead of an OSError; a full disk of a store is
            :class:`~fedlearn.errors.NoSpace`.
        doing: What the block does with ``path``.
    """
    try:
        yield
    except OSError as error:
        kind = NoSpace if raises is StoreError and is_full(error) else raises
        raise kind(f"cannot {doing} {path}: {error.strerror}; {remedy(error)}") from error


def is_full(error: OSError) -> bool:
    """Return whether the disk, or what this process may use of it, is full."""
    return error.errno in _FULL


def remedy(error: OSError) -> str:
    """Return what a user can do about it."""
    if is_full(error):
        return "free some space there"
    return "make it accessible to this user, or name another place"


def _temporary(path: Path, content: bytes, *, mode: int) -> Path:
    """Write ``content`` durably under a name of its own beside ``path``."""
    suffix = SecretBytes.generate(_SUFFIX_BYTES).reveal().hex()
    temporary = path.with_name(f".{path.name}.{suffix}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            sync_file(stream)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def mapped(path: Path) -> bytes | mmap:
    """Return a file's bytes, mapped: they are read where they are looked at.

    Not on Windows, where a file that is mapped can be neither removed nor replaced.

    Raises:
        OSError: The file cannot be opened.
    """
    if sys.platform == "win32":
        return path.read_bytes()
    else:
        with path.open("rb") as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            return mmap(stream.fileno(), num_bytes, access=ACCESS_READ) if num_bytes else b""
