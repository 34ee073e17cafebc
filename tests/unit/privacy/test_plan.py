"""A plan: what one client can do, in deviations of the noise, is what is accounted for."""

import math

import pytest
from torch import nn

from fedlearn.algorithms.lanes import DELTA
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.scaffold import Scaffold
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.privacy.adaptive_clipping import AdaptiveClip
from fedlearn.privacy.bounded_sum import BoundedSum
from fedlearn.privacy.events import PoissonCohorts
from fedlearn.privacy.plan import CentralPlan
from fedlearn.privacy.secret import ReproducibleStreams

SGD = LocalSgd(epochs=1, batch_size=8, learning_rate=0.5)
PLAIN = FedAvg(SGD, weight_by_examples=False)
TWO_LANES = Scaffold(sgd=SGD, num_clients=100, server_learning_rate=1.0, control_bound=3.0)


def plan(
    *, noise_multiplier: float = 0.8, num_wanted: int = 50, adaptive: AdaptiveClip | None = None
) -> CentralPlan:
    return CentralPlan(
        cohorts=PoissonCohorts(100, num_wanted, 2 * num_wanted),
        clip_norm=0.2,
        noise_multiplier=noise_multiplier,
        num_wanted=num_wanted,
        streams=ReproducibleStreams(Seed(0)),
        adaptive=adaptive,
    )


@pytest.mark.parametrize("inner", [PLAIN, TWO_LANES], ids=["fedavg", "scaffold"])
@pytest.mark.parametrize("adaptive", [None, AdaptiveClip(quantile=0.5)], ids=["", "adaptive"])
@pytest.mark.parametrize("num_wanted", [3, 50])
@pytest.mark.parametrize("noise_multiplier", [0.05, 0.8, 30.0])
def test_a_whole_contribution_moves_the_sums_by_one_over_the_multiplier(
    inner: Strategy, adaptive: AdaptiveClip | None, num_wanted: int, noise_multiplier: float
) -> None:
    """All lanes at their bounds at once, each in deviations of its noise, by Pythagoras."""
    made = plan(noise_multiplier=noise_multiplier, num_wanted=num_wanted, adaptive=adaptive)
    strategy = made.strategy(inner)
    state = strategy.init(Params.of(nn.Linear(3, 2)))
    for each in (strategy, strategy.at(state)):
        summed = each.aggregation
        assert isinstance(summed, BoundedSum)
        assert summed.bounds.keys() == {lane.name for lane in each.lanes}
        lanes = summed.lanes(each.lanes, Params.of(nn.Linear(3, 2)).layout)
        moved = [lane.levels / summed.sigma(name) for name, lane in lanes.items()]
        assert math.hypot(*moved) == pytest.approx(1.0 / noise_multiplier, rel=1e-9)


def test_two_lanes_are_one_contribution() -> None:
    """Each has the noise of its bound, by the norm of both: √2 as much."""
    summed = plan().strategy(TWO_LANES).aggregation
    assert isinstance(summed, BoundedSum)
    assert summed.bounds == {"delta": 0.2, "control": 3.0}
    assert summed.multipliers == pytest.approx(dict.fromkeys(summed.bounds, 0.8 * math.sqrt(2.0)))


def test_a_strategy_without_a_norm_that_moves_is_the_same_in_all_rounds() -> None:
    strategy = plan().strategy(PLAIN)
    assert strategy.at({}) is strategy
    assert [lane for lane in strategy.lanes if lane is not DELTA] == []
