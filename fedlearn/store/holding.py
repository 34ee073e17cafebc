"""Which process a run is alive in: a lock on a file in the run's folder.

The kernel holds the lock for the process and releases it when the process is gone, however it
ended. So of a run that is recorded as running, the lock tells whether it is. On NFS, Linux sends
the lock to the server, and all machines see it; a file system that is mounted with local locks, or
replicated, tells only about processes of this machine.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlearn.core.clock import SystemClock
from fedlearn.core.files import disk_errors
from fedlearn.errors import RunHeld, StoreError

_FILE = "lock"
#: Who looks at a lock holds it for a moment: a lock is another process's if it stays.
_TRIES, _PAUSE_S = 10, 0.02


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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with disk_errors(path, raises=StoreError, doing="lock"):
            if not _is_taken(descriptor):
                raise RunHeld(run=folder.name, holder=path.read_text().strip())
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool | None:
    """Whether a process holds the run in ``folder``; ``None``: none ever did, as far as is known.

    That is so where the folder is another machine's, or may not be read.
    """
    try:
        descriptor = os.open(folder / _FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return not _takes(descriptor, fcntl.LOCK_SH)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int) -> bool:
    """Take the lock; return whether it is ours now."""
    clock = SystemClock()
    for _ in range(_TRIES):
        if _takes(descriptor, fcntl.LOCK_EX):
            return True
        clock.sleep(_PAUSE_S)
    return False


def _takes(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
