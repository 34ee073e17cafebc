"""Taking part from inside an application: starts at once, trains in a process of its own."""

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
    interpreter,
    is_training_process,
)
from fedlearn.core.clock import SystemClock
from fedlearn.errors import DeploymentError

if TYPE_CHECKING:  # the application does not wait for torch
    from fedlearn.training.trainer import LocalTrainer

#: Seconds that another process of this client gets to see that there is no consent any more.
_ALONE_S = 30.0
#: Seconds that a caller waits for what goes on in the background anyway.
_SOON_S = 0.9
#: Seconds between two questions to the probes.
_ASK_S = 1.0
_CLOCK = SystemClock()

# In the application's process: what becomes of a line is the application's to say; if it says
# nothing, warnings and errors go to standard error.
_log = logging.getLogger(__name__)


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
    application, however that ends, and is started again when it crashes. A script starts its
    agent under ``if __name__ == "__main__":`` if its trainer lies in the same file, which the
    training process imports. An agent works in the process that has started it: a worker forked
    from there cannot use it.

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
        on_progress: Called with each event, one at a time, on a thread of its own; what it
            raises is reported as of any thread (:func:`threading.excepthook`).
        resources: How much of the device training may use.
        connection: How the coordinator is found, and whose keys are believed there.

    Raises:
        DeploymentError: The trainer cannot be made in another process, or its name leads nowhere;
            there is no such invitation, or no Python to start a process with.

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
        self._python = interpreter()
        # Another interpreter may have other packages.
        if isinstance(trainer, str) and self._python == sys.executable:
            require_trainer(self._options.trainer)
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
        """Begin in the background; returns at once. An agent that runs goes on.

        Raises:
            DeploymentError: This is the training process, which has imported the application's
                script, or a process forked from that in which the agent was started.
        """
        self._require_own_process()
        with self._changed:
            self._pid = os.getpid()
            self._is_stopping = self._is_hopeless = False
            self._changed.notify_all()
            if self._thread is not None and self._thread.is_alive():
                return
            # It ends with the application, and the training process with its socket.
            self._thread = threading.Thread(
                target=self._supervise, name="fedlearn-agent", daemon=True
            )
            self._thread.start()

    def stop(self, *, wait: float = _SOON_S) -> bool:
        """End the training process at its next batch; what it has done so far is kept.

        A training that does not listen is ended after 15 s, with whatever it has started.

        Args:
            wait: Seconds to wait for that, :data:`math.inf` for as long as it takes; it goes on in
                the background all the same.

        Returns:
            Whether the process is gone. In a forked process there is none to end.
        """
        if self._is_forked():
            return True
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        return _done_within(wait, self._await_stop)

    async def stop_async(self, *, wait: float = math.inf) -> bool:
        """Do as :meth:`stop`, while the event loop goes on."""
        return await asyncio.to_thread(self.stop, wait=wait)

    def give_consent(self) -> None:
        """Note that the user agrees; an agent that was started connects now.

        Raises:
            DeploymentError: It cannot be written, what an earlier revocation has left cannot be
                erased, or the process is a wrong one, as for :meth:`start`.
        """
        self._require_own_process()
        self._home.set_consent(granted=True)
        with self._changed:
            self._is_hopeless = self._is_revoked = False
            self._changed.notify_all()

    def revoke_consent(self, *, wait: float = _SOON_S) -> bool:
        """Note that the user does not agree, stop within one batch, erase local state.

        Keys and certificate stay, so that the user may agree again; see :meth:`forget`.
        If the application dies inside this, the next start erases the rest.

        Args:
            wait: Seconds to wait for the end of training and for the erasure, as for :meth:`stop`;
                the decision itself is kept when this returns.

        Returns:
            Whether everything is erased; if not yet, an error in it goes to the log.

        Raises:
            DeploymentError: It cannot be written, which this agent obeys all the same; another
                process works in the folder and does not end; something cannot be erased; or
                the process is a wrong one, as for :meth:`start`.
        """
        self._require_own_process()
        with self._changed:
            self._is_revoked = True
        try:
            self._home.set_consent(granted=False)
        finally:
            is_erased = _done_within(wait, self._await_erasure)
        return is_erased

    async def revoke_consent_async(self, *, wait: float = math.inf) -> bool:
        """Do as :meth:`revoke_consent`, while the event loop goes on."""
        return await asyncio.to_thread(self.revoke_consent, wait=wait)

    def forget(self) -> None:
        """Revoke consent and remove everything, keys included; raises as :meth:`revoke_consent`.

        It waits until that is done.
        """
        self.revoke_consent(wait=math.inf)
        self._home.forget(timeout_s=_ALONE_S)

    def change(self, *, conditions: Conditions | None = None, policy: Policy | None = None) -> None:
        """Have other conditions, or another policy, from now on; a training process goes on.

        Conditions are heeded within a second. A policy is heeded from the next request on: what was
        begun under the former one is finished.

        Args:
            conditions: ``None``: as before.
            policy: Likewise.

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
            child.tell(self._wishes())

    def wake(self) -> None:
        """Look for the coordinator now: the network is back, or the user has come.

        Whatever this agent waits for before it tries again ends at once: its own back-off, an
        absence that the coordinator has asked for, an attempt that gets no answer, and the pause
        before a training process that has crashed is started again. Conditions must still hold. An
        agent that is connected, was not started or has no consent does nothing. Any thread may
        call this.

        Raises:
            DeploymentError: As for :meth:`start`.
        """
        self._require_own_process()
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()
            child = self._child
        if child is not None:
            child.tell(Wake())

    def status(self) -> AgentStatus:
        """Return where the agent stands; raises as :meth:`start`."""
        self._require_own_process()
        with self._changed:
            return replace(self._status, has_consent=self._has_consent())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(wait=math.inf)

    def _is_forked(self) -> bool:
        """Return whether threads, locks and training process are those of another process."""
        return self._pid is not None and self._pid != os.getpid()

    def _require_own_process(self) -> None:
        if is_training_process():
            raise DeploymentError(
                "this is the training process, which has imported the file that the trainer lies "
                "in; put what starts the agent under `if __name__ == '__main__':`, or the trainer "
                "into a file of its own"
            )
        if self._is_forked():
            raise DeploymentError(
                f"this agent was started in process {self._pid}, and process {os.getpid()} is "
                "forked from there; use it there, or start it only after the fork, in one of the "
                "workers"
            )

    def _require_invitation(self) -> None:
        path = self._options.invitation
        if path is not None and not path.is_file():
            raise DeploymentError(
                f"there is no invitation {path}; ask the coordinator's operator for one "
                "(`fedlearn invite NAME`), or pass none if this client has joined"
            )

    def _wishes(self) -> Changes:
        return Changes(conditions=self._options.conditions, policy=self._options.policy)

    def _has_consent(self) -> bool:
        """Return whether the user agrees, as far as that can be read."""
        try:
            return not self._is_revoked and self._home.has_consent()
        except (OSError, UnicodeDecodeError) as error:
            _log.error("the user's consent cannot be read, so there is none: %s", error)
            return False

    # The supervising thread

    def _supervise(self) -> None:
        if not self._has_consent():
            self._erase_leftovers()
        restarts = Restarts()
        with (
            closing(Caller("fedlearn-progress")) as progress,
            closing(Caller("fedlearn-probes")) as asking,
        ):
            while self._wait_until_wanted():
                begin_s = _CLOCK.now_s()
                crash = self._run_child(progress, asking)
                ran_s = _CLOCK.now_s() - begin_s
                if crash is None or self._is_stopping or not self._has_consent():
                    continue
                _log.error("the training process has ended: %s", crash)
                self._hear(AgentEvent(kind=EventKind.CRASHED, message=crash), progress)
                with self._changed:
                    self._is_woken = False
                    self._changed.wait_for(
                        lambda: self._is_stopping or self._is_woken, timeout=restarts.wait_s(ran_s)
                    )

    def _wait_until_wanted(self) -> bool:
        """Return once a child is wanted; false: the agent stops."""
        with self._changed:
            while not self._is_stopping:
                if not self._is_hopeless and self._has_consent():
                    return True
                self._changed.wait()
            self._thread = None  # who starts the agent again needs another one
            self._changed.notify_all()
        return False

    def _erase_leftovers(self) -> None:
        """Finish what a revocation did not come to."""
        if not self._home.folder.exists():
            return
        try:
            with self._home.locked(timeout_s=_ALONE_S):
                self._home.erase()
        except DeploymentError as error:
            _log.error("local state is not erased: %s", error)

    def _run_child(self, progress: Caller, asking: Caller) -> str | None:
        """Run one training process to its end.

        Returns:
            What it ended of; ``None``: it was asked to, or has said that to go on is no use.
        """
        options = self._options
        if options.invitation is None and not self._home.has_keys():
            message = (
                f"{self._home.folder} is not enrolled; pass the invitation that the coordinator's "
                "operator made (`fedlearn invite NAME`)"
            )
            event = AgentEvent(kind=EventKind.FAILED, message=message, is_final=True)
            self._hear(event, progress)
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
            is_changed = self._options != options
        if is_changed:
            child.tell(self._wishes())
        if self._is_stopping or not self._has_consent():
            child.ask_to_stop()
        if self._probes != Probes():
            asking.call(partial(self._ask_probes, child, asking))
        try:
            ending = child.follow(lambda event: self._hear(event, progress))
        finally:
            with self._changed:
                self._child = None
                self._changed.notify_all()
            self._update(is_running=False, pid=None, is_connected=False)
        self._exit_code = ending.crash_code
        return ending.crash

    def _ask_probes(self, child: TrainingProcess, asking: Caller) -> None:
        """Tell the process what the probes find, and again in a second, while it is the child."""
        if self._child is not child:
            return
        asking.call(partial(self._ask_probes, child, asking))  # also if one of them fails
        try:
            child.tell(self._probes.facts())
        finally:
            _CLOCK.sleep(_ASK_S)

    def _await_stop(self) -> None:
        """Return when the supervising thread has ended the child, or the agent is started again."""
        self._end_child()
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or not self._is_stopping)
            if self._thread is None:
                self._pid = None

    def _await_erasure(self) -> None:
        """Return when there is neither a child nor anything that it worked on."""
        self._end_child()
        with self._home.locked(timeout_s=_ALONE_S):
            if not self._has_consent():  # given again meanwhile: that has erased it
                self._home.erase()

    def _end_child(self) -> None:
        """Return when the child that there is now has ended."""
        with self._changed:
            child = self._child
            if child is None:
                return
            child.ask_to_stop()
            if self._changed.wait_for(lambda: self._child is not child, timeout=STOP_S):
                return
            child.kill()
            self._changed.wait_for(lambda: self._child is not child, timeout=STOP_S)

    def _hear(self, event: AgentEvent, progress: Caller) -> None:
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


def _done_within(wait_s: float, job: Callable[[], None]) -> bool:
    """Carry out ``job`` on a thread; return whether it is done in time, and raise what it raises.

    An error of a job that takes longer goes to the log.
    """
    done, lock, has_left = Future[None](), threading.Lock(), False

    def carry_out() -> None:
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

    # A daemon: an application that ends takes the training process with it.
    threading.Thread(target=carry_out, name="fedlearn-ending", daemon=True).start()
    try:
        done.result(timeout=None if math.isinf(wait_s) else wait_s)
    except TimeoutError:
        with lock:
            has_left = not done.done()
        if has_left:
            return False
        done.result()
    return True
