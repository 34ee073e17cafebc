"""The queue of replies to aggregate in one pass: its size, which does not change the result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.aggregations import LaneSums, WeightedMean
from fedlearn.algorithms.collector import CollectedRound, RoundRequest, collect_from
from fedlearn.algorithms.lanes import DELTA, Aggregate, LaneSpec, Updates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, TrainReply
from fedlearn.core.params import Layout, Params
from fedlearn.core.participations import Status
from fedlearn.rounds.plain import PlainCollector
from fedlearn.transport.memory import Handler, MemoryChannel

PARAMS = Params.of(nn.Linear(30, 10))
MODEL_BYTES = PARAMS.vector.nbytes
LOCAL = LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)
MEAN = WeightedMean(by_examples=True)


@dataclass(frozen=True)
class Noting:
    """The weighted mean, which also records the size of each block."""

    sizes: list[int] = field(default_factory=list)

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        return MEAN.weigh(num_examples_B)

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> LaneSums:
        return MEAN.init(lanes, layout, device=device)

    def accumulate(self, state: LaneSums, updates: Updates) -> LaneSums:
        self.sizes.append(len(updates.client_ids))
        return MEAN.accumulate(state, updates)

    def finalize(self, state: LaneSums) -> Aggregate:
        return MEAN.finalize(state)


def deltas(count: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randn(PARAMS.layout.size, generator=draws) for _ in range(count)]


def collector_of(deltas_P: Sequence[Tensor], *, slab_bytes: int, num_wanted: int) -> PlainCollector:
    """Create a collector whose client i replies, in this order, with delta i and i + 1 examples."""

    def client(num: int, delta_P: Tensor) -> Handler:
        lanes = {"delta": delta_P}
        data = encode(TrainReply(round_num=0, lanes=lanes, num_examples=num, metrics={}))
        return lambda _, state: (data, state)

    handlers = {ClientId(i): client(i + 1, delta_P) for i, delta_P in enumerate(deltas_P)}
    policy = StragglerPolicy(
        num_wanted=num_wanted,
        over_selection=1.0,
        deadline_s=math.inf,
        min_reports=1,
        below_minimum=BelowMinimum.FAIL,
        max_retries=0,
    )
    channel = MemoryChannel(handlers, lambda c, _: np.zeros(len(c)), VirtualClock())
    return PlainCollector(channel=channel, policy=policy, slab_bytes=slab_bytes)


def collect(
    deltas_P: Sequence[Tensor], *, slab_bytes: int, num_wanted: int = 10
) -> tuple[CollectedRound, list[int]]:
    """Return the outcome and the sizes of the blocks."""
    noting = Noting()
    collector = collector_of(deltas_P, slab_bytes=slab_bytes, num_wanted=num_wanted)
    request = RoundRequest(
        round_num=0,
        attempt=0,
        params=PARAMS,
        strategy=replace(FedAvg(LOCAL), aggregation=noting),
        broadcast={},
        seed=0,
    )
    return collect_from(collector, collector.available(), request), noting.sizes


def mean_of(collected: CollectedRound) -> Tensor:
    assert collected.aggregate is not None
    return collected.aggregate.lanes["delta"]


@pytest.mark.parametrize(
    ("slab_bytes", "sizes"),
    [
        (0, [1] * 10),
        (2 * MODEL_BYTES - 1, [1] * 10),
        (2 * MODEL_BYTES, [2] * 5),
        (3 * MODEL_BYTES, [3, 3, 3, 1]),
        (10 * MODEL_BYTES, [10]),
        (1 << 40, [10]),
    ],
)
def test_as_many_replies_wait_as_fit_the_bound(slab_bytes: int, sizes: list[int]) -> None:
    """At least one, and at most the wanted number of reports; the mean is equal up to rounding."""
    deltas_P = deltas(10)
    collected, found = collect(deltas_P, slab_bytes=slab_bytes)
    assert found == sizes
    weights = torch.arange(1.0, 11.0, dtype=torch.float64)
    expected = weights @ torch.stack(deltas_P).double() / weights.sum()
    torch.testing.assert_close(mean_of(collected).double(), expected, rtol=0.0, atol=1e-6)


def test_without_a_slab_replies_are_folded_in_one_by_one() -> None:
    """Bit-identical to an engine at block size 1."""
    deltas_P = deltas(10)
    collected, _ = collect(deltas_P, slab_bytes=0)
    state = MEAN.init([DELTA], PARAMS.layout, device=torch.device("cpu"))
    for i, delta_P in enumerate(deltas_P):
        rows = {"delta": delta_P[None]}
        updates = Updates([ClientId(i)], torch.tensor([i + 1.0]), rows, [0])
        state = MEAN.accumulate(state, updates)
    assert torch.equal(mean_of(collected), MEAN.finalize(state).lanes["delta"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_a_reply_that_is_not_finite_leaves_nothing_behind(bad: float, num_rows: int) -> None:
    """Wherever it is in the queue; the next client takes its place."""
    deltas_P = deltas(10)
    sound = [deltas_P[i] for i in range(10) if i not in (0, 4, 9)]
    for i in (0, 4, 9):
        deltas_P[i][-1] = bad
    collected, sizes = collect(deltas_P, slab_bytes=num_rows * MODEL_BYTES, num_wanted=9)
    failed = [p.client_id for p in collected.participations if p.status is Status.FAILED]
    assert failed == [0, 4, 9]
    assert sum(sizes) == 7
    weights = torch.tensor([2.0, 3, 4, 6, 7, 8, 9])
    expected = weights @ torch.stack(sound) / weights.sum()
    torch.testing.assert_close(mean_of(collected), expected, rtol=0.0, atol=1e-6)


def test_infinities_that_cancel_are_noticed() -> None:
    """They are refused. A value that is large, but within the bounds, is not."""
    cancelling, large = torch.zeros(2, PARAMS.layout.size)
    cancelling[0], cancelling[1] = math.inf, -math.inf
    large[:2] = 7e7
    collected, _ = collect([cancelling, large], slab_bytes=0)
    assert [p.status for p in collected.participations] == [Status.FAILED, Status.REPORTED]
