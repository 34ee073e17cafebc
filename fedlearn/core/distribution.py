"""How a metric is spread over clients, and which way is better: a mean hides the badly served."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # who only names parts does not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

Direction: TypeAlias = Literal["max", "min"]
"""Whether more of a measure is better ("max") or less ("min"). Whoever defines it declares it."""

#: What is recorded of each metric over clients, as ``clients/NAME_PART``.
PARTS = ("mean", "p10", "p50", "p90", "worst_decile", "by_examples", "num_clients")

#: The part that counts the clients behind the others. No model is better for more of it.
NUM_CLIENTS = "num_clients"

_OVER_CLIENTS = re.compile(rf"clients/(.+)_({'|'.join(PARTS)})")


def sign(direction: Direction) -> float:
    """Return 1 where more is better, -1 where less is: times a value, more is better."""
    return 1.0 if direction == "max" else -1.0


def split(name: str) -> tuple[str, str | None]:
    """Return the metric that a name in a record is of, and which part of its spread; else ``None``.

    Example:
        >>> split("clients/c_index_p10"), split("c_index")
        (('c_index', 'p10'), ('c_index', None))
    """
    found = _OVER_CLIENTS.fullmatch(name)
    return (name, None) if found is None else (found[1], found[2])


def by_examples(
    per_client: "Mapping[str, NDArray[np.float64]]", num_examples: "Mapping[str, NDArray[np.int64]]"
) -> dict[str, float]:
    """Return the mean of each metric over clients that count by their examples.

    It is the mean over all of their examples, where a client's value is that over its own.
    Non-finite values are left out.

    Args:
        per_client: By metric one value per client.
        num_examples: By metric those clients' examples, >= 1.

    Returns:
        ``clients/NAME_by_examples`` per metric.

    Example:
        >>> import numpy as np
        >>> by_examples({"loss": np.array([1.0, 2.0])}, {"loss": np.array([30, 10])})
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


def distribution(
    per_client: "Mapping[str, NDArray[np.float64]]", *, directions: Mapping[str, Direction]
) -> dict[str, float]:
    """Return how each metric is spread over clients.

    Non-finite values are left out: an AUC, say, of a client with one class. ``num_clients`` is
    how many values are left. The worst decile is the mean of the worst tenth of them (at least
    one): the lowest values where more is better, else the highest.

    Args:
        per_client: By metric one value per client.
        directions: By metric which way is better. A metric that nobody declared has no worst
            decile: its tails are p10 and p90.

    Returns:
        ``clients/NAME_mean``, ``_p10``, ``_p50``, ``_p90``, ``_worst_decile``, ``_num_clients``
        per metric.

    Example:
        >>> import numpy as np
        >>> spread = distribution(
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
