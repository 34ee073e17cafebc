"""Distribution of a metric over clients: a mean alone hides clients that the model serves badly."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # importing this module must not load numpy, which is slow
    import numpy as np
    from numpy.typing import NDArray

Direction: TypeAlias = Literal["max", "min"]
"""Whether more of a measure is better ("max") or less ("min"). The measure declares it."""

#: Statistics recorded of each metric over clients, as ``clients/NAME_PART``.
PARTS = ("mean", "p10", "p50", "p90", "worst_decile", "by_examples", "num_clients")

#: The statistic that counts the clients behind the others. Higher is not better here.
NUM_CLIENTS = "num_clients"

_OVER_CLIENTS = re.compile(rf"clients/(.+)_({'|'.join(PARTS)})")


def improvement_sign(direction: Direction) -> float:
    """Return 1 for "max" and -1 for "min": a value times this sign is better if it is higher."""
    return 1.0 if direction == "max" else -1.0


def split_statistic(name: str) -> tuple[str, str | None]:
    """Split a recorded name into the metric and its statistic over clients (``None``: it has none).

    Example:
        >>> split_statistic("clients/c_index_p10"), split_statistic("c_index")
        (('c_index', 'p10'), ('c_index', None))
    """
    found = _OVER_CLIENTS.fullmatch(name)
    return (name, None) if found is None else (found[1], found[2])


def average_by_examples(
    per_client: "Mapping[str, NDArray[np.float64]]", num_examples: "Mapping[str, NDArray[np.int64]]"
) -> dict[str, float]:
    """Return the mean of each metric over clients, weighted by their number of examples.

    If each client's value is a mean over its own examples, this is the mean over all examples.
    Non-finite values are left out.

    Args:
        per_client: By metric, one value per client.
        num_examples: By metric, the same clients' numbers of examples, >= 1.

    Returns:
        ``clients/NAME_by_examples`` per metric.

    Example:
        >>> import numpy as np
        >>> average_by_examples({"loss": np.array([1.0, 2.0])}, {"loss": np.array([30, 10])})
        {'clients/loss_by_examples': 1.25}
    """
    import numpy as np  # noqa: PLC0415 (see above)

    metrics: dict[str, float] = {}
    for name, values in per_client.items():
        is_finite = np.isfinite(values)
        if is_finite.any():
            weights = num_examples[name][is_finite].astype(np.float64)
            mean = np.average(values[is_finite], weights=weights)
            metrics[f"clients/{name}_by_examples"] = float(mean)
    return metrics


def summarize_metrics(
    per_client: "Mapping[str, NDArray[np.float64]]", *, directions: Mapping[str, Direction]
) -> dict[str, float]:
    """Summarize each metric over clients: mean, quantiles and worst decile.

    Non-finite values are left out, such as the AUC of a client with one class. ``num_clients``
    counts the values that are left. The worst decile is the mean of the worst tenth of them (at
    least one): the lowest values if higher is better, else the highest.

    Args:
        per_client: By metric, one value per client.
        directions: By metric, whether higher or lower is better. A metric without a direction
            has no worst decile; its tails are p10 and p90.

    Returns:
        ``clients/NAME_mean``, ``_p10``, ``_p50``, ``_p90``, ``_worst_decile``, ``_num_clients``
        per metric.

    Example:
        >>> import numpy as np
        >>> spread = summarize_metrics(
        ...     {"accuracy": np.linspace(0.1, 1.0, 10)}, directions={"accuracy": "max"}
        ... )
        >>> round(spread["clients/accuracy_p50"], 2), spread["clients/accuracy_worst_decile"]
        (0.55, 0.1)
    """
    import numpy as np  # noqa: PLC0415 (see above)

    metrics: dict[str, float] = {}
    for name, values in per_client.items():
        finite = np.sort(values[np.isfinite(values)])
        if finite.size == 0:
            continue
        p10, p50, p90 = np.quantile(finite, [0.1, 0.5, 0.9])
        parts = {"mean": finite.mean(), "p10": p10, "p50": p50, "p90": p90}
        if name in directions:
            tenth = max(1, finite.size // 10)
            worst = finite[:tenth] if directions[name] == "max" else finite[-tenth:]
            parts["worst_decile"] = worst.mean()
        parts[NUM_CLIENTS] = np.float64(finite.size)
        metrics |= {f"clients/{name}_{part}": float(value) for part, value in parts.items()}
    return metrics
