r"""The geometric median and centered clipping: means that give less weight to distant updates.

Both are computed from the matrix of distances alone: see :mod:`fedlearn.algorithms.distances`.

==================  =====================================================
Paper               Here
==================  =====================================================
:math:`w_k, x_k`    the update of client k
:math:`\alpha_k`    weight of client k, as a share of all
:math:`\nu`         ``smoothing``
:math:`R, L`        ``num_iterations``
:math:`\tau`        ``clip_radius``
:math:`v_{t-1}`     ``last``, the aggregate of the round before
==================  =====================================================

Distances are those of the trainable parameters. Running statistics and other lanes are averaged
with the same weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.aggregations import RobustAggregation
from fedlearn.algorithms.distances import combine_rows, delta_distances, distances_from_mean
from fedlearn.algorithms.lanes import Lanes, Updates
from fedlearn.core.ranges import Positive, Ranged, Whole


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Ranged, RobustAggregation):
    r"""The point with the smallest sum of distances to the updates, as in RFA.

    Smoothed Weiszfeld iterations from the mean, :math:`\beta_k = \alpha_k / \max(\nu, \|v -
    w_k\|)` and :math:`v \leftarrow \sum_k \beta_k w_k / \sum_k \beta_k`. With no iteration it is
    the mean.

    Attributes:
        by_examples: Weight a client by its number of examples; otherwise all count the same.

    Example:
        >>> rows = {"delta": torch.tensor([[0.0], [1.0], [2.0], [3.0], [90.0]])}
        >>> updates = Updates([0, 1, 2, 3, 4], torch.ones(5), rows, [0] * 5)
        >>> rule = GeometricMedian(by_examples=False, num_iterations=100)
        >>> rule.combine(updates)["delta"].round(decimals=3)
        tensor([2.])

    References:
        Pillutla, Kakade and Harchaoui, 2022, `Robust Aggregation for Federated Learning
        <https://arxiv.org/abs/1912.13445>`_, algorithm 2.
    """

    by_examples: bool
    num_iterations: Annotated[Whole, doc("Iterations of Weiszfeld, >= 0; the paper has 3.")] = 3
    smoothing: Annotated[
        Positive, doc("Smallest distance that an update's weight is divided by, > 0.")
    ] = 1e-6

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Return the example counts, or ones."""
        return num_examples_B if self.by_examples else torch.ones_like(num_examples_B)

    def combine(self, updates: Updates) -> Lanes:
        """Return the geometric median of the deltas, and the same mean of the other lanes."""
        weights_B = updates.weights_B.double().cpu().numpy()
        coefficients_B, squared_BB = weights_B / weights_B.sum(), delta_distances(updates)
        for _ in range(self.num_iterations):
            distances_B = distances_from_mean(squared_BB, coefficients_B)
            coefficients_B = weights_B / np.maximum(self.smoothing, distances_B)
            coefficients_B /= coefficients_B.sum()
        return combine_rows(updates, coefficients_B)


@dataclass(frozen=True, kw_only=True)
class CenteredClipping(Ranged, RobustAggregation):
    r"""Averages the updates after clipping them around the aggregate of the round before.

    From :math:`v = v_{t-1}`, which is zero at first, each iteration is :math:`v \leftarrow v +
    \frac{1}{n} \sum_k (x_k - v) \min(1, \tau / \|x_k - v\|)`. All clients count the same. With a
    radius beyond all distances it is the unweighted mean. The paper combines it with momentum of
    the clients, so that their updates change little from round to round.

    Attributes:
        last: The aggregate of the round before, by lane; empty in the first round.
            :class:`~fedlearn.algorithms.recipes.Algorithm` keeps it.

    Example:
        >>> rows = {"delta": torch.tensor([[1.0], [2.0], [90.0]])}
        >>> updates = Updates([0, 1, 2], torch.ones(3), rows, [0, 0, 0])
        >>> CenteredClipping(clip_radius=3.0).combine(updates)["delta"]
        tensor([2.])

    References:
        Karimireddy, He and Jaggi, 2021, `Learning from History for Byzantine Robust Optimization
        <https://arxiv.org/abs/2012.10333>`_, algorithm 2.
    """

    clip_radius: Annotated[
        Positive, doc("Farthest that one update pulls the aggregate, before averaging, > 0.")
    ]
    num_iterations: Annotated[Whole, doc("Iterations of clipping, >= 0.")] = 1
    last: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def needs_last(self) -> bool:
        """True."""
        return True

    def after(self, last: Lanes) -> "CenteredClipping":
        """Return the rule that clips around ``last``."""
        return replace(self, last=last)

    def combine(self, updates: Updates) -> Lanes:
        """Return the clipped mean of every lane."""
        # The center is one more row: what is between it and the updates is a mean of them all.
        count = len(updates.client_ids)
        rows = {
            name: [*rows, self.last.get(name, torch.zeros_like(rows[0]))]
            for name, rows in updates.lanes.items()
        }
        around = replace(updates, lanes=rows)
        squared_BB, coefficients_B = delta_distances(around), np.eye(count + 1)[count]
        for _ in range(self.num_iterations):
            distances_B = distances_from_mean(squared_BB, coefficients_B)[:count]
            factors_B = self.clip_radius / np.maximum(distances_B, self.clip_radius) / count
            coefficients_B *= 1.0 - factors_B.sum()
            coefficients_B[:count] += factors_B
        return combine_rows(around, coefficients_B)
