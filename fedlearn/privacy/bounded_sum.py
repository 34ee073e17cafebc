r"""The sum of which one user's part is bounded, and what is released of it: with noise.

Each client's lane is clipped to its bound, cut into integer *levels*, and summed exactly; noise is
added to the integers. So nothing of the guarantee rests on floating-point sums, whose result
depends on their order and whose low bits tell of their terms. The mean is the noisy sum by the
number of clients that are *expected*, which is public; how many reported is not.

========================= ==================================================
symbol                    here
========================= ==================================================
:math:`C`                 ``bound`` of a lane
:math:`S`                 ``levels`` of a lane: what the bound is in integers
:math:`z`                 ``noise_multiplier``
========================= ==================================================

References:
    Casacuberta et al., 2022, `Widespread Underestimation of Sensitivity in Differentially Private
    Libraries and How to Fix It <https://arxiv.org/abs/2207.10635>`_ (floating-point sums).
    McMahan et al., 2018, `Learning Differentially Private Recurrent Language Models
    <https://arxiv.org/abs/1710.06963>`_ (a fixed denominator, section 2.2).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from annotated_types import Ge
from torch import Tensor

from fedlearn.algorithms.aggregations import LaneSums, WeightedMean
from fedlearn.algorithms.lanes import Aggregate, LaneSpec, Rows, Updates
from fedlearn.algorithms.strategy import State, Strategy, Wrapped
from fedlearn.algorithms.transforms import norms
from fedlearn.core.noise import MAX_SIGMA
from fedlearn.core.params import Layout
from fedlearn.core.ranges import Count, Ranged

#: Rows that are summed at a time, in float32, which holds every integer up to 2**24.
_TOGETHER = 32
#: Levels of a bound: the sum of so many rows is exact.
_LEVELS = 2.0**24 / _TOGETHER
#: Float64, in which all of a round is summed, holds every integer up to it.
EXACT = 2.0**53
#: Numbers of each row that are summed at a time, in the cache.
_SPAN = 1 << 12
#: More than what rounding does to a norm; clipping is so much stricter.
_MARGIN = 2.0**-14
#: Squares of numbers above it are no zeros in float32.
_LEAST_BOUND = 1e-12


@dataclass(frozen=True)
class BoundedLane(Ranged):
    """A lane of clipped values, and its integers.

    Attributes:
        bound: Largest L2 norm of one client's values, C >= 1e-12.
        size: Numbers in the lane.

    Raises:
        ValueError: The bound is out of range, or the lane so long that its grid would be too
            coarse.
    """

    bound: Annotated[float, Ge(_LEAST_BOUND)]
    size: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._rounding > self.levels / 4.0:
            raise ValueError(
                f"a lane of {self.size} numbers is too long for {self.levels:.0f} levels; train "
                "fewer parameters"
            )

    @property
    def levels(self) -> float:
        """Largest L2 norm of one client's integers, S."""
        return _LEVELS

    @property
    def step(self) -> float:
        """What one level stands for."""
        return self.bound / (self.levels * (1.0 - _MARGIN) - self._rounding)

    @property
    def _rounding(self) -> float:
        """The most that rounding to integers adds to a norm."""
        return math.sqrt(self.size) / 2.0

    def add(self, total: Tensor, rows: Rows) -> None:
        """Add the levels of clipped rows to their sums: shape [size], float64, exact.

        A row that is not finite makes sums that are not, for whoever checks them.

        Guarantees:
            The L2 norm of what one row adds is at most :attr:`levels`: a row is scaled to a little
            less, and rounded to the nearest integers.
        """
        for begin in range(0, len(rows), _TOGETHER):
            group = rows[begin : begin + _TOGETHER]
            scales_B = (1.0 / (self.step * (norms(group) / self.bound).clamp(min=1.0))).float()
            for part, values in _parts(group):
                levels = torch.mul(values, scales_B[:, None]).round_()
                total[part].add_(levels.sum(dim=0))  # no matrix product: it may round


def _parts(rows: Rows) -> Iterator[tuple[slice, Tensor]]:
    """Yield which columns, and the values of some rows there: float32, [B, span]."""
    size = rows[0].numel()
    for begin in range(0, size, _SPAN):
        part = slice(begin, min(begin + _SPAN, size))
        values = rows[:, part] if isinstance(rows, Tensor) else torch.stack([r[part] for r in rows])
        yield part, values.float()


