"""The training process, seen from the application that has started it."""

import json
import logging
import multiprocessing.spawn
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from fedlearn.client.conditions import Facts
from fedlearn.client.events import AgentEvent
from fedlearn.client.forks import keep_from_forks
from fedlearn.client.options import RuntimeOptions
from fedlearn.errors import DeploymentError
from fedlearn.transport.grpc_environment import prepare_for_grpc

_POLL_S = 1.0
_CHUNK_BYTES = 1 << 16
_CHILD = "fedlearn.client.child"

# In the application's process: what becomes of a line is the application's to say.
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainingProcess:
    """A running training process and the socket to it.

    Attributes:
        process: The process.
        link: When this end closes, the process ends.
        was_asked_to_stop: Whether its end is no surprise.
    """

    process: "subprocess.Popen[bytes]"
    link: socket.socket
    was_asked_to_stop: bool = False

    @classmethod
    def start(cls, options: RuntimeOptions, *, python: str) -> Self:
        """Start a process that can import what this one can.

        Its gRPC is silent unless the environment says otherwise (``GRPC_VERBOSITY``).

        Args:
            options: What it is to do.
            python: The interpreter, see :func:`interpreter`.

        Raises:
            OSError: There is no such interpreter, or no memory or process left.
        """
        own, other = socket.socketpair()
        # A forked worker of the application that outlives it must not keep the socket open.
        keep_from_forks(own)
        try:
            with other:
                process = _spawn(python, other)
        except OSError:
            own.close()
            raise
        assert process.stdin is not None  # a pipe
        try:
            with process.stdin as stream:
                stream.write(options.to_json().encode())
        except BrokenPipeError:
            pass  # it has died already: its exit code says so
        return cls(process, own)

    def events(self, facts: Callable[[], Facts]) -> Iterator[AgentEvent]:
        """Yield what the process tells until it ends, and tell it ``facts`` every second.

        It has ended when it has: a worker that it leaves behind may hold its end of the socket.
        """
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            while True:
                has_ended = self.process.poll() is not None  # asked before the last look
                self._send(facts())
                if not selector.select(0.0 if has_ended else _POLL_S):
                    if has_ended:
                        return
                    continue
                data = self._receive()
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if (event := _event(line)) is not None:
                        yield event

    def ask_to_stop(self) -> None:
        """Have the process end at the next batch, or at once if it is still starting."""
        self.was_asked_to_stop = True
        self.process.terminate()

    def close(self) -> None:
        """Let go of a process that has ended."""
        self.link.close()

    def _receive(self) -> bytes:
        try:
            return self.link.recv(_CHUNK_BYTES)
        except ConnectionError:
            return b""  # it was killed

    def _send(self, facts: Facts) -> None:
        try:
            self.link.sendall(json.dumps(asdict(facts)).encode() + b"\n")
        except OSError:
            return  # it has ended, which the reader sees


def interpreter() -> str:
    """Return the Python that a training process runs in: the application's own.

    An application that is its own interpreter (frozen, or embedding Python) names another one
    with :func:`multiprocessing.set_executable`.

    Raises:
        DeploymentError: It has named none; to start it again would start the application.
    """
    named = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    name = Path(named).name.lower()
    is_python = ("python" in name or "pypy" in name) and not getattr(sys, "frozen", False)
    if not named or (named == sys.executable and not is_python):
        raise DeploymentError(
            f"sys.executable is {sys.executable!r}, which is the application and no Python, so a "
            "training process cannot be started with it; name an interpreter that has the "
            "application's packages: multiprocessing.set_executable(path)"
        )
    return named


def is_training_process() -> bool:
    """Return whether this is a process that :class:`TrainingProcess` started, or its worker."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == _CHILD


def _spawn(python: str, link: socket.socket) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - our own module
        # -P: nothing is imported from the working directory unless the application does so too
        [python, "-P", "-m", _CHILD, str(link.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[link.fileno()],
        process_group=0,  # Ctrl-C in a terminal is for the application, from the first moment
        env=_environ(),
    )


def _environ() -> dict[str, str]:
    environ = dict(os.environ)
    # gRPC would write each handshake that fails; what matters is an event.
    prepare_for_grpc(environ, verbosity="NONE")
    return environ | {"PYTHONPATH": os.pathsep.join(_import_path())}


def _event(line: bytes) -> AgentEvent | None:
    """Return what a line says; ``None``: nothing known, as after an update under our feet."""
    try:
        return AgentEvent.from_values(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        _log.warning("the training process said what is no event (%s)", type(error).__name__)
        return None


def _import_path() -> list[str]:
    """Return where this process finds modules; empty stands for the working directory."""
    return [os.path.abspath(each or ".") for each in sys.path]  # noqa: PTH100 - may be a zip
