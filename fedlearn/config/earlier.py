"""Keys that earlier versions had.

The loader refuses them and says what to write. In the record of a run that an earlier version
began, they are read as what they are now.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

from fedlearn.config.keys import ANY_NAME, value_at
from fedlearn.config.reading import with_value
from fedlearn.config.toml import Key, shown

_STALENESS = ("max_staleness", "staleness_weight", "staleness_exponent", "staleness_hinge")

#: Where what they say stands now.
RENAMED: Final[Mapping[str, str]] = {
    "flower.train_config": "client.extra",
    "client.max_gradient_norm": "client.gradient_clip_norm",
    "coordinator.training.max_gradient_norm": "coordinator.training.gradient_clip_norm",
    **{
        f"{table}.{key}": f"staleness.{key}"
        for table in ("asynchronous", "late_updates")
        for key in _STALENESS
    },
}
#: The value that now always holds: that of the default, which nobody had a reason to change.
FIXED: Final[Mapping[str, object]] = {
    "privacy.clip_learning_rate": 0.2,
    "late_updates.deadline_window": 5,
    "secure_aggregation.eta_bits": 30,
    "coordinator.training.initial_loss_scale": 65536.0,
    "coordinator.training.bucket_mbytes": 25.0,
    f"coordinator.training.files.{ANY_NAME}.window_mbytes": 256.0,
}


def advise(path: Key) -> str | None:
    """Return the advice for a key of an earlier version; ``None`` if there was no such key."""
    for key in (".".join(path), ".".join((*path[:-2], ANY_NAME, *path[-1:]))):
        if key in RENAMED:
            return f"it is {RENAMED[key]} now"
        if key in FIXED:
            return f"it is always {shown(FIXED[key])} now; remove it"
    return None


def read_earlier(raw: dict[str, Any]) -> dict[str, Any]:  # Any, here and below: not validated yet
    """Return the tree of a record with each key of an earlier version as it is now.

    Raises:
        ValueError: One has a value that this version cannot give it.
    """
    raw = deepcopy(raw)
    if value_at(raw, ("privacy", "mode")) == "distributed":  # they were the same, by force
        raw.get("secure_aggregation", {}).pop("clip_norm", None)
    for old, new in RENAMED.items():
        for table, key in _tables_with(raw, old):
            value = table.pop(key)
            if table.get("mode") in ("off", "drop"):
                continue  # it meant nothing
            path = tuple(new.split("."))
            # The entries of a table go next to those that are there.
            pairs = value.items() if isinstance(value, dict) else [(path[-1], value)]
            into = path if isinstance(value, dict) else path[:-1]
            for name, each in pairs:
                raw = with_value(raw, (*into, name), each)
    for old, fixed in FIXED.items():
        for table, key in _tables_with(raw, old):
            if (value := table.pop(key)) != fixed:
                raise ValueError(f"{old}: is {shown(value)}, and is always {shown(fixed)} now")
    return raw


def _tables_with(raw: Any, dotted: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the tables of ``raw`` that have the key ``dotted``, and its name in them."""
    *path, key = dotted.split(".")
    tables = [raw]
    for name in path:
        inner = [each for each in tables if isinstance(each, dict)]
        tables = [
            value
            for each in inner
            for value in (each.values() if name == ANY_NAME else [each.get(name)])
        ]
    yield from ((each, key) for each in tables if isinstance(each, dict) and key in each)
