"""A client's folder as the application uses it: locking, consent and erasure.

:mod:`fedlearn.client.home` lists the files in it, and manages the others.
"""

import json
import os
import re
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
from fedlearn.core.files import explain_disk_errors, make_private_folder, sync_folder, write_private
from fedlearn.core.locks import open_lock, read_note, take_lock, write_note
from fedlearn.errors import DeploymentError
from fedlearn.processes.descendants import MARK, end_marked, has_mark
from fedlearn.processes.forks import keep_from_forks

_GRANTED, _REVOKED = b"granted", b"revoked"
_LOCK_POLL_S = 0.05
#: Seconds that a training process gets to shut down cleanly after its application has died.
_ORPHAN_S = 2.0
#: Seconds after which it must be gone: a process inside a system call dies only when that returns.
_ORPHAN_GONE_S = 30.0
#: Seconds that a running process gets to notice that consent was revoked, and to exit.
_REVOKED_S = 30.0
#: Names of this client's files in the folder; all other files belong to someone else.
_OWN = (
    "consent",
    "identity",
    "identity.new",
    "identity.old",
    "pins.json",
    "history.json",
    "rotate",
    "state",
    "tasks",
    "task",  # of an earlier version
    "ahead",
    "constants",
    "spool",
    "tasks.json",
    "evaluations.json",
    "privacy.json",
    "studies",
    "bundles",
)
_STUDY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: What a study can be called.
STUDY_NAMES = "use up to 64 letters, digits, '-', '_' and '.', beginning with a letter or a digit"
#: Glob pattern of the random part in the names of files that are being written.
_SUFFIX = "[0-9a-f]" * 16


@dataclass(frozen=True)
class ClientFolder:
    """Locks a client's folder for one process at a time, and stores the user's consent.

    A method that writes or removes raises :class:`~fedlearn.errors.DeploymentError` if the disk is
    full or not writable, or if something cannot be removed; everything else is still removed. The
    folder is created on first use, with mode 0700.
    """

    folder: Path

    @contextmanager
    def lock(self, *, timeout_s: float = 0.0) -> Iterator[None]:
        """Hold the folder's lock, so that no other process works in it.

        A training process whose application has gone is killed after two seconds, along with its
        descendants, even if native code keeps it from reacting.

        Raises:
            DeploymentError: Another process still holds the lock after ``timeout_s``.
        """
        make_private_folder(self.folder)
        path = self.folder / "lock"
        with explain_disk_errors(path, raises=DeploymentError, doing="lock"):
            file = open_lock(path)
        with file:
            # The lock belongs to the open file, which a fork of the trainer would inherit. If it
            # outlived this process, it would lock out the next one.
            keep_from_forks(file)
            with explain_disk_errors(path, raises=DeploymentError, doing="lock"):
                self._wait_for(file, timeout_s=timeout_s)
                earlier, own = _Holder.in_note(read_note(path)), _Holder.this_process()
                if earlier is not None and earlier.mark != own.mark and earlier.is_orphan():
                    end_marked(earlier.mark)  # kill descendants that the earlier process left
                write_note(file, json.dumps(asdict(own)))
            yield

    def _wait_for(self, file: FileIO, *, timeout_s: float) -> None:
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
                    "process, or give this one its own folder"
                )
            clock.sleep(_LOCK_POLL_S)

    def is_in_use(self) -> bool:
        """Check whether a process works in this folder, without changing anything there."""
        path = self.folder / "lock"
        if not path.exists():
            return False
        with open_lock(path) as file:
            return not take_lock(file)

    def has_keys(self) -> bool:
        """Check whether this client is enrolled, or was interrupted while it replaced its keys."""
        places = (self.folder / name / "enrolment.json" for name in ("identity", "identity.new"))
        return any(place.exists() for place in places)

    # Consent

    def has_consent(self) -> bool:
        """Check whether the user has given consent."""
        return read_or_empty(self.folder / "consent").decode().strip() == _GRANTED.decode()

    def set_consent(self, *, granted: bool) -> None:
        """Save the user's decision durably.

        Consent covers only the future: when it is given again, leftovers of an interrupted
        revocation are erased first.

        Raises:
            DeploymentError: The file can be neither written nor removed. When consent is given:
                another process works in the folder and does not end, or something cannot be erased.
        """
        make_private_folder(self.folder)
        file = self.folder / "consent"
        if granted and not self.has_consent():
            with self.lock(timeout_s=_REVOKED_S):
                # Before the file: a crash in between leaves the client without consent, not with
                # old state.
                self.erase()
                write_private(file, _GRANTED)
        elif not granted:
            try:
                write_private(file, _REVOKED)
            except DeploymentError:
                # A full disk still allows removing the file, and no file means no consent.
                with explain_disk_errors(file, raises=DeploymentError, doing="remove"):
                    file.unlink(missing_ok=True)
                    sync_folder(self.folder)

    def list_studies(self, allowed: Iterable[str]) -> frozenset[str]:
        """Return the studies that the owner consents to.

        Args:
            allowed: Those of the policy; the owner may have withdrawn from one since.
        """
        folder = self.folder / "studies"
        said = {each.name: each.read_bytes() for each in folder.glob("[!.]*")}
        given = {name for name, what in said.items() if what == _GRANTED}
        return frozenset({*allowed, *given} - {name for name in said if name not in given})

    def set_study_consent(self, study: str, *, granted: bool) -> None:
        """Save the owner's decision about a study durably.

        Raises:
            DeploymentError: No study can have that name, or the file cannot be written.
        """
        if not is_study_name(study):
            raise DeploymentError(f"{study!r} is no study; {STUDY_NAMES}")
        make_private_folder(self.folder / "studies")
        write_private(self.folder / "studies" / study, _GRANTED if granted else _REVOKED)

    def erase(self) -> None:
        """Remove state, task and reply.

        Consent, also to studies, keys, certificate, pins, history and ε stay.

        These protect a user who gives consent again. Without the pins, a coordinator could
        substitute other clients' keys; without the history, it could have a second sum of the same
        round opened; without privacy.json, it could spend the day's ε twice.
        """
        counts = ("tasks.json", "evaluations.json")
        files = [self.folder / name for name in counts]
        places = [
            self._tasks,
            self._prefetched,
            self._constants,
            self._replies,
            self.folder / "state",
        ]
        remove_all([*places, *files])
        remove_all(find_half_written(self.folder, of=counts))

    def forget(self, *, timeout_s: float = 0.0) -> None:
        """Remove all of this client's files, including the keys.

        To join again, the client needs a new invitation. The folder itself is removed, too, unless
        it contains other files.

        Raises:
            DeploymentError: As for :meth:`lock`; or something cannot be removed.
        """
        with self.lock(timeout_s=timeout_s):
            remove_all(find_half_written(self.folder, of=_OWN))
            remove_all([self.folder / name for name in _OWN])
        with suppress(OSError):
            (self.folder / "lock").unlink()  # after closing it: Windows cannot remove an open file
            self.folder.rmdir()  # fails if the folder is not empty

    @property
    def _tasks(self) -> Path:
        return self.folder / "tasks"

    @property
    def _prefetched(self) -> Path:
        return self.folder / "ahead"

    @property
    def _constants(self) -> Path:
        return self.folder / "constants"

    @property
    def _replies(self) -> Path:
        return self.folder / "spool"


