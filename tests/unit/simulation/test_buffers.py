"""Asynchronous rounds in virtual time: which clients train, from which model, and the result."""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.collector import CollectedRound
from fedlearn.algorithms.informed_sampling import NO_STATE, SamplerState
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg, FedAvgM
from fedlearn.algorithms.staleness import StalenessWeight
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.core.soundness import describe_unsound
from fedlearn.rounds.round import RoundPlan, ServerState, run_round
from fedlearn.simulation.behavior import DeviceRound
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.base import TrainedBlock, Work
from fedlearn.simulation.population import BootstrapPopulation
from fedlearn.simulation.virtual_round import DROPPED_OUT

NUM_CLIENTS = 12
RATE = 0.25
LOCAL = LocalSgd(epochs=1, batch_size=2, learning_rate=RATE)
#: Seconds of each client; one takes ten times the median. No two sums of them are equal.
SECONDS = [s * 2**0.5 + k * 1e-3 for k, s in enumerate([7, 12, 4, 70, 9, 6, 15, 3, 8, 20, 5, 13])]


@dataclass(frozen=True)
class Table:
    """Devices whose durations and failures are listed in a table."""

    seconds: Sequence[float] = tuple(SECONDS)
    failing: frozenset[int] = frozenset()

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        return np.asarray([self.seconds[each] for each in work.client_ids.tolist()])

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.isin(work.client_ids, list(self.failing))


@dataclass
class ToTheirOwn:
    """An executor whose clients step towards their own ids, from the model that they were sent."""

    diverging: frozenset[int] = frozenset()
    takes_apart: bool = False
    blocks: list[tuple[int, list[int]]] = field(default_factory=list)

    def train(self, work: Work) -> TrainedBlock:
        ids = work.client_ids.tolist()
        self.blocks.append((work.round_num, ids))
        aims_K = torch.tensor([math.nan if c in self.diverging else float(c) for c in ids])
        starts = work.params.vector if work.apart is None else work.apart.starts_KP
        deltas_KP = RATE * (aims_K[:, None] - starts)
        return TrainedBlock(
            deltas_KP=deltas_KP,
            lanes={},
            losses_K=np.asarray(ids) / 10.0,
            num_examples_K=work.num_examples(),
            client_state={},
        )

    @property
    def trained(self) -> list[tuple[int, int]]:
        return [(client, based_on) for based_on, ids in self.blocks for client in ids]


def in_order(
    num: int,
    *,
    round_num: int,
    attempt: int,
    busy: Collection[ClientId],
    state: SamplerState = NO_STATE,
) -> Sequence[ClientId]:
    """Draw the idle clients with the lowest ids."""
    return [ClientId(each) for each in range(NUM_CLIENTS) if each not in busy][:num]


def asynchrony(
    *, buffer_size: int, concurrency: int, max_staleness: int = 20, exponent: float = 0.5
) -> Asynchrony:
    return Asynchrony(
        buffer_size=buffer_size,
        concurrency=concurrency,
        max_staleness=max_staleness,
        staleness_weight=StalenessWeight.POLYNOMIAL,
        staleness_exponent=exponent,
        staleness_hinge=0,
    )


def plan(
    limits: Asynchrony,
    executor: ToTheirOwn,
    *,
    behavior: Table = Table(),
    strategy: Strategy | None = None,
    deadline_s: float = math.inf,
    block_size: int = 4,
) -> RoundPlan:
    policy = StragglerPolicy(
        num_wanted=limits.buffer_size,
        over_selection=1.0,
        deadline_s=deadline_s,
        min_reports=limits.buffer_size,
        below_minimum=BelowMinimum.RETRY,
        max_retries=1,
    )
    population = BootstrapPopulation(
        features=torch.zeros(5, 2),
        labels=torch.zeros(5, dtype=torch.int64),
        num_classes=1,
        num_clients=NUM_CLIENTS,
        examples_per_client=3,
        seed=Seed(0),
    )
    engine = Engine(
        population=population,
        behavior=behavior,
        executor=executor,
        policy=policy,
        cluster=Alone(),
        block_size=block_size,
        round_mode=limits,
    )
    return RoundPlan(
        draw=in_order,
        policy=policy,
        collector=engine,
        strategy=strategy or FedAvg(LOCAL, weight_by_examples=False),
        seed=Seed(3),
        is_retried=False,
    )


def run(plan: RoundPlan, *, num_rounds: int) -> tuple[ServerState, list[CollectedRound]]:
    params = Params.of(nn.Linear(2, 1, bias=False))
    state = plan.init(params.with_vector(torch.zeros(2)))
    rounds = list[CollectedRound]()
    for _ in range(num_rounds):
        state, collected, _ = run_round(state, plan, attempt=0)
        rounds.append(collected)
    return state, rounds


