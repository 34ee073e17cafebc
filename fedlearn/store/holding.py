"""Which process a run is alive in: a lock on a file in the run's folder.

The kernel holds the lock for the process and releases it when the process is gone, however it
ended. So of a run that is recorded as running, the lock tells whether it is. On NFS, Linux sends
the lock to the server, and all machines see it; a file system that is mounted with local locks, or
replicated, tells only about processes of this machine.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from fedlearn.core.clock import SystemClock
from fedlearn.core.files import disk_errors
from fedlearn.core.locks import open_lock, read_note, take_lock, write_note
from fedlearn.errors import RunHeld, StoreError

_FILE = "lock"
#: A process that looks at a lock holds it for a moment: it belongs to another process if it stays.
_TRIES, _PAUSE_S = 10, 0.02
_LOOKS, _LOOK_PAUSE_S = 3, 0.001


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the run in ``folder`` for this process, until the block ends or the process does.

    A process that is forked in the block holds it, too.

    Raises:
        RunHeld: Another process holds it, or another block of this one.
        StoreError: The folder cannot be written, or its file system knows no locks.
    """
    path = folder / _FILE
    with disk_errors(path, raises=StoreError, doing="lock"):
        file = open_lock(path)
    with file:
        with disk_errors(path, raises=StoreError, doing="lock"):
            if not _take_within(file, tries=_TRIES, pause_s=_PAUSE_S):
                raise RunHeld(run=folder.name, holder=read_note(path))
            write_note(file, f"process {os.getpid()} on {socket.gethostname()}")
        yield


def is_held(folder: Path) -> bool | None:
    """Whether a process holds the run in ``folder``; ``None``: none ever did, as far as is known.

    That is so where the folder is another machine's, or may not be read.
    """
    try:
        with _open_to_look(folder / _FILE) as file:
            return not _take_within(file, tries=_LOOKS, pause_s=_LOOK_PAUSE_S)
    except OSError:
        return None


def _open_to_look(path: Path) -> FileIO:
    """Open a lock file that exists, for reading alone where this user may not write it."""
    try:
        return FileIO(path, "r+")  # NFS locks only what may be written
    except PermissionError:
        return FileIO(path, "r")


def _take_within(file: FileIO, *, tries: int, pause_s: float) -> bool:
    """Take the lock, in several tries; return whether this process has it now."""
    clock = SystemClock()
    for _ in range(tries - 1):
        if take_lock(file):
            return True
        clock.sleep(pause_s)
    return take_lock(file)
