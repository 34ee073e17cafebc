"""Processes that this one starts: sound forks, that end with it whatever ends it, and groups."""

import gc
import os
import subprocess
import sys
from typing import NoReturn, TypeAlias, TypedDict

from fedlearn.errors import EngineError

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection

    #: An end of a :func:`multiprocessing.Pipe`.
    Link: TypeAlias = PipeConnection
else:
    from multiprocessing.connection import Connection

    #: An end of a :func:`multiprocessing.Pipe`.
    Link: TypeAlias = Connection


class NewGroup(TypedDict, total=False):
    """Options of :class:`subprocess.Popen`."""

    process_group: int
    creationflags: int


def in_new_group() -> NewGroup:
    """Return what starts a process in a group of its own: Ctrl-C in a terminal is not for it."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    else:
        return {"process_group": 0}


def fork() -> int:
    """Fork, as :func:`os.fork`; the child never collects garbage that it inherits.

    A channel of gRPC would wait in its destructor for ever, for a thread that only the parent has.

    Raises:
        EngineError: Windows has no forks.
    """
    if sys.platform != "win32":
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
    raise EngineError(
        "Windows cannot fork a process, which this needs; run it on Linux, macOS or in WSL 2"
    )


def exit_with_parent(lifeline_end: int) -> NoReturn:
    """Wait until the parent is gone, and end this process: for a thread of its own.

    Args:
        lifeline_end: The end to read of a pipe whose other end only the parent has.
    """
    os.read(lifeline_end, 1)  # blocks until the parent closes its end, by intent or by dying
    os._exit(1)
