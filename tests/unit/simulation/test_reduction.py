"""Blocks of updates become one aggregate, by summing them as they arrive or by keeping them all."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.bounds import UpdateBounds
from fedlearn.algorithms.lanes import DELTA, Lanes, LaneSpec, Updates
from fedlearn.algorithms.median import CoordinateMedian
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.soundness import describe_unsound
from fedlearn.privacy.bounded_sum import BoundedSum
from fedlearn.simulation.reduction import Gathered, Reduction, Summed, select_rows

PARAMS = Params.of(nn.Linear(2, 1))
LANES = (DELTA, LaneSpec(name="more", over=2, weighted=False, bound=None))
BAD = (float("nan"), float("inf"), 1e30)


@dataclass
class Noted:
    """A rule that needs all updates at once, and records them."""

    seen: list[Updates] = field(default_factory=list)

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        return num_examples_B

    def combine(self, updates: Updates) -> Lanes:
        self.seen.append(updates)
        return {name: torch.as_tensor(rows).mean(0) for name, rows in updates.lanes.items()}


def block(clients: Sequence[int]) -> Updates:
    """Build updates in which each number is the client's id, with equal weights."""
    ids = torch.tensor(clients, dtype=torch.float32)[:, None]
    return Updates(
        client_ids=[ClientId(client) for client in clients],
        weights_B=torch.ones(len(clients)),
        lanes={"delta": ids.repeat(1, 3), "more": list(ids.repeat(1, 2))},
        based_on=[10 * client for client in clients],
    )


def end(reduction: Reduction) -> None:
    reduction.share(Alone(), more=torch.zeros(1))


def places(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(numbers, np.int64)


def fold(reduction: Reduction, updates: Updates, *at: int) -> list[str | None]:
    return reduction.fold(updates, places(*at), current=updates)


def reduction_of(way: str, bounds: UpdateBounds | None = None) -> Reduction:
    if way == "summed":
        rule = WeightedMean(by_examples=False)
        return Summed(rule, LANES, PARAMS, bounds=bounds, clip_norm=None)
    return Gathered(Noted(), LANES, PARAMS, bounds=bounds, clip_norm=None)


@pytest.fixture(params=["summed", "gathered"])
def reduction(request: pytest.FixtureRequest) -> Reduction:
    """Both implementations, with rules that compute the same mean."""
    return reduction_of(request.param)


def test_blocks_of_two_waves_are_one_aggregate(reduction: Reduction) -> None:
    """The division into blocks does not matter."""
    for wave, cuts in (((5, 1, 3), ([2, 0], [1])), ((4,), ([0],))):
        reduction.begin(np.asarray(wave, np.int64), Alone())
        for cut in cuts:
            assert fold(reduction, block([wave[place] for place in cut]), *cut) == [None] * len(cut)
        end(reduction)
    aggregate = reduction.close()
    assert aggregate.num_clients == 4
    expected = {"delta": [13 / 4] * 3, "more": [13 / 4] * 2}
    assert {n: v.tolist() for n, v in aggregate.lanes.items()} == {
        name: pytest.approx(values) for name, values in expected.items()
    }


def test_a_round_without_clients_is_an_empty_sum() -> None:
    """A private round is released like any other."""
    summed = BoundedSum(
        bounds={"delta": 1.0, "more": 1.0}, multipliers={"delta": 1.0, "more": 1.0}, largest=9
    )
    aggregate = Summed(summed, LANES, PARAMS, bounds=None, clip_norm=None).close()
    assert aggregate.num_clients == 0
    assert [each.tolist() for each in aggregate.lanes.values()] == [[0.0] * 3, [0.0] * 2]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("lane", ["delta", "more"])
def test_what_is_not_sound_is_left_out(reduction: Reduction, lane: str, value: float) -> None:
    """In any lane; the other updates of the block count."""
    updates = block([1, 2, 3])
    updates.lanes[lane][1][-1] = value
    reduction.begin(places(1, 2, 3), Alone())
    assert fold(reduction, updates, 0, 1, 2) == [None, describe_unsound(lane), None]
    end(reduction)
    aggregate = reduction.close()
    assert aggregate.num_clients == 2
    assert aggregate.lanes["delta"].tolist() == [2.0] * 3


@pytest.mark.parametrize("way", ["summed", "gathered"])
def test_long_rows_that_cancel_in_a_block_are_refused(way: str) -> None:
    """Their sum does not hide them: they are refused as if each were alone in a block."""
    bounds = UpdateBounds(max_norm=4.0, max_examples=100)
    reduction = reduction_of(way, bounds)
    reduction.begin(places(3, -3, 1), Alone())
    reasons = fold(reduction, block([3, -3, 1]), 0, 1, 2)
    assert reasons == [bounds.too_long("delta"), bounds.too_long("delta"), None]
    end(reduction)
    assert reduction.close().lanes["delta"].tolist() == [1.0] * 3


def test_memory_of_a_block_may_be_used_again(reduction: Reduction) -> None:
    """Executors reuse it."""
    updates = block([1, 3])
    reduction.begin(places(1, 3), Alone())
    fold(reduction, updates, 0, 1)
    torch.as_tensor(updates.lanes["delta"]).fill_(99.0)
    for row in updates.lanes["more"]:
        row.fill_(99.0)
    end(reduction)
    assert reduction.close().lanes["delta"].tolist() == [2.0] * 3


def test_a_rule_that_needs_all_sees_them_in_order_of_arrival() -> None:
    """With their ids and weights, and without the clients that were not added."""
    rule = Noted()
    gathered = Gathered(rule, LANES, PARAMS, bounds=None, clip_norm=None)
    gathered.begin(places(7, 2, 5, 1), Alone())
    for clients, where in (([1, 7], (3, 0)), ([2], (1,))):
        weights_B = torch.tensor(clients) + 1.0
        fold(gathered, replace(block(clients), weights_B=weights_B), *where)
    end(gathered)
    gathered.close()
    (updates,) = rule.seen
    assert updates.client_ids == [7, 2, 1]
    assert updates.based_on == [70, 20, 10]
    assert updates.weights_B.tolist() == [8.0, 3.0, 2.0]
    assert torch.as_tensor(updates.lanes["delta"])[:, 0].tolist() == [7.0, 2.0, 1.0]


def test_a_median_of_the_engine_is_the_median() -> None:
    """The blocks may arrive in any order."""
    gathered = Gathered(CoordinateMedian(), LANES, PARAMS, bounds=None, clip_norm=None)
    gathered.begin(places(1, 90, 3), Alone())
    fold(gathered, block([90]), 1)
    fold(gathered, block([3, 1]), 2, 0)
    end(gathered)
    assert gathered.close().lanes["delta"].tolist() == [3.0] * 3


def test_rows_are_chosen_without_a_copy_of_all() -> None:
    """So are their ids and weights."""
    updates = block([4, 5, 6])
    assert select_rows(updates, places(0, 1, 2)) is updates
    some = select_rows(updates, places(2, 0))
    assert (some.client_ids, some.weights_B.tolist()) == ([6, 4], [1.0, 1.0])
    assert some.based_on == [60, 40]
    assert torch.as_tensor(some.lanes["more"]).tolist() == [[6.0, 6.0], [4.0, 4.0]]
