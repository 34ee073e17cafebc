r"""Sums in which each user's contribution is bounded, and their release with noise.

Each client's lane is clipped to its bound, rounded to integer *levels*, and summed exactly; noise
is added to the integers. So the guarantee does not rest on floating-point sums, whose result
depends on their order and whose low bits leak their terms. The mean is the noisy sum divided by the
*expected* number of clients, which is public; the number of reports is not.

========================= ==================================================
symbol                    here
========================= ==================================================
:math:`C`                 ``bound`` of a lane
:math:`S`                 ``levels`` of a lane: the bound in integers
:math:`z`                 ``noise_multiplier``
========================= ==================================================

To hide one example instead of its client, noise is in proportion to what one example adds to the
client's sum. Clipping to a ball brings no two sums further apart, and rounding moves each number of
both by half a level at most. So one example moves a sum of d numbers by at most its own levels and
√d, whatever it is and whatever the others are.

References:
    Casacuberta et al., 2022, `Widespread Underestimation of Sensitivity in Differentially Private
    Libraries and How to Fix It <https://arxiv.org/abs/2207.10635>`_ (floating-point sums).
    McMahan et al., 2018, `Learning Differentially Private Recurrent Language Models
    <https://arxiv.org/abs/1710.06963>`_ (a fixed denominator, section 2.2).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import torch
from annotated_types import Ge
from torch import Tensor

from fedlearn.algorithms.aggregations import LaneSums, WeightedMean
from fedlearn.algorithms.lanes import Aggregate, LaneSpec, Rows, Updates
from fedlearn.algorithms.strategy import State, Strategy, StrategyWrapper
from fedlearn.algorithms.transforms import norms
from fedlearn.core.noise import MAX_SIGMA
from fedlearn.core.params import Layout
from fedlearn.core.ranges import Count, Ranged

#: Rows that are summed at a time in float32, which holds every integer up to 2**24.
_TOGETHER = 32
#: Levels of a bound, chosen so that the float32 sum of ``_TOGETHER`` rows is exact.
_LEVELS = 2.0**24 / _TOGETHER
#: Levels of one example's bound, where a single example is hidden.
_EXAMPLE_LEVELS = 2.0**20
#: What the rounding of float64 adds, in levels, to exact sums of up to 2**28 examples.
_ROUNDED_SUMS = 1.0
#: Float64, in which a whole round is summed, holds every integer up to this.
EXACT = 2.0**53
#: Columns that are summed at a time, so that they fit into the CPU's cache.
_SPAN = 1 << 12
#: Clipping is stricter by this share, which exceeds the rounding error of a computed norm.
_MARGIN = 2.0**-14
#: Squares of numbers above this do not underflow to zero in float32.
_LEAST_BOUND = 1e-12


@dataclass(frozen=True)
class BoundedLane(Ranged):
    """The grid on which the clipped values of a lane are rounded to integers.

    Attributes:
        bound: Largest L2 norm of one client's values, C >= 1e-12.
        size: Numbers in the lane.
        example_bound: Largest L2 norm of what one example adds to them; ``None``: the client is
            hidden as a whole.

    Raises:
        ValueError: The bound is out of range, or the lane so long that its grid would be too
            coarse.
    """

    bound: Annotated[float, Ge(_LEAST_BOUND)]
    size: Count
    example_bound: Annotated[float | None, Ge(_LEAST_BOUND)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        hidden = _LEVELS if self.example_bound is None else _EXAMPLE_LEVELS
        if self._rounding > hidden / 4.0:
            raise ValueError(
                f"a lane of {self.size} numbers is too long for {hidden:.0f} levels; train "
                "fewer parameters"
            )

    @property
    def levels(self) -> float:
        """Largest L2 norm of one client's integers, S."""
        return _LEVELS if self.example_bound is None else self.bound / self.step + self._rounding

    @property
    def sensitivity(self) -> float:
        """Largest L2 norm by which the hidden client or example moves the sum, in levels."""
        if self.example_bound is None:
            return self.levels
        return _EXAMPLE_LEVELS + 2.0 * self._rounding + _ROUNDED_SUMS

    @property
    def step(self) -> float:
        """The value of one level."""
        if self.example_bound is not None:
            return self.example_bound / _EXAMPLE_LEVELS
        return self.bound / (self.levels * (1.0 - _MARGIN) - self._rounding)

    @property
    def _rounding(self) -> float:
        """The most that rounding to integers adds to a norm, in levels."""
        return math.sqrt(self.size) / 2.0

    def add(self, total: Tensor, rows: Rows) -> None:
        """Clip the rows and add their levels to the sums: shape [size], float64, exact.

        A row with NaN or infinite values makes the sums NaN or infinite, so that a later check
        finds it.

        Guarantees:
            The levels that one row adds have an L2 norm of at most :attr:`levels`: a row is scaled
            to slightly less, and rounded to the nearest integers.
        """
        if self.example_bound is not None:
            self._add_precisely(total, rows)
            return
        for begin in range(0, len(rows), _TOGETHER):
            group = rows[begin : begin + _TOGETHER]
            scales_B = (1.0 / (self.step * (norms(group) / self.bound).clamp(min=1.0))).float()
            for part, values in _split_columns(group):
                levels = torch.mul(values, scales_B[:, None]).round_()
                total[part].add_(levels.sum(dim=0))  # not a matrix product, which might round

    def _add_precisely(self, total: Tensor, rows: Rows) -> None:
        """Add rows in float64: the levels of an example may be few next to those of its client."""
        for row in rows:
            values = row.double()
            longer = (torch.linalg.vector_norm(values) / self.bound).clamp(min=1.0)
            total.add_((values / (self.step * longer)).round_())


