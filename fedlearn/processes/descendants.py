"""The processes that a training process has started, wherever they have gone.

A process group loses those that begin a session of their own, and their parent those whose own
parent has ended. What they all keep is the environment: a mark in it, of one training process
alone, finds them.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress

import psutil

from fedlearn.core.secret_bytes import SecretBytes

#: The environment variable that marks a training process, and all that comes of it.
MARK = "FEDLEARN_TRAINING_PROCESS"

_MARK_BYTES = 16
#: Looks at all processes: what is started between two of them is found by the next one.
_MAX_LOOKS = 10


def fresh_mark() -> str:
    """Return a mark that no other process has."""
    return SecretBytes.generate(_MARK_BYTES).reveal().hex()


def has_mark(process: psutil.Process, mark: str) -> bool:
    """Return whether a process has a mark; not if it has ended, or is another user's."""
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def end_marked(mark: str, *, but: Collection[int] = ()) -> None:
    """End all processes with a mark at once.

    One whose environment was cleared, or is another user's, is not found.

    Args:
        mark: Theirs.
        but: Numbers of those that are left alone.
    """
    for _ in range(_MAX_LOOKS):
        found = [each for each in _find_marked(mark) if each.pid not in but]
        for each in found:
            with suppress(psutil.Error):  # it has ended; its number is never another one's here
                each.kill()
        if not found:
            break


def _find_marked(mark: str) -> Iterator[psutil.Process]:
    for each in psutil.process_iter():
        if has_mark(each, mark) and _is_running(each):
            yield each


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
