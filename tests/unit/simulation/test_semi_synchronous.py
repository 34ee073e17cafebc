"""Semi-synchronous rounds in virtual time: a late update counts once, later, or is given up."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedlearn.algorithms.collector import CollectedRound
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.staleness import StalenessWeight
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.participations import Participation, Status
from fedlearn.core.soundness import describe_unsound
from fedlearn.rounds.round import (
    RoundPlan,
    RoundResult,
    ServerState,
    run_round,
)
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.virtual_round import DROPPED_OUT
from tests.unit.simulation import test_buffers as buffers
from tests.unit.simulation.test_buffers import NUM_CLIENTS, RATE, SECONDS, Table, ToTheirOwn

LATE = LateUpdates(
    max_staleness=20,
    staleness_weight=StalenessWeight.POLYNOMIAL,
    staleness_exponent=0.5,
    staleness_hinge=0,
    deadline_quantile=None,
    deadline_window=3,
    least_deadline_s=0.0,
)
BY_TABLE = Table()
POLICY = StragglerPolicy(
    num_wanted=4,
    over_selection=1.5,
    deadline_s=12.0,
    min_reports=1,
    below_minimum=BelowMinimum.RETRY,
    max_retries=2,
)


def plan(
    executor: ToTheirOwn,
    *,
    late: LateUpdates = LATE,
    policy: StragglerPolicy = POLICY,
    behavior: Table = BY_TABLE,
    block_size: int = 4,
) -> RoundPlan:
    limits = buffers.asynchrony(buffer_size=4, concurrency=4)
    made = buffers.plan(limits, executor, behavior=behavior, block_size=block_size)
    assert isinstance(made.collector, Engine)
    engine = replace(made.collector, policy=policy, round_mode=late)
    return replace(made, policy=policy, collector=engine, is_retried=True)


def start_state(made: RoundPlan) -> ServerState:
    return made.init(Params.of(nn.Linear(2, 1, bias=False)).with_vector(torch.zeros(2)))


def step(made: RoundPlan, state: ServerState, *, attempt: int = 0) -> RoundResult:
    return run_round(state, made, attempt=attempt)


def run(made: RoundPlan, *, num_rounds: int) -> tuple[ServerState, list[CollectedRound]]:
    state, rounds = start_state(made), list[CollectedRound]()
    for _ in range(num_rounds):
        state, collected, _ = step(made, state)
        rounds.append(collected)
    return state, rounds


def rows(rounds: Sequence[CollectedRound]) -> list[tuple[int, Participation]]:
    return [(number, row) for number, one in enumerate(rounds) for row in one.participations]


def reference(num_rounds: int, *, exponent: float) -> tuple[float, float, int]:
    """Simulate the same with a scalar model; return it, the seconds, and the number late."""
    x, now_s, num_late = 0.0, 0.0, 0
    awaited, models = dict[int, tuple[float, int]](), list[float]()
    for number in range(num_rounds):
        models.append(x)
        cohort = [c for c in range(NUM_CLIENTS) if c not in awaited][: POLICY.cohort_size]
        awaited |= {c: (now_s + SECONDS[c], number) for c in cohort}
        in_order = sorted(awaited, key=lambda c: awaited[c][0])
        fresh = [c for c in in_order if c in cohort and SECONDS[c] <= POLICY.deadline_s]
        closed_s = now_s + min(POLICY.deadline_s, max(SECONDS[c] for c in cohort))
        if len(fresh) >= POLICY.num_wanted:
            closed_s = awaited[fresh[POLICY.num_wanted - 1]][0]
        arrived = [c for c in in_order if awaited[c][0] <= closed_s]
        weights = [(1 + number - awaited[c][1]) ** -exponent for c in arrived]
        moves = [RATE * (c - models[awaited[c][1]]) for c in arrived]
        x += sum(w * m for w, m in zip(weights, moves, strict=True)) / len(arrived)
        num_late += sum(awaited[c][1] < number for c in arrived)
        awaited = {c: awaited[c] for c in awaited if c not in arrived}
        now_s = closed_s
    return x, now_s, num_late


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_a_run_is_that_of_its_definition(exponent: float) -> None:
    """Model, time and late updates of 15 rounds, compared with a few lines of plain Python."""
    late = replace(LATE, staleness_exponent=exponent)
    state, rounds = run(plan(ToTheirOwn(), late=late), num_rounds=15)
    x, now_s, num_late = reference(15, exponent=exponent)
    assert state.params.vector.tolist() == pytest.approx([x] * 2, rel=1e-5)
    assert sum(each.duration_s for each in rounds) == pytest.approx(now_s)
    staleness = sum((Counter(each.staleness) for each in rounds), Counter[int]())
    assert sum(count for age, count in staleness.items() if age) == num_late > 5


@pytest.mark.parametrize("late", [LATE, replace(LATE, max_staleness=1)])
def test_nothing_is_counted_twice_and_nothing_is_lost(late: LateUpdates) -> None:
    """A late client has a row in a later round or is still in flight, and trains only once."""
    executor = ToTheirOwn(diverging=frozenset({5}))
    failing = Table(failing=frozenset({6, 11}))
    state, rounds = run(plan(executor, late=late, behavior=failing), num_rounds=25)
    awaited = dict[int, int]()
    for number, row in rows(rounds):
        if row.status is Status.LATE:
            assert row.client_id not in awaited, "who is awaited is not asked"
            awaited[row.client_id] = number
        else:
            awaited.pop(row.client_id, None)
    assert awaited == {each.client_id: each.based_on for each in state.pending}
    counted = [row.client_id for _, row in rows(rounds) if row.status is Status.REPORTED]
    assert len(executor.trained) == len(set(executor.trained))
    assert len(counted) == sum(client != 5 for client, _ in executor.trained)
    reasons = {row.reason for _, row in rows(rounds) if row.status is Status.FAILED}
    assert reasons == {DROPPED_OUT, describe_unsound("delta")}
    assert {row.status for _, row in rows(rounds)} >= {Status.REPORTED, Status.LATE, Status.FAILED}


def test_who_is_too_late_is_dropped_with_the_reason_and_never_trained() -> None:
    """Then it may be asked again."""
    executor = ToTheirOwn()
    late = replace(LATE, max_staleness=1)
    _, rounds = run(plan(executor, late=late), num_rounds=12)
    stale = [(number, row) for number, row in rows(rounds) if row.status is Status.STALE]
    assert {row.client_id for _, row in stale} == {3}
    assert stale[0][1].reason == "based on a model 2 rounds old; at most 1 are accepted"
    assert len(stale) > 1
    assert ClientId(3) not in {client for client, _ in executor.trained}
    assert max(age for one in rounds for age in one.staleness) == 1


def test_where_nobody_is_late_it_is_the_synchronous_round_to_the_bit() -> None:
    """In each of four rounds."""
    policy = replace(POLICY, over_selection=1.0, deadline_s=math.inf)
    semi = plan(ToTheirOwn(), policy=policy)
    states: tuple[list[ServerState], list[ServerState]] = ([], [])
    assert isinstance(semi.collector, Engine)
    synchronous = replace(semi, collector=replace(semi.collector, round_mode=None))
    for kept, made in zip(states, (semi, synchronous), strict=True):
        state = start_state(made)
        for _ in range(4):
            state, collected, _ = step(made, state)
            kept.append(state)
            assert collected.count(Status.REPORTED) == 4
    for left, right in zip(*states, strict=True):
        assert torch.equal(left.params.vector, right.params.vector)
        assert left.pending == ()


def test_too_few_reports_lose_nothing() -> None:
    """They count at the start of the next attempt, which asks other clients; all move the model."""
    policy = replace(POLICY, min_reports=3, deadline_s=8.0, over_selection=1.0)
    executor = ToTheirOwn()
    made = plan(executor, policy=policy)
    state, first, _ = step(made, start_state(made))
    assert first.aggregate is None
    assert first.count(Status.REPORTED) == 1  # client 2 after 5.7 s; the others take longer
    assert {each.client_id for each in state.pending} == {0, 1, 2, 3}
    assert state.params.vector.tolist() == [0.0, 0.0]
    after, second, _ = step(made, state, attempt=1)
    told = [row.client_id for row in second.participations if row.status is Status.REPORTED]
    assert told[0] == 2
    assert len(told) == len(set(told)) >= 3
    assert dict(second.staleness) == {0: len(told)}
    expected = RATE * sum(told) / len(told)
    assert after.params.vector.tolist() == pytest.approx([expected] * 2, rel=1e-5)


def test_a_round_that_can_ask_nobody_closes_as_soon_as_those_at_work_have_answered() -> None:
    """All are late in the first attempt; the second waits for them, but not for its deadline."""
    deadline_s, seconds = 10.0, [11.0 + each / 16 for each in range(NUM_CLIENTS)]
    policy = replace(
        POLICY, num_wanted=NUM_CLIENTS, over_selection=1.0, min_reports=6, deadline_s=deadline_s
    )
    made = plan(ToTheirOwn(), policy=policy, behavior=Table(seconds=seconds))
    state, first, _ = step(made, start_state(made))
    assert first.count(Status.LATE) == NUM_CLIENTS
    assert first.duration_s == deadline_s
    state, second, _ = step(made, state, attempt=1)
    assert second.count(Status.REPORTED) == NUM_CLIENTS
    assert second.duration_s == max(seconds) - deadline_s
    assert state.round_num == 1
    assert state.pending == ()


def test_a_round_whose_clients_have_all_answered_before_closes_at_once() -> None:
    """All clients there are have replied to earlier attempts, but are too few: no time passes."""
    never = [math.inf if each else 1.0 for each in range(NUM_CLIENTS)]
    policy = replace(
        POLICY, num_wanted=NUM_CLIENTS, over_selection=1.0, min_reports=2, deadline_s=10.0
    )
    made = plan(ToTheirOwn(), policy=policy, behavior=Table(seconds=never))
    state, _, _ = step(made, start_state(made))
    state = replace(state, pending=tuple(each for each in state.pending if each.client_id == 0))
    nobody = replace(made, draw=lambda *_, **__: ())
    _, again, _ = step(nobody, state, attempt=1)
    assert again.aggregate is None
    assert again.duration_s == 0.0


def test_the_deadline_follows_what_clients_took() -> None:
    """It is the median of the observed durations; in the first round, the longest deadline."""
    late = replace(LATE, deadline_quantile=0.5, deadline_window=4)
    policy = replace(POLICY, num_wanted=6, over_selection=1.0, deadline_s=120.0)
    state, rounds = run(plan(ToTheirOwn(), late=late, policy=policy), num_rounds=12)
    assert rounds[0].duration_s == SECONDS[3]  # the round waits for all clients
    assert all(each.duration_s <= 20.0 for each in rounds[2:])
    assert len(state.durations) == 4
    took = [each for of_round in state.durations for each in of_round]
    assert set(took) <= set(SECONDS)


def test_who_never_answers_holds_up_no_round() -> None:
    """Even without a deadline. The client is given up once its update would be too stale."""
    never = [math.inf if each == 3 else 1.0 + each for each in range(NUM_CLIENTS)]
    policy = replace(POLICY, deadline_s=math.inf, over_selection=1.0)
    late = replace(LATE, max_staleness=2)
    made = plan(ToTheirOwn(), late=late, policy=policy, behavior=Table(seconds=never))
    _, rounds = run(made, num_rounds=5)
    assert all(math.isfinite(each.duration_s) for each in rounds)
    stale = [number for number, row in rows(rounds) if row.status is Status.STALE]
    assert stale == [3]


def test_blocks_change_nothing_but_rounding() -> None:
    """The same clients are in flight as well."""
    one, four = (run(plan(ToTheirOwn(), block_size=size), num_rounds=9) for size in (1, 4))
    assert one[0].pending == four[0].pending
    torch.testing.assert_close(one[0].params.vector, four[0].params.vector)
