"""Decides whether a metric improved, and whether it reached its target."""

import math
from dataclasses import dataclass

from fedlearn.core.distribution import Direction, improvement_sign


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A metric to improve, as for early stopping.

    Attributes:
        metric: The metric's recorded name.
        direction: Whether higher or lower values are better.
        min_improvement: A change counts as an improvement if it exceeds this, >= 0.
        target: The value that is good enough; ``None``: there is no target.
    """

    metric: str
    direction: Direction
    min_improvement: float
    target: float | None

    def improves(self, value: float, best: float) -> bool:
        """Return whether ``value`` beats ``best``; anything finite beats NaN.

        Example:
            >>> loss = Goal(metric="loss", direction="min", min_improvement=0.1, target=0.5)
            >>> loss.improves(0.85, 1.0), loss.improves(0.95, 1.0), loss.reaches(0.5)
            (True, False, True)
        """
        if math.isnan(value):
            return False
        return (
            math.isnan(best)
            or improvement_sign(self.direction) * (value - best) > self.min_improvement
        )

    def reaches(self, value: float) -> bool:
        """Return whether ``value`` is good enough; NaN never is."""
        return (
            self.target is not None
            and improvement_sign(self.direction) * (value - self.target) >= 0.0
        )
