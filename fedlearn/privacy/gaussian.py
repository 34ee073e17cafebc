"""ε of Gaussian noise in closed form, which needs no accountant, so that clients can compute it.

References:
    Balle and Wang, 2018, `Improving the Gaussian Mechanism for Differential Privacy
    <https://arxiv.org/abs/1805.06530>`_, theorem 8.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr


def gaussian_epsilon(distance: float, target_delta: float) -> float:
    r"""Return ε of a Gaussian of standard deviation 1 whose mean moves by ``distance``.

    It inverts :math:`\delta(\varepsilon) = \Phi(\mu/2 - \varepsilon/\mu) - e^\varepsilon
    \Phi(-\mu/2 - \varepsilon/\mu)` with :math:`\mu` the distance.

    Args:
        distance: At least 0; for several releases, the root of the sum of squares.
        target_delta: δ, in (0, 1).

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 3)
        4.377
    """

    def log_delta(epsilon: float) -> float:
        # In logarithms: e^ε overflows, and the tails underflow, long before their product does.
        above = float(log_ndtr(distance / 2.0 - epsilon / distance))
        below = epsilon + float(log_ndtr(-distance / 2.0 - epsilon / distance))
        return (
            above + math.log1p(-math.exp(min(0.0, below - above))) if below < above else -math.inf
        )

    if distance == 0.0 or log_delta(0.0) <= math.log(target_delta):
        return 0.0
    low, high = 0.0, 1.0
    while log_delta(high) > math.log(target_delta):
        low, high = high, high * 2.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2.0
        if log_delta(middle) > math.log(target_delta):
            low = middle
        else:
            high = middle
    # The upper end of the bracket: the lower one could understate ε.
    return high


def mixture_epsilon(
    squares: NDArray[np.float64], chances: NDArray[np.float64], target_delta: float
) -> float:
    """Return ε of a Gaussian whose mean moves by a random distance that the adversary sees.

    Args:
        squares: Squares of the possible distances, each at least 0: shape [n].
        chances: Probability of each distance, at most 1 in total: shape [n].
        target_delta: δ, in (0, 1).

    Example:
        >>> round(mixture_epsilon(np.array([0.0, 1.0]), np.array([0.9, 0.1]), 1e-6), 3)
        4.377
    """
    is_moved = squares > 0.0
    distances, chances = np.sqrt(squares[is_moved]), chances[is_moved]

    def delta(epsilon: float) -> float:
        above = log_ndtr(distances / 2.0 - epsilon / distances)
        below = epsilon + log_ndtr(-distances / 2.0 - epsilon / distances)
        # Rounding may turn a tiny positive difference negative: count it as 0.
        return float(chances @ (np.exp(above) * -np.expm1(np.minimum(0.0, below - above))))

    if delta(0.0) <= target_delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta(high) > target_delta:
        low, high = high, high * 2.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2.0
        if delta(middle) > target_delta:
            low = middle
        else:
            high = middle
    return high
