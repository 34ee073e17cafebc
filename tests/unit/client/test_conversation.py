"""What a client does next: tables of events and actions."""

import math
from pathlib import Path

import pytest

from fedlearn.client.conversation import (
    Action,
    Answered,
    CallOff,
    Connected,
    Conversation,
    Deliver,
    Disconnect,
    Disconnected,
    Drop,
    Ended,
    Erase,
    Event,
    Keep,
    Kept,
    Offered,
    Settled,
    Start,
    Stopped,
    Surveyed,
    Withdrawn,
    step,
)
from fedlearn.client.tasks import HeldReply, OpenTask, TaskKey

HERE = Path("reply")


def key(round_num: int = 0, run_id: str = "run") -> TaskKey:
    return TaskKey(run_id=run_id, kind="TrainRequest", round_num=round_num, attempt=0, exchange=0)


def task(round_num: int = 0, *, expires_unix_s: float = math.inf) -> OpenTask:
    return OpenTask(
        key=key(round_num),
        digest=b"",
        num_bytes=0,
        data=b"",
        expires_unix_s=expires_unix_s,
        max_reply_bytes=0,
        max_inline_bytes=0,
        personal=b"",
    )


def held(round_num: int = 0, *, run_id: str = "run", expires_unix_s: float = math.inf) -> HeldReply:
    return HeldReply(
        key=key(round_num, run_id),
        digest=b"",
        num_bytes=0,
        expires_unix_s=expires_unix_s,
        max_inline_bytes=0,
        path=HERE,
    )


def answered(round_num: int = 0) -> Answered:
    return Answered(task(round_num), b"reply", None)


def play(*events: Event, here: Conversation | None = None) -> tuple[Conversation, list[Action]]:
    """Return where a client stands after ``events``, and all that it did."""
    here, done = here or Conversation(unmet=()), list[Action]()
    for event in events:
        here, actions = step(here, event)
        done += actions
    return here, done


FINE = Surveyed((), 0.0)
BROKEN = Surveyed(("on_power",), 0.0)
METERED = Surveyed(("unmetered (unknown)",), 0.0)
HELLO = Connected("run")
WORKING: tuple[Event, ...] = (HELLO, Offered(task()))
FINISHED: tuple[Event, ...] = (*WORKING, answered(), Kept(held()))
STARTED: list[Action] = [Start(task())]
SENT: list[Action] = [*STARTED, Keep(answered()), Deliver(held())]

