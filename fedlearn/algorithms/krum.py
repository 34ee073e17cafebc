r"""Krum, Multi-Krum and Bulyan: aggregate updates that are close to most of the others.

=================  =======================================================================
Paper              Here
=================  =======================================================================
:math:`n`          number of updates in the round
:math:`f`          ``num_malicious``
:math:`m`          ``num_selected``
:math:`\theta`     ``num_selected`` of Bulyan: n - 2 f
:math:`\beta`      ``num_averaged`` of Bulyan: n - 4 f
=================  =======================================================================

Distances are those of the trainable parameters. Running statistics and other lanes are averaged
over the clients that are selected.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import doc
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import RobustAggregation, iter_spans
from fedlearn.algorithms.distances import combine_rows, delta_distances
from fedlearn.algorithms.lanes import Aggregate, Rows, Updates
from fedlearn.algorithms.median import middle_of, sort_columns
from fedlearn.core.ranges import Count, Ranged, Whole


@dataclass(frozen=True, kw_only=True)
class Krum(Ranged, RobustAggregation):
    r"""Krum: the update with the smallest sum of squared distances to its nearest others.

    The sum is over the :math:`n - f - 2` nearest. Multi-Krum is the mean of the ``num_selected``
    updates with the smallest sums. All clients count the same. The round's record has
    ``num_left_out``.

    Attributes:
        num_malicious: f, for which the rule needs :math:`n \ge 2 f + 3` updates.
        num_selected: m.

    Example:
        >>> rows = {"delta": torch.tensor([[1.0], [1.1], [1.3], [1.4], [90.0]])}
        >>> updates = Updates([0, 1, 2, 3, 4], torch.ones(5), rows, [0, 0, 0, 0, 0])
        >>> krum = Krum(num_malicious=1, num_selected=4).combine(updates)
        >>> krum.lanes["delta"], krum.metrics
        (tensor([1.2000]), {'num_left_out': 1.0})

    References:
        Blanchard et al., 2017, `Machine Learning with Adversaries: Byzantine Tolerant Gradient
        Descent <https://arxiv.org/abs/1703.02757>`_, section 4, and section 5.3 for Multi-Krum.
    """

    num_malicious: Annotated[Whole, doc("Most clients of a round that attack, >= 0.")]
    num_selected: Annotated[
        Count, doc("Updates that are averaged, >= 1; 1 is Krum, more is Multi-Krum.")
    ] = 1

    @property
    def min_updates(self) -> int:
        """2 f + 3, or the number of updates to select."""
        return max(2 * self.num_malicious + 3, self.num_selected)

    def combine(self, updates: Updates) -> Aggregate:
        """Return the mean of the selected updates."""
        scores = _scores(delta_distances(updates), self.num_malicious)
        best = np.argsort(scores, kind="stable")[: self.num_selected]
        coefficients = np.zeros(len(scores))
        coefficients[best] = 1.0 / len(best)
        left_out = float(len(scores) - len(best))
        return Aggregate(
            lanes=combine_rows(updates, coefficients),
            num_clients=len(best),
            metrics={"num_left_out": left_out},
        )


@dataclass(frozen=True, kw_only=True)
class Bulyan(Ranged, RobustAggregation):
    r"""Bulyan: Krum selects updates one by one; the mean of the values near their median follows.

    Krum runs :math:`\theta = n - 2 f` times on the updates that are left, and each time its
    choice is selected. Each coordinate is the mean of the :math:`\beta = \theta - 2 f` selected
    values that are nearest to their median. All clients count the same. The round's record has
    ``num_left_out``.

    Attributes:
        num_malicious: f, for which the rule needs :math:`n \ge 4 f + 3` updates.

    Example:
        >>> values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 90.0]
        >>> rows = {"delta": torch.tensor(values)[:, None]}
        >>> updates = Updates(range(7), torch.ones(7), rows, [0] * 7)
        >>> Bulyan(num_malicious=1).combine(updates).metrics
        {'num_left_out': 2.0}

    References:
        El Mhamdi, Guerraoui and Rouault, 2018, `The Hidden Vulnerability of Distributed Learning
        in Byzantium <https://arxiv.org/abs/1802.07927>`_, section 4.
    """

    num_malicious: Annotated[Whole, doc("Most clients of a round that attack, >= 0.")]

    @property
    def min_updates(self) -> int:
        """4 f + 3."""
        return 4 * self.num_malicious + 3

    def combine(self, updates: Updates) -> Aggregate:
        """Select updates; return the mean of the values near the median, in every lane."""
        squared, malicious = delta_distances(updates), self.num_malicious
        num_selected = len(squared) - 2 * malicious
        left = np.arange(len(squared))
        for _ in range(num_selected):
            scores = _scores(squared[np.ix_(left, left)], malicious)
            left = np.delete(left, scores.argmin())
        selected = np.delete(np.arange(len(squared)), left)
        num_averaged = num_selected - 2 * malicious
        lanes = {
            name: _mean_near_median([rows[row] for row in selected.tolist()], num_averaged)
            for name, rows in updates.lanes.items()
        }
        return Aggregate(lanes, num_selected, metrics={"num_left_out": float(len(left))})


def _scores(squared_BB: NDArray[np.float64], num_malicious: int) -> NDArray[np.float64]:
    """Return the sum of squared distances of each update to its nearest others: [B]."""
    # With the few updates that Bulyan has left at its end, the paper's number can be zero.
    num_nearest = max(1, len(squared_BB) - num_malicious - 2)
    ordered = np.sort(squared_BB, axis=1)  # the first is the distance of an update from itself
    scores: NDArray[np.float64] = ordered[:, 1 : num_nearest + 1].sum(axis=1)
    return scores


def _mean_near_median(rows: Rows, num_averaged: int) -> Tensor:
    """Return, for each coordinate, the mean of the values that are nearest to the median."""
    mean = torch.empty_like(rows[0])
    for part, values in iter_spans(rows):
        ordered = sort_columns(values)
        median, nearest = middle_of(ordered), torch.full_like(ordered[0], torch.inf)
        # Sorted, the nearest values are neighbors: find the window with the nearest ends.
        for start in range(len(rows) - num_averaged + 1):
            window = ordered[start : start + num_averaged]
            farthest = torch.maximum(median - window[0], window[-1] - median)
            mean[part] = torch.where(farthest < nearest, window.mean(dim=0), mean[part])
            nearest = torch.minimum(nearest, farthest)
    return mean