def _split_columns(rows: Rows) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows in slices of columns: the slice, and float32 values of shape [B, span]."""
    size = rows[0].numel()
    for begin in range(0, size, _SPAN):
        part = slice(begin, min(begin + _SPAN, size))
        values = rows[:, part] if isinstance(rows, Tensor) else torch.stack([r[part] for r in rows])
        yield part, values.float()


@dataclass(frozen=True, eq=False)
class LevelSums:
    """The state of a sum of levels.

    Attributes:
        total: Exact sums of integers, in float64.
        lanes: The grid of each lane.
    """

    total: LaneSums
    lanes: Mapping[str, BoundedLane]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors for an all-reduce to add up."""
        return self.total.tensors()


@dataclass(frozen=True, kw_only=True)
class BoundedSum(Ranged):
    """Sums the levels of each lane, with equal weights and a bound on each client's contribution.

    Attributes:
        bounds: By lane, the largest L2 norm of one client's values, > 0.
        multipliers: By lane, the standard deviation of its noise relative to the largest norm by
            which the hidden client or example moves it, > 0.
        largest: Most clients in a sum.
        example_bounds: By lane, the largest L2 norm of what one example adds to a client's values,
            to hide a single example; empty: clients are hidden as a whole.

    Guarantees:
        Adding or removing a client moves the sum by at most the lane's levels, whatever the other
        clients send, because the sums are exact.
    """

    bounds: Mapping[str, float]
    multipliers: Mapping[str, float]
    largest: Count
    example_bounds: Mapping[str, float] = field(default_factory=dict)

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return ones: a larger weight would let a client exceed the bound."""
        return torch.ones_like(num_examples_B)

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> LevelSums:
        """Return empty sums."""
        total = LaneSums.empty(lanes, layout, dtype=torch.float64, device=device)
        return LevelSums(total, self.lanes(lanes, layout))

    def accumulate(self, state: LevelSums, updates: Updates) -> LevelSums:
        """Add the levels of each row."""
        for name, total in state.total.sums.items():
            state.lanes[name].add(total, updates.lanes[name])
        state.total.count_clients(updates.weights_B.double())
        return state

    def finalize(self, state: LevelSums) -> Aggregate:
        """Return the sums of levels, even if they are empty; the release adds noise to them."""
        num_clients = round(float(state.total.num_clients))
        if num_clients > self.largest:
            raise ValueError(f"{num_clients} clients are in a sum for at most {self.largest}")
        return Aggregate(lanes=state.total.sums, num_clients=num_clients)

    def lanes(self, lanes: Sequence[LaneSpec], layout: Layout) -> dict[str, BoundedLane]:
        """Return the grid of each lane for models of ``layout``.

        Raises:
            ValueError: Sums with their noise are too large to be exact, or a lane is too long.
        """
        found = {}
        for spec in lanes:
            name = spec.name
            lane = BoundedLane(self.bounds[name], spec.size(layout), self.example_bounds.get(name))
            # The other half of the exact range is for the noise.
            if self.sigma(name, lane) > MAX_SIGMA or self.largest * lane.levels > EXACT / 2.0:
                raise ValueError(
                    f"a sum of {self.largest} clients with {self.multipliers[name]:g} times the "
                    "noise of their bound exceeds exact integers; ask fewer clients, lower the "
                    "noise, or lower the bound"
                )
            found[name] = lane
        return found

    def sigma(self, name: str, lane: BoundedLane) -> float:
        """Return the standard deviation of the noise in a lane, in levels."""
        return self.multipliers[name] * lane.sensitivity


@dataclass(frozen=True)
class BoundedUpdates(StrategyWrapper):
    """A strategy that bounds each client's contribution.

    Attributes:
        inner: The wrapped strategy.
        summed: The bounded sum, which clips each update itself, so that the bound holds whatever
            a client sends.

    Raises:
        ValueError: The inner strategy combines updates by another rule than the unweighted mean.
    """

    summed: BoundedSum

    def __post_init__(self) -> None:
        require_equal_mean(self.inner)

    @property
    def bounds(self) -> None:
        """None: rejecting updates by their values would break the accounting."""

    @property
    def aggregation(self) -> BoundedSum:
        """The bounded sum."""
        return self.summed


def require_equal_mean(strategy: Strategy) -> None:
    """Raise ValueError if a noisy sum cannot replace a strategy's aggregation."""
    aggregation = strategy.aggregation
    if type(aggregation) is not WeightedMean:  # a subclass may combine updates differently
        raise ValueError(
            f"the aggregation {type(aggregation).__name__} is not WeightedMean itself, so the "
            "noise would not hide one client's effect on it; use an algorithm that averages"
        )
    if aggregation.by_examples:
        raise ValueError(
            "clients are weighted by their numbers of examples, which would be revealed and would "
            "multiply one client's effect; set weight_by_examples to false"
        )


