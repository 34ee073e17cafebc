"""The client's state machine: decides what to do next, without I/O; events in, actions out.

The life of one task, as events and actions::

    TaskOffered -> Begin -> WorkFinished -> Hold -> ReplyStored -> Deliver -> ReplySettled -> Drop
                     |
                     +-- cancelled (coordinator, conditions, user) -> Cancel -> WorkAbandoned

The work on a task (download and training) is one action. It ends with exactly one of
:class:`WorkFinished` and :class:`WorkAbandoned`, even after a cancellation, because training stops
only at the end of a batch. A task that arrives in between waits for that.

A client works for as many runs at a time as its policy says, usually for one, with one task of
each. The coordinator has no more tasks open than that: of more, it has closed those that it offered
longest ago.

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

#: Most replies that are kept, one for each run: as many as a service has at work at most.
MOST_HELD = 16

# Events: what happened.


@dataclass(frozen=True)
class SessionStarted:
    """The coordinator has welcomed this client.

    Attributes:
        run_ids: Its runs that are not over.
        max_concurrent_runs: Runs for which this client works at a time, as it has told.
    """

    run_ids: tuple[str, ...]
    max_concurrent_runs: int = 1


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
    trainer: str = ""  # what was run


@dataclass(frozen=True)
class WorkAbandoned:
    """Work on a run's task has ended without a reply: cancelled, or the download failed."""

    run_id: str


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
    """Remove the request and the checkpoint of a run's task."""

    run_id: str


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
class WorkState:
    """Work on a task.

    Attributes:
        task: The task.
        is_cancelled: Whether it was cancelled; it ends at the next batch.
        is_withdrawn: Whether the coordinator no longer wants the reply.
    """

    task: OpenTask
    is_cancelled: bool = False
    is_withdrawn: bool = False


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The state of a client.

    Attributes:
        is_connected: Whether there is a session with the coordinator.
        is_stopping: Whether this process is to end.
        unmet: Conditions that do not hold.
        max_concurrent_runs: Runs for which this client works at a time.
        work: By run, the work on its task until it has ended, in the order in which the tasks were
            offered last.
        waiting: By run, the task that waits for the end of other work, the oldest first.
        held: By run, the finished reply that is not settled yet, the oldest first.
        run_ids: The coordinator's runs that are not over, as far as this client knows.
        begun_rounds: By run, the round of the newest model on which training has started.
        announced: The newest announced model that is not fetched yet.
        prefetched: A prefetched model on which work has not started.
        ready: The result of work in advance for which no task has come yet.
    """

    is_connected: bool = False
    is_stopping: bool = False
    unmet: tuple[str, ...] = ("not checked yet",)
    max_concurrent_runs: int = 1
    work: Mapping[str, WorkState] = field(default_factory=dict)
    waiting: Mapping[str, OpenTask] = field(default_factory=dict)
    held: Mapping[str, HeldReply] = field(default_factory=dict)
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
        return self.is_stopping and not self.work

    @property
    def to_fetch(self) -> OpenTask | None:
        """The model to prefetch, if any; none while a prefetched one is still unused."""
        return self.announced if self.is_connected and self.prefetched is None else None


Transition: TypeAlias = tuple[Conversation, tuple[Action, ...]]


def step(here: Conversation, event: Event) -> Transition:  # noqa: C901, PLR0911 - one line per event
    """Return the client's state after ``event``, and the actions to perform."""
    match event:
        case SessionStarted():
            return _start_session(here, event)
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
        case WorkAbandoned(run_id):
            return _end_work(here, run_id)
        case ReplyStored(held):
            return _keep_reply(here, held)
        case ConditionsChecked():
            return _apply_conditions(here, event)
        case StopRequested():
            stopping = replace(here, is_stopping=True, waiting={}, announced=None, prefetched=None)
            return _cancel_all(stopping, "stopped")


def _start_session(here: Conversation, event: SessionStarted) -> Transition:
    run_ids = event.run_ids

    def goes_on(task: OpenTask | None) -> bool:
        return task is not None and task.key.run_id in run_ids

    ready = here.ready
    here = replace(
        here,
        is_connected=True,
        run_ids=run_ids,
        max_concurrent_runs=event.max_concurrent_runs,
        waiting={each: task for each, task in here.waiting.items() if each in run_ids},
        begun_rounds={each: last for each, last in here.begun_rounds.items() if each in run_ids},
        announced=here.announced if goes_on(here.announced) else None,
        prefetched=here.prefetched if goes_on(here.prefetched) else None,
        ready=ready if ready is not None and goes_on(ready.task) else None,
    )
    here, actions = _give_up(here, lambda each: each.key.run_id not in run_ids, "its run is over")
    # A large reply waits until its task is offered again: while no exchange is open for it, as
    # before its run has started again, the coordinator would only refuse the upload.
    return here, (*actions, *(Deliver(each) for each in here.held.values() if each.is_inline))


