"""Write TOML, and find the lines of its keys; :mod:`tomllib` does neither."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from fedlearn.core.redaction import redact

Key: TypeAlias = tuple[str, ...]
"""The path of a value in the tree: table names and keys."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARACTERS = 60


def toml_lines(table: Mapping[str, Any], path: Key) -> Iterator[str]:
    """Yield the lines of the table at ``path``: its own values, then the tables inside it."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    if path and (len(inner) < len(table) or not table):
        yield f"\n[{join_key(path)}]"
    for key, value in table.items():
        if key not in inner:
            yield f"{format_key(key)} = {format_toml(value)}"
    for key, value in inner.items():
        yield from toml_lines(value, (*path, key))


def format_toml(value: Any) -> str:
    """Format a value as TOML; tables and arrays on one line."""
    match value:
        # Before the last case: `str(True)` is not TOML.
        case bool():
            return "true" if value else "false"
        case str():  # JSON's escapes are valid TOML, but TOML requires DEL to be escaped too
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            pairs = (f"{format_key(key)} = {format_toml(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case list() | tuple():
            return f"[{', '.join(map(format_toml, value))}]"
        case _:
            return str(value)


def format_key(key: str) -> str:
    """Format a key as TOML, quoted if necessary."""
    return key if _BARE_KEY.fullmatch(key) else format_toml(key)


def join_key(path: Iterable[str]) -> str:
    """Return a path as a dotted key."""
    return ".".join(map(format_key, path))


def quote(value: Any) -> str:
    """Format a value for an error: as TOML, without passwords, cut to a readable length."""
    text = redact(format_toml(value))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def key_lines(text: str) -> dict[Key, int]:
    r"""Return the line of the statement that first sets each table and key, counted from 1.

    Keys inside arrays are left out.

    Args:
        text: Valid TOML, as :mod:`tomllib` accepts it.

    Example:
        >>> key_lines("seed = 1\n[client]\nepochs = 2")
        {('seed',): 1, ('client',): 2, ('client', 'epochs'): 3}
    """
    lines: dict[Key, int] = {}
    table: Key = ()
    statement, first = "", 1
    # Not `splitlines`, which also splits at characters that may be inside a TOML string, as
    # U+2028. Lines are collected until they parse: then a statement is complete.
    for number, line in enumerate(text.split("\n"), start=1):
        statement += f"{line}\n"
        try:
            parsed = tomllib.loads(statement)
        except ValueError:
            continue  # the value continues on the next line
        is_header = statement.lstrip().startswith("[")
        keys = list(keys_in(parsed, () if is_header else table))
        for key in keys:
            lines.setdefault(key, first)
        table = keys[-1] if is_header else table
        statement, first = "", number + 1
    return lines


def keys_in(table: Mapping[str, Any], path: Key = ()) -> Iterator[Key]:
    """Yield the paths of the tables and keys in a table at ``path``, parents first."""
    for name, value in table.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from keys_in(value, (*path, name))
