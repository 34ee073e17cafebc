"""Plaintext collection over a channel: which clients are in the aggregate, late, or failed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedlearn.algorithms.collector import CollectedRound, RoundRequest, collect_from
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.staleness import StalenessWeight
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, Failure, Request, TrainReply
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.rounds.plain import PlainCollector
from fedlearn.transport.memory import Handler, MemoryChannel, MemoryExchange

PARAMS = Params.of(nn.Linear(2, 1, bias=False))
POLICY = StragglerPolicy(
    num_wanted=10,
    over_selection=1.3,
    deadline_s=20.0,
    min_reports=5,
    below_minimum=BelowMinimum.SKIP,
    max_retries=0,
)
REQUEST = RoundRequest(
    round_num=4,
    attempt=0,
    params=PARAMS,
    strategy=FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)),
    broadcast={},
    seed=0,
)


def client(client_id: int, *, num_examples: int = 1) -> Handler:
    """Create a client whose delta is its id, so that the mean shows which clients are in it."""
    lanes = {"delta": torch.full((2,), float(client_id))}
    reply = TrainReply(
        round_num=4, lanes=lanes, num_examples=num_examples, metrics={"loss": client_id / 10}
    )
    data = encode(reply)
    return lambda _, state: (data, state)


def failing(_: bytes, state: bytes) -> tuple[bytes, bytes]:
    return encode(Failure("battery low")), state


def collect(
    latencies_s: Sequence[float],
    *,
    policy: StragglerPolicy = POLICY,
    failures: Iterable[int] = (),
    num_examples: Mapping[int, int] | None = None,
) -> CollectedRound:
    """Ask clients 0, 1, ..., whose replies take ``latencies_s``."""
    cohort = [ClientId(i) for i in range(len(latencies_s))]
    sizes = num_examples or {}
    handlers = {c: client(c, num_examples=sizes.get(c, 1)) for c in cohort}
    handlers |= dict.fromkeys(map(ClientId, failures), failing)

    def latency(clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
        return np.array([latencies_s[c] for c in clients])

    channel = MemoryChannel(handlers, latency, VirtualClock())
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=1 << 20)
    return collect_from(collector, cohort, REQUEST)


def mean_of(collected: CollectedRound) -> list[float]:
    assert collected.aggregate is not None
    mean: list[float] = collected.aggregate.lanes["delta"].tolist()
    return mean


def with_status(collected: CollectedRound, status: Status) -> list[int]:
    return [p.client_id for p in collected.participations if p.status is status]


def test_a_round_closes_with_the_report_it_wants() -> None:
    """Of thirteen clients, the ten fastest are aggregated and the rest are late."""
    collected = collect([float(13 - i) for i in range(13)])
    assert with_status(collected, Status.REPORTED) == list(range(12, 2, -1))
    assert sorted(with_status(collected, Status.LATE)) == [0, 1, 2]
    assert collected.duration_s == 10.0
    assert mean_of(collected) == [7.5, 7.5]


def test_failures_are_data_and_the_next_client_takes_their_place() -> None:
    """Three fail early; the other ten fill the round."""
    collected = collect([float(i) for i in range(13)], failures=[0, 5, 7])
    assert with_status(collected, Status.FAILED) == [0, 5, 7]
    assert collected.count(Status.REPORTED) == 10
    assert collected.duration_s == 12.0
    failed = next(p for p in collected.participations if p.client_id == 5)
    assert (failed.reason, failed.duration_s, failed.num_examples) == ("battery low", 5.0, 0)


@pytest.mark.parametrize(
    ("deadline_s", "num_reported", "duration_s"),
    [(2.0, 3, 2.0), (1.999, 2, 1.999), (2.001, 3, 2.001), (4.0, 5, 4.0), (100.0, 5, 4.0)],
)
def test_the_deadline_cuts_off_what_comes_later(
    deadline_s: float, num_reported: int, duration_s: float
) -> None:
    """A reply exactly at the deadline counts; a round that has all replies does not wait for it."""
    policy = replace(POLICY, deadline_s=deadline_s)
    collected = collect([0.0, 1.0, 2.0, 3.0, 4.0], policy=policy)
    assert collected.count(Status.REPORTED) == num_reported
    assert collected.count(Status.LATE) == 5 - num_reported
    assert collected.duration_s == duration_s


@dataclass
class GraceChannel(MemoryChannel):
    """A channel after a restart: clients have more time than the round's deadline to reconnect."""

    grace_s: float = 0.0

    def open(self, *, deadline_s: float) -> MemoryExchange:
        return super().open(deadline_s=deadline_s + self.grace_s)


