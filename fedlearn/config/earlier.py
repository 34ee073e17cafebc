"""Keys of earlier versions.

In a configuration file they are refused, with advice on what to write instead. In the record of a
run that an earlier version started, they are translated to the current keys.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

from fedlearn.config.keys import ANY_NAME, get_value
from fedlearn.config.reading import with_value
from fedlearn.config.toml import Key, quote

_STALENESS = ("max_staleness", "staleness_weight", "staleness_exponent", "staleness_hinge")

#: Renamed keys, with their current names.
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
#: Removed keys, with the value that now always applies: their former default.
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
    # The second form is for tables whose names the user chooses.
    for key in (".".join(path), ".".join((*path[:-2], ANY_NAME, *path[-1:]))):
        if key in RENAMED:
            return f"it is {RENAMED[key]} now"
        if key in FIXED:
            return f"it is always {quote(FIXED[key])} now; remove it"
    return None


def read_earlier(raw: dict[str, Any]) -> dict[str, Any]:  # Any, here and below: not validated yet
    """Translate the keys of earlier versions in the tree of a record.

    Raises:
        ValueError: A removed key has another value than the one that now always applies.
    """
    # The tables inside are changed below, and belong to the caller's record.
    raw = deepcopy(raw)
    # Earlier versions required it to equal privacy.clip_norm, which now takes its place.
    if get_value(raw, ("privacy", "mode")) == "distributed":
        raw.get("secure_aggregation", {}).pop("clip_norm", None)
    for old, new in RENAMED.items():
        for table, key in _iter_tables(raw, old):
            value = table.pop(key)
            if table.get("mode") in ("off", "drop"):
                continue  # the table was off, so the value had no effect
            path = tuple(new.split("."))
            # The entries of a table are merged with those already there.
            pairs = value.items() if isinstance(value, dict) else [(path[-1], value)]
            into = path if isinstance(value, dict) else path[:-1]
            for name, each in pairs:
                raw = with_value(raw, (*into, name), each)
    for old, fixed in FIXED.items():
        for table, key in _iter_tables(raw, old):
            if (value := table.pop(key)) != fixed:
                raise ValueError(f"{old}: is {quote(value)}, and is always {quote(fixed)} now")
    return raw


def _iter_tables(raw: Any, dotted_key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each table of ``raw`` that has the key ``dotted_key``, with the key's last part."""
    *path, key = dotted_key.split(".")
    tables = [raw]
    for name in path:
        inner = [each for each in tables if isinstance(each, dict)]
        tables = [
            value
            for each in inner
            for value in (each.values() if name == ANY_NAME else [each.get(name)])
        ]
    yield from ((each, key) for each in tables if isinstance(each, dict) and key in each)
