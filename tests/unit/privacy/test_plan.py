"""A plan accounts for what one client can change, in standard deviations of the noise."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.cohorts import CyclicCohorts, PoissonCohorts
from fedlearn.algorithms.lanes import DELTA, Aggregate
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg, Scaffold
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.privacy.adaptive_clipping import AdaptiveClip
from fedlearn.privacy.banded_matrix import BandedMatrix, find_optimal
from fedlearn.privacy.banded_noise import BandedUpdates
from fedlearn.privacy.bounded_sum import BoundedSum
from fedlearn.privacy.plan import BandedPlan, CentralPlan
from fedlearn.privacy.secret import ReproducibleStreams

SGD = LocalSgd(epochs=1, batch_size=8, learning_rate=0.5)
PLAIN = FedAvg(SGD, weight_by_examples=False)
TWO_LANES = Scaffold(SGD, num_clients=100, server_learning_rate=1.0, control_bound=3.0)


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
    """All lanes are at their bounds at once; their distances add up as a norm."""
    made = plan(noise_multiplier=noise_multiplier, num_wanted=num_wanted, adaptive=adaptive)
    strategy = made.wrap_strategy(inner)
    state = strategy.init(Params.of(nn.Linear(3, 2)))
    for each in (strategy, strategy.at(state)):
        summed = each.aggregation
        assert isinstance(summed, BoundedSum)
        assert summed.bounds.keys() == {lane.name for lane in each.lanes}
        lanes = summed.lanes(each.lanes, Params.of(nn.Linear(3, 2)).layout)
        moved = [lane.levels / summed.sigma(name, lane) for name, lane in lanes.items()]
        assert math.hypot(*moved) == pytest.approx(1.0 / noise_multiplier, rel=1e-9)


def test_two_lanes_are_one_contribution() -> None:
    """Each has noise for its own bound; by the norm of both it has √2 as much."""
    summed = plan().wrap_strategy(TWO_LANES).aggregation
    assert isinstance(summed, BoundedSum)
    assert summed.bounds == {"delta": 0.2, "control": 3.0}
    assert summed.multipliers == pytest.approx(dict.fromkeys(summed.bounds, 0.8 * math.sqrt(2.0)))


def test_a_strategy_without_a_norm_that_moves_is_the_same_in_all_rounds() -> None:
    strategy = plan().wrap_strategy(PLAIN)
    assert strategy.at({}) is strategy
    assert [lane for lane in strategy.lanes if lane is not DELTA] == []


# ---- Noise that is correlated over rounds -------------------------------------------------


def run_banded(bands: int, *, noise_multiplier: float = 0.8) -> BandedPlan:
    """Return a plan of 4 groups."""
    return BandedPlan(
        cohorts=CyclicCohorts(100, 25, 25),
        clip_norm=0.2,
        noise_multiplier=noise_multiplier,
        num_wanted=25,
        streams=ReproducibleStreams(Seed(0)),
        matrix=find_optimal(bands=bands, num_rounds=30),
    )


@pytest.mark.parametrize("inner", [PLAIN, TWO_LANES], ids=["fedavg", "scaffold"])
@pytest.mark.parametrize("bands", [1, 3, 4])
@pytest.mark.parametrize("noise_multiplier", [0.05, 0.8, 30.0])
def test_one_taking_part_moves_its_rows_by_one_over_the_multiplier(
    inner: Strategy, bands: int, noise_multiplier: float
) -> None:
    """All lanes are at their bounds, in all rows of a column, in standard deviations."""
    made = run_banded(bands, noise_multiplier=noise_multiplier)
    strategy, drawn = made.wrap_strategy(inner), dict[str, float]()
    assert isinstance(strategy, BandedUpdates)
    params = Params.of(nn.Linear(3, 2))
    layout = params.layout

    class Seen:
        def draw(self, sigma: float, size: int, *, labels: tuple[str | int, ...]) -> Tensor:
            drawn[str(labels[0])] = sigma
            return torch.zeros(size, dtype=torch.float64)

    lanes = strategy.summed.lanes(strategy.lanes, layout)
    sums = {name: torch.zeros(lane.size, dtype=torch.float64) for name, lane in lanes.items()}
    made.build_release(strategy, layout, Seen())(
        Aggregate(lanes=sums, num_clients=0),
        strategy=strategy,
        layout=layout,
        state=strategy.init(params),
        round_num=0,
        attempt=0,
    )
    column = made.matrix.diagonals
    moved = [c * lane.levels / drawn[name] for name, lane in lanes.items() for c in column]
    assert math.hypot(*moved) == pytest.approx(1.0 / noise_multiplier, rel=1e-9)


def test_noise_reaches_no_further_than_a_user_stays_away() -> None:
    """With 4 groups, over at most 4 rounds."""
    assert len(run_banded(4).matrix.diagonals) == 4
    with pytest.raises(
        ValueError, match=r"over 5 rounds .*once in 4 rounds; lower privacy.bands to 4,"
    ):
        run_banded(5)
    with pytest.raises(ValueError, match=r"or cohort.num_wanted to 20"):
        run_banded(5)


def test_a_group_is_asked_as_a_whole_and_whoever_reports_counts() -> None:
    """If a round closed with part of it, one user could displace another."""
    policy = StragglerPolicy(
        num_wanted=20,
        over_selection=1.0,
        deadline_s=5.0,
        min_reports=10,
        below_minimum=BelowMinimum.RETRY,
        max_retries=3,
    )
    made = run_banded(2).adapt_policy(policy)
    assert (made.num_wanted, made.cohort_size, made.min_reports) == (25, 25, 0)
    with pytest.raises(ValueError, match=r"over_selection is 1.2.*must not displace another"):
        run_banded(2).adapt_policy(replace(policy, over_selection=1.2))


def test_clip_norm_and_lanes_are_bounded_as_without_bands() -> None:
    """And lanes without a bound are refused."""
    strategy, without = (
        run_banded(3).wrap_strategy(TWO_LANES),
        plan().wrap_strategy(TWO_LANES).aggregation,
    )
    assert isinstance(strategy, BandedUpdates)
    assert isinstance(without, BoundedSum)
    assert strategy.summed == replace(without, largest=25)
    with pytest.raises(ValueError, match="weighted by their numbers of examples"):
        run_banded(3).wrap_strategy(FedAvg(SGD))
    assert BandedMatrix((1,)) == run_banded(1).matrix
