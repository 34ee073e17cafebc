"""The client's state machine: decides what to do next, without I/O; events in, actions out.

The life of one task, as events and actions::

    TaskOffered -> Begin -> WorkFinished -> Hold -> ReplyStored -> Deliver -> ReplySettled -> Drop
                     |
                     +-- cancelled (coordinator, conditions, user) -> Cancel -> WorkAbandoned

The work on a task (download and training) is one action. It ends with exactly one of
:class:`WorkFinished` and :class:`WorkAbandoned`, even after a cancellation, because training stops
only at the end of a batch. A task that arrives in between waits for that.

The coordinator may announce a model before it sends a task for it, so that the client can prefetch
it. Once the model is here and the client is idle, it starts to train. The next task for which this
model is recent enough then adopts that work::

    ModelAnnounced -> ModelFetched -> Begin -> TaskOffered -> Adopt -> WorkFinished -> Hold
                                        |
                                        +-- WorkFinished before any task came -> TaskOffered -> Hold
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.core.kinds import TRAIN_KIND
from fedlearn.transport.content import NO_QUESTION, TaskKey

# Events: what happened.


@dataclass(frozen=True)
class SessionStarted:
    """The coordinator has welcomed this client; ``run_ids`` are its runs that are not over."""

    run_ids: tuple[str, ...]


@dataclass(frozen=True)
class SessionEnded:
    """The session has ended, for any reason."""


@dataclass(frozen=True)
class TaskOffered:
    """The coordinator has sent a task."""

    task: OpenTask


@dataclass(frozen=True)
class ModelAnnounced:
    """The coordinator has announced a model that a coming task may need."""

    task: OpenTask


@dataclass(frozen=True)
class ModelFetched:
    """A prefetched model has arrived."""

    task: OpenTask


@dataclass(frozen=True)
class TaskWithdrawn:
    """The coordinator no longer waits for this task's reply."""

    key: TaskKey
    reason: str


@dataclass(frozen=True)
class ReplySettled:
    """A receipt has arrived: the coordinator has the reply, or does not want it."""

    key: TaskKey


@dataclass(frozen=True)
class WorkFinished:
    """Work on a task has produced a reply and a new client state (``None`` if unchanged)."""

    task: OpenTask
    reply: bytes = field(repr=False)
    state: bytes | None = field(repr=False)
    is_failure: bool = False


@dataclass(frozen=True)
class WorkAbandoned:
    """Work on the task has ended without a reply: cancelled, or the download failed."""


@dataclass(frozen=True)
class ReplyStored:
    """A reply has been stored durably."""

    held: HeldReply


@dataclass(frozen=True)
class ConditionsChecked:
    """The conditions were checked, as they are every second; ``unmet`` lists those that fail."""

    unmet: tuple[str, ...]
    now_unix_s: float


@dataclass(frozen=True)
class StopRequested:
    """The user or the operating system has asked this process to end."""


Event: TypeAlias = (
    SessionStarted
    | SessionEnded
    | TaskOffered
    | ModelAnnounced
    | ModelFetched
    | TaskWithdrawn
    | ReplySettled
    | WorkFinished
    | WorkAbandoned
    | ReplyStored
    | ConditionsChecked
    | StopRequested
)

# Actions: what to do about it.


@dataclass(frozen=True)
class Begin:
    """Start work on a task, resuming an earlier attempt if there was one."""

    task: OpenTask


@dataclass(frozen=True)
class Cancel:
    """Cancel the work on a task; it ends at the next batch."""

    key: TaskKey
    reason: str


@dataclass(frozen=True)
class Erase:
    """Remove the request and the checkpoint of the task."""


@dataclass(frozen=True)
class Adopt:
    """Make the work that was started in advance the work on this task."""

    task: OpenTask


@dataclass(frozen=True)
class Hold:
    """Store a reply durably, together with the client state after it."""

    answered: WorkFinished


