"""Find and kill every process that a training process has started, including detached ones.

A process group loses descendants that start a session (``setsid``), and the process tree loses
those whose parent has exited. All of them inherit the environment, though, so a random mark in an
environment variable, unique to one training process, finds them.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress

import psutil

from fedlearn.core.secret_bytes import SecretBytes

#: The environment variable that marks a training process and all its descendants.
MARK = "FEDLEARN_TRAINING_PROCESS"

_MARK_BYTES = 16
#: Most scans of the process table: a process started during one scan is found by the next.
_MAX_LOOKS = 10


def fresh_mark() -> str:
    """Generate a random mark for a new training process."""
    return SecretBytes.generate(_MARK_BYTES).reveal().hex()


def has_mark(process: psutil.Process, mark: str) -> bool:
    """Check for ``mark`` in a process's environment; false if it has exited or is unreadable."""
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def end_marked(mark: str, *, but: Collection[int] = ()) -> None:
    """Kill all processes that carry ``mark``.

    A process that has cleared its environment, or that runs as another user, is not found.

    Args:
        mark: The mark of the training process.
        but: Process ids to spare.
    """
    for _ in range(_MAX_LOOKS):
        found = [each for each in _find_marked(mark) if each.pid not in but]
        for each in found:
            # It may have exited; psutil checks the start time, so a reused pid is safe.
            with suppress(psutil.Error):
                each.kill()
        if not found:
            break


def _find_marked(mark: str) -> Iterator[psutil.Process]:
    for each in psutil.process_iter():
        if has_mark(each, mark) and _is_running(each):
            yield each


def _is_running(process: psutil.Process) -> bool:
    try:
        # A zombie cannot be killed, so every scan would find it again.
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
