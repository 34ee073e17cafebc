"""Draws without replacement in which each client has a given probability of being drawn."""

import numpy as np
from numpy.typing import NDArray


def inclusion_probabilities(
    weights_N: NDArray[np.float64], *, num_drawn: int
) -> NDArray[np.float64]:
    """Return probabilities proportional to the weights, at most 1, that sum to ``num_drawn``.

    A client whose share would exceed 1 is certain to be drawn; the others divide the rest.

    Args:
        weights_N: Weights > 0: [N].
        num_drawn: Clients to draw, <= N.

    Example:
        >>> inclusion_probabilities(np.array([1.0, 1.0, 2.0, 12.0]), num_drawn=2)
        array([0.25, 0.25, 0.5 , 1.  ])
    """
    probabilities_N = np.ones(len(weights_N))
    is_open_N = np.ones(len(weights_N), bool)
    while is_open_N.any():
        left = num_drawn - np.count_nonzero(~is_open_N)
        shares_N = left * weights_N / weights_N[is_open_N].sum()
        exceeds_N = is_open_N & (shares_N >= 1.0)
        if not exceeds_N.any():
            probabilities_N[is_open_N] = shares_N[is_open_N]
            break
        # Each round makes at least one client certain, so this ends.
        is_open_N &= ~exceeds_N
    return probabilities_N


def draw_systematically(
    probabilities_N: NDArray[np.float64], order_N: NDArray[np.int64], *, start: float
) -> NDArray[np.int64]:
    """Draw each client with exactly its probability, and their sum of clients.

    The probabilities are laid end to end in some order, and a client is drawn if one of the points
    ``start``, ``start`` + 1, … falls on its part.

    Args:
        probabilities_N: Probabilities whose sum is a whole number: [N].
        order_N: The order, a permutation: clients that are neighbors are rarely drawn together.
        start: Uniform in [0, 1).

    Returns:
        The positions drawn, in this order.

    References:
        Madow, 1949, `On the Theory of Systematic Sampling, II
        <https://doi.org/10.1214/aoms/1177729988>`_.

    Example:
        >>> draw_systematically(np.array([0.25, 0.25, 0.5, 1.0]), np.arange(4), start=0.3)
        array([1, 3])
    """
    ends_N = np.cumsum(probabilities_N[order_N])
    num_drawn = round(float(ends_N[-1]))
    # Rounding may leave the last end just below the number of points.
    ends_N[-1] = max(ends_N[-1], num_drawn)
    return order_N[np.searchsorted(ends_N, start + np.arange(num_drawn), side="right")]
