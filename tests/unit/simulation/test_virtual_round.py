"""A round in virtual time equals the round over a channel, but is decided before training."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from fedlearn.algorithms.collector import RoundRequest, collect_from
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.cluster import Alone
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, Failure, Request, TrainReply
from fedlearn.core.params import Params
from fedlearn.core.participations import Participation, Status
from fedlearn.core.randomness import Seed
from fedlearn.core.soundness import describe_unsound
from fedlearn.rounds.plain import PlainCollector
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.population import BootstrapPopulation
from fedlearn.simulation.virtual_round import DROPPED_OUT
from fedlearn.transport.memory import Handler, MemoryChannel
from tests.unit.simulation.test_buffers import Table, ToTheirOwn

PARAMS = Params.of(nn.Linear(1, 1, bias=False))
REQUEST = RoundRequest(
    round_num=0,
    attempt=0,
    params=PARAMS,
    strategy=FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)),
    broadcast={},
    seed=0,
)
SOUND, DROPS, UNSOUND = "sound", "drops", "unsound"


def policy_of(num_wanted: int, deadline_s: float) -> StragglerPolicy:
    return StragglerPolicy(
        num_wanted=num_wanted,
        over_selection=1.0,
        deadline_s=deadline_s,
        min_reports=1,
        below_minimum=BelowMinimum.SKIP,
        max_retries=0,
    )


def run_in_engine(
    durations_s: Sequence[float], kinds: Sequence[str], policy: StragglerPolicy
) -> tuple[list[Participation], float, list[int]]:
    """Run a round in the engine; also return the trained clients, in order."""
    cohort = [ClientId(i) for i in range(len(kinds))]
    executor = ToTheirOwn(frozenset(i for i in cohort if kinds[i] == UNSOUND))
    engine = Engine(
        population=BootstrapPopulation(
            features=torch.zeros(5, 1),
            labels=torch.zeros(5, dtype=torch.int64),
            num_classes=1,
            num_clients=max(1, len(cohort)),
            examples_per_client=1,
            seed=Seed(0),
        ),
        behavior=Table(durations_s, frozenset(i for i in cohort if kinds[i] == DROPS)),
        executor=executor,
        policy=policy,
        cluster=Alone(),
        block_size=3,
    )
    outcome = collect_from(engine, cohort, REQUEST)
    return list(outcome.participations), outcome.duration_s, [each for each, _ in executor.trained]


def collect(
    durations_s: Sequence[float], kinds: Sequence[str], policy: StragglerPolicy
) -> tuple[list[Participation], float]:
    """Run the same round over a channel."""

    def client(client_id: int, kind: str) -> Handler:
        value = math.nan if kind == UNSOUND else 1.0
        lanes, metrics = {"delta": torch.full((1,), value)}, {"loss": client_id / 10.0}
        trained = TrainReply(round_num=0, lanes=lanes, num_examples=1, metrics=metrics)
        data = encode(Failure(DROPPED_OUT) if kind == DROPS else trained)
        return lambda _, state: (data, state)

    def latency(clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
        return np.array([durations_s[c] for c in clients])

    cohort = [ClientId(i) for i in range(len(kinds))]
    channel = MemoryChannel({c: client(c, kinds[c]) for c in cohort}, latency, VirtualClock())
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=0)
    outcome = collect_from(collector, cohort, REQUEST)
    return list(outcome.participations), outcome.duration_s


# Few distinct times, so that many clients arrive at the same time and at the deadline.
times = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf])
kinds = st.sampled_from([SOUND, SOUND, DROPS, UNSOUND])
clients = st.lists(st.tuples(times, kinds), max_size=8)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    clients=clients, num_wanted=st.integers(1, 8), deadline_s=st.sampled_from([1.0, 2.5, math.inf])
)
def test_a_played_round_is_the_round_over_a_channel(
    clients: list[tuple[float, str]], num_wanted: int, deadline_s: float
) -> None:
    """The same reports and failures in the same order, the same late clients, the same duration."""
    policy = policy_of(num_wanted, deadline_s)
    durations_s, kinds = [t for t, _ in clients], [k for _, k in clients]
    expected, closed_s = collect(durations_s, kinds, policy)
    found, played_s, _ = run_in_engine(durations_s, kinds, policy)
    assert describe_rows(found) == describe_rows(expected)
    assert late(found) == late(expected)
    assert played_s == closed_s


def describe_rows(rows: list[Participation]) -> list[str]:
    return [repr(row) for row in rows if row.status is not Status.LATE]


def late(rows: list[Participation]) -> set[int]:
    return {row.client_id for row in rows if row.status is Status.LATE}


def test_only_those_are_trained_whom_the_round_needs() -> None:
    """Ten of thirteen; none is trained in vain."""
    rows, closed_s, trained = run_in_engine(range(13), [SOUND] * 13, policy_of(10, 100.0))
    assert trained == list(range(10))
    assert closed_s == 9.0
    assert late(rows) == {10, 11, 12}


def test_the_next_to_arrive_takes_the_place_of_an_unsound_client() -> None:
    """It is trained in a second wave, and the round closes later."""
    kinds = [SOUND, UNSOUND, SOUND, UNSOUND, SOUND]
    rows, closed_s, trained = run_in_engine(range(5), kinds, policy_of(2, 100.0))
    assert trained == [0, 1, 2]
    assert closed_s == 2.0
    assert [row.status for row in rows] == ["reported", "failed", "reported", "late", "late"]
    assert rows[1].reason == describe_unsound("delta")


def test_a_client_that_drops_is_never_trained() -> None:
    """It fails at the time of its report, if the round is still open."""
    rows, _, trained = run_in_engine([0.0, 1.0, 2.0], [DROPS, SOUND, DROPS], policy_of(1, 9.0))
    assert trained == [1]
    assert [row.status for row in rows] == ["failed", "reported", "late"]
    assert rows[0].reason == DROPPED_OUT


@pytest.mark.parametrize(("deadline_s", "num_reported"), [(2.0, 3), (1.9999, 2)])
def test_the_deadline_itself_is_in_time(deadline_s: float, num_reported: int) -> None:
    """A reply at exactly that time counts; late clients have the duration that they would take."""
    rows, closed_s, _ = run_in_engine(range(4), [SOUND] * 4, policy_of(4, deadline_s))
    assert sum(row.status is Status.REPORTED for row in rows) == num_reported
    assert closed_s == deadline_s
    assert [row.duration_s for row in rows] == [0.0, 1.0, 2.0, 3.0]