@dataclass(frozen=True)
class Deliver:
    """Send a reply; send it again if its task was offered again.

    A restarted coordinator ignores replies until it has reopened the task's exchange, so an earlier
    delivery may have been lost.
    """

    held: HeldReply
    is_requested_again: bool = False


@dataclass(frozen=True)
class Drop:
    """Remove a stored reply."""

    held: HeldReply
    reason: str


@dataclass(frozen=True)
class Disconnect:
    """End the session."""


Action: TypeAlias = Begin | Adopt | Cancel | Erase | Hold | Deliver | Drop | Disconnect


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The state of a client.

    Attributes:
        is_connected: Whether there is a session with the coordinator.
        is_stopping: Whether this process is to end.
        unmet: Conditions that do not hold.
        task: The task in work; a cancelled one stays here until its work has ended.
        is_cancelled: Whether the task in work was cancelled.
        is_withdrawn: Whether the coordinator no longer wants the reply to the task in work.
        waiting: A task that arrived while a cancelled one is still ending.
        held: The finished reply that is not settled yet.
        run_ids: The coordinator's runs that are not over, as far as this client knows.
        begun_rounds: By run, the round of the newest model on which training has started.
        announced: The newest announced model that is not fetched yet.
        prefetched: A prefetched model on which work has not started.
        ready: The result of work in advance for which no task has come yet.
    """

    is_connected: bool = False
    is_stopping: bool = False
    unmet: tuple[str, ...] = ("not checked yet",)
    task: OpenTask | None = None
    is_cancelled: bool = False
    is_withdrawn: bool = False
    waiting: OpenTask | None = None
    held: HeldReply | None = None
    run_ids: tuple[str, ...] = ()
    begun_rounds: Mapping[str, int] = field(default_factory=dict)
    announced: OpenTask | None = None
    prefetched: OpenTask | None = None
    ready: WorkFinished | None = None

    @property
    def may_connect(self) -> bool:
        """Whether this client may connect to its coordinator."""
        return not self.unmet and not self.is_stopping

    @property
    def is_done(self) -> bool:
        """Whether this process may end."""
        return self.is_stopping and self.task is None

    @property
    def to_fetch(self) -> OpenTask | None:
        """The model to prefetch, if any; none while a prefetched one is still unused."""
        return self.announced if self.is_connected and self.prefetched is None else None


Transition: TypeAlias = tuple[Conversation, tuple[Action, ...]]


def step(here: Conversation, event: Event) -> Transition:  # noqa: C901, PLR0911 - one line per event
    """Return the client's state after ``event``, and the actions to perform."""
    match event:
        case SessionStarted(run_ids):
            return _start_session(here, run_ids)
        case SessionEnded():
            return replace(here, is_connected=False, announced=None), ()
        case TaskOffered(task):
            return _consider_task(here, task)
        case ModelAnnounced(task):
            return _note_announcement(here, task)
        case ModelFetched(task):
            return _use_prefetched(here, task)
        case TaskWithdrawn(key, reason):
            return _withdraw(here, key, reason)
        case ReplySettled(key):
            return _forget_reply(here, key, "settled")
        case WorkFinished():
            return _finish_work(here, event)
        case WorkAbandoned():
            return _end_work(here)
        case ReplyStored(held):
            return replace(here, held=held), ((Deliver(held),) if here.is_connected else ())
        case ConditionsChecked():
            return _apply_conditions(here, event)
        case StopRequested():
            stopping = replace(
                here, is_stopping=True, waiting=None, announced=None, prefetched=None
            )
            return _cancel(stopping, "stopped")


def _start_session(here: Conversation, run_ids: tuple[str, ...]) -> Transition:
    def goes_on(task: OpenTask | None) -> bool:
        return task is not None and task.key.run_id in run_ids

    ready = here.ready
    here = replace(
        here,
        is_connected=True,
        run_ids=run_ids,
        begun_rounds={each: last for each, last in here.begun_rounds.items() if each in run_ids},
        announced=here.announced if goes_on(here.announced) else None,
        prefetched=here.prefetched if goes_on(here.prefetched) else None,
        ready=ready if ready is not None and goes_on(ready.task) else None,
    )
    here, actions = _give_up(here, lambda each: each.key.run_id not in run_ids, "its run is over")
    return here, (*actions, *(() if here.held is None else (Deliver(here.held),)))


