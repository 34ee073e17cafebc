"""The state machine of an asynchronous round: whom to ask, which updates count or are too stale."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.pending_tasks import PendingTask, tasks_from_tensors, tasks_to_tensors
from fedlearn.algorithms.round_state import Attempt, BufferRoundState
from fedlearn.algorithms.staleness import StalenessWeight
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Status


def asynchrony(*, buffer_size: int, concurrency: int, max_staleness: int) -> Asynchrony:
    return Asynchrony(
        buffer_size=buffer_size,
        concurrency=concurrency,
        max_staleness=max_staleness,
        staleness_weight=StalenessWeight.CONSTANT,
        staleness_exponent=0.0,
        staleness_hinge=0,
    )


@dataclass
class InOrder:
    """Draws the first idle clients, and records each call's arguments."""

    population: int = 100
    asked_for: list[tuple[int, int]] = field(default_factory=list)

    def __call__(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        assert round_num >= 0
        self.asked_for.append((num, attempt))
        free = [ClientId(each) for each in range(self.population) if each not in busy]
        return free[:num]


def run_buffered(
    limits: Asynchrony,
    pending: Sequence[PendingTask] = (),
    *,
    round_num: int = 0,
    max_retries: int = 1000,
) -> BufferRoundState:
    policy = StragglerPolicy(
        num_wanted=1,
        over_selection=1.0,
        deadline_s=math.inf,
        min_reports=1,
        below_minimum=BelowMinimum.RETRY,
        max_retries=max_retries,
    )
    return BufferRoundState(policy, limits, pending, Attempt(round_num, attempt=0))


def take(buffer: BufferRoundState, client_id: int) -> None:
    """Let a client reply with an update that counts."""
    task = buffer.land(ClientId(client_id))
    buffer.take(task, Participation(task.client_id, Status.REPORTED, 1.0, 1))


def fail(buffer: BufferRoundState, client_id: int) -> None:
    """Let a client reply that it failed."""
    task = buffer.land(ClientId(client_id))
    buffer.fail(task, Participation(task.client_id, Status.FAILED, 1.0), sent_nothing=True)


def refuse(buffer: BufferRoundState, client_id: int) -> None:
    """Withdraw an update that was counted before it was trained."""
    buffer.revise(ClientId(client_id), Participation(ClientId(client_id), Status.FAILED, 1.0))


def fill(buffer: BufferRoundState, draw: InOrder, now_s: float) -> list[ClientId]:
    """Ask all clients that may be asked now, as a collector does."""
    asked = list[ClientId]()
    while True:
        asked += [each.client_id for each in buffer.ask(now_s)]
        if not (drawn := buffer.draw(draw)):
            return asked
        buffer.put(drawn)


def test_as_one_lands_another_is_asked() -> None:
    """One draw is enough for the whole round if no client fails."""
    draw = InOrder()
    limits = asynchrony(buffer_size=3, concurrency=4, max_staleness=5)
    buffer = run_buffered(limits)
    assert fill(buffer, draw, 0.0) == [0, 1, 2, 3]
    take(buffer, 2)
    assert fill(buffer, draw, 1.0) == [4]
    take(buffer, 4)
    assert fill(buffer, draw, 1.5) == [5]
    take(buffer, 0)
    assert buffer.is_full
    assert draw.asked_for == [(6, 0)]
    left = [(each.client_id, each.sent_s) for each in buffer.pending_after(2.0)]
    assert left == [(1, -2.0), (3, -2.0), (5, -0.5)]


def test_without_staleness_nobody_is_asked_whose_update_cannot_count() -> None:
    """With max_staleness 0, a client that reported is not replaced: the round is synchronous."""
    draw = InOrder()
    limits = asynchrony(buffer_size=3, concurrency=3, max_staleness=0)
    buffer = run_buffered(limits)
    assert fill(buffer, draw, 0.0) == [0, 1, 2]
    take(buffer, 0)
    assert fill(buffer, draw, 1.0) == []
    buffer.land(ClientId(1))  # it failed, so another client takes its place
    assert fill(buffer, draw, 2.0) == [3]
    assert draw.asked_for == [(3, 0), (1, 1)]


def test_more_in_flight_than_can_count_is_refused() -> None:
    """Control: one client fewer is accepted."""
    asynchrony(buffer_size=3, concurrency=6, max_staleness=1)
    with pytest.raises(ValueError, match="concurrency is 7, but with max_staleness 1 and buffer"):
        asynchrony(buffer_size=3, concurrency=7, max_staleness=1)


def test_who_is_too_stale_is_given_up_before_anybody_is_asked() -> None:
    """An update exactly at the bound still counts."""
    pending = [
        PendingTask(ClientId(client), based_on, 0, 0, -1.0) for client, based_on in ((7, 2), (8, 3))
    ]
    limits = asynchrony(buffer_size=2, concurrency=4, max_staleness=2)
    buffer = run_buffered(limits, pending, round_num=5)
    assert [each.client_id for each in buffer.give_up_stale()] == [7]
    assert [each.client_id for each in buffer.pending] == [8]
    take(buffer, 8)
    assert [buffer.age(each) for each in buffer.counted] == [2]
    assert [(row.status, bool(row.reason)) for row in buffer.rows] == [
        (Status.STALE, True),
        (Status.REPORTED, False),
    ]


def test_who_answered_is_not_asked_again_in_the_round_unless_it_sent_nothing() -> None:
    """Of two clients, one's update was refused, and the other failed without sending any."""
    draw = InOrder(population=2)
    limits = asynchrony(buffer_size=2, concurrency=2, max_staleness=3)
    buffer = run_buffered(limits)
    assert fill(buffer, draw, 0.0) == [0, 1]
    take(buffer, 0)
    refuse(buffer, 0)
    assert fill(buffer, draw, 1.0) == []
    buffer.land(ClientId(1))
    buffer.excuse(ClientId(1))
    assert fill(buffer, draw, 2.0) == [1]


def test_who_fails_is_asked_again_so_many_times() -> None:
    """After max_retries it is not asked again in this round; in the next round it is."""
    draw, limits = InOrder(population=2), asynchrony(buffer_size=2, concurrency=2, max_staleness=3)
    buffer = run_buffered(limits, max_retries=2)
    assert fill(buffer, draw, 0.0) == [0, 1]
    take(buffer, 0)
    for now_s, asked_again in ((1.0, [1]), (2.0, [1]), (3.0, [])):
        fail(buffer, 1)
        assert buffer.has_missed_any == (not asked_again)
        assert fill(buffer, draw, now_s) == asked_again
    later = run_buffered(limits, buffer.pending_after(3.0), round_num=1)
    assert fill(later, draw, 0.0) == [0, 1]


def test_who_failed_is_asked_again_after_all_others() -> None:
    """Only if no client is in flight, since any reply may free another client."""
    draw = InOrder(population=3)
    limits = asynchrony(buffer_size=2, concurrency=2, max_staleness=3)
    buffer = run_buffered(limits)
    assert fill(buffer, draw, 0.0) == [0, 1]
    fail(buffer, 0)
    assert fill(buffer, draw, 1.0) == [2]
    take(buffer, 1)
    assert fill(buffer, draw, 2.0) == []
    lost = [buffer.has_missed_any]
    buffer.land(ClientId(2))
    assert [*lost, buffer.has_missed_any] == [False, True]
    assert fill(buffer, draw, 3.0) == [0]


@pytest.mark.slow
@given(st.data())
def test_no_client_is_in_two_places_and_no_more_fly_than_can_count(data: st.DataObject) -> None:
    """Holds for any order of replies and failures over several rounds."""
    buffer_size = data.draw(st.integers(1, 4))
    max_staleness = data.draw(st.integers(0, 3))
    most = (max_staleness + 1) * buffer_size
    concurrency = data.draw(st.integers(1, most))
    limits = asynchrony(
        buffer_size=buffer_size, concurrency=concurrency, max_staleness=max_staleness
    )
    draw, pending = InOrder(population=concurrency + buffer_size), tuple[PendingTask, ...]()
    for round_num in range(4):
        buffer, taken = run_buffered(limits, pending, round_num=round_num), list[ClientId]()
        buffer.give_up_stale()
        while not buffer.is_full:
            fill(buffer, draw, 0.0)
            flying = [each.client_id for each in buffer.pending]
            assert len(set(flying)) == len(flying) <= concurrency
            assert len(flying) + len(taken) <= most
            assert not set(flying) & set(taken)
            assert flying, "somebody is always there"
            landed = data.draw(st.sampled_from(flying))
            (age,) = [buffer.age(each) for each in buffer.pending if each.client_id == landed]
            assert 0 <= age <= max_staleness
            if data.draw(st.booleans(), label="fails"):
                if data.draw(st.booleans(), label="says so"):
                    fail(buffer, landed)
                else:
                    buffer.land(landed)
                    buffer.excuse(landed)
            else:
                take(buffer, landed)
                taken.append(landed)
        assert [each.client_id for each in buffer.counted] == taken
        assert len(taken) == buffer_size
        pending = buffer.pending_after(1.0)


def test_who_is_in_flight_is_kept_in_a_checkpoint() -> None:
    """An empty list of pending tasks survives as well."""
    pending = (
        PendingTask(ClientId(7), 2, 1, 4, -1.0 / 3.0, 2.0 / 3.0),
        PendingTask(ClientId(2**40), 3, 0, 0, -0.1, math.inf, fails=True),
    )
    assert tasks_from_tensors(tasks_to_tensors(pending)) == pending
    assert tasks_from_tensors(tasks_to_tensors(())) == ()
