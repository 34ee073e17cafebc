"""Forks of this process: what they must not inherit, and how they end with it."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from multiprocessing.connection import Connection, Pipe
from socket import socket
from typing import NoReturn, TypeAlias
from weakref import WeakSet

import psutil

from fedlearn.errors import EngineError

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection

    #: An end of a :func:`multiprocessing.Pipe`.
    Link: TypeAlias = PipeConnection
else:
    #: An end of a :func:`multiprocessing.Pipe`.
    Link: TypeAlias = Connection

# A file with a buffer would be written once more by a child.
_own = WeakSet[socket | FileIO | Connection | Link]()


def keep_from_forks(resource: socket | FileIO | Connection | Link) -> None:
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


@dataclass(eq=False)
class ForkedProcess:
    """A fork of this process that runs a function.

    Attributes:
        pid: Its number, which is its own until :meth:`wait` has returned.
        link: To it, in both ways; it ends when the fork does.
    """

    pid: int
    link: Link
    _code: int | None = None

    def wait(self) -> int:
        """Wait for its end; return its exit code, negative: the signal that killed it."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        """End it at once, unless it was waited for."""
        if self._code is None:
            with suppress(psutil.Error):
                psutil.Process(self.pid).kill()


@contextmanager
def forked(bodies: Sequence[Callable[[Link], object]]) -> Iterator[Sequence[ForkedProcess]]:
    """Run each of ``bodies`` in a fork of its own, for as long as the context lasts.

    None is left when the context ends or this process is killed; Ctrl-C is for this process. A
    fork exits with 0 when its body returns, and with 1, without a word, when that raises.

    Args:
        bodies: Each is given its end of the link to this process.

    Raises:
        EngineError: Windows has no forks.
        OSError: There is no memory or process left.

    Example:
        >>> with forked([lambda link: link.send(1)]) as (fork,):
        ...     fork.link.recv(), fork.wait()
        (1, 0)
    """
    lifeline_end, descriptor = os.pipe()
    lifeline = FileIO(descriptor, "w")
    keep_from_forks(lifeline)
    forks = list[ForkedProcess]()
    try:
        for body in bodies:
            link, other = Pipe()
            # A fork that had the link to another would keep it open.
            keep_from_forks(link)
            with other:
                pid = fork()
                if not pid:
                    _be_forked(body, other, lifeline_end)
            forks.append(ForkedProcess(pid, link))
        yield forks
    finally:
        for each in forks:
            each.kill()
        for each in forks:
            each.wait()
            each.link.close()
        lifeline.close()
        os.close(lifeline_end)


def _be_forked(body: Callable[[Link], object], link: Link, lifeline_end: int) -> NoReturn:
    """Run in a fork; never returns into the caller's code."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, the lifeline tells
        threading.Thread(target=exit_with_parent, args=(lifeline_end,), daemon=True).start()
        body(link)
        code = 0
    finally:
        os._exit(code)
