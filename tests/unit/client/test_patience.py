"""Events for the application while the user's code does not return."""

import queue

from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.patience import report_while_running


def test_what_does_not_come_back_is_told_with_its_place_and_what_does_is_not() -> None:
    """Repeated, each time with the seconds passed and the current line."""
    told: queue.Queue[AgentEvent] = queue.Queue()
    with report_while_running("app:make is still being created", told.put, patience_s=0.05):
        events = [told.get(timeout=60) for _ in range(2)]
    assert {event.kind for event in events} == {EventKind.WAITING}
    assert events[0].message.startswith(
        f"app:make is still being created after 0.05 s, at {__file__}:"
    )
    assert "after 0.1 s" in events[1].message
    with report_while_running("quick", told.put, patience_s=60.0):
        pass
    left = [told.get_nowait() for _ in range(told.qsize())]
    assert all(event.message.startswith("app:make") for event in left)
