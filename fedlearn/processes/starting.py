"""Start one of fedlearn's modules as a process in a new interpreter."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import IO, TypedDict

from fedlearn.processes.forks import keep_from_forks
from fedlearn.processes.links import Handover


class NewGroup(TypedDict, total=False):
    """Keyword arguments of :class:`subprocess.Popen` that create a process group."""

    process_group: int
    creationflags: int


def in_new_group() -> NewGroup:
    """Build the ``Popen`` arguments for a new process group, which Ctrl-C does not reach."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    else:
        return {"process_group": 0}


def start_module(
    module: str,
    *arguments: str,
    environ: Mapping[str, str],
    link: socket.socket | None = None,
    python: str,
    stdout: int | None = None,
    stderr: int | IO[bytes] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a module in a new process that can import everything that this process can.

    Args:
        module: Dotted name of the module.
        arguments: Its command-line arguments.
        environ: Its environment; ``PYTHONPATH`` is overwritten.
        link: A socket to pass to the process, which opens it by calling
            :func:`~fedlearn.processes.links.take_link` with its last argument.
        python: Path of the interpreter.
        stdout: Standard output, as for :class:`subprocess.Popen`.
        stderr: Standard error, likewise.

    Returns:
        The process, whose standard input is a pipe.

    Raises:
        OSError: There is no such interpreter, or the system is out of memory or processes.
    """
    # An empty entry is the working directory; an entry may also be a zip file.
    paths = [os.path.abspath(each or ".") for each in sys.path]  # noqa: PTH100
    environ = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
    if sys.platform == "win32" and python == sys.executable:
        # In a virtual environment python.exe is a launcher that starts the real interpreter as a
        # child, so the socket would be duplicated into the launcher.
        environ["__PYVENV_LAUNCHER__"] = python
        python = str(vars(sys)["_base_executable"])  # as multiprocessing does
    handover = None if link is None else Handover(link)
    last = [] if handover is None else [handover.argument]
    process = subprocess.Popen(  # noqa: S603 - our own module
        # -P: import nothing from the working directory unless the application does so too
        [python, "-P", "-m", module, *arguments, *last],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=environ,
        **in_new_group(),  # Ctrl-C in a terminal must reach only the application
        **({} if handover is None else handover.inherited),
    )
    if handover is not None:
        with suppress(BrokenPipeError):
            handover.complete(process)
    return process


def start_linked(
    module: str,
    *,
    environ: Mapping[str, str],
    python: str,
    stdout: int | None = None,
    stderr: int | None = None,
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a module as :func:`start_module` does, with a socket to talk to it.

    The socket closes when this process dies, even if one of its forks survives.

    Returns:
        The process, and this process's end of the socket.

    Raises:
        OSError: There is no such interpreter, or the system is out of memory or processes.
    """
    own, other = socket.socketpair()
    keep_from_forks(own)
    with ExitStack() as if_failed, other:
        if_failed.callback(own.close)
        process = start_module(
            module, environ=environ, link=other, python=python, stdout=stdout, stderr=stderr
        )
        if_failed.pop_all()
    return process, own
