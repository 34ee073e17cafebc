"""ε of Gaussian noise, in closed form: what a client computes for itself.

References:
    Balle and Wang, 2018, `Improving the Gaussian Mechanism for Differential Privacy
    <https://arxiv.org/abs/1805.06530>`_, theorem 8.
"""

import math

from scipy.special import log_ndtr


def gaussian_epsilon(distance: float, target_delta: float) -> float:
    """Return ε of one Gaussian of standard deviation 1 that is moved by ``distance``.

    Args:
        distance: At least 0; of several releases, the root of the sum of squares.
        target_delta: δ, in (0, 1).

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 3)
        4.377
    """

    def log_delta(epsilon: float) -> float:
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
    return high
