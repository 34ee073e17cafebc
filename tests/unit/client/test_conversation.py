"""What a client does next: tables of events and actions."""

import math
from pathlib import Path

import pytest

from fedlearn.client.conversation import (
    Action,
    Answered,
    Begin,
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
    Held,
    Hold,
    Offered,
    Settled,
    Stopped,
    Surveyed,
    Withdrawn,
    step,
)
from fedlearn.client.tasks import HeldReply, OpenTask
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import TaskKey

HERE = Path("reply")


def key(round_num: int = 0, run_id: str = "run") -> TaskKey:
    return TaskKey(run_id=run_id, kind="TrainRequest", round_num=round_num, attempt=0, exchange=0)


def task(round_num: int = 0, *, expires_unix_s: float = math.inf) -> OpenTask:
    message = wire_pb2.Task(key=key(round_num).message())
    return OpenTask(key=key(round_num), message=message, expires_unix_s=expires_unix_s)


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
FINISHED: tuple[Event, ...] = (*WORKING, answered(), Held(held()))
STARTED: list[Action] = [Begin(task())]
SENT: list[Action] = [*STARTED, Hold(answered()), Deliver(held())]

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
        (*WORKING, BROKEN, Disconnected(), FINE, HELLO, Offered(task()), answered(), Held(held())),
        [
            *STARTED,
            CallOff(key(), "conditions"),
            Disconnect(),
            Hold(answered()),
            Deliver(held()),
        ],
    ),
    "a task that is offered again while its last batch runs goes on if that was the end": (
        (*WORKING, BROKEN, Disconnected(), FINE, HELLO, Offered(task()), Ended()),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Begin(task())],
    ),
    "a reply waits for the next session": (
        (*WORKING, Disconnected(), answered(), Held(held()), HELLO),
        SENT,
    ),
    "a withdrawn task is called off and erased": (
        (*WORKING, Withdrawn(key(), "closed"), Ended()),
        [*STARTED, CallOff(key(), "closed"), Erase()],
    ),
    "a task that was finished before it heard is dropped": (
        (*WORKING, Withdrawn(key(), "closed"), answered()),
        [*STARTED, CallOff(key(), "closed"), Erase()],
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
        (*WORKING, Offered(task(1)), Ended()),
        [
            *STARTED,
            CallOff(key(), "the coordinator has moved on"),
            Erase(),
            Begin(task(1)),
        ],
    ),
    "a task that waited may be withdrawn before it begins": (
        (*WORKING, Offered(task(1)), Withdrawn(key(1), "closed"), Ended()),
        [*STARTED, CallOff(key(), "the coordinator has moved on"), Erase()],
    ),
    "a broken condition calls the task off, keeps its checkpoint and leaves": (
        (*WORKING, BROKEN, Ended()),
        [*STARTED, CallOff(key(), "conditions"), Disconnect()],
    ),
    "a task that was finished when the condition broke is kept": (
        (*WORKING, BROKEN, Disconnected(), answered()),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Hold(answered())],
    ),
    "the task goes on when the condition holds again and it is still open": (
        (*WORKING, BROKEN, Disconnected(), Ended(), FINE, HELLO, Offered(task())),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Begin(task())],
    ),
    "a task that is offered again before the batch is over begins after it": (
        (*WORKING, BROKEN, Disconnected(), FINE, HELLO, Offered(task()), Ended()),
        [*STARTED, CallOff(key(), "conditions"), Disconnect(), Begin(task())],
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
        (*WORKING, Ended()),
        [*STARTED, Disconnect()],
    ),
    "work whose download broke with the session is offered again by the next": (
        (*WORKING, Disconnected(), Ended(), HELLO, Offered(task())),
        [*STARTED, Begin(task())],
    ),
    "stopping calls the task off and keeps it": (
        (*WORKING, Stopped(), Ended()),
        [*STARTED, CallOff(key(), "stopped")],
    ),
    "stopping keeps a reply that was just finished": (
        (*WORKING, Stopped(), answered()),
        [*STARTED, CallOff(key(), "stopped"), Hold(answered())],
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
        (*WORKING, Disconnected(), Connected("another"), Ended()),
        [*STARTED, CallOff(key(), "its run is over"), Erase()],
    ),
    "work long past its deadline is given up": (
        (HELLO, Offered(task(expires_unix_s=9.0)), FINE, Surveyed((), 10.0), Ended()),
        [
            Begin(task(expires_unix_s=9.0)),
            CallOff(key(), "its deadline is long past"),
            Erase(),
        ],
    ),
    "a reply long past its deadline is dropped": (
        (Held(held(expires_unix_s=9.0)), FINE, Surveyed((), 10.0)),
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
    assert play(Ended(), here=busy)[0].is_done
    assert not play(*WORKING, Ended())[0].is_done