def reference(
    *, buffer_size: int, concurrency: int, num_rounds: int, exponent: float, server_rate: float
) -> tuple[float, list[dict[int, int]], float]:
    """Simulate FedBuff (Nguyen et al., 2022, algorithm 1) event by event, with a scalar model."""
    x, version, now_s, number = 0.0, 0, 0.0, 0
    flying, models = list[tuple[float, int, int, int]](), list[float]()
    histograms = list[dict[int, int]]()
    while version < num_rounds:
        models.append(x)
        free = [c for c in range(NUM_CLIENTS) if c not in {each[2] for each in flying}]
        histogram, total = dict[int, int](), 0.0
        for _ in range(buffer_size):
            while len(flying) < concurrency:
                client = free.pop(0)
                heapq.heappush(flying, (now_s + SECONDS[client], number, client, version))
                number += 1
            now_s, _, client, based_on = heapq.heappop(flying)
            staleness = version - based_on
            total += (1 + staleness) ** -exponent * RATE * (client - models[based_on])
            histogram[staleness] = histogram.get(staleness, 0) + 1
        x, version = x + server_rate * total / buffer_size, version + 1
        histograms.append(dict(sorted(histogram.items())))
    return x, histograms, now_s


@pytest.mark.parametrize(
    ("buffer_size", "concurrency", "exponent", "server_rate"),
    [(1, 4, 0.5, 0.6), (3, 5, 0.5, 1.0), (3, 8, 0.0, 0.7), (4, 4, 1.0, 1.0)],
)
def test_a_run_is_that_of_the_paper(
    buffer_size: int, concurrency: int, exponent: float, server_rate: float
) -> None:
    """Model, staleness and virtual time of 25 rounds, compared with a few lines of plain Python."""
    limits = asynchrony(
        buffer_size=buffer_size, concurrency=concurrency, exponent=exponent, max_staleness=30
    )
    strategy = FedAvgM(
        LOCAL, server_learning_rate=server_rate, server_momentum=0.0, weight_by_examples=False
    )
    state, rounds = run(plan(limits, ToTheirOwn(), strategy=strategy), num_rounds=25)
    expected, histograms, now_s = reference(
        buffer_size=buffer_size,
        concurrency=concurrency,
        num_rounds=25,
        exponent=exponent,
        server_rate=server_rate,
    )
    assert [dict(each.staleness) for each in rounds] == histograms
    assert any(max(each) > 1 for each in histograms), "somebody is stale"
    assert state.params.vector.tolist() == pytest.approx([expected] * 2, rel=1e-5)
    assert sum(each.duration_s for each in rounds) == pytest.approx(now_s)


def test_a_stale_buffer_is_a_short_step() -> None:
    """The mean does not cancel the staleness weight, which would have no effect in FedAsync."""
    whole, short = (
        run(
            plan(asynchrony(buffer_size=1, concurrency=4, exponent=exponent), ToTheirOwn()),
            num_rounds=4,
        )[0].params.vector
        for exponent in (0.0, 3.0)
    )
    assert float(short[0]) < 0.7 * float(whole[0])


def test_clients_of_one_model_train_as_a_block() -> None:
    """Each block starts from the model that its clients were sent."""
    executor = ToTheirOwn()
    run(plan(asynchrony(buffer_size=4, concurrency=8), executor), num_rounds=3)
    first, *later = executor.blocks
    assert (first[0], len(first[1])) == (0, 4)
    assert len(later) < 2 * 4, "those of one model are together"
    assert {based_on for based_on, _ in later} > {0}
    assert len(executor.trained) == 3 * 4


def test_clients_of_several_models_train_as_a_block_where_the_executor_takes_it() -> None:
    """Each client starts from its own model: equal up to rounding, but with fewer blocks."""
    limits = asynchrony(buffer_size=4, concurrency=9)
    apart, together = ToTheirOwn(), ToTheirOwn(takes_apart=True)
    (expected, _), (found, rounds) = (
        run(plan(limits, each), num_rounds=8) for each in (apart, together)
    )
    assert [len(ids) for _, ids in together.blocks] == [4] * 8
    assert len(apart.blocks) > 8
    assert any(len(each.staleness) > 1 for each in rounds), "of several models"
    torch.testing.assert_close(found.params.vector, expected.params.vector)


