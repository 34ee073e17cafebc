"""Fork this process safely: close what children must not inherit, and end them with the parent."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from multiprocessing import parent_process
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

# Unbuffered files only: closing a buffered one in a child would flush the parent's bytes again.
_own = WeakSet[socket | FileIO | Connection | Link]()


def keep_from_forks(resource: socket | FileIO | Connection | Link) -> None:
    """Close ``resource`` in every child forked from now on, for as long as it is alive.

    Otherwise a child that outlives this process would keep it open.
    """
    _own.add(resource)


def _let_go() -> None:
    for resource in list(_own):
        resource.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go)


def fork() -> int:
    """Fork like :func:`os.fork`, but the child never garbage-collects objects it inherits.

    The destructor of an inherited gRPC channel would wait forever for a thread that exists only in
    the parent.

    Raises:
        EngineError: This is Windows, which cannot fork.
    """
    if sys.platform != "win32":
        collects = gc.isenabled()
        gc.disable()  # no collection may run in the child between the fork and the freeze
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
    """Block until the parent is gone, then exit this process; run it on a separate thread.

    Args:
        lifeline_end: File descriptor of the read end of a pipe whose write end only the parent
            holds.
    """
    os.read(lifeline_end, 1)  # blocks until the parent closes its end or dies
    os._exit(1)


def exit_with_parent_process() -> NoReturn:
    """Do as :func:`exit_with_parent` in a process that :mod:`multiprocessing` has started."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass(eq=False)
class ForkedProcess:
    """A fork of this process that runs a function.

    Attributes:
        pid: Its process id, not reused by the kernel until :meth:`wait` has returned.
        link: Two-way connection to it; it reaches end of file when the fork exits.
    """

    pid: int
    link: Link
    _code: int | None = None

    def wait(self) -> int:
        """Wait for it to exit; return its exit code, or minus the signal that killed it."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        """Kill it, unless it has been waited for already."""
        if self._code is None:
            with suppress(psutil.Error):
                psutil.Process(self.pid).kill()


@contextmanager
def run_forks(bodies: Sequence[Callable[[Link], object]]) -> Iterator[Sequence[ForkedProcess]]:
    """Run each of ``bodies`` in its own fork, for as long as the context lasts.

    All forks are killed when the context ends or this process dies. They ignore Ctrl-C, which only
    this process handles. A fork exits with code 0 when its body returns, and with code 1, silently,
    when the body raises.

    Args:
        bodies: Each is called with its end of the connection to this process.

    Raises:
        EngineError: This is Windows, which cannot fork.
        OSError: The system is out of memory or processes.

    Example:
        >>> with run_forks([lambda link: link.send(1)]) as (fork,):
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
            # A later fork that inherited this end would keep the connection open.
            keep_from_forks(link)
            # This process closes its copy, so that the link ends when the fork exits.
            with other:
                pid = fork()
                if not pid:
                    _be_forked(body, other, lifeline_end)
            forks.append(ForkedProcess(pid, link))
        yield forks
    finally:
        # Kill all before waiting for any: one may be waiting for another.
        for each in forks:
            each.kill()
        for each in forks:
            each.wait()
            each.link.close()
        lifeline.close()
        os.close(lifeline_end)


def _be_forked(body: Callable[[Link], object], link: Link, lifeline_end: int) -> NoReturn:
    """Run ``body`` in the forked child, and exit without returning into the caller's code."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child ends when the lifeline closes
        threading.Thread(target=exit_with_parent, args=(lifeline_end,), daemon=True).start()
        body(link)
        code = 0
    finally:
        # Not sys.exit: that would run the parent's exit handlers and finally blocks in the child.
        os._exit(code)