def _note_run(here: Conversation, run_id: str) -> Conversation:
    """Add a run that has begun since the welcome."""
    return here if run_id in here.run_ids else replace(here, run_ids=(*here.run_ids, run_id))


def _consider_task(here: Conversation, task: OpenTask) -> Transition:
    if here.unmet or here.is_stopping:
        return here, ()  # the session is about to end; the task is offered again in the next one
    here = _note_run(here, task.key.run_id)
    # Answered already: the coordinator has lost the reply, or not got it yet.
    held = here.held.get(task.key.run_id)
    if held is not None and held.key == task.key:
        return here, (Deliver(held, is_requested_again=True),)
    work = here.work.get(task.key.run_id)
    if work is not None and not work.is_cancelled:
        if work.task.key == task.key:  # offered again in a new session: the work continues
            return _put_last(here, work), ()
        if work.task.is_announced and work.task.may_answer(task):
            return _put_last(here, replace(work, task=task)), (Adopt(task),)
    others = {each: it for each, it in here.waiting.items() if each != task.key.run_id}
    here, cancelled = _make_room(replace(here, waiting={**others, task.key.run_id: task}), task)
    here, actions = _start_next(here)
    return here, (*cancelled, *actions)


def _put_last(here: Conversation, work: WorkState) -> Conversation:
    """Put work in place of earlier work for its run, as that whose task was offered last."""
    run_id = work.task.key.run_id
    others = {each: it for each, it in here.work.items() if each != run_id}
    return replace(here, work={**others, run_id: work})


def _make_room(here: Conversation, task: OpenTask) -> Transition:
    """Call off what the coordinator has closed, now that ``task`` has been offered."""
    reason = "the coordinator has moved on"
    work = here.work.get(task.key.run_id)
    here, actions = _cancel(
        here, task.key.run_id, reason, is_withdrawn=work is not None and work.task.key != task.key
    )
    going_on = [each.task for each in here.work.values() if not each.is_cancelled]
    # Nobody has asked yet for what was begun in advance, so it goes first.
    oldest = [*sorted(going_on, key=lambda each: not each.is_announced), *here.waiting.values()]
    for each in oldest[: max(0, len(oldest) - here.max_concurrent_runs)]:
        run_id = each.key.run_id
        if here.waiting.get(run_id) is each:
            left = {other: it for other, it in here.waiting.items() if other != run_id}
            here = replace(here, waiting=left)
        else:
            here, more = _cancel(here, run_id, reason, is_withdrawn=True)
            actions += more
    return here, actions


def _begin(here: Conversation, task: OpenTask) -> Transition:
    waiting = {each: it for each, it in here.waiting.items() if it is not task}
    here = replace(here, waiting=waiting)
    # Only plain training is done in advance; other kinds leave `ready` for a later task.
    if task.key.kind != TRAIN_KIND:
        return _put_last(here, WorkState(task=task)), (Begin(task),)
    ready, here = here.ready, replace(here, ready=None)
    if ready is not None and ready.task.may_answer(task):
        return here, (Hold(replace(ready, task=task)),)
    return _drop_old_models(_start(here, task)), (Begin(task),)


def _start(here: Conversation, task: OpenTask) -> Conversation:
    """Put a training task to work."""
    begun = {**here.begun_rounds, task.key.run_id: task.key.round_num}
    return _put_last(replace(here, begun_rounds=begun), WorkState(task=task))


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
    here = _forget_waiting(here, key)
    work = here.work.get(key.run_id)
    if work is not None and _is_withdrawn_by(work.task, key):
        return _cancel(here, key.run_id, reason, is_withdrawn=True)
    return _forget_reply(here, key, reason)


def _is_withdrawn_by(task: OpenTask, withdrawn: TaskKey) -> bool:
    """Check whether a withdrawal covers ``task``.

    Withdrawing an announced model also withdraws all earlier ones of its run.
    """
    if not (task.is_announced and withdrawn.exchange == NO_QUESTION):
        return task.key == withdrawn
    return task.key.run_id == withdrawn.run_id and task.key.round_num <= withdrawn.round_num


def _forget_waiting(here: Conversation, key: TaskKey) -> Conversation:
    return replace(here, waiting={each: it for each, it in here.waiting.items() if it.key != key})


