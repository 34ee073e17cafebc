"""Conversion of values to JSON for other programs, and access to nested values by dotted keys."""

import json
from collections.abc import Iterator, Mapping

from pydantic_core import to_jsonable_python


def to_json_values(values: Mapping[str, object]) -> dict[str, object]:
    """Convert to JSON values, with NaN and infinities replaced by ``None`` at any depth.

    Example:
        >>> to_json_values({"loss": float("nan"), "over": {"auc": 0.5}, "bests": (float("inf"), 1)})
        {'loss': None, 'over': {'auc': 0.5}, 'bests': [None, 1]}
    """
    made: dict[str, object] = to_jsonable_python(values, inf_nan_mode="null", fallback=dict)
    return made


def format_json(values: Mapping[str, object]) -> str:
    """Format :func:`to_json_values` as a JSON object in one line."""
    return json.dumps(to_json_values(values), allow_nan=False)


def iterate_leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and values of a nested configuration; an empty table is a value.

    Example:
        >>> list(iterate_leaves({"seed": 1, "client": {"epochs": 2}, "metrics": {}}))
        [('seed', 1), ('client.epochs', 2), ('metrics', {})]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from iterate_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