TABLE: dict[str, tuple[tuple[Event, ...], list[Action]]] = {
    "a task is worked on and its reply delivered": (FINISHED, SENT),
    "a receipt settles the reply": (
        (*FINISHED, Settled(key())),
        [*SENT, Drop(held(), "settled")],
    ),
    "a receipt for something else settles nothing": ((*FINISHED, Settled(key(5))), SENT),
    "a task that is offered again is not begun again": ((*WORKING, Offered(task())), STARTED),
    "a task that is answered is answered again, not worked on again": (
        (*FINISHED, Offered(task())),
        [*SENT, Deliver(held(), is_asked_again=True)],
    ),
    "a task that is offered again while its last batch runs is answered once": (
        (*WORKING, BROKEN, Disconnected(), FINE, HELLO, Offered(task()), answered(), Kept(held())),
        [
            *STARTED,
            CallOff(key(), "conditions"),
            Disconnect(),
            Keep(answered()),
            Deliver(held()),
        ],
    ),
    "a task that is offered again while its last batch runs goes on if that was the end": (
        (*WORKING, BROKEN, Disconnected(), FINE, HELLO, Offered(task()), Ended(key())),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Start(task())],
    ),
    "a reply waits for the next session": (
        (*WORKING, Disconnected(), answered(), Kept(held()), HELLO),
        SENT,
    ),
    "a withdrawn task is called off and erased": (
        (*WORKING, Withdrawn(key(), "closed"), Ended(key())),
        [*STARTED, CallOff(key(), "closed"), Erase(key())],
    ),
    "a task that was finished before it heard is dropped": (
        (*WORKING, Withdrawn(key(), "closed"), answered()),
        [*STARTED, CallOff(key(), "closed"), Erase(key())],
    ),
    "a reply whose task is withdrawn is dropped": (
        (*FINISHED, Withdrawn(key(), "closed")),
        [*SENT, Drop(held(), "closed")],
    ),
    "a withdrawal of something else changes nothing": (
        (*WORKING, Withdrawn(key(5), "closed")),
        STARTED,
    ),
    "another task waits until the batch is over": (
        (*WORKING, Offered(task(1)), Ended(key())),
        [
            *STARTED,
            CallOff(key(), "the coordinator has moved on"),
            Erase(key()),
            Start(task(1)),
        ],
    ),
    "a task that waited may be withdrawn before it begins": (
        (*WORKING, Offered(task(1)), Withdrawn(key(1), "closed"), Ended(key())),
        [*STARTED, CallOff(key(), "the coordinator has moved on"), Erase(key())],
    ),
    "a broken condition calls the task off, keeps its checkpoint and leaves": (
        (*WORKING, BROKEN, Ended(key())),
        [*STARTED, CallOff(key(), "conditions"), Disconnect()],
    ),
    "a task that was finished when the condition broke is kept": (
        (*WORKING, BROKEN, Disconnected(), answered()),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Keep(answered())],
    ),
    "the task goes on when the condition holds again and it is still open": (
        (*WORKING, BROKEN, Disconnected(), Ended(key()), FINE, HELLO, Offered(task())),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Start(task())],
    ),
    "a task that is offered again before the batch is over begins after it": (
        (*WORKING, BROKEN, Disconnected(), FINE, HELLO, Offered(task()), Ended(key())),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Start(task())],
    ),
    "a task that comes while a condition is broken is left": (
        (HELLO, BROKEN, Offered(task())),
        [Disconnect()],
    ),
    "a reply on its way may arrive although a condition breaks": ((*FINISHED, BROKEN), SENT),
    "it may leave the device only over an unmetered network": (
        (*FINISHED, METERED),
        [*SENT, Disconnect()],
    ),
    "work whose download broke leaves and is offered again": (
        (*WORKING, Ended(key())),
        [*STARTED, Disconnect()],
    ),
    "work whose download broke with the session is offered again by the next": (
        (*WORKING, Disconnected(), Ended(key()), HELLO, Offered(task())),
        [*STARTED, Start(task())],
    ),
    "stopping calls the task off and keeps it": (
        (*WORKING, Stopped(), Ended(key())),
        [*STARTED, CallOff(key(), "stopped")],
    ),
    "stopping keeps a reply that was just finished": (
        (*WORKING, Stopped(), answered()),
        [*STARTED, CallOff(key(), "stopped"), Keep(answered())],
    ),
    "nothing begins while stopping": ((HELLO, Stopped(), Offered(task())), []),
    "it is called off once": (
        (*WORKING, BROKEN, BROKEN, Stopped()),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Disconnect()],
    ),
    "a reply of a run that is over is dropped": (
        (*FINISHED, Disconnected(), Connected("another")),
        [*SENT, Drop(held(), "its run is over")],
    ),
    "work for a run that is over is called off": (
        (*WORKING, Disconnected(), Connected("another"), Ended(key())),
        [*STARTED, CallOff(key(), "its run is over"), Erase(key())],
    ),
    "work long past its deadline is given up": (
        (HELLO, Offered(task(expires_unix_s=9.0)), FINE, Surveyed((), 10.0), Ended(key())),
        [
            Start(task(expires_unix_s=9.0)),
            CallOff(key(), "its deadline is long past"),
            Erase(key()),
        ],
    ),
    "a reply long past its deadline is dropped": (
        (Kept(held(expires_unix_s=9.0)), FINE, Surveyed((), 10.0)),
        [Drop(held(expires_unix_s=9.0), "its deadline is long past")],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_conversations_go_as_in_the_table(name: str) -> None:
    """Each row: what happens, and what the client does."""
    events, expected = TABLE[name]
    _, done = play(*events)
    assert done == expected


def test_nothing_connects_before_the_device_was_looked_at() -> None:
    """Nor while a condition is broken, nor once the process shall end."""
    fresh = Conversation()
    assert not fresh.may_connect
    assert play(FINE, here=fresh)[0].may_connect
    assert not play(FINE, BROKEN, here=fresh)[0].may_connect
    assert not play(FINE, Stopped(), here=fresh)[0].may_connect


def test_a_process_ends_when_its_work_has() -> None:
    """At once if there is none."""
    assert play(Stopped())[0].is_done
    busy, _ = play(*WORKING, Stopped())
    assert not busy.is_done
    assert play(Ended(key()), here=busy)[0].is_done
    assert not play(*WORKING, Ended(key()))[0].is_done
