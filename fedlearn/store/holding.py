"""Lock a run for the process that runs it, through a file in the run's folder.

The kernel releases the lock when the process ends, even by a crash. So the lock tells whether a run
that is recorded as running really is. On NFS, Linux sends the lock to the server, and all machines
see it; on a replicated file system, or one mounted with local locks, it covers only the processes
of this machine.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from fedlearn.core.clock import SystemClock
from fedlearn.core.files import explain_disk_errors
from fedlearn.core.locks import open_lock, read_note, take_lock, write_note
from fedlearn.errors import RunHeld, StoreError

_FILE = "lock"
#: Checking a lock takes it for a moment, so only a lock that stays taken belongs to a run.
_TRIES, _PAUSE_S = 10, 0.02
_LOOKS, _LOOK_PAUSE_S = 3, 0.001


@contextmanager
def hold_run(folder: Path) -> Iterator[None]:
    """Lock the run in ``folder`` for this process, until the block or the process ends.

    A process that is forked inside the block holds the lock, too.

    Raises:
        RunHeld: Another process, or another block of this process, holds the run.
        StoreError: The folder cannot be written, or its file system has no locks.
    """
    path = folder / _FILE
    with explain_disk_errors(path, raises=StoreError, doing="lock"):
        file = open_lock(path)
    with file:
        with explain_disk_errors(path, raises=StoreError, doing="lock"):
            if not _take_within(file, tries=_TRIES, pause_s=_PAUSE_S):
                raise RunHeld(run=folder.name, holder=read_note(path))
            # For the error message of the process that comes second; the lock alone decides.
            write_note(file, f"process {os.getpid()} on {socket.gethostname()}")
        yield


def is_held(folder: Path) -> bool | None:
    """Check whether a process holds the run in ``folder``; ``None`` if that cannot be told.

    It cannot be told if there is no lock file (the folder may be on another machine), or if the
    file cannot be opened.
    """
    try:
        with _open_to_look(folder / _FILE) as file:
            # Closing the file, on leaving the block, releases the lock again.
            return not _take_within(file, tries=_LOOKS, pause_s=_LOOK_PAUSE_S)
    except OSError:
        return None


def _open_to_look(path: Path) -> FileIO:
    try:
        return FileIO(path, "r+")  # NFS locks only files that are open for writing
    except PermissionError:
        return FileIO(path, "r")


def _take_within(file: FileIO, *, tries: int, pause_s: float) -> bool:
    clock = SystemClock()
    for _ in range(tries - 1):
        if take_lock(file):
            return True
        clock.sleep(pause_s)
    return take_lock(file)