def test_who_is_given_up_is_never_trained_and_told() -> None:
    """That is the slow client, whose update would be more than two rounds old."""
    executor = ToTheirOwn()
    limits = asynchrony(buffer_size=2, concurrency=6, max_staleness=2)
    state, rounds = run(plan(limits, executor), num_rounds=8)
    rows = [(each.client_id, each.status) for one in rounds for each in one.participations]
    stale = [client for client, status in rows if status is Status.STALE]
    assert stale.count(ClientId(3)) >= 1
    assert 3 not in {client for client, _ in executor.trained}
    assert len(executor.trained) == 8 * 2, "nobody trains for nothing"
    assert max(age for one in rounds for age in one.staleness) <= 2
    assert all(8 - each.based_on <= 3 for each in state.pending)
    assert set(state.versions) == {each.based_on for each in state.pending}


def test_who_is_silent_beyond_the_deadline_is_late_and_another_is_asked() -> None:
    """The deadline counts from when the client was asked."""
    executor = ToTheirOwn()
    _, rounds = run(
        plan(asynchrony(buffer_size=3, concurrency=5), executor, deadline_s=17.5), num_rounds=6
    )
    late = {
        (each.client_id, each.duration_s)
        for one in rounds
        for each in one.participations
        if each.status is Status.LATE
    }
    assert late
    assert {client for client, _ in late} <= {3, 6, 9, 11}
    assert not {3, 6, 9, 11} & {client for client, _ in executor.trained}


def test_failures_are_told_and_others_take_their_place() -> None:
    """One drops out and one diverges; the buffer still gets as many different clients."""
    executor = ToTheirOwn(diverging=frozenset({4}))
    _, rounds = run(
        plan(
            asynchrony(buffer_size=3, concurrency=5),
            executor,
            behavior=Table(failing=frozenset({7})),
        ),
        num_rounds=5,
    )
    for one in rounds:
        reported = [e.client_id for e in one.participations if e.status is Status.REPORTED]
        assert len(reported) == len(set(reported)) == 3
    reasons = {
        each.client_id: each.reason
        for one in rounds
        for each in one.participations
        if each.status is Status.FAILED
    }
    assert reasons == {7: DROPPED_OUT, 4: describe_unsound("delta")}


def test_a_round_that_nobody_fills_has_no_aggregate() -> None:
    """It ends, although clients could be asked again without end."""
    everyone = Table(failing=frozenset(range(NUM_CLIENTS)))
    _, rounds = run(
        plan(asynchrony(buffer_size=3, concurrency=5), ToTheirOwn(), behavior=everyone),
        num_rounds=1,
    )
    assert rounds[0].aggregate is None
    assert rounds[0].count(Status.FAILED) > 10
    never = Table(seconds=[math.inf] * NUM_CLIENTS)
    _, rounds = run(
        plan(asynchrony(buffer_size=3, concurrency=5), ToTheirOwn(), behavior=never), num_rounds=1
    )
    assert rounds[0].aggregate is None


def test_a_buffer_that_nobody_is_left_to_fill_closes_as_it_is() -> None:
    """Four are late and one diverges; the model moves by the mean of the other updates."""
    deadline_s = 18.0
    late = [each for each, seconds in enumerate(SECONDS) if seconds > deadline_s]
    assert len(late) == 4
    executor = ToTheirOwn(diverging=frozenset({4}))
    everybody = asynchrony(buffer_size=NUM_CLIENTS, concurrency=NUM_CLIENTS)
    state, rounds = run(plan(everybody, executor, deadline_s=deadline_s), num_rounds=1)
    counted = [each for each in range(NUM_CLIENTS) if each not in (*late, 4)]
    assert rounds[0].count(Status.LATE) == len(late)
    assert rounds[0].count(Status.FAILED) == 1
    assert rounds[0].staleness == {0: len(counted)}
    assert rounds[0].duration_s == deadline_s
    mean = RATE * sum(counted) / len(counted)
    assert state.params.vector.tolist() == pytest.approx([mean, mean])


def test_a_buffer_of_which_all_are_late_has_no_aggregate() -> None:
    """No update has arrived."""
    everybody = asynchrony(buffer_size=NUM_CLIENTS, concurrency=NUM_CLIENTS)
    _, rounds = run(plan(everybody, ToTheirOwn(), deadline_s=1.0), num_rounds=1)
    assert rounds[0].aggregate is None
    assert rounds[0].count(Status.LATE) == NUM_CLIENTS


def test_what_is_in_flight_does_not_depend_on_block_size() -> None:
    """Neither does the model, up to rounding."""
    limits = asynchrony(buffer_size=3, concurrency=7)
    one, four = (run(plan(limits, ToTheirOwn(), block_size=size), num_rounds=9) for size in (1, 4))
    assert one[0].pending == four[0].pending
    torch.testing.assert_close(one[0].params.vector, four[0].params.vector)
    for left, right in zip(one[1], four[1], strict=True):
        assert left.participations == right.participations
