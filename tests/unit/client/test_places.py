"""Where the user's code is, in what an application is told."""

import json
import queue

import pytest

from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.places import place_of, told_while_it_lasts


def failing() -> None:
    json.loads("none")  # fails in the standard library


def test_a_failure_is_placed_in_the_users_code() -> None:
    """Not in the library that it calls."""
    with pytest.raises(ValueError, match="Expecting value") as failed:
        failing()
    line = failing.__code__.co_firstlineno + 1
    assert place_of(failed.value.__traceback__) == f"{__file__}:{line} in failing"


def test_what_does_not_come_back_is_told_with_its_place_and_what_does_is_not() -> None:
    """Again and again, with the seconds that it has taken."""
    told: queue.Queue[AgentEvent] = queue.Queue()
    with told_while_it_lasts("app:make is still being made", told.put, patience_s=0.05):
        events = [told.get(timeout=60) for _ in range(2)]
    assert {event.kind for event in events} == {EventKind.WAITING}
    assert events[0].message.startswith(
        f"app:make is still being made after 0.05 s, at {__file__}:"
    )
    assert "after 0.1 s" in events[1].message
    with told_while_it_lasts("quick", told.put, patience_s=60.0):
        pass
    left = [told.get_nowait() for _ in range(told.qsize())]
    assert all(event.message.startswith("app:make") for event in left)
