"""Take part in federated learning from inside an application, training in a separate process."""

import asyncio
import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedlearn.client.callbacks import Caller
from fedlearn.client.conditions import Conditions, Probes
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.folder import ClientFolder
from fedlearn.client.loading import name_of, require_trainer
from fedlearn.client.options import Changes, Connection, Resources, RuntimeOptions, Wake
from fedlearn.client.policy import Policy
from fedlearn.client.process import (
    STOP_S,
    Restarts,
    TrainingProcess,
    find_interpreter,
    is_training_process,
)
from fedlearn.core.clock import SystemClock
from fedlearn.errors import DeploymentError

if TYPE_CHECKING:  # keeps torch out of the application's process
    from fedlearn.training.trainer import LocalTrainer

#: Seconds that another process of this client gets to notice that consent was revoked.
_ALONE_S = 30.0
#: Seconds that a caller waits by default for work that finishes in the background anyway.
_SOON_S = 0.9
#: Seconds between two polls of the application's probes.
_PROBE_S = 1.0
_CLOCK = SystemClock()

# Standard logging, not structlog: this runs in the application's process, which configures its own
# logging. If it configures none, Python prints warnings and errors to standard error.
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentStatus:
    """A snapshot of an agent's state.

    Attributes:
        has_consent: Whether the user agrees to take part.
        is_running: Whether the training process is running.
        pid: The training process's id, or ``None`` if it is not running.
        is_connected: Whether it is connected to the coordinator.
        num_accepted: Replies that the coordinator has accepted since the agent was created.
        last: The latest event other than progress.
    """

    has_consent: bool = False
    is_running: bool = False
    pid: int | None = None
    is_connected: bool = False
    num_accepted: int = 0
    last: AgentEvent | None = None


