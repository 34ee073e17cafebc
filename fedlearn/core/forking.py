"""Forks of this process that are sound, and end with it whatever ends it."""

import gc
import os
from typing import NoReturn


def fork() -> int:
    """Fork, as :func:`os.fork`; the child never collects garbage that it inherits.

    A channel of gRPC would wait in its destructor for ever, for a thread that only the parent has.
    """
    collects = gc.isenabled()
    gc.disable()  # nor may a collection come between the fork and the freeze
    try:
        child = os.fork()
        if not child:
            gc.freeze()
        return child
    finally:
        if collects:
            gc.enable()


def exit_with_parent(lifeline_end: int) -> NoReturn:
    """Wait until the parent is gone, and end this process: for a thread of its own.

    Args:
        lifeline_end: The end to read of a pipe whose other end only the parent has.
    """
    os.read(lifeline_end, 1)  # blocks until the parent closes its end, by intent or by dying
    os._exit(1)
