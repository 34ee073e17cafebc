"""Forks of this process: what they must not inherit, and how they end with it."""

import gc
import os
import sys
from io import FileIO
from multiprocessing.connection import Connection
from socket import socket
from typing import NoReturn, TypeAlias
from weakref import WeakSet

from fedlearn.errors import EngineError

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection

    #: An end of a :func:`multiprocessing.Pipe`.
    Link: TypeAlias = PipeConnection
else:
    #: An end of a :func:`multiprocessing.Pipe`.
    Link: TypeAlias = Connection

# A file with a buffer would be written once more by a child.
_own = WeakSet[socket | FileIO | Connection]()


def keep_from_forks(resource: socket | FileIO | Connection) -> None:
    """Have ``resource`` closed in every child that is forked from now on, while it is in use.

    A child may outlive this process, and would keep it open.
    """
    _own.add(resource)


def _let_go() -> None:
    for resource in list(_own):
        resource.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go)


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