@dataclass(frozen=True, eq=False)
class LevelSums:
    """The state of a sum of levels.

    Attributes:
        total: Sums of integers in float64, which are exact.
        lanes: How each lane is cut.
    """

    total: LaneSums
    lanes: Mapping[str, BoundedLane]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that an all-reduce adds up."""
        return self.total.tensors()


@dataclass(frozen=True, kw_only=True)
class BoundedSum(Ranged):
    """Sum of each lane's levels; each client counts the same, and at most by the bound.

    Attributes:
        bounds: By lane the largest L2 norm of one client's values, > 0.
        multipliers: By lane the standard deviation of its noise by its bound, > 0.
        largest: Clients in a sum at the most.

    Guarantees:
        A client that is added, or taken away, moves the sum by at most its levels in each lane,
        and what the others send does not matter: the sums are exact.
    """

    bounds: Mapping[str, float]
    multipliers: Mapping[str, float]
    largest: Count

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return ones: a weight would multiply what a client can do."""
        return torch.ones_like(num_examples_B)

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> LevelSums:
        """Return empty sums."""
        total = LaneSums.empty(lanes, layout, dtype=torch.float64, device=device)
        return LevelSums(total, self.lanes(lanes, layout))

    def accumulate(self, state: LevelSums, updates: Updates) -> LevelSums:
        """Add the levels of each row."""
        for name, total in state.total.sums.items():
            state.lanes[name].add(total, updates.lanes[name])
        state.total.counted(updates.weights_B.double())
        return state

    def finalize(self, state: LevelSums) -> Aggregate:
        """Return the sums of levels, be it of nobody: what is released of them is another's."""
        num_clients = round(float(state.total.num_clients))
        if num_clients > self.largest:
            raise ValueError(f"{num_clients} clients are in a sum for at most {self.largest}")
        return Aggregate(lanes=state.total.sums, num_clients=num_clients)

    def lanes(self, lanes: Sequence[LaneSpec], layout: Layout) -> dict[str, BoundedLane]:
        """Return how each lane of models of ``layout`` is cut; raises ValueError if none fits."""
        for lane in lanes:
            if self.sigma(lane.name) > MAX_SIGMA or self.largest * _LEVELS > EXACT / 2.0:
                raise ValueError(
                    f"a sum of {self.largest} clients with {self.multipliers[lane.name]:g} times "
                    "the noise of their bound is beyond exact integers; ask fewer, or lower the "
                    "noise"
                )
        return {lane.name: BoundedLane(self.bounds[lane.name], lane.size(layout)) for lane in lanes}

    def sigma(self, lane: str) -> float:
        """Return the noise of a lane, in levels."""
        return self.multipliers[lane] * _LEVELS


@dataclass(frozen=True)
class BoundedUpdates(Wrapped):
    """A strategy of which each client's part is bounded.

    Attributes:
        inner: The strategy otherwise.
        summed: The bounded sum, which clips: whatever a client sends, its part is bounded.

    Raises:
        ValueError: The inner strategy combines updates by another rule than the mean, in this
            round at least.
    """

    summed: BoundedSum

    def __post_init__(self) -> None:
        require_equal_mean(self.inner)

    @property
    def bounds(self) -> None:
        """None: whether an update counts is part of what is accounted for."""

    @property
    def aggregation(self) -> BoundedSum:
        """The bounded sum."""
        return self.summed


def require_equal_mean(strategy: Strategy) -> None:
    """Raise ValueError if a sum with noise cannot take the place of a strategy's aggregation."""
    aggregation = strategy.aggregation
    if type(aggregation) is not WeightedMean:  # a subclass may do something else
        raise ValueError(
            f"the aggregation {type(aggregation).__name__} is not WeightedMean itself, so that the "
            "noise would not hide what one client does to it; take an algorithm that averages"
        )
    if aggregation.by_examples:
        raise ValueError(
            "clients are weighted by their examples, whose number would then be told, and multiply "
            "what one client can do; set weight_by_examples to false"
        )


class Noise(Protocol):
    """Where noise comes from."""

    def draw(self, sigma: float, size: int, *, labels: tuple[str | int, ...]) -> Tensor:
        """Return samples of the discrete Gaussian, the same in every process.

        Args:
            sigma: Its parameter.
            size: How many.
            labels: What they are for: noise that is reproducible differs by them.

        Returns:
            Shape [size], float64.
        """


@dataclass(frozen=True, kw_only=True)
class NoisyMean:
    """Releases a sum of levels: with noise, by the number of clients that is expected.

    Attributes:
        expected: The public denominator.
        noise: Where noise comes from.
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
        """Return the noisy means, of as many clients as are expected, and the state.

        Args:
            aggregate: Sums of levels; overwritten.
            strategy: Of the round, whose aggregation is a :class:`BoundedSum`.
            layout: Of the model.
            state: The strategy's, which stays.
            round_num: Index, from 0.
            attempt: 0, or how often the round was retried.
        """
        summed, means = strategy.aggregation, {}
        assert isinstance(summed, BoundedSum)  # a plan makes both
        for name, lane in summed.lanes(strategy.lanes, layout).items():
            total, labels = aggregate.lanes[name], (name, round_num, attempt)
            noise = self.noise.draw(summed.sigma(name), len(total), labels=labels)
            noisy = total.add_(noise.to(total.device))
            means[name] = noisy.mul_(lane.step / self.expected).to(layout.dtype)
        return Aggregate(lanes=means, num_clients=max(1, round(self.expected))), state
