"""The bounded sum is exact for any rows, and its noise has the right scale."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlearn.algorithms.bounds import GENEROUS
from fedlearn.algorithms.lanes import DELTA, Aggregate, LaneSpec, Over, Updates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg, Scaffold
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.privacy.bounded_sum import (
    BoundedLane,
    BoundedSum,
    BoundedUpdates,
    LevelSums,
    NoisyMean,
)
from fedlearn.privacy.secret import DiscreteGaussianNoise, ReproducibleStreams

CPU = torch.device("cpu")
CONTROL = LaneSpec(name="control", over=Over.TRAINABLE, weighted=False, bound=0.5)


def summing(aggregation: BoundedSum) -> BoundedUpdates:
    """Return a strategy with one lane or two around the aggregation."""
    sgd = LocalSgd(epochs=1, batch_size=None, learning_rate=1.0)
    if len(aggregation.bounds) == 1:
        return BoundedUpdates(FedAvg(sgd, weight_by_examples=False), aggregation)
    inner = Scaffold(sgd, num_clients=9, server_learning_rate=1.0, control_bound=CONTROL.bound)
    return BoundedUpdates(inner, aggregation)


def read_levels(rows: Tensor, *, bound: float) -> Tensor:
    """Return the levels that each row adds on its own: shape [B, n]."""
    lane = BoundedLane(bound, rows.shape[1])
    return torch.stack([_add(lane, row[None]) for row in rows])


def _add(lane: BoundedLane, rows: Tensor) -> Tensor:
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    lane.add(total, rows)
    return total


def sum_rows(size: int, rows: Tensor, *, largest: int = 100) -> tuple[BoundedSum, LevelSums]:
    """Return a bounded sum with bound 1, and its state after these rows."""
    aggregation = BoundedSum(bounds={"delta": 1.0}, multipliers={"delta": 1.0}, largest=largest)
    layout = Layout.of(nn.Linear(size, 1, bias=False))
    state = aggregation.init([DELTA], layout, device=CPU)
    client_ids = [ClientId(each) for each in range(len(rows))]
    return aggregation, aggregation.accumulate(
        state, Updates(client_ids, torch.ones(len(rows)), {"delta": rows}, [0] * len(rows))
    )


@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 1023, 1024, 1025, 9000]),
    scale=st.floats(-12, 15),
    spread=st.floats(0, 4),
)
def test_no_row_adds_more_than_its_levels(
    seed: int, size: int, scale: float, spread: float
) -> None:
    """Small, large, equal or mixed magnitudes give exact integers with an exact norm."""
    rng = Seed(seed).numpy()
    magnitudes = 10.0 ** (scale + spread * rng.standard_normal(size))
    row = torch.from_numpy(magnitudes * rng.choice([-1.0, 1.0], size)).float()[None]
    added = read_levels(row, bound=0.7)[0]
    squares = sum(int(level) ** 2 for level in added.tolist())
    assert added.eq(added.round()).all()
    assert squares <= int(BoundedLane(0.7, size).levels) ** 2


def test_a_clipped_row_adds_nearly_all_of_its_levels() -> None:
    """A row within the bound adds its own norm, rounded without bias."""
    row = torch.from_numpy(Seed(3).numpy().standard_normal(50_000)).float()[None]
    row /= row.norm()
    for factor, expected in ((10.0, 1.0), (1.0, 1.0), (0.25, 0.25)):
        added = read_levels(factor * row, bound=1.0)
        lane = BoundedLane(1.0, 50_000)
        assert float(added.norm()) == pytest.approx(expected * lane.levels, rel=1e-3)
        assert torch.allclose(added[0] * lane.step, min(factor, 1.0) * row[0].double(), atol=1e-6)


def test_a_sum_is_exact_in_any_order_and_any_blocks() -> None:
    """It equals a sum of Python's integers, for one block, several blocks and strided rows."""
    rows = torch.from_numpy(Seed(5).numpy().standard_normal((45, 3000)) * 3.0).float()
    each = read_levels(rows, bound=1.0)
    expected = [sum(int(level) for level in column) for column in each.t().tolist()]
    lane = BoundedLane(1.0, 3000)
    together, apart = _add(lane, rows), torch.zeros(3000, dtype=torch.float64)
    for begin, end in ((20, 45), (0, 1), (1, 20)):
        lane.add(apart, list(rows[begin:end].flip(0)))
    assert together.tolist() == apart.tolist() == expected


