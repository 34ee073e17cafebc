"""Run a client in the foreground: ``fedlearn join``.

Training runs in a second process, which imports torch. This process restarts it when it crashes, so
that the coordinator learns at once of a task that crashed the trainer's process.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TextIO

import structlog

from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.folder import ClientFolder, default_home
from fedlearn.client.options import Connection, Resources, RuntimeOptions, Wake
from fedlearn.client.process import STOP_S, STUCK, Restarts, TrainingProcess, find_interpreter
from fedlearn.config import ClientConfig
from fedlearn.core.clock import SystemClock
from fedlearn.core.logs import find_log_format
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import Invitation

#: Seconds between two checks whether a pause has ended.
_LOOK_S = 0.1
_CLOCK = SystemClock()


def join(
    invitation: Path,
    *,
    task: str | None,
    home: Path | None,
    config: ClientConfig,
    roster: Path | None = None,
    addresses: Sequence[str] = (),
    out: TextIO = sys.stdout,
) -> bool:
    """Take part until SIGTERM or Ctrl-C; enrol first if the client is not enrolled yet.

    SIGCONT makes the client look for its coordinator at once; Windows has no such signal.

    Args:
        invitation: The file from the coordinator's operator.
        task: The trainer, as in ``fedlearn join --task``; ``None``: the client runs only bundles.
        home: Folder of the client's keys and state; ``None`` for
            :func:`~fedlearn.client.folder.default_home`.
        config: The client's policy, the conditions under which it trains, and its number of worker
            processes.
        roster: File with the identity keys of the other clients; ``None`` to trust those that the
            coordinator sends.
        addresses: New addresses of the coordinator, if it has moved.
        out: Stream for one line per event.

    Returns:
        Whether the client ended cleanly; false if a training did not stop and was killed.

    Raises:
        ConfigError: The configuration names data for bundles that are missing.
        DeploymentError: The invitation, the trainer, the folder or an address is invalid, or the
            coordinator does not accept the invitation.
    """
    config.require_data()
    folder = ClientFolder(home or home_of(invitation))
    folder.set_consent(granted=True)  # the command is the consent
    options = RuntimeOptions(
        home=folder.folder,
        trainer=task,
        invitation=invitation,
        conditions=config.to_conditions(),
        policy=config.to_policy(),
        resources=Resources(num_workers=config.training.num_workers, niceness=0),
        connection=Connection(
            addresses=addresses, roster=roster, reconnection=config.to_reconnection()
        ),
        is_command=True,
        log_level=structlog.get_logger().get_effective_level(),
        log_format=find_log_format(),
        traces=config.telemetry.build_trace_settings(),
    )
    supervisor = _Supervisor(options, folder, out)
    with _call_on_signals(supervisor):
        supervisor.run()
    return not supervisor.is_stuck


@dataclass
class _Supervisor:
    """Runs training processes, one after another, until it is stopped or consent is revoked.

    Attributes:
        is_stuck: Whether a training ignored the request to stop.
    """

    options: RuntimeOptions
    folder: ClientFolder
    out: TextIO
    is_stuck: bool = False
    _is_stopping: bool = False
    _is_woken: bool = False
    _child: TrainingProcess | None = None
    _final: str | None = None
    _run_id: str | None = None  # of the last event that concerns a run

    def stop(self) -> None:
        """End the training process at its next batch, or at once if it is still starting."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._child is not None:
            self._end(self._child)

    def wake(self) -> None:
        """Look for the coordinator now, or restart the training process without further delay."""
        self._is_woken = True
        if self._child is not None:
            self._child.resume()
            self._child.send(Wake())

    def suspend(self) -> None:
        """Suspend both processes on Ctrl-Z; the terminal does not reach the training process."""
        if self._child is not None:
            self._child.suspend()
        if sys.platform != "win32":
            # Our handler has replaced the default action of SIGTSTP, so stop this process
            # explicitly.
            os.kill(os.getpid(), signal.SIGSTOP)

    def run(self) -> None:
        """Run training processes until the last one has ended.

        Raises:
            DeploymentError: The client cannot take part; the message is the training process's.
        """
        restarts = Restarts()
        while not self._is_stopping and self.folder.has_consent():
            begin_s = _CLOCK.now_s()
            self._run_child()
            ran_s = _CLOCK.now_s() - begin_s
            if self.options.exit_code is not None:
                self._pause(restarts.wait_s(ran_s))

    def _run_child(self) -> None:
        try:
            child = TrainingProcess.start(self.options, python=find_interpreter())
        except OSError as error:
            if self.options.exit_code is None:  # the first process: retrying may never help
                raise DeploymentError(f"the training process cannot be started: {error}") from error
            # Retry: the machine may be short of memory, which may also have caused the last crash.
            self._print(
                AgentEvent(kind=EventKind.CRASHED, message=f"it cannot be started: {error}")
            )
            return
        self._child = child
        if self._is_stopping:
            # A signal came before the process was known to `stop`.
            self._end(child)
        try:
            ending = child.follow(self._hear)
        finally:
            self._child = None
        if self._final is not None:
            raise DeploymentError(self._final)
        if child.is_stopping and ending.code == STUCK:
            self.is_stuck = True
        self.options = replace(self.options, exit_code=ending.crash_code)
        if ending.crash is not None and self.folder.has_consent():
            self._print(AgentEvent(kind=EventKind.CRASHED, message=ending.crash))

    def _end(self, child: TrainingProcess) -> None:
        child.ask_to_stop()
        timer = threading.Timer(STOP_S, self._kill, [child])
        timer.daemon = True
        timer.start()

    def _kill(self, child: TrainingProcess) -> None:
        # It did not react to a message, as inside a long call of native code.
        if self._child is child:
            self.is_stuck = True
            child.kill()

    def _pause(self, wait_s: float) -> None:
        self._is_woken = False
        until_s = _CLOCK.now_s() + wait_s
        while not (self._is_stopping or self._is_woken) and _CLOCK.now_s() < until_s:
            _CLOCK.sleep(_LOOK_S)

    def _hear(self, event: AgentEvent) -> None:
        if event.is_final:
            self._final = event.message
        elif event.kind is not EventKind.PROGRESS:  # too frequent to print
            self._print(event)

    def _print(self, event: AgentEvent) -> None:
        is_other = event.run_id not in (None, self._run_id)
        self._run_id = event.run_id or self._run_id
        try:
            if is_other:
                print(f"run {event.run_id}", file=self.out)
            print(_line(event), file=self.out, flush=True)
        except OSError:  # standard output was closed
            self.stop()
            raise


def home_of(invitation: Path) -> Path:
    """Return the default folder of the client named in an invitation."""
    return default_home(Invitation.load(invitation).name, environ=os.environ)


@contextmanager
def _call_on_signals(supervisor: _Supervisor) -> Iterator[None]:
    callbacks = {signal.SIGTERM: supervisor.stop, signal.SIGINT: supervisor.stop}
    if sys.platform != "win32":
        # SIGCONT is harmless before this handler is installed, and the system sends it by itself
        # after a stop.
        callbacks |= {signal.SIGCONT: supervisor.wake, signal.SIGTSTP: supervisor.suspend}

    def handle(number: int, _: FrameType | None) -> None:
        callbacks[signal.Signals(number)]()

    before = {number: signal.signal(number, handle) for number in callbacks}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(event: AgentEvent) -> str:
    place = "" if event.round_num is None else f"round {event.round_num + 1}: "
    words = f": {event.message}" if event.message else ""
    return f"{place}{event.kind}{words}"
