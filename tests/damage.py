"""JSON files with each kind of damage that a reader must refuse."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

#: Replaces a value in a file: no key of ours has this type.
_WRONG = {"wrong": "type"}


class Damage(NamedTuple):
    """A damaged copy of a file, and a regular expression for its error message."""

    content: bytes
    says: str


def damaged(content: bytes, *, key: str, shows_values: bool = True) -> Iterator[Damage]:
    """Yield copies of a JSON object without a key, with a wrong type, or that are not JSON."""
    values = json.loads(content)
    without = {name: value for name, value in values.items() if name != key}
    yield Damage(json.dumps(without).encode(), f"{key} is missing")
    found = re.escape(repr(_WRONG)) if shows_values else "wrong"
    yield Damage(json.dumps(values | {key: _WRONG}).encode(), f"{key} is {found}: ")
    yield Damage(content[: len(content) // 2], "Invalid JSON")
    yield Damage(b"", "Invalid JSON")
