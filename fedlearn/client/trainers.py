"""Trainers like the client's own, in other processes, for several tasks at the same time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fedlearn.client.control import WorkControl
from fedlearn.client.options import OPTIONS, RuntimeOptions
from fedlearn.client.process import make_client_environment
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.errors import Cancelled, DeploymentError
from fedlearn.parallel.workers import WorkerProcess

_MODULE = "fedlearn.client.trainer_process"
#: Send the process's prints to standard error, since they are not output of this process.
_STDERR = 2
_POLL_S = 0.2
#: Seconds that a cancelled task has to end by itself.
_CANCEL_S = 10.0
_CLOCK = SystemClock()


@dataclass(frozen=True, kw_only=True)
class SpareTask:
    """A task without secure aggregation, for another process.

    Attributes:
        client_id: This client.
        folder: The folder of the task, with its request.
        state: The client's state in the run.
        personal: The part of the request for this client only.
        constants: File of the model's tensors that stay constant; ``None`` if there are none.
    """

    client_id: ClientId
    folder: Path
    state: bytes
    personal: bytes
    constants: Path | None


class TrainerEnded(Exception):
    """The other process has ended during its task.

    Attributes:
        code: Its exit code; negative for the number of the signal that killed it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


@dataclass(eq=False)
class TrainerProcess:
    """A process with a trainer like the client's own: see ``trainer_process.py``."""

    _worker: WorkerProcess
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, options: RuntimeOptions) -> Self:
        """Start a process; it makes its trainer before its first task.

        Raises:
            DeploymentError: The system is out of memory or processes.
        """
        try:
            worker = WorkerProcess.start(_MODULE, environ=make_client_environment(), stdout=_STDERR)
            worker.link.send_bytes(OPTIONS.dump_json(options))
        except OSError as error:
            raise DeploymentError(
                f"no process for another task could be started: {error}; lower "
                "policy.max_concurrent_runs, or free some memory"
            ) from error
        return cls(worker)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._worker.process.poll() is None

    def handle(
        self, task: SpareTask, *, control: WorkControl, on_failure: Callable[[str], object]
    ) -> tuple[bytes, bytes]:
        """Return the reply to a task, and the client's state after it.

        Args:
            task: The task.
            control: Cancels the task, and takes its progress; the process writes checkpoints
                itself.
            on_failure: As for :class:`~fedlearn.session.session.ClientSession`.

        Raises:
            Cancelled: ``control`` has cancelled the task.
            TrainerEnded: The process has ended, or was ended because it did not stop.
        """
        cancelled_s: float | None = None
        try:
            self._worker.link.send(task)
            while True:
                if control.is_cancelled and cancelled_s is None:
                    cancelled_s = _CLOCK.now_s()
                    self._worker.link.send("cancel")
                if cancelled_s is not None and _CLOCK.now_s() - cancelled_s > _CANCEL_S:
                    self.end()
                    control.check()
                if not self._worker.link.poll(_POLL_S):
                    continue
                match self._worker.link.recv():
                    case ("done", (bytes(reply), bytes(state))):
                        return reply, state
                    case ("report", (float(fraction), float(loss))):
                        control.report(fraction=fraction, loss=loss)
                    case ("failure", str(words)):
                        on_failure(words)
                    case ("cancelled", None):
                        raise Cancelled("the task was cancelled")
        except (EOFError, OSError):
            self.end()
            control.check()
            raise TrainerEnded(self._worker.process.returncode) from None

    def end(self) -> None:
        """Kill the process, if it has not ended by itself; its exit code tells which."""
        with self._lock:
            self._worker.end()


@dataclass(eq=False)
class SpareTrainers:
    """Processes for tasks that are worked on at the same time.

    A process takes seconds to start, and a round has a deadline. So one starts ahead of the task
    that needs it, and all are kept for later tasks.

    Attributes:
        options: The client's options, which name a trainer.
        most: Processes that are kept; 0: none.
    """

    options: RuntimeOptions
    most: int
    _idle: list[TrainerProcess] = field(default_factory=list)
    _all: set[TrainerProcess] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self) -> None:
        """Start a process ahead, unless one is idle or there are as many as are kept.

        Raises:
            DeploymentError: It cannot be started.
        """
        with self._lock:
            if not self._idle and len(self._all) < self.most:
                process = TrainerProcess.start(self.options)
                self._all.add(process)
                self._idle.append(process)

    @contextmanager
    def borrow(self) -> Iterator[TrainerProcess]:
        """Lend a process for a task.

        Raises:
            DeploymentError: None can be started.
        """
        process = self._take()
        self.prepare()
        try:
            yield process
        finally:
            with self._lock:
                is_kept = process.is_alive and len(self._idle) < self.most
                if is_kept:
                    self._idle.append(process)
                else:
                    self._all.discard(process)
            if not is_kept:
                process.end()

    def _take(self) -> TrainerProcess:
        with self._lock:
            while self._idle:
                if (process := self._idle.pop()).is_alive:
                    return process
                self._all.discard(process)
            process = TrainerProcess.start(self.options)
            self._all.add(process)
        return process

    def close(self) -> None:
        """End all processes, also those at work."""
        with self._lock:
            ended, self._all, self._idle, self.most = self._all, set(), [], 0
        for each in ended:
            each.end()
