"""The client's conversation with the coordinator, as tables of events and expected actions."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.client.conversation import (
    MOST_HELD,
    Action,
    Adopt,
    Begin,
    Cancel,
    ConditionsChecked,
    Conversation,
    Deliver,
    Disconnect,
    Drop,
    Erase,
    Event,
    Hold,
    ModelAnnounced,
    ModelFetched,
    ReplySettled,
    ReplyStored,
    SessionEnded,
    SessionStarted,
    StopRequested,
    TaskOffered,
    TaskWithdrawn,
    WorkAbandoned,
    WorkFinished,
    step,
)
from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import NO_QUESTION, TaskKey

HERE = Path("reply")


def key(round_num: int = 0, run_id: str = "run") -> TaskKey:
    return TaskKey(run_id=run_id, kind="TrainRequest", round_num=round_num, attempt=0, exchange=0)


def no_question(round_num: int) -> TaskKey:
    """Return the task key of a prefetched model, which has no task yet."""
    return key(round_num)._replace(exchange=NO_QUESTION)


def task(round_num: int = 0, *, expires_unix_s: float = math.inf) -> OpenTask:
    message = wire_pb2.Task(key=key(round_num).message())
    return OpenTask(key=key(round_num), message=message, expires_unix_s=expires_unix_s)


def ahead(round_num: int, *, last: int = 9) -> OpenTask:
    message = wire_pb2.Task(key=key(round_num).message(), last_round_num=last)
    return OpenTask(key=key(round_num), message=message, expires_unix_s=math.inf, is_announced=True)


def evaluation(round_num: int) -> OpenTask:
    return replace(task(round_num), key=key(round_num)._replace(kind="EvaluateRequest"))


def make_held(
    round_num: int = 0,
    *,
    run_id: str = "run",
    expires_unix_s: float = math.inf,
    num_bytes: int = 0,
) -> HeldReply:
    return HeldReply(
        key=key(round_num, run_id),
        digest=b"",
        num_bytes=num_bytes,
        expires_unix_s=expires_unix_s,
        max_inline_bytes=0,
        path=HERE,
    )


def make_answer(round_num: int = 0) -> WorkFinished:
    return WorkFinished(task(round_num), b"reply", None)


def play(*events: Event, here: Conversation | None = None) -> tuple[Conversation, list[Action]]:
    """Return the state after ``events``, and all actions taken."""
    here, done = here or Conversation(unmet=()), list[Action]()
    for event in events:
        here, actions = step(here, event)
        done += actions
    return here, done


def answer_for(begun: OpenTask, *, asked: OpenTask) -> tuple[WorkFinished, WorkFinished]:
    """Return the result of work on a prefetched model: as reported, and as held for the task."""
    return WorkFinished(begun, b"ahead", None), WorkFinished(asked, b"ahead", None)


FINE = ConditionsChecked((), 0.0)
BROKEN = ConditionsChecked(("on_power",), 0.0)
METERED = ConditionsChecked(("unmetered (unknown)",), 0.0)
HELLO = SessionStarted(("run",))
WORKING: tuple[Event, ...] = (HELLO, TaskOffered(task()))
FINISHED: tuple[Event, ...] = (*WORKING, make_answer(), ReplyStored(make_held()))
STARTED: list[Action] = [Begin(task())]
SENT: list[Action] = [*STARTED, Hold(make_answer()), Deliver(make_held())]

#: The model of round 1 was prefetched during training in round 0, and training on it has begun.
OVERLAPPED: tuple[Event, ...] = (
    *(
        *WORKING,
        ModelAnnounced(ahead(1)),
        ModelFetched(ahead(1)),
        make_answer(),
        ReplyStored(make_held()),
    ),
)
BEGUN: list[Action] = [*STARTED, Hold(make_answer()), Begin(ahead(1)), Deliver(make_held())]
DONE, HELD_FOR_2 = answer_for(ahead(1), asked=task(2))

AHEAD: dict[str, tuple[tuple[Event, ...], list[Action]]] = {
    "what came ahead is begun when the work before is done": (OVERLAPPED, BEGUN),
    "what is told ahead and is not here is not begun": (
        (*WORKING, ModelAnnounced(ahead(1)), make_answer(), ReplyStored(make_held())),
        SENT,
    ),
    "what comes later is begun then": (
        (*FINISHED, ModelAnnounced(ahead(1)), ModelFetched(ahead(1))),
        [*SENT, Begin(ahead(1))],
    ),
    "the next question takes work ahead over": (
        (*OVERLAPPED, TaskOffered(task(2)), DONE, ReplyStored(make_held(2))),
        [*BEGUN, Adopt(task(2)), Hold(HELD_FOR_2), Deliver(make_held(2))],
    ),
    "what is done ahead waits for the next question": (
        (*OVERLAPPED, DONE, ReplySettled(key()), TaskOffered(task(2)), ReplyStored(make_held(2))),
        [*BEGUN, Drop(make_held(), "settled"), Hold(HELD_FOR_2), Deliver(make_held(2))],
    ),
    "nothing more is begun ahead of that question": (
        (*OVERLAPPED, DONE, ModelAnnounced(ahead(3)), ModelFetched(ahead(3))),
        BEGUN,
    ),
    "with that question the next is begun": (
        (*OVERLAPPED, DONE, ModelAnnounced(ahead(3)), ModelFetched(ahead(3)), TaskOffered(task(2))),
        [*BEGUN, Hold(HELD_FOR_2), Begin(ahead(3))],
    ),
    "a newer model replaces one that is not begun": (
        (
            *WORKING,
            ModelAnnounced(ahead(1)),
            ModelFetched(ahead(1)),
            ModelFetched(ahead(2)),
            make_answer(),
        ),
        [*STARTED, Hold(make_answer()), Begin(ahead(2))],
    ),
    "a question replaces an older model that is not begun": (
        (
            *WORKING,
            ModelAnnounced(ahead(1)),
            make_answer(),
            TaskOffered(task(2)),
            ModelFetched(ahead(1)),
            WorkAbandoned("run"),
        ),
        [*STARTED, Hold(make_answer()), Begin(task(2)), Disconnect()],
    ),
    "no model is trained twice": (
        (*WORKING, ModelFetched(ahead(0)), make_answer()),
        [*STARTED, Hold(make_answer())],
    ),
    "work ahead that is too old is called off for the question": (
        (
            *(*WORKING, ModelFetched(ahead(1, last=3)), make_answer()),
            *(TaskOffered(task(4)), WorkAbandoned("run")),
        ),
        [
            *(*STARTED, Hold(make_answer()), Begin(ahead(1, last=3))),
            *(Cancel(key(1), "the coordinator has moved on"), Erase("run"), Begin(task(4))),
        ],
    ),
    "work ahead is called off for an evaluation": (
        (*OVERLAPPED, TaskOffered(evaluation(1)), WorkAbandoned("run")),
        [
            *(*BEGUN, Cancel(key(1), "the coordinator has moved on")),
            *(Erase("run"), Begin(evaluation(1))),
        ],
    ),
    "what is done ahead outlasts an evaluation": (
        (
            *(*OVERLAPPED, DONE, TaskOffered(evaluation(1))),
            *(WorkFinished(evaluation(1), b"loss", None), TaskOffered(task(2))),
        ),
        [
            *(*BEGUN, Begin(evaluation(1))),
            *(Hold(WorkFinished(evaluation(1), b"loss", None)), Hold(HELD_FOR_2)),
        ],
    ),
    "it is of no use where that changed the client's state": (
        (
            *(*OVERLAPPED, DONE, TaskOffered(evaluation(1))),
            *(WorkFinished(evaluation(1), b"loss", b"state"), TaskOffered(task(2))),
        ),
        [
            *(*BEGUN, Begin(evaluation(1))),
            *(Hold(WorkFinished(evaluation(1), b"loss", b"state")), Begin(task(2))),
        ],
    ),
    "conditions call work ahead off, and forget what was told": (
        (*OVERLAPPED, ModelAnnounced(ahead(2)), BROKEN, WorkAbandoned("run"), FINE, HELLO),
        [*BEGUN, Cancel(key(1), "conditions"), Deliver(make_held())],
    ),
    "work ahead that failed before anybody asked is forgotten": (
        (*OVERLAPPED, replace(DONE, is_failure=True), TaskOffered(task(2))),
        [*BEGUN, Begin(task(2))],
    ),
    "work ahead that failed answers the question that has taken it over": (
        (*OVERLAPPED, TaskOffered(task(2)), replace(DONE, is_failure=True)),
        [*BEGUN, Adopt(task(2)), Hold(replace(HELD_FOR_2, is_failure=True))],
    ),
    "work ahead goes on without a connection": (
        (*OVERLAPPED, SessionEnded(), SessionStarted(("run",)), TaskOffered(task(2)), DONE),
        [*BEGUN, Deliver(make_held()), Adopt(task(2)), Hold(HELD_FOR_2)],
    ),
    "work ahead that ends in nothing costs no session": (
        (*OVERLAPPED, WorkAbandoned("run")),
        BEGUN,
    ),
    "a question that took it over and ends in nothing is offered anew": (
        (*OVERLAPPED, TaskOffered(task(2)), WorkAbandoned("run")),
        [*BEGUN, Adopt(task(2)), Disconnect()],
    ),
    "work ahead is withdrawn": (
        (*OVERLAPPED, TaskWithdrawn(key(1), "over"), WorkAbandoned("run")),
        [*BEGUN, Cancel(key(1), "over"), Erase("run")],
    ),
    "what is done ahead is withdrawn": (
        (*OVERLAPPED, DONE, TaskWithdrawn(key(1), "over"), TaskOffered(task(2))),
        [*BEGUN, Begin(task(2))],
    ),
    "work ahead is withdrawn with a newer model that was sent ahead": (
        (
            *OVERLAPPED,
            ModelAnnounced(ahead(3)),
            TaskWithdrawn(no_question(3), "limited"),
            WorkAbandoned("run"),
        ),
        [*BEGUN, Cancel(key(1), "limited"), Erase("run")],
    ),
    "what is done ahead is withdrawn with a newer model that was sent ahead": (
        (*OVERLAPPED, DONE, TaskWithdrawn(no_question(3), "limited"), TaskOffered(task(4))),
        [*BEGUN, Begin(task(4))],
    ),
    "what is done ahead stays where an older model is withdrawn": (
        (*OVERLAPPED, DONE, TaskWithdrawn(no_question(0), "limited"), TaskOffered(task(2))),
        [*BEGUN, Hold(HELD_FOR_2)],
    ),
    "a question that took work ahead over is not withdrawn with it": (
        (*OVERLAPPED, TaskOffered(task(2)), TaskWithdrawn(no_question(3), "limited"), DONE),
        [*BEGUN, Adopt(task(2)), Hold(HELD_FOR_2)],
    ),
    "what is told ahead of another run is nothing": (
        (*WORKING, ModelFetched(replace(ahead(1), key=key(1, "another"))), make_answer()),
        [*STARTED, Hold(make_answer())],
    ),
    "another run forgets what was done ahead": (
        (*OVERLAPPED, DONE, SessionEnded(), SessionStarted(("another",)), SessionStarted(("run",))),
        [*BEGUN, Drop(make_held(), "its run is over")],
    ),
    "nothing is begun ahead while stopping": (
        (HELLO, StopRequested(), ModelAnnounced(ahead(1)), ModelFetched(ahead(1))),
        [],
    ),
}

#: A client of two runs: it has held a reply to "run", and "other" is a run that goes on.
BOTH = SessionStarted(("run", "other"))
OTHER = replace(task(), key=key(0, "other"))
HELD_OTHER = make_held(run_id="other")
LARGE = make_held(num_bytes=1)
AHEAD_OTHER = replace(ahead(1), key=key(1, "other"))

MANY_RUNS: dict[str, tuple[tuple[Event, ...], list[Action]]] = {
    "a reply is delivered in a session in which its run goes on": (
        (*FINISHED, SessionEnded(), BOTH),
        [*SENT, Deliver(make_held())],
    ),
    "work goes on in a session in which its run goes on": (
        (*WORKING, SessionEnded(), BOTH, TaskOffered(task()), make_answer()),
        [*STARTED, Hold(make_answer())],
    ),
    "a task of a run that began after the welcome is worked on": (
        (HELLO, TaskOffered(OTHER)),
        [Begin(OTHER)],
    ),
    "a task of another run waits for the end of work that was called off": (
        (BOTH, TaskOffered(task()), TaskOffered(OTHER), WorkAbandoned("run")),
        [*STARTED, Cancel(key(), "the coordinator has moved on"), Erase("run"), Begin(OTHER)],
    ),
    "calling one run's task off leaves the task of another": (
        (BOTH, TaskOffered(OTHER), TaskWithdrawn(key(), "over"), TaskOffered(OTHER)),
        [Begin(OTHER)],
    ),
    "what was done ahead answers no task of another run": (
        (BOTH, *OVERLAPPED[1:], DONE, ReplySettled(key()), TaskOffered(OTHER)),
        [*BEGUN, Drop(make_held(), "settled"), Begin(OTHER)],
    ),
    "a model of one run is not older than one of another": (
        (
            *(BOTH, TaskOffered(task(5)), make_answer(5)),
            *(ModelAnnounced(AHEAD_OTHER), ModelFetched(AHEAD_OTHER)),
        ),
        [Begin(task(5)), Hold(make_answer(5)), Begin(AHEAD_OTHER)],
    ),
    "a reply survives a session of another run's tasks until its own run ends": (
        (
            *(*FINISHED, SessionEnded(), BOTH, TaskWithdrawn(key(0, "other"), "closed")),
            *(SessionEnded(), SessionStarted(("other",))),
        ),
        [*SENT, Deliver(make_held()), Drop(make_held(), "its run is over")],
    ),
    "a reply is kept while another run's task is answered": (
        (
            *(BOTH, *FINISHED[1:], SessionEnded(), BOTH, TaskOffered(OTHER)),
            *(WorkFinished(OTHER, b"reply", None), ReplyStored(HELD_OTHER), TaskOffered(task())),
        ),
        [
            *(*SENT, Deliver(make_held()), Begin(OTHER), Hold(WorkFinished(OTHER, b"reply", None))),
            *(Deliver(HELD_OTHER), Deliver(make_held(), is_requested_again=True)),
        ],
    ),
    "each run's reply is delivered and settled by itself": (
        (ReplyStored(make_held()), ReplyStored(HELD_OTHER), BOTH, ReplySettled(key())),
        [Deliver(make_held()), Deliver(HELD_OTHER), Drop(make_held(), "settled")],
    ),
    "a newer reply replaces the one to its run": (
        (ReplyStored(make_held()), ReplyStored(HELD_OTHER), ReplyStored(make_held(1)), BOTH),
        [Deliver(HELD_OTHER), Deliver(make_held(1))],
    ),
    "the oldest of too many replies is dropped": (
        tuple(ReplyStored(make_held(run_id=str(number))) for number in range(MOST_HELD + 1)),
        [Drop(make_held(run_id="0"), "there are too many newer replies")],
    ),
    "a large reply waits in a new session until its task is offered again": (
        (ReplyStored(LARGE), BOTH, TaskOffered(task())),
        [Deliver(LARGE, is_requested_again=True)],
    ),
    "work in advance survives a session in which its run goes on": (
        (*OVERLAPPED, DONE, SessionEnded(), BOTH, ReplySettled(key()), TaskOffered(task(2))),
        [
            *(*BEGUN, Deliver(make_held()), Drop(make_held(), "settled")),
            Hold(HELD_FOR_2),
        ],
    ),
    "no model is trained twice after a session of both runs": (
        (*WORKING, make_answer(), SessionEnded(), BOTH, ModelFetched(ahead(0))),
        [*STARTED, Hold(make_answer())],
    ),
    "a model of a run that is over is not begun": (
        (
            *(BOTH, TaskOffered(task()), ModelAnnounced(AHEAD_OTHER), SessionEnded()),
            *(HELLO, ModelFetched(AHEAD_OTHER), make_answer()),
        ),
        [*STARTED, Hold(make_answer())],
    ),
}

TABLE: dict[str, tuple[tuple[Event, ...], list[Action]]] = {
    "a task is worked on and its reply delivered": (FINISHED, SENT),
    "a receipt settles the reply": (
        (*FINISHED, ReplySettled(key())),
        [*SENT, Drop(make_held(), "settled")],
    ),
    "a receipt for something else settles nothing": ((*FINISHED, ReplySettled(key(5))), SENT),
    "a task that is offered again is not begun again": ((*WORKING, TaskOffered(task())), STARTED),
    "a task that is answered is answered again, not worked on again": (
        (*FINISHED, TaskOffered(task())),
        [*SENT, Deliver(make_held(), is_requested_again=True)],
    ),
    "a task that is offered again while its last batch runs is answered once": (
        (
            *WORKING,
            BROKEN,
            SessionEnded(),
            FINE,
            HELLO,
            TaskOffered(task()),
            make_answer(),
            ReplyStored(make_held()),
        ),
        [
            *STARTED,
            Cancel(key(), "conditions"),
            Disconnect(),
            Hold(make_answer()),
            Deliver(make_held()),
        ],
    ),
    "a task that is offered again while its last batch runs goes on if that was the end": (
        (*WORKING, BROKEN, SessionEnded(), FINE, HELLO, TaskOffered(task()), WorkAbandoned("run")),
        [*STARTED, Cancel(key(), "conditions"), Disconnect(), Begin(task())],
    ),
    "a reply waits for the next session": (
        (*WORKING, SessionEnded(), make_answer(), ReplyStored(make_held()), HELLO),
        SENT,
    ),
    "a withdrawn task is called off and erased": (
        (*WORKING, TaskWithdrawn(key(), "closed"), WorkAbandoned("run")),
        [*STARTED, Cancel(key(), "closed"), Erase("run")],
    ),
    "a task that was finished before it heard is dropped": (
        (*WORKING, TaskWithdrawn(key(), "closed"), make_answer()),
        [*STARTED, Cancel(key(), "closed"), Erase("run")],
    ),
    "a reply whose task is withdrawn is dropped": (
        (*FINISHED, TaskWithdrawn(key(), "closed")),
        [*SENT, Drop(make_held(), "closed")],
    ),
    "a withdrawal of something else changes nothing": (
        (*WORKING, TaskWithdrawn(key(5), "closed")),
        STARTED,
    ),
    "another task waits until the batch is over": (
        (*WORKING, TaskOffered(task(1)), WorkAbandoned("run")),
        [
            *STARTED,
            Cancel(key(), "the coordinator has moved on"),
            Erase("run"),
            Begin(task(1)),
        ],
    ),
    "a task that waited may be withdrawn before it begins": (
        (*WORKING, TaskOffered(task(1)), TaskWithdrawn(key(1), "closed"), WorkAbandoned("run")),
        [*STARTED, Cancel(key(), "the coordinator has moved on"), Erase("run")],
    ),
    "a broken condition calls the task off, keeps its checkpoint and leaves": (
        (*WORKING, BROKEN, WorkAbandoned("run")),
        [*STARTED, Cancel(key(), "conditions"), Disconnect()],
    ),
    "a task that was finished when the condition broke is kept": (
        (*WORKING, BROKEN, SessionEnded(), make_answer()),
        [*STARTED, Cancel(key(), "conditions"), Disconnect(), Hold(make_answer())],
    ),
    "the task goes on when the condition holds again and it is still open": (
        (*WORKING, BROKEN, SessionEnded(), WorkAbandoned("run"), FINE, HELLO, TaskOffered(task())),
        [*STARTED, Cancel(key(), "conditions"), Disconnect(), Begin(task())],
    ),
    "a task that is offered again before the batch is over begins after it": (
        (*WORKING, BROKEN, SessionEnded(), FINE, HELLO, TaskOffered(task()), WorkAbandoned("run")),
        [*STARTED, Cancel(key(), "conditions"), Disconnect(), Begin(task())],
    ),
    "a task that comes while a condition is broken is left": (
        (HELLO, BROKEN, TaskOffered(task())),
        [Disconnect()],
    ),
    "a reply on its way may arrive although a condition breaks": ((*FINISHED, BROKEN), SENT),
    "it may leave the device only over an unmetered network": (
        (*FINISHED, METERED),
        [*SENT, Disconnect()],
    ),
    "work whose download broke leaves and is offered again": (
        (*WORKING, WorkAbandoned("run")),
        [*STARTED, Disconnect()],
    ),
    "work whose download broke with the session is offered again by the next": (
        (*WORKING, SessionEnded(), WorkAbandoned("run"), HELLO, TaskOffered(task())),
        [*STARTED, Begin(task())],
    ),
    "stopping calls the task off and keeps it": (
        (*WORKING, StopRequested(), WorkAbandoned("run")),
        [*STARTED, Cancel(key(), "stopped")],
    ),
    "stopping keeps a reply that was just finished": (
        (*WORKING, StopRequested(), make_answer()),
        [*STARTED, Cancel(key(), "stopped"), Hold(make_answer())],
    ),
    "nothing begins while stopping": ((HELLO, StopRequested(), TaskOffered(task())), []),
    "it is called off once": (
        (*WORKING, BROKEN, BROKEN, StopRequested()),
        [*STARTED, Cancel(key(), "conditions"), Disconnect(), Disconnect()],
    ),
    "a reply of a run that is over is dropped": (
        (*FINISHED, SessionEnded(), SessionStarted(("another",))),
        [*SENT, Drop(make_held(), "its run is over")],
    ),
    "work for a run that is over is called off": (
        (*WORKING, SessionEnded(), SessionStarted(("another",)), WorkAbandoned("run")),
        [*STARTED, Cancel(key(), "its run is over"), Erase("run")],
    ),
    "work long past its deadline is given up": (
        (
            HELLO,
            TaskOffered(task(expires_unix_s=9.0)),
            FINE,
            ConditionsChecked((), 10.0),
            WorkAbandoned("run"),
        ),
        [
            Begin(task(expires_unix_s=9.0)),
            Cancel(key(), "its deadline is long past"),
            Erase("run"),
        ],
    ),
    "a reply long past its deadline is dropped": (
        (ReplyStored(make_held(expires_unix_s=9.0)), FINE, ConditionsChecked((), 10.0)),
        [Drop(make_held(expires_unix_s=9.0), "its deadline is long past")],
    ),
}


#: The same runs and a third one, for a client that works for two at a time.
TWO = SessionStarted(("run", "other", "third"), max_concurrent_runs=2)
THIRD = replace(task(), key=key(0, "third"))
MOVED_ON = "the coordinator has moved on"
BOTH_AT_WORK: tuple[Event, ...] = (TWO, TaskOffered(task()), TaskOffered(OTHER))

AT_A_TIME: dict[str, tuple[tuple[Event, ...], list[Action]]] = {
    "two runs' tasks are worked on at a time, and answered in any order": (
        (*BOTH_AT_WORK, WorkFinished(OTHER, b"reply", None), make_answer()),
        [
            Begin(task()),
            Begin(OTHER),
            Hold(WorkFinished(OTHER, b"reply", None)),
            Hold(make_answer()),
        ],
    ),
    "a third task means that the one that was offered first is closed": (
        (*BOTH_AT_WORK, TaskOffered(THIRD), WorkAbandoned("run")),
        [Begin(task()), Begin(OTHER), Cancel(key(), MOVED_ON), Erase("run"), Begin(THIRD)],
    ),
    "what is offered again in a new session is not closed": (
        (*BOTH_AT_WORK, SessionEnded(), TWO, TaskOffered(task()), TaskOffered(THIRD)),
        [Begin(task()), Begin(OTHER), Cancel(OTHER.key, MOVED_ON)],
    ),
    "a task waits for its own run's work only": (
        (*BOTH_AT_WORK, TaskOffered(task(1)), WorkAbandoned("run")),
        [Begin(task()), Begin(OTHER), Cancel(key(), MOVED_ON), Erase("run"), Begin(task(1))],
    ),
    "work that ends makes room for all that waits": (
        (
            *(*BOTH_AT_WORK, BROKEN, SessionEnded(), FINE, TWO),
            *(TaskOffered(OTHER), TaskOffered(task()), WorkAbandoned("run")),
            WorkAbandoned("other"),
        ),
        [
            *(Begin(task()), Begin(OTHER), Cancel(key(), "conditions")),
            *(Cancel(OTHER.key, "conditions"), Disconnect(), Begin(task()), Begin(OTHER)),
        ],
    ),
    "work ahead gives way before tasks that were asked for": (
        (*(TWO, *OVERLAPPED[1:]), TaskOffered(OTHER), TaskOffered(THIRD), WorkAbandoned("run")),
        [*BEGUN, Begin(OTHER), Cancel(key(1), MOVED_ON), Erase("run"), Begin(THIRD)],
    ),
    "a model is not trained ahead while its run's task is in work": (
        (*BOTH_AT_WORK, ModelFetched(ahead(1)), WorkFinished(OTHER, b"reply", None), make_answer()),
        [
            *(Begin(task()), Begin(OTHER), Hold(WorkFinished(OTHER, b"reply", None))),
            *(Hold(make_answer()), Begin(ahead(1))),
        ],
    ),
    "stopping calls all work off": (
        (*BOTH_AT_WORK, StopRequested()),
        [Begin(task()), Begin(OTHER), Cancel(key(), "stopped"), Cancel(OTHER.key, "stopped")],
    ),
    "a run that ends takes only its own work": (
        (*BOTH_AT_WORK, SessionEnded(), SessionStarted(("other",), max_concurrent_runs=2)),
        [Begin(task()), Begin(OTHER), Cancel(key(), "its run is over")],
    ),
    "a download that breaks leaves the other work alone": (
        (*BOTH_AT_WORK, WorkAbandoned("run"), WorkFinished(OTHER, b"reply", None)),
        [Begin(task()), Begin(OTHER), Disconnect(), Hold(WorkFinished(OTHER, b"reply", None))],
    ),
    "with a lower limit, work in progress goes on, and no more is begun": (
        (
            *(*BOTH_AT_WORK, SessionEnded(), SessionStarted(("run", "other"))),
            *(TaskOffered(task()), WorkFinished(OTHER, b"reply", None)),
        ),
        [Begin(task()), Begin(OTHER), Hold(WorkFinished(OTHER, b"reply", None))],
    ),
}


TABLE |= AHEAD | MANY_RUNS | AT_A_TIME


@pytest.mark.parametrize("name", TABLE)
def test_conversations_go_as_in_the_table(name: str) -> None:
    """Each row has the events, and the actions that the client takes."""
    events, expected = TABLE[name]
    _, done = play(*events)
    assert done == expected


def test_one_model_is_fetched_ahead_at_a_time() -> None:
    """A newer model is not fetched while one waits to be trained, nor without a session."""
    told, _ = play(*WORKING, ModelAnnounced(ahead(1)))
    assert told.to_fetch == ahead(1)
    newer, _ = play(ModelAnnounced(ahead(2)), here=told)
    assert newer.to_fetch == ahead(2)
    here, _ = play(ModelFetched(ahead(1)), here=newer)
    assert here.to_fetch is None
    begun, _ = play(make_answer(), here=here)
    assert begun.to_fetch == ahead(2)
    assert play(SessionEnded(), here=begun)[0].to_fetch is None


def test_nothing_connects_before_the_device_was_looked_at() -> None:
    """Nor while a condition is not met, nor once the client is stopping."""
    fresh = Conversation()
    assert not fresh.may_connect
    assert play(FINE, here=fresh)[0].may_connect
    assert not play(FINE, BROKEN, here=fresh)[0].may_connect
    assert not play(FINE, StopRequested(), here=fresh)[0].may_connect


def test_a_process_ends_when_its_work_has() -> None:
    """At once if there is no work."""
    assert play(StopRequested())[0].is_done
    busy, _ = play(*WORKING, StopRequested())
    assert not busy.is_done
    assert play(WorkAbandoned("run"), here=busy)[0].is_done
    assert not play(*WORKING, WorkAbandoned("run"))[0].is_done