def _note_run(here: Conversation, run_id: str) -> Conversation:
    """Add a run that has begun since the welcome."""
    return here if run_id in here.run_ids else replace(here, run_ids=(*here.run_ids, run_id))


def _consider_task(here: Conversation, task: OpenTask) -> Transition:
    if here.unmet or here.is_stopping:
        return here, ()  # the session is about to end; the task is offered again in the next one
    here = _note_run(here, task.key.run_id)
    # Answered already: the coordinator has lost the reply, or not got it yet.
    if here.held is not None and here.held.key == task.key:
        return here, (Deliver(here.held, is_requested_again=True),)
    if here.task is None:
        return _begin(here, task)
    if here.task.key == task.key and not here.is_cancelled:
        return here, ()  # offered again in a new session: the work continues
    if here.task.is_announced and here.task.may_answer(task) and not here.is_cancelled:
        return replace(here, task=task), (Adopt(task),)
    # The coordinator has one open task per client, over all runs, so a different task means that
    # the one in work has been closed.
    here = replace(here, waiting=task, is_withdrawn=here.is_withdrawn or here.task.key != task.key)
    return _cancel(here, "the coordinator has moved on")


def _begin(here: Conversation, task: OpenTask) -> Transition:
    here = replace(here, task=None, waiting=None, is_cancelled=False, is_withdrawn=False)
    # Only plain training is done in advance; other kinds leave `ready` for a later task.
    if task.key.kind != TRAIN_KIND:
        return replace(here, task=task), (Begin(task),)
    ready, here = here.ready, replace(here, ready=None)
    if ready is not None and ready.task.may_answer(task):
        here, actions = _start_next(here)
        return here, (Hold(replace(ready, task=task)), *actions)
    return _drop_old_models(_start(here, task)), (Begin(task),)


def _start(here: Conversation, task: OpenTask) -> Conversation:
    """Put a training task to work."""
    begun = {**here.begun_rounds, task.key.run_id: task.key.round_num}
    return replace(here, task=task, begun_rounds=begun)


def _note_announcement(here: Conversation, task: OpenTask) -> Transition:
    if here.unmet or here.is_stopping:
        return here, ()
    return _drop_old_models(_note_run(replace(here, announced=task), task.key.run_id)), ()


def _use_prefetched(here: Conversation, task: OpenTask) -> Transition:
    if here.unmet or here.is_stopping or task.key.run_id not in here.run_ids:
        return here, ()
    # Keep `announced` if it differs from the fetched model: a newer one was announced meanwhile.
    announced = None if here.announced == task else here.announced
    return _start_next(_drop_old_models(replace(here, announced=announced, prefetched=task)))


def _drop_old_models(here: Conversation) -> Conversation:
    """Drop announced and prefetched models that are no newer than the one last trained on."""
    announced, prefetched = (
        None
        if each is None or each.key.round_num <= here.begun_rounds.get(each.key.run_id, -1)
        else each
        for each in (here.announced, here.prefetched)
    )
    return replace(here, announced=announced, prefetched=prefetched)


def _withdraw(here: Conversation, key: TaskKey, reason: str) -> Transition:
    if here.announced is not None and _is_withdrawn_by(here.announced, key):
        here = replace(here, announced=None)
    if here.prefetched is not None and _is_withdrawn_by(here.prefetched, key):
        here = replace(here, prefetched=None)
    if here.ready is not None and _is_withdrawn_by(here.ready.task, key):
        here = replace(here, ready=None)
    if here.waiting is not None and here.waiting.key == key:
        here = replace(here, waiting=None)
    if here.task is not None and _is_withdrawn_by(here.task, key):
        return _cancel(replace(here, is_withdrawn=True), reason)
    return _forget_reply(here, key, reason)


