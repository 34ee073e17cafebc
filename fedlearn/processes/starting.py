"""Starting a module of ours as a process in a new interpreter."""

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
    """Options of :class:`subprocess.Popen`."""

    process_group: int
    creationflags: int


def in_new_group() -> NewGroup:
    """Return what starts a process in a group of its own: Ctrl-C in a terminal is not for it."""
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
    """Start a module of ours in a process that can import what this one can.

    Args:
        module: Its name.
        arguments: What it is given.
        environ: Its environment, but for ``PYTHONPATH``.
        link: A socket for the process, which takes it by
            :func:`~fedlearn.processes.links.take_link` of its last argument.
        python: The interpreter.
        stdout: Where it prints, as for :class:`subprocess.Popen`, and so ``stderr``.
        stderr: Where it writes errors.

    Returns:
        The process, whose standard input is a pipe.

    Raises:
        OSError: There is no such interpreter, or no memory or process left.
    """
    # Empty stands for the working directory; a path may be that of a zip file.
    paths = [os.path.abspath(each or ".") for each in sys.path]  # noqa: PTH100
    environ = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
    if sys.platform == "win32" and python == sys.executable:
        # In a virtual environment this is a launcher, and the socket would be the launcher's.
        environ["__PYVENV_LAUNCHER__"] = python
        python = str(vars(sys)["_base_executable"])  # as multiprocessing does
    handover = None if link is None else Handover(link)
    last = [] if handover is None else [handover.argument]
    process = subprocess.Popen(  # noqa: S603 - our own module
        # -P: nothing is imported from the working directory unless the application does so too
        [python, "-P", "-m", module, *arguments, *last],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=environ,
        **in_new_group(),  # Ctrl-C in a terminal is for the application, from the first moment
        **({} if handover is None else handover.inherited),
    )
    if handover is not None:
        with suppress(BrokenPipeError):
            handover.complete(process)
    return process


def start_linked(
    module: str, *, environ: Mapping[str, str], python: str, stdout: int | None = None
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a module of ours, and return it with a socket to it: see :func:`start_module`.

    The socket closes when this process dies, even if a fork of it lives on.

    Raises:
        OSError: There is no such interpreter, or no memory or process left.
    """
    own, other = socket.socketpair()
    keep_from_forks(own)
    with ExitStack() as if_failed, other:
        if_failed.callback(own.close)
        process = start_module(module, environ=environ, link=other, python=python, stdout=stdout)
        if_failed.pop_all()
    return process, own
