"""Conversion of values to JSON for other programs, and access to nested values by dotted keys."""

import json
from collections.abc import Iterator, Mapping

from pydantic_core import to_jsonable_python


def json_values(values: Mapping[str, object]) -> dict[str, object]:
    """Convert to JSON values, with NaN and infinities replaced by ``None`` at any depth.

    Example:
        >>> json_values({"loss": float("nan"), "metrics": {"auc": 0.5}, "bests": (float("inf"), 1)})
        {'loss': None, 'metrics': {'auc': 0.5}, 'bests': [None, 1]}
    """
    made: dict[str, object] = to_jsonable_python(values, inf_nan_mode="null", fallback=dict)
    return made


def json_text(values: Mapping[str, object]) -> str:
    """Format :func:`json_values` as a JSON object in one line."""
    return json.dumps(json_values(values), allow_nan=False)


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and values of a nested configuration; an empty table is a value.

    Example:
        >>> list(leaves({"seed": 1, "client": {"epochs": 2}, "metrics": {}}))
        [('seed', 1), ('client.epochs', 2), ('metrics', {})]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
