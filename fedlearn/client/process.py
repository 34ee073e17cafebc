"""The training process, seen from the application that has started it."""

import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Self

from fedlearn.client.conditions import Facts
from fedlearn.client.events import AgentEvent
from fedlearn.client.options import RuntimeOptions

_POLL_S = 1.0
_CHUNK_BYTES = 1 << 16
#: gRPC writes each handshake that fails to standard error; what matters is an event.
_QUIET = {"GRPC_VERBOSITY": "NONE"}


class Exit(IntEnum):
    """How a training process ended; anything else is a crash."""

    STOPPED = 0
    NOT_STARTED = 127  # out of memory or processes
    HOPELESS = 3  # trying again changes nothing: somebody must do something


@dataclass(eq=False)
class TrainingProcess:
    """A running training process and the socket to it.

    Attributes:
        process: The process.
        link: When this end closes, the process ends.
    """

    process: "subprocess.Popen[bytes]"
    link: socket.socket

    @classmethod
    def start(cls, options: RuntimeOptions) -> Self:
        """Start a process that can import what this one can.

        Its gRPC is silent unless the environment says otherwise (``GRPC_VERBOSITY``).
        """
        own, other = socket.socketpair()
        with other:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "fedlearn.client.child", str(other.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[other.fileno()],
                env={
                    **_QUIET,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(_import_path()),
                },
            )
        assert process.stdin is not None  # a pipe
        try:
            with process.stdin as stream:
                stream.write(options.to_json().encode())
        except BrokenPipeError:
            pass  # it has died already: its exit code says so
        return cls(process, own)

    def events(self, facts: Callable[[], Facts]) -> Iterator[AgentEvent]:
        """Yield what the process tells until it ends, and tell it ``facts`` every second."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            while True:
                self._send(facts())
                if not selector.select(_POLL_S):
                    continue
                data = self._receive()
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield AgentEvent.from_values(json.loads(line))

    def ask_to_stop(self) -> None:
        """Have the process end at the next batch, or at once if it is still starting."""
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


def _import_path() -> list[str]:
    """Return where this process finds modules; empty stands for the working directory."""
    return [os.path.abspath(each or ".") for each in sys.path]  # noqa: PTH100 - may be a zip
