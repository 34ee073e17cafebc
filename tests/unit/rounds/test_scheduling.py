"""The queue of runs: which start next, and what the others wait for."""

import pytest

from fedlearn.rounds.scheduling import QueuedRun, QueueState, choose_next, explain_waits

QUEUED, RUNNING, DONE = QueueState.QUEUED, QueueState.RUNNING, QueueState.DONE


def queue_of(*runs: tuple[str, QueueState, int, str]) -> list[QueuedRun]:
    """Return runs of these names, states, priorities, and runs to wait for."""
    return [
        QueuedRun(
            id=place,
            name=name,
            state=state,
            priority=priority,
            after=after,
            config={},
            submitted_by="ann",
            start_from={},
            reason="",
            submitted_utc="",
            started_utc="",
            ended_utc="",
        )
        for place, (name, state, priority, after) in enumerate(runs)
    ]


def test_runs_start_by_priority_then_in_order_of_submission() -> None:
    """As many as may run next to those that do; none if too many run already."""
    queue = queue_of(
        ("done", DONE, 9, ""),
        ("now", RUNNING, 0, ""),
        ("late", QUEUED, -1, ""),
        ("first", QUEUED, 0, ""),
        ("second", QUEUED, 0, ""),
        ("urgent", QUEUED, 5, ""),
    )
    starts = {most: choose_next(queue, max_concurrent_runs=most) for most in (1, 2, 4, 16)}
    assert starts[1] == []
    assert starts[2] == ["urgent"]
    assert starts[4] == ["urgent", "first", "second"]
    assert starts[16] == ["urgent", "first", "second", "late"]
    two_at_work = [*queue, *queue_of(("more", RUNNING, 0, ""))]
    assert choose_next(two_at_work, max_concurrent_runs=1) == []


@pytest.mark.parametrize("state", QueueState)
def test_a_run_waits_until_another_one_is_done(state: QueueState) -> None:
    """Those behind it do not wait for that."""
    queue = queue_of(("one", state, 0, ""), ("two", QUEUED, 0, "one"), ("three", QUEUED, 0, ""))
    starts = choose_next(queue, max_concurrent_runs=8)
    assert ("two" in starts) == (state is DONE)
    assert "three" in starts


def test_each_queued_run_says_what_it_waits_for() -> None:
    queue = queue_of(
        ("broken", QueueState.FAILED, 0, ""),
        ("dropped", QueueState.CANCELLED, 0, ""),
        ("now", RUNNING, 0, ""),
        ("a", QUEUED, 0, ""),
        ("b", QUEUED, 0, "broken"),
        ("c", QUEUED, 0, "dropped"),
        ("d", QUEUED, 0, "now"),
        ("e", QUEUED, 0, ""),
        ("f", QUEUED, 0, "a"),
        ("g", QUEUED, 1, ""),
    )
    assert explain_waits(queue) == {
        "g": "next",
        "a": "1 run ahead",
        "e": "2 runs ahead",
        "b": "after broken, which failed: retry broken, or cancel b",
        "c": "after dropped, which was cancelled: retry dropped, or cancel c",
        "d": "after now, which is running",
        "f": "after a, which is queued",
    }
