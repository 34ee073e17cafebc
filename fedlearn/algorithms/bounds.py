"""Sanity checks of updates: those too long, too heavy or not finite are refused."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le, doc
from torch import Tensor

from fedlearn.algorithms.lanes import LaneSpec, Over
from fedlearn.core.cores import run_on_all_cores
from fedlearn.core.params import Layout
from fedlearn.core.ranges import Ranged
from fedlearn.core.soundness import LIKELY_CAUSE, MAX_DELTA, describe_unsound, is_sound


@dataclass(frozen=True, kw_only=True)
class UpdateBounds(Ranged):
    """Bounds on unmasked updates; an update beyond them is refused, and its client fails.

    They keep one broken client from ruining the model. Against attacks within the bounds use a
    robust rule such as :class:`~fedlearn.algorithms.median.CoordinateMedian`.
    """

    max_norm: Annotated[
        float,
        Gt(0),
        Le(1e18),
        doc(
            "Largest Euclidean norm of each vector of an update, such as its delta, above 0 and "
            "at most 1e18. Running statistics in a delta are not counted."
        ),
    ]  # the square of a larger norm overflows float32
    max_examples: Annotated[
        int,
        Ge(1),
        Le(10**9),
        doc("Most examples that a client may report for its training, 1 to 1e9."),
    ]

    def too_long(self, lane: str) -> str:
        """Return the failure reason for a lane whose norm is too large."""
        reason = f"the norm of the {lane} exceeds {self.max_norm:g} (updates.max_norm)"
        # A smaller bound is the user's choice, and honest updates may exceed it.
        return f"{reason}, {LIKELY_CAUSE}" if self.max_norm >= GENEROUS.max_norm else reason

    @property
    def max_statistics_norm(self) -> float:
        """Largest Euclidean norm of the running statistics in a delta.

        Their size depends on the data, not on training, so only absurd values are refused.
        """
        return max(self.max_norm, GENEROUS.max_norm)

    def too_large_statistics(self, lane: str) -> str:
        """Return the failure reason for absurdly large running statistics."""
        return f"the norm of the statistics in the {lane} exceeds {self.max_statistics_norm:g}"

    def too_heavy(self, num_examples: int) -> str:
        """Return the failure reason for an implausible number of examples."""
        return (
            f"num_examples {num_examples} is not in 1..{self.max_examples} (updates.max_examples)"
        )


#: Default bounds, which no honest update reaches. At 1e8, neighboring float32 numbers are 8 apart,
#: so no model trained in float32 gets there. And a device that trains on 10,000 examples a second
#: would take three hours for one epoch of 1e8.
GENEROUS = UpdateBounds(max_norm=1e8, max_examples=10**8)


def refusal(
    lanes: Mapping[str, Tensor],
    specs: Sequence[LaneSpec],
    *,
    layout: Layout,
    bounds: UpdateBounds | None,
) -> str | None:
    """Return the reason to refuse an update, or ``None`` to accept it.

    Sessions and the simulation engine both call this on an update as its client sent it.

    Args:
        lanes: The update's vectors: shape [n] each, as ``specs`` declare them.
        specs: The strategy's lanes.
        layout: Layout of the model.
        bounds: Bounds on the norms; ``None``: only refuse values that are not finite or absurd.
    """
    for spec in specs:
        vector = lanes[spec.name]
        if bounds is None:
            if not all(run_on_all_cores(len(vector), partial(_is_sound, vector))):
                return describe_unsound(spec.name)
            continue
        num_trained = layout.num_trainable if spec.over is Over.ALL else len(vector)
        # Statistics have their own, wider bound: their size depends on the data.
        norm, statistics_norm = _norm(vector[:num_trained]), _norm(vector[num_trained:])
        if not (norm <= MAX_DELTA and statistics_norm <= MAX_DELTA):  # also true for NaN
            return describe_unsound(spec.name)
        if norm > bounds.max_norm:
            return bounds.too_long(spec.name)
        if statistics_norm > bounds.max_statistics_norm:
            return bounds.too_large_statistics(spec.name)
    return None


def _norm(vector: Tensor) -> float:
    # The norm of the parts' norms; hypot does not overflow.
    return math.hypot(*run_on_all_cores(len(vector), partial(_norm_of_part, vector)))


def _norm_of_part(vector: Tensor, part: slice) -> float:
    return float(torch.linalg.vector_norm(vector[part]))


def _is_sound(vector: Tensor, part: slice) -> bool:
    return is_sound(vector[part])
