"""How a metric is spread over clients: a mean hides those that a model serves badly."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def distribution(per_client: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return how each metric is spread over clients.

    Non-finite values are left out. The worst decile is the mean of the worst tenth of the
    clients (at least one): the lowest values, or the highest of a loss.

    Args:
        per_client: By metric one value per client.

    Returns:
        ``clients/NAME_mean``, ``_p10``, ``_p50``, ``_p90``, ``_worst_decile`` per metric.

    Example:
        >>> spread = distribution({"accuracy": np.linspace(0.1, 1.0, 10)})
        >>> round(spread["clients/accuracy_p50"], 2), spread["clients/accuracy_worst_decile"]
        (0.55, 0.1)
    """
    metrics: dict[str, float] = {}
    for name, values in per_client.items():
        finite = np.sort(values[np.isfinite(values)])
        if finite.size == 0:
            continue
        tenth = max(1, finite.size // 10)
        worst = finite[-tenth:] if "loss" in name else finite[:tenth]
        p10, p50, p90 = np.quantile(finite, [0.1, 0.5, 0.9])
        parts = {"mean": finite.mean(), "p10": p10, "p50": p50, "p90": p90}
        parts["worst_decile"] = worst.mean()
        metrics |= {f"clients/{name}_{part}": float(value) for part, value in parts.items()}
    return metrics
