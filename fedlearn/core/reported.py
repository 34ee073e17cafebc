"""Metrics that clients report, by names of their own: clients are not trusted with either."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: So many metrics of one reply are kept.
MAX_METRICS = 64
#: Characters of a metric's name, at the most.
MAX_NAME = 64


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those of a reply's metrics that may be recorded: of so many and so long names.

    Example:
        >>> named({"grad_norm": 0.5, "": 1.0, "x" * 65: 1.0})
        {'grad_norm': 0.5}
    """
    sound = [name for name in metrics if 0 < len(name) <= MAX_NAME and name.isprintable()]
    return {name: metrics[name] for name in sound[:MAX_METRICS]}


def usual(num_named: Mapping[str, int], *, num_replies: int) -> list[str]:
    """Return the names that more than half of the replies have, sorted.

    What few clients name is a mistake or a nuisance, not a measurement. So many names at the most
    are usual as twice those that one reply may have.
    """
    return sorted(name for name, num in num_named.items() if 2 * num > num_replies)


@dataclass
class WeightedMeans:
    """Training metrics of a round on their way to their means."""

    num_replies: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, int] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float], *, num_examples: int) -> None:
        """Take the metrics of a report; ``loss`` is the participation's, and NaN counts as none."""
        self.num_replies += 1
        for name, value in named(metrics).items():
            if name != "loss" and math.isfinite(value):
                self._sums[name] = self._sums.get(name, 0.0) + num_examples * value
                self._weights[name] = self._weights.get(name, 0) + num_examples
                self._counts[name] = self._counts.get(name, 0) + 1

    def close(self) -> dict[str, float]:
        """Return the means over the reports that have them, weighted by examples; finite."""
        names = usual(self._counts, num_replies=self.num_replies)
        means = {name: self._sums[name] / self._weights[name] for name in names}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}