@pytest.mark.parametrize(("grace_s", "num_reports"), [(0.0, 5), (10.0, 6)])
def test_the_exchange_of_a_synchronous_round_decides_when_it_ends(
    grace_s: float, num_reports: int
) -> None:
    """After a restart, clients may need longer than the deadline to reconnect."""
    cohort = [ClientId(i) for i in range(7)]
    latencies_s = np.array([1.0] * 5 + [25.0, 35.0])
    channel = GraceChannel(
        {c: client(c) for c in cohort},
        lambda clients, _: latencies_s[list(clients)],
        VirtualClock(),
        grace_s=grace_s,
    )
    collector = PlainCollector(channel=channel, policy=POLICY, slab_bytes=1 << 20)
    collected = collect_from(collector, cohort, REQUEST)
    assert collected.count(Status.REPORTED) == num_reports


@dataclass
class ResumedChannel(MemoryChannel):
    """A channel of a restarted coordinator, with a grace period for reconnecting."""

    grace_s: float = 0.0

    def open(self, *, deadline_s: float) -> MemoryExchange:
        return ResumedExchange(self, deadline_s, grace_s=self.grace_s)


class ResumedExchange(MemoryExchange):
    """An exchange with a grace period."""

    def __init__(self, channel: MemoryChannel, deadline_s: float, *, grace_s: float) -> None:
        super().__init__(channel, deadline_s)
        self.grace_s = grace_s

    def grace_until_s(self) -> float:
        return self.grace_s


@pytest.mark.parametrize(
    ("grace_s", "longest_s", "num_reports", "duration_s"),
    [(0.0, 60.0, 5, 1.0), (30.0, 60.0, 6, 30.0), (30.0, 20.0, 5, 20.0), (90.0, 60.0, 7, 35.0)],
)
def test_a_deadline_that_follows_durations_leaves_time_to_return_after_a_restart(
    grace_s: float, longest_s: float, num_reports: int, duration_s: float
) -> None:
    """Clients that train in one second need longer to reconnect; the fixed deadline limits it."""
    cohort = [ClientId(i) for i in range(7)]
    latencies_s = np.array([1.0] * 5 + [25.0, 35.0])
    channel = ResumedChannel(
        {c: client(c) for c in cohort},
        lambda clients, _: latencies_s[list(clients)],
        VirtualClock(),
        grace_s=grace_s,
    )
    policy = replace(POLICY, deadline_s=longest_s)
    late = LateUpdates(
        max_staleness=9,
        staleness_weight=StalenessWeight.CONSTANT,
        staleness_exponent=0.0,
        staleness_hinge=0,
        deadline_quantile=0.8,
        deadline_window=2,
        least_deadline_s=0.0,
    )
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=1 << 20, round_mode=late)
    request = replace(REQUEST, durations=((1.0,) * 5,))
    collected = collect_from(collector, cohort, request)
    assert collected.count(Status.REPORTED) == num_reports
    assert collected.duration_s == duration_s


def test_late_clients_are_counted_and_left_out() -> None:
    """Their delta is not in the mean, and their duration is unknown."""
    policy = replace(POLICY, deadline_s=1.5, min_reports=2)
    collected = collect([0.0, 1.0, 2.0], policy=policy)
    assert mean_of(collected) == [0.5, 0.5]
    (late,) = [p for p in collected.participations if p.status is Status.LATE]
    assert (late.client_id, late.num_examples) == (2, 0)
    assert math.isnan(late.duration_s)
    assert math.isnan(late.loss)


def test_without_a_deadline_a_client_that_never_answers_ends_nothing() -> None:
    """The channel reports when no further client will answer; the round took that long."""
    policy = replace(POLICY, deadline_s=math.inf)
    collected = collect([1.0, math.inf, 3.0], policy=policy)
    assert with_status(collected, Status.REPORTED) == [0, 2]
    assert with_status(collected, Status.LATE) == [1]
    assert collected.duration_s == 3.0


def test_an_empty_cohort_is_an_empty_round() -> None:
    """Poisson sampling may choose no clients."""
    collected = collect([])
    assert len(collected.participations) == 0
    assert collected.aggregate is None
    assert collected.duration_s == 0.0


def test_clients_weigh_as_many_examples_as_they_trained_on() -> None:
    """Their losses and numbers of examples are recorded."""
    policy = replace(POLICY, min_reports=2)
    collected = collect([0.0, 1.0], policy=policy, num_examples={0: 3, 1: 1})
    assert mean_of(collected) == [0.25, 0.25]
    assert [(p.num_examples, p.loss) for p in collected.participations] == [(3, 0.0), (1, 0.1)]


def test_a_collector_over_a_channel_keeps_nothing_for_a_checkpoint() -> None:
    """Clients store their own state."""
    channel = MemoryChannel({}, lambda c, _: np.zeros(len(c)), VirtualClock())
    assert PlainCollector(channel=channel, policy=POLICY, slab_bytes=0).available() == ()
    assert collect([0.0]).client_states == {}