def _is_withdrawn_by(task: OpenTask, withdrawn: TaskKey) -> bool:
    """Check whether a withdrawal covers ``task``.

    Withdrawing an announced model also withdraws all earlier ones of its run.
    """
    if not (task.is_announced and withdrawn.exchange == NO_QUESTION):
        return task.key == withdrawn
    return task.key.run_id == withdrawn.run_id and task.key.round_num <= withdrawn.round_num


def _cancel(here: Conversation, reason: str) -> Transition:
    if here.task is None or here.is_cancelled:
        return here, ()
    return replace(here, is_cancelled=True), (Cancel(here.task.key, reason),)


def _forget_reply(here: Conversation, key: TaskKey, reason: str) -> Transition:
    if here.held is None or here.held.key != key:
        return here, ()
    return replace(here, held=None), (Drop(here.held, reason),)


def _finish_work(here: Conversation, event: WorkFinished) -> Transition:
    # Finished before the cancellation took effect, but the coordinator does not want it.
    if here.is_withdrawn:
        return _end_work(here)
    task = here.task or event.task  # `here.task` is the adopting task, if work started in advance
    here = replace(here, task=None, is_cancelled=False)
    if task.is_announced:
        return _start_next(replace(here, ready=None if event.is_failure else event))
    if here.waiting is not None and here.waiting.key == task.key:
        here = replace(here, waiting=None)  # finished before the cancellation took effect
    if event.state is not None and task.key.kind != TRAIN_KIND:
        here = replace(here, ready=None)  # it was computed from the state before this task
    here, actions = _start_next(here)
    return here, (Hold(replace(event, task=task)), *actions)


def _end_work(here: Conversation) -> Transition:
    erase = (Erase(),) if here.is_withdrawn else ()
    # Work that ended without being cancelled has lost its connection. Reconnecting makes the
    # coordinator offer the task again.
    is_missed = not here.is_cancelled and here.task is not None and not here.task.is_announced
    leave = (Disconnect(),) if is_missed and here.is_connected else ()
    here = replace(here, task=None, is_cancelled=False, is_withdrawn=False)
    here, actions = _start_next(here)
    return here, (*erase, *actions, *leave)


def _start_next(here: Conversation) -> Transition:
    """If the client is idle, begin the waiting task, or else work on a prefetched model."""
    if here.task is not None or here.unmet or here.is_stopping:
        return here, ()
    if here.waiting is not None:
        return _begin(here, here.waiting)
    task = here.prefetched
    # One result in advance at a time: the next task uses it, and only then is more work useful.
    if task is None or here.ready is not None or not here.is_connected:
        return here, ()
    return _drop_old_models(_start(here, task)), (Begin(task),)


def _apply_conditions(here: Conversation, event: ConditionsChecked) -> Transition:
    here, actions = _give_up(
        here, lambda each: each.expires_unix_s < event.now_unix_s, "its deadline is long past"
    )
    here = replace(here, unmet=event.unmet)
    if not event.unmet:
        return here, actions
    here, cancelled = _cancel(
        replace(here, waiting=None, announced=None, prefetched=None), "conditions"
    )
    # Stay connected while a reply is being delivered, unless the network must not be used.
    may_stay = here.held is not None and not any("unmetered" in each for each in event.unmet)
    leave = (Disconnect(),) if here.is_connected and not may_stay else ()
    return here, (*actions, *cancelled, *leave)


def _give_up(
    here: Conversation, is_over: Callable[[OpenTask | HeldReply], bool], reason: str
) -> Transition:
    """Withdraw the task in work and drop the stored reply, each if ``is_over`` holds for it."""
    actions: tuple[Action, ...] = ()
    for each in (here.task, here.held):
        if each is not None and is_over(each):
            here, more = _withdraw(here, each.key, reason)
            actions += more
    return here, actions