def test_one_client_moves_a_sum_by_its_levels_whoever_the_others_are() -> None:
    """Floating-point sums lose a small term next to a large one; integers do not."""
    others = torch.full((40, 4), 1e18)
    others[::2] *= -1.0
    mine = torch.tensor([[1e-3, -2e-3, 0.0, 5e-4]])
    _, without = sum_rows(4, others)
    _, with_me = sum_rows(4, torch.cat([others[:7], mine, others[7:]]))
    moved = with_me.total.sums["delta"] - without.total.sums["delta"]
    assert moved.tolist() == read_levels(mine, bound=1.0)[0].tolist()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_seen(odd: float) -> None:
    """The sums flag it, so that the caller can leave the row out."""
    rows = torch.zeros(3, 2000)
    rows[1, 1500] = odd
    _, state = sum_rows(2000, rows)
    assert not state.total.sums["delta"].isfinite().all()


def test_a_sum_of_nobody_is_released() -> None:
    """Like a sum over many: an error would reveal who did not report."""
    aggregation, state = sum_rows(3, torch.zeros(0, 3))
    aggregate = aggregation.finalize(state)
    assert aggregate.lanes["delta"].tolist() == [0.0, 0.0, 0.0]
    assert aggregate.num_clients == 0


def test_more_clients_than_were_accounted_for_are_an_error() -> None:
    """Their sum might overflow, and the accounted event would be wrong."""
    aggregation, state = sum_rows(2, torch.zeros(3, 2), largest=2)
    with pytest.raises(ValueError, match="3 clients are in a sum for at most 2"):
        aggregation.finalize(state)


def test_weights_are_ones() -> None:
    """Whatever number of examples the clients report."""
    aggregation, _ = sum_rows(2, torch.zeros(0, 2))
    assert aggregation.weigh(torch.tensor([5.0, 900.0])).tolist() == [1.0, 1.0]


# ---- What is released ---------------------------------------------------------------------


def release_means(noise_multiplier: float, *, lanes: dict[str, float], size: int) -> Aggregate:
    """Return the noisy means of an empty cohort, where 4 clients were expected."""
    specs = [DELTA, CONTROL][: len(lanes)]
    aggregation = BoundedSum(
        bounds=lanes, multipliers=dict.fromkeys(lanes, noise_multiplier), largest=10
    )
    layout = Layout.of(nn.Linear(size, 1, bias=False))
    aggregate = aggregation.finalize(aggregation.init(specs, layout, device=CPU))
    release = NoisyMean(expected=4, noise=DiscreteGaussianNoise(ReproducibleStreams(Seed(8))))
    strategy = summing(aggregation)
    made, _ = release(aggregate, strategy=strategy, layout=layout, state={}, round_num=2, attempt=0)
    return made