def _cancel(
    here: Conversation, run_id: str, reason: str, *, is_withdrawn: bool = False
) -> Transition:
    """Cancel the work for a run, if there is any and it was not cancelled before."""
    before = here.work.get(run_id)
    if before is None:
        return here, ()
    after = replace(before, is_cancelled=True, is_withdrawn=before.is_withdrawn or is_withdrawn)
    here = replace(here, work={**here.work, run_id: after})
    return here, () if before.is_cancelled else (Cancel(before.task.key, reason),)


def _cancel_all(here: Conversation, reason: str) -> Transition:
    actions: tuple[Action, ...] = ()
    for run_id in here.work:
        here, more = _cancel(here, run_id, reason)
        actions += more
    return here, actions


def _forget_reply(here: Conversation, key: TaskKey, reason: str) -> Transition:
    held = here.held.get(key.run_id)
    if held is None or held.key != key:
        return here, ()
    others = {run_id: each for run_id, each in here.held.items() if each is not held}
    return replace(here, held=others), (Drop(held, reason),)


def _keep_reply(here: Conversation, held: HeldReply) -> Transition:
    """Keep a new reply in place of an earlier one to its run, and drop the oldest of too many."""
    others = [each for each in here.held.values() if each.key.run_id != held.key.run_id]
    surplus = others[: max(0, len(others) + 1 - MOST_HELD)]
    kept = {each.key.run_id: each for each in (*others[len(surplus) :], held)}
    dropped = tuple(Drop(each, "there are too many newer replies") for each in surplus)
    delivered = (Deliver(held),) if here.is_connected else ()
    return replace(here, held=kept), (*dropped, *delivered)


def _finish_work(here: Conversation, event: WorkFinished) -> Transition:
    run_id = event.task.key.run_id
    work = here.work[run_id]
    # Finished before the cancellation took effect, but the coordinator does not want it.
    if work.is_withdrawn:
        return _end_work(here, run_id)
    task = work.task  # the adopting task, if work started in advance
    here = _take_out(here, run_id)
    if task.is_announced:
        return _start_next(replace(here, ready=None if event.is_failure else event))
    here = _forget_waiting(here, task.key)  # finished before the cancellation took effect
    is_stale = here.ready is not None and here.ready.task.key.run_id == run_id
    if event.state is not None and task.key.kind != TRAIN_KIND and is_stale:
        here = replace(here, ready=None)  # it was computed from the state before this task
    here, actions = _start_next(here)
    return here, (Hold(replace(event, task=task)), *actions)


def _take_out(here: Conversation, run_id: str) -> Conversation:
    return replace(here, work={each: it for each, it in here.work.items() if each != run_id})


def _end_work(here: Conversation, run_id: str) -> Transition:
    work = here.work[run_id]
    erase = (Erase(run_id),) if work.is_withdrawn else ()
    # Work that ended without being cancelled has lost its connection. Reconnecting makes the
    # coordinator offer the task again.
    is_missed = not work.is_cancelled and not work.task.is_announced
    leave = (Disconnect(),) if is_missed and here.is_connected else ()
    here, actions = _start_next(_take_out(here, run_id))
    return here, (*erase, *actions, *leave)


def _start_next(here: Conversation) -> Transition:
    """If there is room, begin the tasks that wait, or else work on a prefetched model."""
    if len(here.work) >= here.max_concurrent_runs or here.unmet or here.is_stopping:
        return here, ()
    waiting = next((it for run_id, it in here.waiting.items() if run_id not in here.work), None)
    if waiting is not None:
        here, actions = _begin(here, waiting)
        here, more = _start_next(here)
        return here, (*actions, *more)
    task = here.prefetched
    if task is not None and task.key.run_id in here.work:
        return here, ()
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
    here, cancelled = _cancel_all(
        replace(here, waiting={}, announced=None, prefetched=None), "conditions"
    )
    # Stay connected while a reply is being delivered, unless the network must not be used.
    may_stay = bool(here.held) and not any("unmetered" in each for each in event.unmet)
    leave = (Disconnect(),) if here.is_connected and not may_stay else ()
    return here, (*actions, *cancelled, *leave)


def _give_up(
    here: Conversation, is_over: Callable[[OpenTask | HeldReply], bool], reason: str
) -> Transition:
    """Withdraw tasks in work and drop stored replies, each if ``is_over`` holds for it."""
    actions: tuple[Action, ...] = ()
    tasks = [each.task for each in here.work.values()]
    found: list[OpenTask | HeldReply] = [*tasks, *here.held.values()]
    for each in found:
        if is_over(each):
            here, more = _withdraw(here, each.key, reason)
            actions += more
    return here, actions
