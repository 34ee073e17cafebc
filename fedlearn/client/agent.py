"""Taking part from inside an application: starts at once, trains in a process of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import structlog

from fedlearn.client.backoff import Backoff
from fedlearn.client.conditions import Conditions, Facts, Probes
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.loading import name_of
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.policy import Policy
from fedlearn.client.process import Exit, TrainingProcess
from fedlearn.client.trainer import LocalTrainer
from fedlearn.core.clock import SystemClock
from fedlearn.errors import DeploymentError

#: Seconds that the process gets to end by itself; it gives its own training thread less.
_STOP_S = 15.0
#: A training process that lasted so long did not crash at once: it is soon started again.
_STEADY_S = 60.0
#: Seconds that another process of this client gets to see that there is no consent any more.
_ALONE_S = 30.0

ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentStatus:
    """Where an agent stands.

    Attributes:
        has_consent: Whether the user agrees to take part.
        is_running: Whether the training process is there.
        pid: Its process id; ``None``: there is none.
        is_connected: Whether the coordinator hears it.
        num_accepted: Replies that counted since the agent was made.
        last: The latest event that is not progress.
    """

    has_consent: bool = False
    is_running: bool = False
    pid: int | None = None
    is_connected: bool = False
    num_accepted: int = 0
    last: AgentEvent | None = None


class Agent:
    """Lets an application's device take part in federated learning.

    Nothing connects before :meth:`give_consent`. The training process ends with the
    application, however that ends, and is started again when it crashes.

    Args:
        home: The client's folder: its keys, the user's consent, what it works on.
        trainer: The user's: ``"module:Class"``, ``"path/file.py:Class"``, or a class or
            function at the top level of a module. It is made, without arguments, in the
            training process.
        invitation: The file from the coordinator's operator; one that was used changes nothing,
            a new one renews keys and certificate.
        conditions: What must hold before and during training.
        policy: What is refused, whatever the coordinator asks.
        probes: What the application knows of the device.
        on_progress: Called with each event, one at a time, on a thread of its own.
        num_threads: Threads that torch may use.
        niceness: 0 is a program like any other, 19 gives way to all others.
        roster: The operator's list of identity keys, checked with the other users: in secure
            aggregation these clients are believed and no others.

    Raises:
        DeploymentError: The trainer cannot be made in another process.

    Example:
        ::

            with Agent("~/.my_app/fedlearn", trainer="my_app.training:Trainer",
                       invitation="laptop.invitation") as agent:
                agent.give_consent()
                ...
    """

    def __init__(
        self,
        home: Path | str,
        *,
        trainer: str | Callable[[], LocalTrainer],
        invitation: Path | str | None = None,
        conditions: Conditions = Conditions(),  # noqa: B008 - frozen
        policy: Policy = Policy(),  # noqa: B008 - frozen
        probes: Probes = Probes(),  # noqa: B008 - frozen
        on_progress: Callable[[AgentEvent], None] | None = None,
        num_threads: int = 1,
        niceness: int = 10,
        roster: Path | str | None = None,
    ) -> None:
        self._home = Home(Path(home).expanduser().resolve())
        self._options = RuntimeOptions(
            home=self._home.folder,
            trainer=name_of(trainer),
            invitation=None if invitation is None else Path(invitation).expanduser().resolve(),
            conditions=conditions,
            policy=policy,
            num_threads=num_threads,
            niceness=niceness,
            roster=None if roster is None else Path(roster).expanduser().resolve(),
        )
        self._probes, self._on_progress = probes, on_progress
        self._status = AgentStatus()
        self._changed = threading.Condition()
        self._is_stopping = self._is_hopeless = False
        self._child: TrainingProcess | None = None
        self._thread: threading.Thread | None = None
        # Of the application's code, each on a thread of its own: it may fail, or take its time.
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="fedlearn-progress")
        self._polls = ThreadPoolExecutor(1, thread_name_prefix="fedlearn-probes")
        self._poll: Future[Facts] | None = None

    def start(self) -> None:
        """Begin in the background; returns at once. An agent that runs goes on."""
        with self._changed:
            if self._thread is not None:
                return
            self._is_stopping = self._is_hopeless = False
            # It ends with the application, and the training process with its socket.
            self._thread = threading.Thread(
                target=self._supervise, name="fedlearn-agent", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the training process at its next batch; what it has done so far is kept."""
        with self._changed:
            thread, self._is_stopping = self._thread, True
            self._changed.notify_all()
        if thread is None:
            return
        self._end_child()
        thread.join()
        self._thread = None

    def give_consent(self) -> None:
        """Note that the user agrees; an agent that was started connects now.

        Raises:
            DeploymentError: It cannot be written.
        """
        self._home.set_consent(granted=True)
        with self._changed:
            self._is_hopeless = False
            self._changed.notify_all()

    def revoke_consent(self) -> None:
        """Note that the user does not agree, stop within one batch, erase local state.

        Keys and certificate stay, so that the user may agree again; see :meth:`forget`.
        If the application dies inside this, the next start erases the rest.

        Raises:
            DeploymentError: It cannot be written, or another process works in the folder and
                does not end.
        """
        self._home.set_consent(granted=False)
        self._end_child()
        with self._home.locked(timeout_s=_ALONE_S):
            self._home.erase()

    def forget(self) -> None:
        """Revoke consent and remove everything, keys included.

        Raises:
            DeploymentError: As for :meth:`revoke_consent`.
        """
        self.revoke_consent()
        with self._home.locked(timeout_s=_ALONE_S):
            self._home.forget()

    def status(self) -> AgentStatus:
        """Return where the agent stands."""
        with self._changed:
            return replace(self._status, has_consent=self._home.has_consent())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # The supervising thread

    def _supervise(self) -> None:
        backoff, clock = Backoff(), SystemClock()
        if not self._home.has_consent():
            self._erase_leftovers()
        while self._wait_until_wanted():
            begin_s = clock.now_s()
            code = self._run_child()
            if clock.now_s() - begin_s > _STEADY_S:
                backoff.reset()
            if code == Exit.STOPPED or self._is_stopping or not self._home.has_consent():
                continue
            if code == Exit.HOPELESS:
                self._is_hopeless = True  # its last event says what to do
                continue
            _log.error("training_process_crashed", exit_code=code)
            self._hear(AgentEvent(kind=EventKind.CRASHED, message=f"exit code {code}"))
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping, timeout=backoff.next_s())

    def _wait_until_wanted(self) -> bool:
        """Return once a child is wanted; false: the agent stops."""
        with self._changed:
            while not self._is_stopping:
                if not self._is_hopeless and self._home.has_consent():
                    return True
                self._changed.wait()
        return False

    def _erase_leftovers(self) -> None:
        """Finish what a revocation did not come to."""
        if not self._home.folder.exists():
            return
        try:
            with self._home.locked(timeout_s=_ALONE_S):
                self._home.erase()
        except DeploymentError as error:
            _log.error("local_state_not_erased", error=str(error))

    def _run_child(self) -> int:
        """Run one training process to its end; returns its exit code."""
        try:
            child = TrainingProcess.start(self._options)
        except OSError as error:
            _log.error("training_process_not_started", error=str(error))
            return Exit.NOT_STARTED
        self._update(is_running=True, pid=child.process.pid)
        with self._changed:
            self._child = child
        if self._is_stopping or not self._home.has_consent():
            child.ask_to_stop()
        try:
            for event in child.events(self._facts):
                self._hear(event)
            return child.process.wait()
        finally:
            child.close()
            with self._changed:
                self._child = None
                self._changed.notify_all()
            self._update(is_running=False, pid=None, is_connected=False)

    def _end_child(self) -> None:
        """Return when there is no child any more."""
        with self._changed:
            if self._child is None:
                return
            self._child.ask_to_stop()
            if self._changed.wait_for(lambda: self._child is None, timeout=_STOP_S):
                return
            self._child.process.kill()
            self._changed.wait_for(lambda: self._child is None, timeout=_STOP_S)

    def _hear(self, event: AgentEvent) -> None:
        if event.kind is not EventKind.PROGRESS:
            self._update(last=event)
        if event.kind is EventKind.ACCEPTED:
            self._update(num_accepted=self._status.num_accepted + 1)
        if event.kind is EventKind.CONNECTED:
            self._update(is_connected=True)
        if event.kind is EventKind.DISCONNECTED:
            self._update(is_connected=False)
        if self._on_progress is not None:
            _call_in(self._callbacks, self._on_progress, event)

    def _facts(self) -> Facts:
        """Return what the application's probes have found lately; never waits for them."""
        found = Facts()
        if self._poll is not None and self._poll.done() and self._poll.exception() is None:
            found = self._poll.result()
        if self._poll is None or self._poll.done():
            self._poll = _call_in(self._polls, self._probes.facts)
        return found

    def _update(self, **changes: Any) -> None:  # Any: a value of any field
        with self._changed:
            self._status = replace(self._status, **changes)


def _call_in(
    executor: ThreadPoolExecutor,
    function: Callable[ParamT, ResultT],
    *args: ParamT.args,
    **kwargs: ParamT.kwargs,
) -> "Future[ResultT] | None":
    """Call the application's code; its failure is logged, not ours."""
    try:
        call = executor.submit(function, *args, **kwargs)
    except RuntimeError:
        return None  # the interpreter is shutting down
    call.add_done_callback(_report_failure)
    return call


def _report_failure(call: "Future[Any]") -> None:  # Any: of whatever function
    error = None if call.cancelled() else call.exception()
    if error is not None:
        _log.warning("callback_failed", error=repr(error))
