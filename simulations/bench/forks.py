"""Start programs as forks of one process, so that a short run of a benchmark imports torch once."""

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from harness import Program, start_program

_REQUEST_BYTES, _PID_BYTES = 1 << 18, 20


@dataclass(frozen=True)
class Fork:
    """A program that runs in a fork; see :class:`harness.Program`.

    Only the parent of a process learns its exit status, so the fork writes it to a file.
    """

    args: Sequence[str | Path]
    pid: int
    stdin: IO[str]
    stdout: IO[str]
    descriptor: int
    status: int

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has exited; return its status, or -9 if it wrote none.

        Raises:
            subprocess.TimeoutExpired: It runs on.
        """
        if not select.select([self.descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired([str(each) for each in self.args], timeout or 0.0)
        written = os.pread(self.status, 1, 0)
        return written[0] if written else -signal.SIGKILL

    def kill(self) -> None:
        """Kill it."""
        signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)


class Nursery:
    """A fork of this process as it is now, which forks for each program that is started.

    This process cannot do so itself: gRPC has threads later, which a fork lacks.
    """

    def __init__(self) -> None:
        self._link, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._link.close()
            _serve(link)
        link.close()

    def start(
        self, command: Sequence[str | Path], environ: Mapping[str, str], errors: int = 2
    ) -> Program:
        """Start ``python -m MODULE`` or ``python FILE``: a fork, if it is this interpreter."""
        python, *words = map(str, command)
        if python != sys.executable:
            return start_program(command, environ, errors)
        request = json.dumps({"words": words, "environ": dict(environ)}).encode()
        (commands, to), (answers, out) = os.pipe(), os.pipe()
        status = os.memfd_create("status")
        socket.send_fds(self._link, [request], [commands, out, errors, status])
        os.close(commands)
        os.close(out)
        pid, (descriptor,), _, _ = socket.recv_fds(self._link, _PID_BYTES, 1)
        return Fork(command, int(pid), os.fdopen(to, "w"), os.fdopen(answers), descriptor, status)


def _serve(link: socket.socket) -> NoReturn:
    """Fork for each request, until the other end of the link is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        request, files, _, _ = socket.recv_fds(link, _REQUEST_BYTES, 4)
        if not request:
            os._exit(0)
        *streams, status = files
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            link.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            _become(**json.loads(request), status=status)
        descriptor = os.pidfd_open(pid)
        socket.send_fds(link, [str(pid).encode()], [descriptor])
        for each in (*streams, descriptor, status):
            os.close(each)


def _become(words: list[str], environ: dict[str, str], *, status: int) -> NoReturn:
    """Run a program as the main one, write its exit status to a file, and exit."""
    os.environ.clear()
    os.environ.update(environ)
    # Not those of a multiprocessing fork.
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(at, mode) for at, mode in enumerate("rww"))
    code = 1
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int | None):
            code = (end.code or 0) & 0xFF
        else:
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (it is shown, and nothing above can handle it)
        traceback.print_exc()
    vars(threading)["_shutdown"]()
    for each in (sys.stdout, sys.stderr):
        each.flush()
    os.write(status, bytes([code]))
    os._exit(code)
