"""A client's folder as its application sees it: whose it is, and whether the user agrees.

What lies in it says :mod:`fedlearn.client.home`, which works with the rest.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import ClassVar

import psutil
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedlearn.core.clock import SystemClock
from fedlearn.core.files import disk_errors, make_private_folder, sync_folder, write_private
from fedlearn.core.locks import open_lock, read_note, take_lock, write_note
from fedlearn.errors import DeploymentError
from fedlearn.processes.descendants import MARK, end_marked, has_mark
from fedlearn.processes.forks import keep_from_forks

_GRANTED, _REVOKED = b"granted", b"revoked"
_LOCK_POLL_S = 0.05
#: Seconds that a training process whose application has gone gets to end in order.
_ORPHAN_S = 2.0
#: Seconds after which it must be gone: the kernel ends one that is inside of a call last.
_ORPHAN_GONE_S = 30.0
#: Seconds that the process of a consent that was revoked gets to see it, and to end.
_REVOKED_S = 30.0
#: Names in the folder that are this client's; whatever else lies there is somebody else's.
_OWN = (
    "consent",
    "identity",
    "identity.new",
    "identity.old",
    "pins.json",
    "history.json",
    "rotate",
    "state",
    "task",
    "ahead",
    "constants",
    "spool",
    "tasks.json",
    "evaluations.json",
    "privacy.json",
)
#: Of the names of files that are being written.
_SUFFIX = "[0-9a-f]" * 16


@dataclass(frozen=True)
class ClientFolder:
    """Keeps one process at a time in a client's folder, and its user's decision.

    A method that writes or removes raises :class:`~fedlearn.errors.DeploymentError` if the disk is
    full or not writable, or if something cannot be removed; all else that it removes is. The folder
    is made on first use, mode 0700.
    """

    folder: Path

    @contextmanager
    def locked(self, *, timeout_s: float = 0.0) -> Iterator[None]:
        """Be the only process that works in this folder.

        A training process whose application has gone is ended after two seconds, along with all
        that it has started, even if native code keeps it from listening.

        Raises:
            DeploymentError: Another process works here, also after ``timeout_s``.
        """
        make_private_folder(self.folder)
        path = self.folder / "lock"
        with disk_errors(path, raises=DeploymentError, doing="lock"):
            file = open_lock(path)
        with file:
            # The lock belongs to the open file, which a forked child of a trainer would share:
            # one that outlives this process would keep the folder from the next.
            keep_from_forks(file)
            with disk_errors(path, raises=DeploymentError, doing="lock"):
                self._wait_for(file, timeout_s=timeout_s)
                earlier, own = _Holder.in_note(read_note(path)), _Holder.this_process()
                if earlier is not None and earlier.mark != own.mark and earlier.is_orphan():
                    end_marked(earlier.mark)  # the rest of what it had started
                write_note(file, json.dumps(asdict(own)))
            yield

    def _wait_for(self, file: FileIO, *, timeout_s: float) -> None:
        """Take the lock, or raise after ``timeout_s``."""
        clock, path = SystemClock(), self.folder / "lock"
        begin_s = clock.now_s()
        while not take_lock(file):
            waited_s, patience_s = clock.now_s() - begin_s, timeout_s
            holder = _Holder.in_note(read_note(path))
            if holder is not None and holder.is_orphan():
                patience_s = max(timeout_s, _ORPHAN_GONE_S)
                if waited_s > _ORPHAN_S:
                    end_marked(holder.mark)
            if waited_s > patience_s:
                raise DeploymentError(
                    f"{self.folder} is in use by another process of this client; stop that "
                    "one, or give this one a folder of its own"
                )
            clock.sleep(_LOCK_POLL_S)

    def is_in_use(self) -> bool:
        """Return whether a process works in this folder, where nothing changes by the look."""
        path = self.folder / "lock"
        if not path.exists():
            return False
        with open_lock(path) as file:
            return not take_lock(file)

    def has_keys(self) -> bool:
        """Return whether this client is enrolled, or was just about to take new keys over."""
        places = (self.folder / name / "enrolment.json" for name in ("identity", "identity.new"))
        return any(place.exists() for place in places)

    # Consent

    def has_consent(self) -> bool:
        """Return whether the user agrees; off until they do."""
        return content_of(self.folder / "consent").decode().strip() == _GRANTED.decode()

    def set_consent(self, *, granted: bool) -> None:
        """Keep the user's decision durably.

        A user who agrees again agrees to what comes: what a revocation that was cut short has
        left is erased first.

        Raises:
            DeploymentError: It can be neither written nor removed; or, where there was no consent,
                another process works in the folder and does not end, or something cannot be erased.
        """
        make_private_folder(self.folder)
        file = self.folder / "consent"
        if granted and not self.has_consent():
            with self.locked(timeout_s=_REVOKED_S):
                self.erase()
                write_private(file, _GRANTED)
        elif not granted:
            try:
                write_private(file, _REVOKED)
            except DeploymentError:  # on a full disk a file can still go, and none is no consent
                with disk_errors(file, raises=DeploymentError, doing="remove"):
                    file.unlink(missing_ok=True)
                    sync_folder(self.folder)

    def erase(self) -> None:
        """Remove state, task and reply; consent, keys, certificate, pins, history and ε stay.

        To a user who agrees again, a coordinator could without pins name other keys, without the
        history have another sum of a round opened, and without privacy.json ask for the day's ε
        again.
        """
        counts = ("tasks.json", "evaluations.json")
        files = [self.folder / name for name in counts]
        places = [self._task, self._ahead, self._constants, self._spool, self.folder / "state"]
        remove_all([*places, *files])
        remove_all(half_written(self.folder, of=counts))

    def forget(self, *, timeout_s: float = 0.0) -> None:
        """Remove all that is this client's, keys included: to join again takes a new invitation.

        The folder goes as well, unless somebody else keeps something there.

        Raises:
            DeploymentError: As of :meth:`locked`; or something cannot be removed.
        """
        with self.locked(timeout_s=timeout_s):
            remove_all(half_written(self.folder, of=_OWN))
            remove_all([self.folder / name for name in _OWN])
        with suppress(OSError):
            (self.folder / "lock").unlink()  # after its end: Windows keeps an open file
            self.folder.rmdir()  # not if it is not empty

    @property
    def _task(self) -> Path:
        return self.folder / "task"

    @property
    def _ahead(self) -> Path:
        return self.folder / "ahead"

    @property
    def _constants(self) -> Path:
        return self.folder / "constants"

    @property
    def _spool(self) -> Path:
        return self.folder / "spool"


def default_home(name: str, *, environ: Mapping[str, str]) -> Path:
    """Return the folder of the client called ``name``, by the XDG convention.

    Example:
        >>> default_home("clinic-a", environ={"XDG_DATA_HOME": "/data"})
        PosixPath('/data/fedlearn/clinic-a')
    """
    base = environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "fedlearn" / name


def content_of(path: Path) -> bytes:
    """Return what a file holds; nothing if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def half_written(folder: Path, *, of: Iterable[str] = ("*",)) -> list[Path]:
    """Return what processes that were killed while they wrote files have left beside them."""
    return [path for name in of for path in folder.glob(f".{name}.{_SUFFIX}.tmp")]