class Noise(Protocol):
    """A source of discrete Gaussian noise."""

    def draw(self, sigma: float, size: int, *, labels: tuple[str | int, ...]) -> Tensor:
        """Draw samples of the discrete Gaussian, the same in every process.

        Args:
            sigma: Parameter of the distribution, close to its standard deviation.
            size: Number of samples.
            labels: Purpose of the samples; reproducible noise differs between labels.

        Returns:
            Shape [size], float64.
        """


@dataclass(frozen=True, kw_only=True)
class NoisyMean:
    """Releases a sum of levels with noise, divided by the expected number of clients.

    Attributes:
        expected: The public denominator.
        noise: Source of the noise.
    """

    expected: float
    noise: Noise

    def __call__(
        self,
        aggregate: Aggregate,
        *,
        strategy: Strategy,
        layout: Layout,
        state: State,
        round_num: int,
        attempt: int,
    ) -> tuple[Aggregate, State]:
        """Return the noisy means over the expected number of clients, and the unchanged state.

        Args:
            aggregate: Sums of levels; overwritten.
            strategy: Strategy of the round, whose aggregation is a :class:`BoundedSum`.
            layout: Layout of the model.
            state: State of the strategy.
            round_num: Round index, from 0.
            attempt: Retry number of the round, from 0.
        """
        summed, means = strategy.aggregation, {}
        assert isinstance(summed, BoundedSum)  # a plan makes both
        for name, lane in summed.lanes(strategy.lanes, layout).items():
            total, labels = aggregate.lanes[name], (name, round_num, attempt)
            noise = self.noise.draw(summed.sigma(name, lane), len(total), labels=labels)
            noisy = total.add_(noise.to(total.device))
            means[name] = noisy.mul_(lane.step / self.expected).to(layout.dtype)
        return Aggregate(lanes=means, num_clients=max(1, round(self.expected))), state
