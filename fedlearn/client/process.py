"""The training process, seen from the application that has started it."""

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

#: Seconds that the process gets to end by itself; it gives its own training thread less.
STOP_S = 15.0
#: Exit code of a process that was asked to end while a training did not listen.
STUCK = 3
#: A training process that lasted so long did not crash at once: it is soon started again.
_STEADY_S = 60.0
#: Longest wait before one that crashes time and again is started once more.
_RESTART_S = 300.0
_POLL_S = 1.0
_CHUNK_BYTES = 1 << 16
_CHILD = "fedlearn.client.child"
#: Of the processes beside it that share its trainings: see :mod:`fedlearn.client.worker_process`.
WORKER = "fedlearn.client.worker_process"
_EVENT = TypeAdapter(AgentEvent)

# In the application's process: what becomes of a line is the application's to say.
_log = logging.getLogger(__name__)


class Restarts:
    """How long to wait before a training process that has crashed is started again."""

    def __init__(self) -> None:
        self._backoff = Backoff(_RESTART_S)

    def wait_s(self, ran_s: float) -> float:
        """Return the seconds to wait after a process that ran for ``ran_s`` seconds."""
        if ran_s > _STEADY_S:
            self._backoff.reset()
        return self._backoff.next_s()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a training process has ended.

    Attributes:
        code: Its exit code; negative: the number of the signal that killed it.
        crash: What ended it, in words. ``None``: it was asked to end, or its last event was final.
    """

    code: int
    crash: str | None

    @property
    def crash_code(self) -> int | None:
        """What the next process is told of this one: see :class:`RuntimeOptions`."""
        return None if self.crash is None else self.code


@dataclass(eq=False)
class TrainingProcess:
    """A running training process, and those that its trainer has started.

    No signal reaches a stranger: the process is not waited for before all of them are ended.
    Those that have left its group are found by their mark.

    Attributes:
        mark: That is in their environment.
        link: The socket to it; when this end closes, the process ends.
        was_asked_to_stop: Whether its end is no surprise.
    """

    process: "subprocess.Popen[bytes]"
    link: socket.socket
    mark: str
    was_asked_to_stop: bool = False
    _: KW_ONLY
    _family: Family
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, options: RuntimeOptions, *, python: str) -> Self:
        """Start a process that can import what this one can, in a Python like :func:`interpreter`.

        Its gRPC is silent unless the environment says otherwise (``GRPC_VERBOSITY``).

        Raises:
            OSError: There is no such interpreter, or no memory or process left.
        """
        mark = fresh_mark()
        environ = client_environment() | {MARK: mark}
        process, link = start_linked(_CHILD, environ=environ, python=python)
        with ExitStack() as if_failed:
            if_failed.callback(link.close)
            if_failed.callback(process.wait)
            if_failed.callback(process.kill)
            family = Family.of(process, python=python)
            if_failed.pop_all()
        assert process.stdin is not None  # a pipe
        # A process that has died already says so by its exit code.
        with suppress(BrokenPipeError), process.stdin as stream:
            stream.write(OPTIONS.dump_json(options))
        return cls(process, link, mark, _family=family)

    def events(self) -> Iterator[AgentEvent]:
        """Yield events until the process exits, even if a worker of it keeps the socket open."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            while True:
                has_ended = self._family.has_ended()  # asked before the last look
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
                    except ValueError as error:  # as after an update under our feet
                        _log.warning(
                            "the training process said no event (%s)", type(error).__name__
                        )
                    else:
                        yield event

    def follow(self, on_event: Callable[[AgentEvent], None]) -> Ending:
        """Pass on events until the process has ended, and all that its trainer has started.

        Args:
            on_event: Called with each event but a crash, which is part of what is returned.
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
        is_meant = is_final or self.was_asked_to_stop
        return Ending(code=code, crash=None if is_meant else f"exit code {code}{words}")

    def ask_to_stop(self) -> None:
        """Have the process end at the next batch, or at once if it is still starting."""
        self.was_asked_to_stop = True
        self.tell(Stop())

    def suspend(self) -> None:
        """Have the process and its group stand still until :meth:`resume`; not on Windows."""
        if sys.platform != "win32":
            self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Have them continue."""
        if sys.platform != "win32":
            self._send(signal.SIGCONT)

    def kill(self) -> None:
        """End the process, and those that its trainer has started, at once."""
        with self._lock:
            if self.process.returncode is None:
                self._family.kill()

    def end(self) -> int:
        """Wait for the process to end, end those that its trainer has left; return its code."""
        self._family.await_end()
        self.kill()
        end_marked(self.mark, but=[self.process.pid])
        with self._lock:
            code = self.process.wait()
        self._family.release()
        return code

    def tell(self, told: Facts | Changes | Wake | Stop) -> None:
        """Send what the application knows or wants; a process that has ended does not hear it."""
        with suppress(OSError):
            self.link.sendall(json.dumps({type(told).__name__: asdict(told)}).encode() + b"\n")

    def _send(self, number: signal.Signals) -> None:
        # Without the lock: a signal handler may interrupt the thread that holds it.
        if sys.platform != "win32" and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


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
    return spec is not None and spec.name in (_CHILD, WORKER)


def client_environment() -> dict[str, str]:
    """Return the environment of a process of the client's, in which gRPC is silent.

    gRPC would write each handshake that fails; what matters is an event. A level in this process's
    environment (``GRPC_VERBOSITY``) stays.
    """
    environ = dict(os.environ)
    prepare_for_grpc(environ, verbosity="NONE")
    return environ
