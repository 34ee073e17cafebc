"""Read a TOML file and make its paths absolute, before it is validated."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedlearn.config.keys import ANY_NAME, get_value, walk_keys
from fedlearn.config.section import Section
from fedlearn.config.toml import Key, keys_in, quote
from fedlearn.errors import ConfigError


def read(file: Path) -> tuple[dict[str, Any], str]:
    """Read a TOML file; return its values, which are not validated yet, and its text.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML.
    """
    try:
        # Editors on Windows may write a byte order mark, which tomllib refuses.
        text = file.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
        return tomllib.loads(text), text
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file; check the path") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: arrays or tables are nested too deeply") from error
    except ValueError as error:
        # Before Python 3.14, the position is only in the message. (A UnicodeDecodeError is a
        # ValueError, too, and was caught above.)
        what, _, where = str(error).partition(" (at line ")
        line, _, column = where.rstrip(")").partition(", column ")
        place = f"{file}:{line}: column {column}" if where else f"{file}"
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
    # The form of path by key, over all kinds of each table.
    formats = {each.path: kind for each in walk_keys(root) if (kind := each.path_format())}
    formats |= more
    for path in keys_in(raw):
        value = get_value(raw, path)
        # The second look-up is for tables with names of your choice.
        kind = formats.get(path) or formats.get((*path[:-2], ANY_NAME, *path[-1:]))
        if kind and value and isinstance(value, str):
            raw = with_value(raw, path, _make_absolute(value, kind, base))
    return raw


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


def _make_absolute(value: str, kind: str, base: Path) -> str:
    path, colon, function = value.rpartition(":") if kind == "factory" else (value, "", "")
    if kind == "factory" and not path.endswith(".py"):
        return value  # a module
    expanded = Path(path).expanduser() if path.startswith("~/") else Path(path)
    return f"{base / expanded}{colon}{function}"
