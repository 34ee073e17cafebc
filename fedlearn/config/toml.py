"""TOML as text, which :mod:`tomllib` does not do: values written, and the lines of keys."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from fedlearn.core.redaction import redacted

Key: TypeAlias = tuple[str, ...]
"""The path of a value in the tree: table names and keys."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARACTERS = 60


def toml_lines(table: Mapping[str, Any], path: Key) -> Iterator[str]:
    """Yield the lines of the table at ``path``: its own values, then the tables inside it."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    if path and (len(inner) < len(table) or not table):
        yield f"\n[{dotted(path)}]"
    for key, value in table.items():
        if key not in inner:
            yield f"{toml_key(key)} = {toml(value)}"
    for key, value in inner.items():
        yield from toml_lines(value, (*path, key))


def toml(value: Any) -> str:
    """Return a value as TOML has it; tables and arrays in one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():  # JSON's escapes are TOML's, but for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            pairs = (f"{toml_key(key)} = {toml(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case _:
            return str(value)


def toml_key(key: str) -> str:
    """Return a key as TOML has it, quoted if it must be."""
    return key if _BARE_KEY.fullmatch(key) else toml(key)


def dotted(path: Iterable[str]) -> str:
    """Return a path as a dotted key."""
    return ".".join(map(toml_key, path))


def shown(value: Any) -> str:
    """Return a value for an error: as TOML, without passwords, cut to a readable length."""
    text = redacted(toml(value))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def key_lines(text: str) -> dict[Key, int]:
    r"""Return the line, from 1, of the statement in which each table and key first stands.

    Those in arrays are left out.

    Args:
        text: Valid TOML, as :mod:`tomllib` accepts it; it tells values but not places.

    Example:
        >>> key_lines("seed = 1\n[client]\nepochs = 2")
        {('seed',): 1, ('client',): 2, ('client', 'epochs'): 3}
    """
    lines: dict[Key, int] = {}
    table: Key = ()
    statement, first = "", 1
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
    """Yield the tables and keys of a table at ``path``, each before what is in it."""
    for name, value in table.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from keys_in(value, (*path, name))