def is_study_name(name: str) -> bool:
    """Whether a study can have this name."""
    return _STUDY.fullmatch(name) is not None


def default_home(name: str, *, environ: Mapping[str, str]) -> Path:
    """Return the default folder of the client called ``name``, by the XDG convention.

    Example:
        >>> default_home("clinic-a", environ={"XDG_DATA_HOME": "/data"})
        PosixPath('/data/fedlearn/clinic-a')
    """
    base = environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "fedlearn" / name


def read_or_empty(path: Path) -> bytes:
    """Read a file; empty if it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def find_half_written(folder: Path, *, of: Iterable[str] = ("*",)) -> list[Path]:
    """List the temporary files that processes killed during a write have left in ``folder``."""
    return [path for name in of for path in folder.glob(f".{name}.{_SUFFIX}.tmp")]


def remove_all(paths: list[Path]) -> None:
    """Remove files and folders, skipping those that do not exist.

    Raises:
        DeploymentError: One cannot be removed; the others are.
    """
    with ExitStack() as removals:  # makes every removal, even if one raises
        # The stack unwinds in reverse order, so this removes them in the order given.
        for path in reversed(paths):
            removals.callback(_remove, path)


def _remove(path: Path) -> None:
    with (
        explain_disk_errors(path, raises=DeploymentError, doing="remove"),
        suppress(FileNotFoundError),
    ):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@dataclass(frozen=True)
class _Holder:
    """The process that works in a folder, as noted in the lock file.

    Attributes:
        pid: Its process id.
        parent: The process id of its parent.
        mark: The mark in its environment if it is a training process, or else empty.
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
        except ValidationError:  # no note, or one of another version
            return None

    def is_orphan(self) -> bool:
        """Check whether this is a training process that has exited or lost its application."""
        if not self.mark:
            return False
        try:
            process = psutil.Process(self.pid)
            parent = process.parent()
        except psutil.Error:
            return True
        # An orphan is adopted by another process, or on Windows has no parent.
        return not has_mark(process, self.mark) or parent is None or parent.pid != self.parent


_HOLDER = TypeAdapter(_Holder)
