"""The processes that a training process has started, wherever they have gone (Linux).

A process group loses those that begin a session of their own, and their parent those whose own
parent has ended. What they all keep is the environment: a mark in it, of one training process
alone, finds them.
"""

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedlearn.core.secret_bytes import SecretBytes

#: The environment variable that marks a training process, and all that comes of it.
MARK = "FEDLEARN_TRAINING_PROCESS"

_PROCESSES = Path("/proc")
_MARK_BYTES = 16
#: Looks at all processes: what is started between two of them is found by the next one.
_MAX_LOOKS = 10


def fresh_mark() -> str:
    """Return a mark that no other process has."""
    return SecretBytes.generate(_MARK_BYTES).reveal().hex()


def end_marked(mark: str, *, but: Collection[int] = ()) -> None:
    """End all processes with a mark at once.

    One whose environment was cleared, or is another user's, is not found; nor is any where there
    is no ``/proc``.

    Args:
        mark: Theirs.
        but: Numbers of those that are left alone.
    """
    for _ in range(_MAX_LOOKS):
        if not sum(_end(pid, mark) for pid in _pids() if pid not in but):
            break


def _end(pid: int, mark: str) -> bool:
    """End a process if it has the mark; by its descriptor, so that no other one is ever meant."""
    try:
        with _opened(pid) as descriptor:
            variables = (_PROCESSES / str(pid) / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() not in variables:
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return True
    except OSError:  # it has ended, or is another user's
        return False


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(each.name) for each in _PROCESSES.iterdir() if each.name.isdecimal())


@contextmanager
def _opened(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
