r"""Distances between the updates of a round, in one pass over them and in bounded memory.

The rules here need only the matrix D of squared distances between the updates. Each of their
intermediate results is a mean :math:`v = \sum_k c_k x_k` whose coefficients add up to 1, and the
distances from it follow from D:

.. math:: \|v - x_k\|^2 = (D c)_k - \tfrac{1}{2} c^\top D c.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import add_weighted, iter_spans
from fedlearn.algorithms.lanes import DELTA, Lanes, Rows, Updates


def pairwise_squares(rows: Rows, *, num_columns: int | None) -> NDArray[np.float64]:
    """Compute the squared distances between all pairs of rows, over the first columns: [B, B].

    Example:
        >>> pairwise_squares([torch.zeros(2), torch.ones(2)], num_columns=None).tolist()
        [[0.0, 2.0], [2.0, 0.0]]
    """
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
    for _, values in iter_spans([row[:num_columns] for row in rows]):
        wide = values.double()  # in float32, near updates of large norm would have no distance
        products.addmm_(wide, wide.t())
    products = (products + products.t()) / 2.0  # so that ties are exact
    squares = products.diagonal()
    distances = (squares[:, None] + squares - 2.0 * products).clamp_(min=0.0)
    return distances.cpu().numpy()


def delta_distances(updates: Updates) -> NDArray[np.float64]:
    """Compute the squared distances between deltas; running statistics do not count: [B, B]."""
    return pairwise_squares(updates.lanes[DELTA.name], num_columns=updates.num_trained)


def distances_from_mean(
    squared_BB: NDArray[np.float64], coefficients_B: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute the distance of each row from a mean of the rows, whose coefficients add up to 1.

    Example:
        >>> squared = pairwise_squares([torch.zeros(1), torch.ones(1)], num_columns=None)
        >>> distances_from_mean(squared, np.asarray([0.75, 0.25])).tolist()
        [0.25, 0.75]
    """
    to_rows_B = squared_BB @ coefficients_B
    squared_B = to_rows_B - coefficients_B @ to_rows_B / 2.0
    distances_B: NDArray[np.float64] = np.sqrt(np.maximum(squared_B, 0.0))
    return distances_B


def combine_rows(updates: Updates, coefficients_B: NDArray[np.float64] | Sequence[float]) -> Lanes:
    """Return the sum of coefficients times rows, for every lane."""
    combined = dict[str, Tensor]()
    for name, rows in updates.lanes.items():
        total = combined[name] = torch.zeros_like(rows[0])
        add_weighted(total, rows, total.new_tensor(coefficients_B))
    return combined