class Agent:
    """Lets an application's device take part in federated learning.

    The agent does not connect before :meth:`give_consent`. Training runs in a separate process,
    which ends with the application, even if that crashes, and is restarted when it crashes itself.
    If the trainer is defined in the script that starts the agent, start the agent under
    ``if __name__ == "__main__":``, because the training process imports that script. An agent works
    only in the process that has started it, not in one forked from it.

    Args:
        home: The client's folder, for its keys, the user's consent and the task in work.
        trainer: The user's trainer: ``"module:Class"``, ``"path/file.py:Class"``, or a class or
            function at the top level of a module. The training process calls it without arguments.
        invitation: The file from the coordinator's operator. A file that was used before has no
            effect; a new one enrols again, with new keys and a new certificate.
        conditions: What must hold before and during training.
        policy: What the client refuses, no matter what the coordinator asks.
        probes: What the application knows about the device.
        on_progress: Called with each event, one at a time, on a separate thread. An exception in it
            is reported like that of any thread (:func:`threading.excepthook`).
        resources: How much of the device training may use.
        connection: How to find the coordinator, and which clients' identity keys to trust.

    Raises:
        DeploymentError: Another process cannot create the trainer, or its name cannot be found; the
            invitation does not exist; or there is no Python interpreter to start the training
            process with.

    Example:
        ::

            with Agent("~/.my_app/fedlearn", trainer="my_app.training:Trainer",
                       invitation="laptop.invitation") as agent:
                agent.give_consent()
                ...

        The user's consent is stored in the client's folder:

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as home:
        ...     agent = Agent(home, trainer="fedlearn.client:TorchTrainer")
        ...     agent.give_consent()
        ...     agent.status().has_consent
        True
    """

    def __init__(
        self,
        home: Path | str,
        *,
        trainer: "str | Callable[[], LocalTrainer]",
        invitation: Path | str | None = None,
        conditions: Conditions = Conditions(),  # noqa: B008 - frozen
        policy: Policy = Policy(),  # noqa: B008 - frozen
        probes: Probes = Probes(),  # noqa: B008 - frozen
        on_progress: Callable[[AgentEvent], None] | None = None,
        resources: Resources = Resources(),  # noqa: B008 - frozen
        connection: Connection = Connection(),  # noqa: B008 - frozen
    ) -> None:
        self._home = ClientFolder(Path(home).expanduser().resolve())
        self._options = RuntimeOptions(
            home=self._home.folder,
            trainer=name_of(trainer),
            invitation=None if invitation is None else Path(invitation).expanduser().resolve(),
            conditions=conditions,
            policy=policy,
            resources=resources,
            connection=connection,
        )
        self._python = find_interpreter()
        # Another interpreter may have other packages.
        if isinstance(trainer, str) and self._python == sys.executable:
            require_trainer(trainer)
        self._require_invitation()
        self._probes, self._on_progress = probes, on_progress
        self._status = AgentStatus()
        self._changed = threading.Condition()
        self._is_stopping = self._is_hopeless = self._is_revoked = self._is_woken = False
        self._child: TrainingProcess | None = None
        self._thread: threading.Thread | None = None  # until it begins to end
        self._exit_code: int | None = None  # of the last child, unless it was asked to end
        self._pid: int | None = None  # of the process that has started it

    def start(self) -> None:
        """Start in the background and return at once; a running agent continues.

        Raises:
            DeploymentError: This is the training process, which has imported the application's
                script, or a fork of the process that started the agent.
        """
        self._require_own_process()
        with self._changed:
            self._pid = os.getpid()
            self._is_stopping = self._is_hopeless = False
            self._changed.notify_all()
            if self._thread is not None and self._thread.is_alive():
                return
            # A daemon thread ends with the application, and closing its socket ends the training
            # process.
            self._thread = threading.Thread(
                target=self._supervise, name="fedlearn-agent", daemon=True
            )
            self._thread.start()

    def stop(self, *, wait: float = _SOON_S) -> bool:
        """Stop the training process at its next batch, keeping its last checkpoint.

        If it does not stop within 15 s, it is killed, together with its child processes.

        Args:
            wait: Seconds to wait for it to exit, or :data:`math.inf` to wait as long as it takes.
                Stopping continues in the background after that.

        Returns:
            Whether the process has exited; always true in a forked process, which has none.
        """
        if self._is_forked():
            return True
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        return _run_within(wait, self._await_stop)

    async def stop_async(self, *, wait: float = math.inf) -> bool:
        """Do the same as :meth:`stop` without blocking the event loop."""
        return await asyncio.to_thread(self.stop, wait=wait)

    def give_consent(self) -> None:
        """Record that the user agrees; an agent that was started connects now.

        Raises:
            DeploymentError: The decision cannot be written; leftovers of an earlier revocation
                cannot be erased; or this is the wrong process, as for :meth:`start`.
        """
        self._require_own_process()
        self._home.set_consent(granted=True)
        with self._changed:
            self._is_hopeless = self._is_revoked = False
            self._changed.notify_all()

    def revoke_consent(self, *, wait: float = _SOON_S) -> bool:
        """Record that the user does not agree, stop within one batch, and erase local state.

        Keys and certificate stay, so that the user may agree again; see :meth:`forget`.
        If the application dies during this call, the next start erases the rest.

        Args:
            wait: Seconds to wait for training to end and for the erasure, as for :meth:`stop`. The
                decision itself has been saved when this returns.

        Returns:
            Whether everything is erased; if not yet, a later error goes to the log.

        Raises:
            DeploymentError: The decision cannot be written (this agent obeys it all the same);
                another process uses the folder and does not end; something cannot be erased; or
                this is the wrong process, as for :meth:`start`.
        """
        self._require_own_process()
        with self._changed:
            # First in memory: this agent obeys even if the disk does not take the decision.
            self._is_revoked = True
        try:
            self._home.set_consent(granted=False)
        finally:
            is_erased = _run_within(wait, self._await_erasure)
        return is_erased

    async def revoke_consent_async(self, *, wait: float = math.inf) -> bool:
        """Do the same as :meth:`revoke_consent` without blocking the event loop."""
        return await asyncio.to_thread(self.revoke_consent, wait=wait)

    def forget(self) -> None:
        """Revoke consent and remove everything, including the keys; return when that is done.

        Raises as :meth:`revoke_consent`.
        """
        self.revoke_consent(wait=math.inf)
        self._home.forget(timeout_s=_ALONE_S)

    def change(self, *, conditions: Conditions | None = None, policy: Policy | None = None) -> None:
        """Replace the conditions or the policy, without restarting the training process.

        New conditions take effect within a second. A new policy applies from the next request on; a
        task that was started under the old policy is finished.

        Args:
            conditions: The new conditions; ``None`` keeps the present ones.
            policy: The new policy; ``None`` keeps the present one.

        Raises:
            DeploymentError: As for :meth:`start`.
        """
        self._require_own_process()
        with self._changed:
            self._options = replace(
                self._options,
                conditions=conditions or self._options.conditions,
                policy=policy or self._options.policy,
            )
            child = self._child
        if child is not None:
            child.send(self._make_changes())

    def wake(self) -> None:
        """Try to connect now, for example because the network is back or the user has arrived.

        Ends every wait before the next attempt: the agent's back-off, an absence that the
        coordinator has asked for, an attempt without an answer, and the pause before a crashed
        training process is restarted. Conditions must still hold. Has no effect on an agent that is
        connected, was not started or has no consent. Any thread may call this.

        Raises:
            DeploymentError: As for :meth:`start`.
        """
        self._require_own_process()
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()
            child = self._child
        if child is not None:
            child.send(Wake())

    def status(self) -> AgentStatus:
        """Return a snapshot of the agent's state; raises as :meth:`start`."""
        self._require_own_process()
        with self._changed:
            return replace(self._status, has_consent=self._has_consent())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(wait=math.inf)

    def _is_forked(self) -> bool:
        """Check whether this is a fork of the process that started the agent.

        A fork inherits copies of the locks, but neither the threads nor the training process.
        """
        return self._pid is not None and self._pid != os.getpid()

    def _require_own_process(self) -> None:
        if is_training_process():
            raise DeploymentError(
                "this is the training process, which has imported the file that defines the "
                "trainer; start the agent under `if __name__ == '__main__':`, or move the trainer "
                "to a separate file"
            )
        if self._is_forked():
            raise DeploymentError(
                f"this agent was started in process {self._pid}, and process {os.getpid()} is a "
                "fork of it; use the agent in the process that started it, or start it after the "
                "fork, in one of the workers"
            )

    def _require_invitation(self) -> None:
        path = self._options.invitation
        if path is not None and not path.is_file():
            raise DeploymentError(
                f"there is no invitation file {path}; ask the coordinator's operator for one "
                "(`fedlearn invite NAME`), or leave it out if this client has joined already"
            )

    def _make_changes(self) -> Changes:
        return Changes(conditions=self._options.conditions, policy=self._options.policy)

    def _has_consent(self) -> bool:
        try:
            return not self._is_revoked and self._home.has_consent()
        except (OSError, UnicodeDecodeError) as error:
            _log.error("the user's consent cannot be read, so it counts as not given: %s", error)
            return False

    # The supervisor thread

    def _supervise(self) -> None:
        if not self._has_consent():
            self._erase_leftovers()
        restarts = Restarts()
        with (
            closing(Caller("fedlearn-progress")) as progress,
            closing(Caller("fedlearn-probes")) as probing,
        ):
            while self._wait_until_wanted():
                begin_s = _CLOCK.now_s()
                crash = self._run_child(progress, probing)
                ran_s = _CLOCK.now_s() - begin_s
                if crash is None or self._is_stopping or not self._has_consent():
                    continue
                _log.error("the training process has ended: %s", crash)
                self._handle_event(AgentEvent(kind=EventKind.CRASHED, message=crash), progress)
                with self._changed:
                    self._is_woken = False
                    self._changed.wait_for(
                        lambda: self._is_stopping or self._is_woken, timeout=restarts.wait_s(ran_s)
                    )

    def _wait_until_wanted(self) -> bool:
        """Block until a training process is wanted (true) or the agent stops (false)."""
        with self._changed:
            while not self._is_stopping:
                if not self._is_hopeless and self._has_consent():
                    return True
                self._changed.wait()
            # Under the lock, or `start` could see a thread that is alive but about to end.
            self._thread = None  # `start` must create a new thread
            self._changed.notify_all()
        return False

    def _erase_leftovers(self) -> None:
        """Finish an erasure that an earlier revocation did not complete."""
        if not self._home.folder.exists():
            return
        try:
            with self._home.lock(timeout_s=_ALONE_S):
                self._home.erase()
        except DeploymentError as error:
            _log.error("local state could not be erased: %s", error)

    def _run_child(self, progress: Caller, probing: Caller) -> str | None:
        """Run one training process until it exits.

        Returns:
            The description of a crash. ``None`` if the process was asked to stop, or has reported
            that another attempt would be pointless.
        """
        options = self._options
        if options.invitation is None and not self._home.has_keys():
            message = (
                f"{self._home.folder} is not enrolled; pass the invitation that the coordinator's "
                "operator made (`fedlearn invite NAME`)"
            )
            event = AgentEvent(kind=EventKind.FAILED, message=message, is_final=True)
            self._handle_event(event, progress)
            return None
        try:
            child = TrainingProcess.start(
                replace(options, exit_code=self._exit_code), python=self._python
            )
        except OSError as error:
            return f"it cannot be started: {error}"
        self._update(is_running=True, pid=child.process.pid)
        with self._changed:
            self._child = child
            # `change` may have run since `options` was read; it found no child to tell.
            is_changed = self._options != options
        if is_changed:
            child.send(self._make_changes())
        # Likewise for `stop` and `revoke_consent`.
        if self._is_stopping or not self._has_consent():
            child.ask_to_stop()
        if self._probes != Probes():
            probing.call(partial(self._poll_probes, child, probing))
        try:
            ending = child.follow(lambda event: self._handle_event(event, progress))
        finally:
            with self._changed:
                self._child = None
                self._changed.notify_all()
            self._update(is_running=False, pid=None, is_connected=False)
        self._exit_code = ending.crash_code
        return ending.crash

    def _poll_probes(self, child: TrainingProcess, probing: Caller) -> None:
        """Poll the probes every second, and send the results to ``child`` while it runs."""
        if self._child is not child:
            return
        probing.call(partial(self._poll_probes, child, probing))  # first, in case a probe raises
        try:
            child.send(self._probes.poll())
        finally:
            _CLOCK.sleep(_PROBE_S)

    def _await_stop(self) -> None:
        """Block until the supervisor thread has ended, or the agent is started again."""
        self._end_child()
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or not self._is_stopping)
            if self._thread is None:
                self._pid = None

    def _await_erasure(self) -> None:
        self._end_child()
        with self._home.lock(timeout_s=_ALONE_S):
            # If consent was given again meanwhile, `set_consent` has erased the state already.
            if not self._has_consent():
                self._home.erase()

    def _end_child(self) -> None:
        with self._changed:
            child = self._child
            if child is None:
                return
            child.ask_to_stop()
            if self._changed.wait_for(lambda: self._child is not child, timeout=STOP_S):
                return
            child.kill()
            self._changed.wait_for(lambda: self._child is not child, timeout=STOP_S)

    def _handle_event(self, event: AgentEvent, progress: Caller) -> None:
        if event.kind is not EventKind.PROGRESS:
            self._update(last=event)
        match event.kind:
            case EventKind.ACCEPTED:
                self._update(num_accepted=self._status.num_accepted + 1)
            case EventKind.CONNECTED | EventKind.DISCONNECTED:
                self._update(is_connected=event.kind is EventKind.CONNECTED)
        if event.is_final:
            with self._changed:
                self._is_hopeless = True
        if self._on_progress is not None:
            progress.call(partial(self._on_progress, event))

    def _update(self, **changes: Any) -> None:  # Any: a value of any field
        with self._changed:
            self._status = replace(self._status, **changes)


def _run_within(wait_s: float, job: Callable[[], None]) -> bool:
    """Run ``job`` on a thread; return whether it finishes within ``wait_s``.

    An error within that time is raised here; a later one goes to the log.
    """
    done, lock, has_left = Future[None](), threading.Lock(), False

    def run() -> None:
        try:
            job()
        except DeploymentError as error:
            with lock:
                if has_left:
                    _log.error("%s", error)
                else:
                    done.set_exception(error)
        else:
            done.set_result(None)

    # A daemon thread, so that it does not keep the application alive: the training process ends
    # with the application anyway.
    threading.Thread(target=run, name="fedlearn-ending", daemon=True).start()
    try:
        done.result(timeout=None if math.isinf(wait_s) else wait_s)
    except TimeoutError:
        with lock:
            has_left = not done.done()
        if has_left:
            return False
        done.result()
    return True
