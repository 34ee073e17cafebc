r"""A clip norm that follows a quantile of the updates' norms, at a small part of the budget.

Each client tells beside its update whether that was at most as long as the clip norm. Of the noisy
share of those that were, the server makes the next clip norm:
:math:`C \leftarrow C \exp(-\eta_C (\bar{b} - \gamma))`.

============================= ==================================================
symbol                        here
============================= ==================================================
:math:`C`                     the clip norm of a round, in the strategy's state
:math:`\gamma, \eta_C`        ``quantile``, ``learning_rate``
:math:`\bar{b}`               the noisy share, ``BELOW`` with 1/2 added
:math:`z`                     the noise multiplier of a release, all of it
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
from fedlearn.algorithms.strategy import State, Stepped, Strategy
from fedlearn.algorithms.transforms import BELOW, ToldBelow, Transform
from fedlearn.core.params import Params
from fedlearn.core.ranges import Positive, Ranged
from fedlearn.privacy.bounded_sum import BoundedUpdates

_CLIP_NORM = "adaptive_clip_norm"
#: Of the budget, as a part of 1 / z**2, the most that the count may take.
_LARGEST_PART = 0.05
#: Standard deviation of the noise of the count by the clients that are expected, as in the paper.
_COUNT_NOISE = 1 / 20
#: Far from what overflows, and from norms whose squares are zeros.
_LEAST, _LARGEST = 1e-9, 1e9


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip(Ranged):
    """How the clip norm follows the norms of the updates.

    Attributes:
        quantile: Share of updates that shall be at most as long, between 0 and 1.
        learning_rate: Step size of the clip norm's logarithm, > 0.
    """

    quantile: Annotated[float, Gt(0.0), Lt(1.0)]
    learning_rate: Positive = 0.2  # as in the paper

    def following(self, clip_norm: float, *, share: float) -> float:
        """Return the next clip norm, after one that this share of the updates was below.

        Example:
            >>> AdaptiveClip(quantile=0.5).following(1.0, share=1.0) < 1.0
            True
        """
        moved = clip_norm * math.exp(-self.learning_rate * (share - self.quantile))
        return min(max(moved, _LEAST), _LARGEST)


def divided(noise_multiplier: float, *, expected: float) -> tuple[float, float]:
    r"""Return the multipliers of updates and of the count that together cost as one of both.

    :math:`z^{-2} = z_\Delta^{-2} + (2\sigma_b)^{-2}`: theorem 1. The count's noise is a twentieth
    of the clients expected, or more where it would take more than a twentieth of the budget.

    Args:
        noise_multiplier: Of the release, z > 0.
        expected: Clients in a round.

    Example:
        >>> z_updates, z_count = divided(1.0, expected=100)
        >>> round(z_updates, 3), round(z_count, 3)
        (1.005, 10.0)
    """
    # A bit is 1/2 or -1/2, so noise of sigma_b is 2 sigma_b times its bound.
    count = max(2.0 * _COUNT_NOISE * expected, noise_multiplier / math.sqrt(_LARGEST_PART))
    return 1.0 / math.sqrt(noise_multiplier**-2 - count**-2), count


@dataclass(frozen=True)
class AdaptivelyBounded(BoundedUpdates):
    """A strategy of which each client's part is bounded by a norm that follows the updates.

    Attributes:
        inner: The strategy otherwise.
        summed: The bounded sum of a round; of the first one, before there is a state.
        adaptive: How the norm moves.
    """

    adaptive: AdaptiveClip

    own = frozenset({_CLIP_NORM})

    @property
    def needs_same_round(self) -> str:
        """Clients compare their updates with the norm of the round that asked them."""
        return "clients tell whether they were below the clip norm of the round that asked them"

    @property
    def clip_norm(self) -> float:
        """The largest norm of a delta."""
        return self.summed.bounds[DELTA.name]

    @property
    def lanes(self) -> Sequence[LaneSpec]:
        """The inner strategy's, and whether the delta was below the norm."""
        return (*self.inner.lanes, BELOW)

    @property
    def transforms(self) -> Sequence[Transform]:
        """The inner strategy's; then each client compares its delta with the norm."""
        return (*self.inner.transforms, ToldBelow(asked_norm=self.clip_norm))

    def init(self, params: Params) -> State:
        """Return the inner strategy's state, and the first norm."""
        first = torch.tensor(self.clip_norm, dtype=torch.float64)
        return {**self.inner.init(params), _CLIP_NORM: first}

    def at(self, state: State) -> Strategy:
        """Return the strategy of a round, with its norm."""
        bounds = {**self.summed.bounds, DELTA.name: float(state[_CLIP_NORM])}
        summed = replace(self.summed, bounds=bounds)
        return replace(self, inner=self.inner.at(self.inner_state(state)), summed=summed)

    def step(self, params: Params, aggregate: Aggregate, state: State) -> Stepped:
        """Take the inner strategy's step, and move the norm."""
        lanes = {name: lane for name, lane in aggregate.lanes.items() if name != BELOW.name}
        stepped = super().step(params, replace(aggregate, lanes=lanes), state)
        share = float(aggregate.lanes[BELOW.name]) + 0.5
        following = self.adaptive.following(self.clip_norm, share=share)
        moved = torch.tensor(following, dtype=torch.float64)
        return Stepped(
            stepped.params,
            {**stepped.state, _CLIP_NORM: moved},
            {**stepped.metrics, "clip_norm": self.clip_norm},
        )
