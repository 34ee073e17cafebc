"""The coordinate-wise median and trimmed mean, which a minority of clients cannot move far."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Lt, doc
from torch import Tensor

from fedlearn.algorithms.aggregations import RobustAggregation, iter_spans
from fedlearn.algorithms.lanes import Lanes, Rows, Updates
from fedlearn.core.ranges import Ranged

#: Columns that are sorted at a time.
_COLUMNS = 1024


@dataclass(frozen=True)
class CoordinateMedian(RobustAggregation):
    """The median of each coordinate over the clients; all clients count the same.

    With an even number of clients it is the mean of the two in the middle. It needs every update at
    once, so its memory grows with the cohort.

    Example:
        >>> rows = {"delta": torch.tensor([[1.0], [2.0], [90.0]])}
        >>> CoordinateMedian().combine(Updates([0, 1, 2], torch.ones(3), rows, [0, 0, 0]))["delta"]
        tensor([2.])

    References:
        Yin et al., 2018, `Byzantine-Robust Distributed Learning: Towards Optimal Statistical
        Rates <https://arxiv.org/abs/1803.01498>`_, algorithm 1, option I.
    """

    def combine(self, updates: Updates) -> Lanes:
        """Return the median of every lane."""
        return {name: _median(rows) for name, rows in updates.lanes.items()}


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Ranged, RobustAggregation):
    r"""The mean of each coordinate without its largest and smallest values.

    Of n values, the :math:`\lfloor \beta n \rfloor` largest and as many of the smallest are left
    out. All clients count the same. With :math:`\beta = 0` it is the unweighted mean.

    Attributes:
        trimmed_share: :math:`\beta`.

    Example:
        >>> rows = {"delta": torch.tensor([[1.0], [2.0], [3.0], [90.0]])}
        >>> updates = Updates([0, 1, 2, 3], torch.ones(4), rows, [0, 0, 0, 0])
        >>> TrimmedMean(trimmed_share=0.25).combine(updates)["delta"]
        tensor([2.5000])

    References:
        Yin et al., 2018, `Byzantine-Robust Distributed Learning: Towards Optimal Statistical
        Rates <https://arxiv.org/abs/1803.01498>`_, algorithm 1, option II.
    """

    trimmed_share: Annotated[
        float,
        Ge(0),
        Lt(0.5),
        doc(
            "Share of the values of each coordinate that is left out at either end, >= 0 and "
            "< 0.5: at least the share of clients that attack."
        ),
    ]

    def combine(self, updates: Updates) -> Lanes:
        """Return the trimmed mean of every lane."""
        return {name: self._mean(rows) for name, rows in updates.lanes.items()}

    def _mean(self, rows: Rows) -> Tensor:
        mean = torch.empty_like(rows[0])
        cut = int(self.trimmed_share * len(rows) + 1e-9)  # 0.29 * 100 is a little below 29
        for part, values in iter_spans(rows):
            mean[part] = sort_columns(values)[cut : len(rows) - cut].mean(dim=0)
        return mean


def sort_columns(values: Tensor) -> Tensor:
    """Return the values, each column in ascending order."""
    if _sorts_by_numpy(values):
        return torch.from_numpy(np.sort(values.numpy(), axis=0))
    return values.sort(dim=0).values


def _sorts_by_numpy(values: Tensor) -> bool:
    # On a CPU, NumPy sorts ten times as fast as torch.
    return values.is_cpu and values.dtype in (torch.float32, torch.float64)


def middle_of(ordered: Tensor) -> Tensor:
    """Return the median of each column of ascending values."""
    half = len(ordered) // 2
    upper = ordered[half]
    return upper if len(ordered) % 2 else (ordered[half - 1] + upper) / 2


def _median(rows: Rows) -> Tensor:
    median = torch.empty_like(rows[0])
    if not _sorts_by_numpy(median):
        for part, values in iter_spans(rows):
            median[part] = middle_of(sort_columns(values))
        return median
    # Transposed, each column's values lie next to each other, and few columns stay in the cache.
    arrays = [row.numpy() for row in rows]
    for begin in range(0, len(median), _COLUMNS):
        columns_SB = np.stack([row[begin : begin + _COLUMNS] for row in arrays], axis=1)
        columns_SB.sort(axis=1)
        median[begin : begin + _COLUMNS] = middle_of(torch.from_numpy(columns_SB.T))
    return median
