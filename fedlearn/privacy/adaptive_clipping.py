r"""Adaptive clipping: a clip norm that follows a quantile of the update norms.

Each client sends, next to its update, one bit: whether the update's norm was at most the clip norm.
From the noisy share of such clients the server computes the next clip norm,
:math:`C \leftarrow C \exp(-\eta_C (\bar{b} - \gamma))`. It costs a small part of the privacy
budget.

============================= ==================================================
symbol                        here
============================= ==================================================
:math:`C`                     the clip norm of a round, in the strategy's state
:math:`\gamma, \eta_C`        ``quantile``, ``learning_rate``
:math:`\bar{b}`               the noisy share, ``BELOW`` with 1/2 added
:math:`z`                     the noise multiplier of a whole release
:math:`z_\Delta, 2\sigma_b`   the multipliers of updates and of the count
============================= ==================================================

References:
    Andrew, Thakkar, McMahan and Ramaswamy, 2021, `Differentially Private Learning with Adaptive
    Clipping <https://arxiv.org/abs/1905.03871>`_, algorithm 1 and theorem 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Gt, Lt

from fedlearn.algorithms.lanes import DELTA, Aggregate, LaneSpec
from fedlearn.algorithms.strategy import State, StepResult, Strategy
from fedlearn.algorithms.transforms import BELOW, ClipIndicator, Transform
from fedlearn.core.params import Params
from fedlearn.core.ranges import Positive, Ranged
from fedlearn.privacy.bounded_sum import BoundedUpdates

_CLIP_NORM = "adaptive_clip_norm"
#: Largest share of the budget, in terms of 1 / z**2, that the count may take.
_LARGEST_PART = 0.05
#: Standard deviation of the count's noise per expected client, as in the paper.
_COUNT_NOISE = 1 / 20
#: Range of the clip norm: far from overflow, and from norms whose squares underflow to zero.
_LEAST, _LARGEST = 1e-9, 1e9


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip(Ranged):
    """Settings of a clip norm that follows the norms of the updates.

    Attributes:
        quantile: Share of updates whose norm should be at most the clip norm, between 0 and 1.
        learning_rate: Step size of the clip norm's logarithm, > 0.
    """

    quantile: Annotated[float, Gt(0.0), Lt(1.0)]
    learning_rate: Positive = 0.2  # as in the paper

    def next_norm(self, clip_norm: float, *, share: float) -> float:
        """Return the next clip norm, given the share of updates that were below ``clip_norm``.

        Example:
            >>> AdaptiveClip(quantile=0.5).next_norm(1.0, share=1.0) < 1.0
            True
        """
        moved = clip_norm * math.exp(-self.learning_rate * (share - self.quantile))
        return min(max(moved, _LEAST), _LARGEST)


def split_multiplier(noise_multiplier: float, *, expected: float) -> tuple[float, float]:
    r"""Split a release's noise multiplier into one for the updates and one for the count.

    By theorem 1, :math:`z^{-2} = z_\Delta^{-2} + (2\sigma_b)^{-2}`. The standard deviation of the
    count's noise is a twentieth of the expected clients, or more if that would take more than a
    twentieth of the budget.

    Args:
        noise_multiplier: Multiplier of the whole release, z > 0.
        expected: Expected number of clients in a round.

    Example:
        >>> z_updates, z_count = split_multiplier(1.0, expected=100)
        >>> round(z_updates, 3), round(z_count, 3)
        (1.005, 10.0)
    """
    # A client sends its bit as 1/2 or -1/2, so the bound is 1/2 and the multiplier 2 sigma_b.
    count = max(2.0 * _COUNT_NOISE * expected, noise_multiplier / math.sqrt(_LARGEST_PART))
    return 1.0 / math.sqrt(noise_multiplier**-2 - count**-2), count


@dataclass(frozen=True)
class AdaptivelyBoundedUpdates(BoundedUpdates):
    """A strategy that clips each client's contribution to an adaptive norm.

    Attributes:
        inner: The wrapped strategy.
        summed: The bounded sum of a round; until there is a state, that of the first round.
        adaptive: Settings of the clip norm.
    """

    adaptive: AdaptiveClip

    own = frozenset({_CLIP_NORM})

    @property
    def needs_same_round(self) -> str:
        """Why stale updates do not fit: clients compare with the clip norm of their own round."""
        return "clients report whether they were below the clip norm of the round that asked them"

    @property
    def clip_norm(self) -> float:
        """The largest norm of a delta."""
        return self.summed.bounds[DELTA.name]

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner strategy's lanes, and the bit that compares the delta with the clip norm."""
        return (*self.inner.lanes, BELOW)

    @property
    def transforms(self) -> Sequence[Transform]:
        """The inner strategy's transforms, then the comparison of the delta with the clip norm."""
        return (*self.inner.transforms, ClipIndicator(asked_norm=self.clip_norm))

    def init(self, params: Params) -> State:
        """Return the inner strategy's state with the first clip norm."""
        first = torch.tensor(self.clip_norm, dtype=torch.float64)
        return {**self.inner.init(params), _CLIP_NORM: first}

    def at(self, state: State) -> Strategy:
        """Return the strategy of a round, which clips to the norm in ``state``."""
        bounds = {**self.summed.bounds, DELTA.name: float(state[_CLIP_NORM])}
        summed = replace(self.summed, bounds=bounds)
        return replace(self, inner=self.inner.at(self.inner_state(state)), summed=summed)

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        """Take the inner strategy's step, and update the clip norm."""
        lanes = {name: lane for name, lane in aggregate.lanes.items() if name != BELOW.name}
        stepped = super().step(params, replace(aggregate, lanes=lanes), state)
        share = float(aggregate.lanes[BELOW.name]) + 0.5  # bits are sent as 1/2 or -1/2
        following = self.adaptive.next_norm(self.clip_norm, share=share)
        moved = torch.tensor(following, dtype=torch.float64)
        return StepResult(
            stepped.params,
            {**stepped.state, _CLIP_NORM: moved},
            {**stepped.metrics, "clip_norm": self.clip_norm},
        )
