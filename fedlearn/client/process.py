"""Start, watch and stop the training process, from within the application."""

import json
import logging
import multiprocessing.spawn
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from fedlearn.client.backoff import Backoff
from fedlearn.client.conditions import Facts
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.options import OPTIONS, Changes, RuntimeOptions, Stop, Wake
from fedlearn.errors import DeploymentError
from fedlearn.processes.descendants import MARK, end_marked, fresh_mark
from fedlearn.processes.family import Family
from fedlearn.processes.starting import start_linked
from fedlearn.transport.grpc_environment import prepare_for_grpc

#: Seconds that the process gets to stop by itself; it gives its own training thread less.
STOP_S = 15.0
#: Exit code of a process that was asked to stop while the training did not react.
STUCK = 3
#: A training process that ran at least this long was healthy, so its restart back-off is reset.
_STEADY_S = 60.0
#: Longest wait before a process that keeps crashing is restarted.
_RESTART_S = 300.0
_POLL_S = 1.0
_CHUNK_BYTES = 1 << 16
_CHILD = "fedlearn.client.child"
#: Module of its data-parallel workers: see :mod:`fedlearn.client.worker_process`.
WORKER = "fedlearn.client.worker_process"
_EVENT = TypeAdapter(AgentEvent)

# Standard logging: this runs in the application's process, which configures its own logging.
_log = logging.getLogger(__name__)


class Restarts:
    """Decides how long to wait before a crashed training process is restarted."""

    def __init__(self) -> None:
        self._backoff = Backoff(_RESTART_S)

    def wait_s(self, ran_s: float) -> float:
        """Draw the seconds to wait after a process that ran for ``ran_s`` seconds."""
        if ran_s > _STEADY_S:
            self._backoff.reset()
        return self._backoff.next_s()


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """How a training process has ended.

    Attributes:
        code: Its exit code; negative for the number of the signal that killed it.
        crash: A description of the crash; ``None`` if it was asked to stop, or has sent a final
            event.
    """

    code: int
    crash: str | None

    @property
    def crash_code(self) -> int | None:
        """The exit code to pass to the next process: see :class:`RuntimeOptions`."""
        return None if self.crash is None else self.code


