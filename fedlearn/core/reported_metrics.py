"""Metrics that clients report. Clients choose names and values, and neither is trusted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Most metrics kept of one reply.
MAX_METRICS = 64
#: Most characters in a metric's name.
MAX_NAME = 64


def select_recordable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the metrics of a reply that may be recorded, limiting their number and their names.

    Example:
        >>> select_recordable({"grad_norm": 0.5, "": 1.0, "x" * 65: 1.0})
        {'grad_norm': 0.5}
    """
    # Unprintable names could hide or reorder what a terminal shows.
    sound = [name for name in metrics if 0 < len(name) <= MAX_NAME and name.isprintable()]
    return {name: metrics[name] for name in sound[:MAX_METRICS]}


def list_majority_names(num_named: Mapping[str, int], *, num_replies: int) -> list[str]:
    """Return the names that more than half of the replies have, sorted.

    A name that only few clients report is a mistake or an attack, not a measurement. There are
    fewer such common names than twice :data:`MAX_METRICS`.
    """
    return sorted(name for name, num in num_named.items() if 2 * num > num_replies)


@dataclass
class WeightedMeans:
    """Accumulates the training metrics of a round into weighted means."""

    num_replies: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, int] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float], *, num_examples: int) -> None:
        """Add the metrics of a report, without NaN and infinity.

        ``loss`` is left out: it is recorded in the client's participation.
        """
        self.num_replies += 1
        for name, value in select_recordable(metrics).items():
            if name != "loss" and math.isfinite(value):
                self._sums[name] = self._sums.get(name, 0.0) + num_examples * value
                self._weights[name] = self._weights.get(name, 0) + num_examples
                self._counts[name] = self._counts.get(name, 0) + 1

    def close(self) -> dict[str, float]:
        """Return the means over the reports that have each metric, weighted by examples.

        Only of names that more than half of the reports have, and only finite means.
        """
        names = list_majority_names(self._counts, num_replies=self.num_replies)
        means = {name: self._sums[name] / self._weights[name] for name in names}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}