def remove_all(paths: list[Path]) -> None:
    """Remove files and folders that are there.

    Raises:
        DeploymentError: One cannot be removed; the others are.
    """
    with ExitStack() as removals:  # one that fails does not keep it from the rest
        for path in reversed(paths):
            removals.callback(_remove, path)


def _remove(path: Path) -> None:
    with disk_errors(path, raises=DeploymentError, doing="remove"), suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@dataclass(frozen=True)
class _Holder:
    """Which process works in a folder, as its lock's note tells.

    Attributes:
        pid: Its number.
        parent: That of the process that has started it.
        mark: In its environment if it is a training process; else empty.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    pid: int
    parent: int
    mark: str

    @classmethod
    def this_process(cls) -> "_Holder":
        return cls(os.getpid(), os.getppid(), os.environ.get(MARK, ""))

    @classmethod
    def in_note(cls, note: str) -> "_Holder | None":
        try:
            return _HOLDER.validate_json(note)
        except ValidationError:  # none, or that of another version
            return None

    def is_orphan(self) -> bool:
        """Return whether this is a training process whose application has gone, or has ended."""
        if not self.mark:
            return False
        try:
            process = psutil.Process(self.pid)
            parent = process.parent()
        except psutil.Error:
            return True
        # The parent of an orphan is another process, or on Windows none.
        return not has_mark(process, self.mark) or parent is None or parent.pid != self.parent


_HOLDER = TypeAdapter(_Holder)
