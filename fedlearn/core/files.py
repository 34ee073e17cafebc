"""Atomic, durable file writes: after a crash, a file has its old or its new content.

Content is written to a temporary file in the same folder, synced to disk, and renamed in one
step. Then the folder is synced too, since fsync of a file does not cover its name.
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
    """Write a file, replacing an existing one; return once it is durable.

    Args:
        path: The file, in a folder that exists.
        content: The whole content.
        raises: The class of the error to raise instead of an OSError.
        mode: Permissions, minus those that the process's umask removes.

    Raises:
        FedlearnError: Of the class ``raises``: the file cannot be written (disk full, folder
            missing or read-only). No partial file is left.
    """
    with explain_disk_errors(path, raises=raises):
        temporary = _write_temporary(path, content, mode=mode)
        try:
            move_into_place(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        # After the rename: until the folder is synced, a crash may bring the old name back.
        sync_folder(path.parent)


def require_writable(path: Path, *, raises: type[FedlearnError]) -> None:
    """Check in advance that :func:`write_durably` can write to ``path``.

    Call it before the work whose result would be lost.

    Raises:
        FedlearnError: Of the class ``raises``: the folder is missing or read-only, or the path is
            a folder.
    """
    with explain_disk_errors(path, raises=raises):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Try it: permission bits alone do not show read-only file systems or access lists.
        _write_temporary(path, b"", mode=_PRIVATE).unlink()


def write_private(path: Path, content: bytes) -> None:
    """Write a file durably that only its owner can read (0600); raises DeploymentError."""
    write_durably(path, content, raises=DeploymentError, mode=_PRIVATE)


def create_private(path: Path, content: bytes) -> bool:
    """Create a private file unless it exists; return whether it was created.

    If several processes try at once, one succeeds, and the others see its complete file.

    Raises:
        DeploymentError: The file cannot be written. No partial file is left.
    """
    with explain_disk_errors(path, raises=DeploymentError):
        temporary = _write_temporary(path, content, mode=_PRIVATE)
        try:
            os.link(temporary, path)  # unlike a rename, this fails if the name is taken
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    return True


def make_private_folder(folder: Path) -> None:
    """Create ``folder``, which only its owner can access, and its parents.

    Raises:
        DeploymentError: The folder cannot be created, or belongs to another user.
    """
    with explain_disk_errors(folder, raises=DeploymentError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The umask limits mkdir's mode, and a folder that existed keeps its own.
        folder.chmod(0o700)


def move_into_place(source: Path, path: Path) -> None:
    """Rename ``source`` to ``path``, replacing the file there atomically.

    Windows refuses while another process has that file open. Processes of one client open each
    other's files for short moments, so on Windows the rename is retried for a second.

    Raises:
        OSError: The file cannot be renamed.
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
    """Flush an open file to the disk, and wait until it is there.

    Raises:
        OSError: The disk fails.
    """
    if sys.platform == "darwin":
        fcntl(file.fileno(), F_FULLFSYNC)  # fsync would leave it in the disk's cache
    else:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable; does nothing on Windows, which cannot sync a folder.

    Raises:
        OSError: The folder cannot be opened or synced.
    """
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def explain_disk_errors(
    path: Path, *, raises: type[FedlearnError], doing: str = "write"
) -> Iterator[None]:
    """Convert an OSError in the block to an error that says how to fix it.

    Args:
        path: The file or folder that the block works on.
        raises: The class of the error to raise. If it is StoreError and the disk is full,
            :class:`~fedlearn.errors.NoSpace` is raised instead.
        doing: What the block does with ``path``, as a verb.
    """
    try:
        yield
    except OSError as error:
        kind = NoSpace if raises is StoreError and is_full(error) else raises
        raise kind(f"cannot {doing} {path}: {error.strerror}; {suggest_remedy(error)}") from error


def is_full(error: OSError) -> bool:
    """Return whether an error means a full disk, a used-up quota or a file-size limit."""
    return error.errno in _FULL


def suggest_remedy(error: OSError) -> str:
    """Suggest to the user how to fix the error."""
    if is_full(error):
        return "free some space there"
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return "check the path"
    return "make it accessible to this user, or name another place"


def _write_temporary(path: Path, content: bytes, *, mode: int) -> Path:
    """Write ``content`` durably to a new, randomly named file in the folder of ``path``."""
    suffix = SecretBytes.generate(_SUFFIX_BYTES).reveal().hex()
    temporary = path.with_name(f".{path.name}.{suffix}.tmp")
    # O_EXCL: never follow or overwrite a file that is there already.
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


def map_file(path: Path) -> bytes | mmap:
    """Map a file into memory, so that its bytes are read only when they are accessed.

    On Windows a mapped file can be neither removed nor replaced, so there it is read instead.

    Raises:
        OSError: The file cannot be opened.
    """
    if sys.platform == "win32":
        return path.read_bytes()
    else:
        with path.open("rb") as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            # An empty file cannot be mapped.
            return mmap(stream.fileno(), num_bytes, access=ACCESS_READ) if num_bytes else b""
