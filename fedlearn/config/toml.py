"""TOML as text: how values are written, and on which lines keys stand.

:mod:`tomllib` reads values but neither writes them nor says where they stood.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from fedlearn.config.redaction import redacted

Key: TypeAlias = tuple[str | int, ...]
"""The path of a value in the tree: table names, keys, and indices of arrays."""

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


def dotted(path: Iterable[str | int]) -> str:
    """Return a path as a dotted key."""
    return ".".join(toml_key(str(key)) for key in path)


def shown(value: Any) -> str:
    """Return a value for an error: as TOML, without passwords, cut to a readable length."""
    text = redacted(toml(value))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def key_lines(text: str) -> Mapping[Key, int]:
    r"""Return the line, from 1, on which each table, key and array element first stands.

    Args:
        text: Valid TOML, as :mod:`tomllib` accepts it; it tells values but not places.

    Example:
        >>> key_lines("seed = 1\n[client]\nepochs = 2")
        {('seed',): 1, ('client',): 2, ('client', 'epochs'): 3}
    """
    scanner = Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_QUOTED_KEY = re.compile(r'"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'')
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'', re.DOTALL
)
_SCALAR = re.compile(r"[^,\]}#\n]*")


class Scanner:
    """Walks over valid TOML and notes where keys stand; values are only skipped.

    Attributes:
        text: What is walked over, its lines ended by newlines alone.
        position: Index of the next character.
        lines: Where each key was first seen.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[Key, int] = {}
        self._last_index: dict[Key, int] = {}  # of each array of tables

    def document(self) -> None:
        """Note the lines of all keys of a document."""
        table: Key = ()
        while self._peek():
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)

    def key(self) -> tuple[str, ...]:
        """Return the dotted key here; blanks after it are skipped.

        Raises:
            ValueError: There is none.
        """
        parts: list[str] = []
        while not parts or self._skip("."):
            self._take(_BLANK)
            quoted = self._take(_QUOTED_KEY)
            part = tomllib.loads(f"k = {quoted}")["k"] if quoted else self._take(_BARE_KEY)
            if not (quoted or part):
                raise ValueError(f"no key at {self.position}")
            parts.append(part)
            self._take(_BLANK)
        return tuple(parts)

    def _header(self) -> Key:
        line = self._line()
        is_array = self._skip("[[")
        if not is_array:
            self._skip("[")
        key = self.key()
        self._skip("]]" if is_array else "]")
        path: Key = ()
        for part in key[:-1]:
            path = self._note((*path, part), line)
            path = (*path, self._last_index[path]) if path in self._last_index else path
        path = self._note((*path, key[-1]), line)
        if not is_array:
            return path
        self._last_index[path] = self._last_index.get(path, -1) + 1
        return self._note((*path, self._last_index[path]), line)

    def _pair(self, path: Key) -> None:
        line = self._line()
        for part in self.key():
            path = self._note((*path, part), line)
        self._skip("=")
        self._value(path)

    def _value(self, path: Key) -> None:
        match self._peek():
            case '"' | "'":
                self._take(_STRING)
            case "[":
                self._skip("[")
                index = 0
                while not self._skip("]"):
                    self._value(self._note((*path, index), self._line()))
                    self._skip(",")
                    index += 1
            case "{":
                self._skip("{")
                while not self._skip("}"):
                    self._pair(path)
                    self._skip(",")
            case _:
                self._take(_SCALAR)

    def _note(self, path: Key, line: int) -> Key:
        self.lines.setdefault(path, line)
        return path

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.position)
        self.position = found.end() if found else self.position
        return found.group() if found else ""

    def _peek(self) -> str:
        self._take(_BLANK)
        return self.text[self.position : self.position + 1]

    def _skip(self, token: str) -> bool:
        self._take(_BLANK)
        found = self.text.startswith(token, self.position)
        self.position += len(token) if found else 0
        return found
