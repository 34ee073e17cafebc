"""Taking part from inside an application: starts at once, trains in a process of its own."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedlearn.client.backoff import Backoff
from fedlearn.client.callbacks import Caller
from fedlearn.client.conditions import Conditions, Probes
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.folder import ClientFolder
from fedlearn.client.loading import name_of
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.policy import Policy
from fedlearn.client.process import TrainingProcess, interpreter, is_training_process
from fedlearn.core.clock import SystemClock
from fedlearn.errors import DeploymentError

if TYPE_CHECKING:  # the application does not wait for torch
    from fedlearn.training.trainer import LocalTrainer

#: Seconds that the process gets to end by itself; it gives its own training thread less.
_STOP_S = 15.0
#: A training process that lasted so long did not crash at once: it is soon started again.
_STEADY_S = 60.0
#: Seconds that another process of this client gets to see that there is no consent any more.
_ALONE_S = 30.0
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
        num_threads: Threads that torch may use, in each process that trains.
        num_workers: Processes that share each training, data-parallel; more than one are for a
            :class:`~fedlearn.training.torch_trainer.TorchTrainer`.
        niceness: 0 is a program like any other, 19 gives way to all others.
        roster: The operator's list of identity keys, checked with the other users: in secure
            aggregation these clients are believed and no others.

    Raises:
        DeploymentError: The trainer cannot be made in another process, or there is no Python
            to start one with.

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
        num_threads: int = 1,
        num_workers: int = 1,
        niceness: int = 10,
        roster: Path | str | None = None,
    ) -> None:
        self._home = ClientFolder(Path(home).expanduser().resolve())
        self._options = RuntimeOptions(
            home=self._home.folder,
            trainer=name_of(trainer),
            invitation=None if invitation is None else Path(invitation).expanduser().resolve(),
            conditions=conditions,
            policy=policy,
            num_threads=num_threads,
            num_workers=num_workers,
            niceness=niceness,
            roster=None if roster is None else Path(roster).expanduser().resolve(),
        )
        self._python = interpreter()
        self._probes, self._on_progress = probes, on_progress
        self._status = AgentStatus()
        self._changed = threading.Condition()
        self._is_stopping = self._is_hopeless = self._is_revoked = False
        self._child: TrainingProcess | None = None
        self._thread: threading.Thread | None = None
        self._pid: int | None = None  # of the process that has started it

    def start(self) -> None:
        """Begin in the background; returns at once. An agent that runs goes on.

        Raises:
            DeploymentError: This is the training process, which has imported the application's
                script, or a process forked from that in which the agent was started.
        """
        self._require_own_process()
        with self._changed:
            if self._thread is not None and self._thread.is_alive():
                return
            self._pid = os.getpid()
            self._is_stopping = self._is_hopeless = False
            # It ends with the application, and the training process with its socket.
            self._thread = threading.Thread(
                target=self._supervise, name="fedlearn-agent", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the training process at its next batch; what it has done so far is kept.

        In a forked process there is none to end.
        """
        if self._is_forked():
            return
        with self._changed:
            thread, self._is_stopping = self._thread, True
            self._changed.notify_all()
        if thread is None:
            return
        self._end_child()
        thread.join()
        self._thread = self._pid = None

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

    def revoke_consent(self) -> None:
        """Note that the user does not agree, stop within one batch, erase local state.

        Keys and certificate stay, so that the user may agree again; see :meth:`forget`.
        If the application dies inside this, the next start erases the rest.

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
            self._end_child()
            with self._home.locked(timeout_s=_ALONE_S):
                self._home.erase()

    def forget(self) -> None:
        """Revoke consent and remove everything, keys included; raises as :meth:`revoke_consent`."""
        self.revoke_consent()
        with self._home.locked(timeout_s=_ALONE_S):
            self._home.forget()

    def status(self) -> AgentStatus:
        """Return where the agent stands; raises as :meth:`start`."""
        self._require_own_process()
        with self._changed:
            return replace(self._status, has_consent=self._has_consent())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

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
        backoff = Backoff()
        with (
            closing(Caller("fedlearn-progress")) as progress,
            closing(Caller("fedlearn-probes")) as asking,
        ):
            while self._wait_until_wanted():
                begin_s = _CLOCK.now_s()
                crash = self._run_child(progress, asking)
                if _CLOCK.now_s() - begin_s > _STEADY_S:
                    backoff.reset()
                if crash is None or self._is_stopping or not self._has_consent():
                    continue
                _log.error("the training process has ended: %s", crash)
                self._hear(AgentEvent(kind=EventKind.CRASHED, message=crash), progress)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_stopping, timeout=backoff.next_s())

    def _wait_until_wanted(self) -> bool:
        """Return once a child is wanted; false: the agent stops."""
        with self._changed:
            while not self._is_stopping:
                if not self._is_hopeless and self._has_consent():
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
            _log.error("local state is not erased: %s", error)

    def _run_child(self, progress: Caller, asking: Caller) -> str | None:
        """Run one training process to its end.

        Returns:
            What it ended of; ``None``: it was asked to, or has said that to go on is no use.
        """
        try:
            child = TrainingProcess.start(self._options, python=self._python)
        except OSError as error:
            return f"it cannot be started: {error}"
        self._update(is_running=True, pid=child.process.pid)
        with self._changed:
            self._child = child
        if self._is_stopping or not self._has_consent():
            child.ask_to_stop()
        if self._probes != Probes():
            asking.call(partial(self._ask_probes, child, asking))
        is_final, words = False, ""
        try:
            for event in child.events():
                if event.kind is EventKind.CRASHED:
                    words = f": {event.message}"  # told with the exit code
                    continue
                is_final = is_final or event.is_final
                self._hear(event, progress)
            code = child.process.wait()
        finally:
            child.link.close()
            with self._changed:
                self._child = None
                self._changed.notify_all()
            self._update(is_running=False, pid=None, is_connected=False)
        return None if is_final or child.was_asked_to_stop else f"exit code {code}{words}"

    def _ask_probes(self, child: TrainingProcess, asking: Caller) -> None:
        """Tell the process what the probes find, and again in a second, while it is the child."""
        if self._child is not child:
            return
        asking.call(partial(self._ask_probes, child, asking))  # also if one of them fails
        try:
            child.tell(self._probes.facts())
        finally:
            _CLOCK.sleep(_ASK_S)

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