@pytest.mark.parametrize(("noise_multiplier", "is_told"), [(1e-6, True), (1.0, False)])
def test_two_releases_do_not_tell_of_the_one_client_between_them(
    noise_multiplier: float, *, is_told: bool
) -> None:
    """With negligible noise the difference of two sums is that client's update."""
    size, layout = 20_000, Layout.of(nn.Linear(20_000, 1, bias=False))
    rows = torch.from_numpy(Seed(11).numpy().standard_normal((10, size))).float()
    rows /= rows.norm(dim=1, keepdim=True)
    aggregation = BoundedSum(
        bounds={"delta": 1.0}, multipliers={"delta": noise_multiplier}, largest=10
    )
    release = NoisyMean(expected=10, noise=DiscreteGaussianNoise(ReproducibleStreams(Seed(12))))
    strategy = summing(aggregation)
    means = []
    for round_num, cohort in enumerate((range(10), range(9))):  # client 9 is absent from the second
        state = aggregation.init([DELTA], layout, device=CPU)
        some = Updates(
            [ClientId(c) for c in cohort],
            torch.ones(len(cohort)),
            {"delta": rows[cohort]},
            [round_num] * len(cohort),
        )
        aggregate = aggregation.finalize(aggregation.accumulate(state, some))
        released, _ = release(
            aggregate, strategy=strategy, layout=layout, state={}, round_num=round_num, attempt=0
        )
        means.append(released.lanes["delta"])
    guess = 10 * (means[0] - means[1])
    alignment = float(torch.cosine_similarity(guess, rows[9], dim=0))
    if is_told:
        assert alignment > 0.999
        assert torch.allclose(guess, rows[9], atol=1e-5)
    else:
        assert abs(alignment) < 0.05
        assert float((guess - rows[9]).norm()) > 100.0  # the update's own norm is 1


def has_scale(values: Tensor, sigma: float) -> bool:
    """Tell whether normal values have variance ``sigma``², within 5 standard deviations."""
    excess = float((values.double() ** 2).mean()) / sigma**2 - 1.0
    return abs(excess) < 5.0 * math.sqrt(2.0 / len(values))


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 40.0])
def test_the_noise_is_of_the_bound_by_the_public_denominator(noise_multiplier: float) -> None:
    """By the deviation Z C / m; the test would detect a factor of 2/3 or 3/2."""
    noise = release_means(noise_multiplier, lanes={"delta": 0.2}, size=40_000).lanes["delta"]
    sigma = noise_multiplier * 0.2 / 4
    assert has_scale(noise, sigma)
    assert not has_scale(noise * 2.0 / 3.0, sigma)
    assert not has_scale(noise * 1.5, sigma)
    assert noise.dtype is torch.float32
    assert abs(float(noise.mean())) < 5.0 * sigma / 200.0


def test_each_lane_has_noise_of_its_own() -> None:
    """Scaled by its bound, with the same multiplier and independent draws."""
    lanes = release_means(1.5, lanes={"delta": 0.2, "control": 3.0}, size=40_000).lanes
    assert has_scale(lanes["delta"], 1.5 * 0.2 / 4)
    assert has_scale(lanes["control"], 1.5 * 3.0 / 4)
    apart = np.corrcoef(lanes["delta"].numpy(), lanes["control"].numpy())[0, 1]
    assert abs(apart) < 0.03


def test_as_many_clients_are_told_as_are_expected() -> None:
    """The number that reported is never released."""
    assert release_means(1.0, lanes={"delta": 1.0}, size=3).num_clients == 4


@pytest.mark.parametrize(
    ("noise_multiplier", "largest", "bound", "size", "message"),
    [
        (1e9, 10, 1.0, 5, "exceeds exact integers"),
        (1.0, 1 << 40, 1.0, 5, "exceeds exact integers"),
        (1.0, 10, 1e-13, 5, "bound is 1e-13"),
    ],
)
def test_what_does_not_fit_is_refused(
    noise_multiplier: float, largest: int, bound: float, size: int, message: str
) -> None:
    """When the run is assembled."""
    aggregation = BoundedSum(
        bounds={"delta": bound}, multipliers={"delta": noise_multiplier}, largest=largest
    )
    with pytest.raises(ValueError, match=message):
        aggregation.lanes([DELTA], Layout.of(nn.Linear(size, 1, bias=False)))


def test_a_lane_that_is_too_long_for_its_grid_is_refused() -> None:
    """Rounding would be a quarter of a client's contribution."""
    with pytest.raises(ValueError, match="too long"):
        BoundedLane(1.0, 1 << 39)


def test_no_bound_beside_the_clip_decides_whose_part_counts() -> None:
    """Otherwise an update's content would decide how many count; control: the inner strategy's."""
    bounded = summing(BoundedSum(bounds={"delta": 1.0}, multipliers={"delta": 1.0}, largest=10))
    assert bounded.bounds is None
    assert bounded.inner.bounds == GENEROUS