@dataclass(eq=False)
class TrainingProcess:
    """A running training process, and the processes that its trainer has started.

    The process is reaped only after all of them are killed, so that its process id is not reused
    and no signal reaches an unrelated process. Processes that have left its group are found by the
    mark in their environment.

    Attributes:
        process: The training process.
        link: The socket to it; closing this end makes the process exit.
        mark: The value of the mark in the environment of all of them.
        is_stopping: Whether its exit is expected.
    """

    process: "subprocess.Popen[bytes]"
    link: socket.socket
    mark: str
    is_stopping: bool = False
    _: KW_ONLY
    _family: Family
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Reentrant, since a signal handler may ask to stop in the thread that is sending.
    _sending: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def start(cls, options: RuntimeOptions, *, python: str) -> Self:
        """Start a training process that can import everything that this process can.

        Its gRPC logs nothing unless the environment says otherwise (``GRPC_VERBOSITY``).

        Args:
            options: Options of the client.
            python: Path of the interpreter, such as :func:`find_interpreter` returns.

        Raises:
            OSError: There is no such interpreter, or the system is out of memory or processes.
        """
        mark = fresh_mark()
        environ = make_client_environment() | {MARK: mark}
        process, link = start_linked(_CHILD, environ=environ, python=python)
        with ExitStack() as if_failed:
            # Called in reverse: kill, then reap, then close.
            if_failed.callback(link.close)
            if_failed.callback(process.wait)
            if_failed.callback(process.kill)
            family = Family.of(process, python=python)
            if_failed.pop_all()
        assert process.stdin is not None  # a pipe
        # If the process has died already, its exit code will tell.
        with suppress(BrokenPipeError), process.stdin as stream:
            stream.write(OPTIONS.dump_json(options))
        return cls(process, link, mark, _family=family)

    def events(self) -> Iterator[AgentEvent]:
        """Yield events until the process exits, even if a worker of it keeps the socket open."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            while True:
                # Check this before reading, so that the last events are read after the exit.
                has_ended = self._family.has_ended()
                if not selector.select(0.0 if has_ended else _POLL_S):
                    if has_ended:
                        return
                    continue
                try:
                    data = self.link.recv(_CHUNK_BYTES)
                except ConnectionError:
                    return  # it was killed
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    try:
                        event = _EVENT.validate_json(line)
                    except ValueError as error:  # for example, fedlearn was updated meanwhile
                        _log.warning(
                            "the training process sent an invalid event (%s)", type(error).__name__
                        )
                    else:
                        yield event

    def follow(self, on_event: Callable[[AgentEvent], None]) -> ProcessExit:
        """Pass on events until the process exits; then end the processes its trainer started.

        Args:
            on_event: Called with each event except a crash, which the result describes instead.
        """
        is_final, words = False, ""
        try:
            for event in self.events():
                if event.kind is EventKind.CRASHED:
                    words = f": {event.message}"
                    continue
                is_final = is_final or event.is_final
                on_event(event)
        finally:
            code = self.end()
            self.link.close()
        is_meant = is_final or self.is_stopping
        return ProcessExit(code=code, crash=None if is_meant else f"exit code {code}{words}")

    def ask_to_stop(self) -> None:
        """Ask the process to stop at the next batch, or at once if it is still starting."""
        self.is_stopping = True
        self.send(Stop())

    def suspend(self) -> None:
        """Pause the process and its group until :meth:`resume`; no effect on Windows."""
        if sys.platform != "win32":
            self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process and its group continue after :meth:`suspend`."""
        if sys.platform != "win32":
            self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and its group."""
        with self._lock:
            if self.process.returncode is None:
                self._family.kill()

    def end(self) -> int:
        """Wait for the process to exit, kill its remaining descendants, and return its code."""
        self._family.await_end()
        # Only the group; then those that have left it. The process itself is reaped last, which
        # keeps its id from being reused.
        self.kill()
        end_marked(self.mark, but=[self.process.pid])
        with self._lock:
            code = self.process.wait()
        self._family.release()
        return code

    def send(self, message: Facts | Changes | Wake | Stop) -> None:
        """Send facts or a command; they are lost if the process has exited."""
        with suppress(OSError), self._sending:
            self.link.sendall(
                json.dumps({type(message).__name__: asdict(message)}).encode() + b"\n"
            )

    def _signal_group(self, number: signal.Signals) -> None:
        # Do not take the lock: a signal handler may run this in the thread that holds it.
        if sys.platform != "win32" and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def find_interpreter() -> str:
    """Return the Python interpreter for training processes, by default the application's own.

    A frozen application, or one that embeds Python, must name an interpreter with
    :func:`multiprocessing.set_executable`: its own executable would start the application again.

    Raises:
        DeploymentError: Such an application has not named an interpreter.
    """
    named = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    name = Path(named).name.lower()
    is_python = ("python" in name or "pypy" in name) and not getattr(sys, "frozen", False)
    if not named or (named == sys.executable and not is_python):
        raise DeploymentError(
            f"sys.executable is {sys.executable!r}, which is the application and not Python, so a "
            "training process cannot be started with it; name an interpreter that has the "
            "application's packages: multiprocessing.set_executable(path)"
        )
    return named


def is_training_process() -> bool:
    """Check whether this is a process that :class:`TrainingProcess` started, or its worker."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name in (_CHILD, WORKER)


def make_client_environment() -> dict[str, str]:
    """Build the environment for the client's processes, in which gRPC logs nothing.

    gRPC would log every failed handshake, and the client reports those that matter as events. A
    level that is set in this process's environment (``GRPC_VERBOSITY``) is kept.
    """
    environ = dict(os.environ)
    prepare_for_grpc(environ, verbosity="NONE")
    return environ
