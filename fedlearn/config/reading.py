"""Read a TOML file and make its paths absolute, before it is validated."""

import tomllib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from fedlearn.config.keys import ANY_NAME, get_value, walk_keys
from fedlearn.config.section import Section
from fedlearn.config.toml import Key, keys_in, quote
from fedlearn.errors import ConfigError


def read(file: Path) -> tuple[dict[str, Any], str]:
    """Read a TOML file; return its values, which are not validated yet, and its text.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML.
    """
    text = read_text(file)
    return parse(text, source=str(file)), text


def read_text(file: Path) -> str:
    """Read the text of a TOML file.

    Raises:
        ConfigError: The file is missing or unreadable.
    """
    try:
        # Editors on Windows may write a byte order mark, which tomllib refuses.
        return file.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file; check the path") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8; save it as UTF-8") from error


def parse(text: str, *, source: str) -> dict[str, Any]:
    """Parse TOML; ``source`` is for error messages.

    Raises:
        ConfigError: It is not TOML.
    """
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{source}: arrays or tables are nested too deeply") from error
    except ValueError as error:
        # Before Python 3.14, the position is only in the message.
        what, _, where = str(error).partition(" (at line ")
        line, _, column = where.rstrip(")").partition(", column ")
        place = f"{source}:{line}: column {column}" if where else source
        raise ConfigError(f"{place}: not valid TOML: {what}") from error


def with_absolute_paths(
    raw: dict[str, Any],
    base: Path,
    *,
    root: type[Section],
    more: Mapping[Key, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Resolve the paths in ``raw`` values of a ``root`` relative to ``base``.

    ``more`` has further keys that may hold a path, each with its form.
    """
    for path, value, kind in list(find_paths(raw, root=root, more=more)):
        raw = with_value(raw, path, make_absolute(value, kind, base))
    return raw


def find_paths(
    raw: Mapping[str, Any],  # Any: not validated yet
    *,
    root: type[Section],
    more: Mapping[Key, str] = MappingProxyType({}),
) -> Iterator[tuple[Key, str, str]]:
    """Yield the keys of ``raw`` that hold a path or own code, each with its value and its form.

    Arguments are those of :func:`with_absolute_paths`.
    """
    # Where mypy does not follow pydantic, it takes no class of it for hashable.
    formats = {**_find_path_formats(cast("Hashable", root)), **more}
    for path in keys_in(raw):
        value = get_value(raw, path)
        # The second look-up is for tables with names of your choice.
        kind = formats.get(path) or formats.get((*path[:-2], ANY_NAME, *path[-1:]))
        if kind and value and isinstance(value, str):
            yield path, value, kind


@cache  # it takes some ten milliseconds, and each override of a run asks for it
def _find_path_formats(root: type[Section]) -> Mapping[Key, str]:
    """Return the form of path by key, over all kinds of each table, of keys that hold a path."""
    return {each.path: kind for each in walk_keys(root) if (kind := each.path_format())}


def with_value(table: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of ``table`` with a value set at ``path``.

    Raises:
        ValueError: A key on the path holds a value that is not a table.
    """
    key, *rest = path
    if not rest:
        return table | {key: value}
    inner = table.get(key, {})
    if not isinstance(inner, dict):
        text = f"{key} is {quote(inner)} and not a table; remove one of the two"
        raise ValueError(text)  # noqa: TRY004  what is wrong is the text of an override
    return table | {key: with_value(inner, rest, value)}


def make_absolute(value: str, kind: str, base: Path) -> str:
    """Resolve a path, or the file of own code, relative to ``base``; ``kind`` is its form."""
    path, colon, function = value.rpartition(":") if kind == "factory" else (value, "", "")
    if kind == "factory" and not path.endswith(".py"):
        return value  # a module
    expanded = Path(path).expanduser() if path.startswith("~/") else Path(path)
    return f"{base / expanded}{colon}{function}"
