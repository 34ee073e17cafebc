"""Explain the problems of a configuration: place, key, value and remedy."""

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedlearn.config.earlier import advise
from fedlearn.config.keys import KeyInfo, get_value, kinds_of, walk_keys
from fedlearn.config.section import Section, get_tag
from fedlearn.config.toml import Key, join_key, key_lines, quote
from fedlearn.core.redaction import redact
from fedlearn.errors import ConfigError

SectionT = TypeVar("SectionT", bound=Section)

#: TOML's integers have 64 bits, as do those of the libraries below; tomllib reads longer ones.
_INTEGERS = range(-(2**63), 2**63)


class Complaint(NamedTuple):
    """A problem to report; complaints sort by line, then by override."""

    order: tuple[float, int]
    text: str


@dataclass(frozen=True)
class Override:
    """One ``--set``, parsed, and its original ``text``."""

    path: Key
    value: Any  # what TOML can hold
    text: str


@dataclass(frozen=True)
class Sources:
    """Where values came from.

    Attributes:
        name: The file, or what errors name in its place.
        text: TOML text of the file.
        overrides: Overrides in the order in which they were applied.
    """

    name: str
    text: str = ""
    overrides: tuple[Override, ...] = ()

    @cached_property
    def lines(self) -> Mapping[Key, int]:
        """Line of each key in the file."""
        return key_lines(self.text)

    def complain(self, keys: Sequence[Key], text: str) -> Complaint:
        """Build a complaint about ``keys[0]``, located where one of ``keys`` was set."""
        order, place = self._locate(keys)
        return Complaint(order, f"{place}: {join_key(keys[0])}: {text}")

    def _locate(self, keys: Sequence[Key]) -> tuple[tuple[float, int], str]:
        """Return the sort order and name of the override or line that set one of ``keys``.

        If none was set, it is the line of the nearest table around ``keys[0]``, or the file.
        """
        parents = [keys[0][:depth] for depth in reversed(range(1, len(keys[0])))]
        lines = [key for key in keys if key in self.lines]
        setting = [self._find_override(key, inside=False) for key in keys]
        inside = [] if lines else [self._find_override(key, inside=True) for key in keys]
        # Overrides first: they win over the file, so they are what the user has to change.
        for index in (*setting, *inside):
            if index is not None:
                return (math.inf, index), f"--set {redact(self.overrides[index].text)}"
        for key in (*lines, *(parent for parent in parents if parent in self.lines)):
            return (self.lines[key], 0), f"{self.name}:{self.lines[key]}"
        return (0, 0), self.name

    def _find_override(self, key: Key, *, inside: bool) -> int | None:
        """Return the index of the last override of ``key`` or a table around it.

        With ``inside``, it is the last override of ``key`` or of a key inside it.
        """
        for index in reversed(range(len(self.overrides))):
            path = self.overrides[index].path
            if (path[: len(key)] == key) if inside else (key[: len(path)] == path):
                return index
        return None


def validate(
    root: type[SectionT],
    raw: dict[str, Any],
    *,
    sources: Sources,
    complaints: Sequence[Complaint] = (),
) -> SectionT:
    """Validate ``raw`` values as a ``root``.

    Raises:
        ConfigError: Lists all problems of the values, after adding ``complaints`` found before.
            Integers beyond 64 bits are reported alone.
    """
    if huge := [
        sources.complain([key], f"is {quote(value)}; give an integer below 2^63")
        for key, value in _walk_leaves(raw)
        if isinstance(value, int) and value not in _INTEGERS
    ]:
        raise _build_error(huge)
    try:
        tree = root.model_validate(raw)
    except ValidationError as error:
        explained = (_explain(details, raw, sources, root) for details in _drop_repeated(error))
        found = [complaint for each in explained for complaint in each]
        raise _build_error([*complaints, *found]) from error
    if complaints:
        raise _build_error(complaints)
    return tree


def _walk_leaves(value: Any, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the leaves of a tree with their keys; items of an array have the array's key."""
    match value:
        case dict():
            for key, item in value.items():
                yield from _walk_leaves(item, (*path, str(key)))
        case list() | tuple():
            for item in value:
                yield from _walk_leaves(item, path)
        case _:
            yield path, value


def _drop_repeated(error: ValidationError) -> Collection[ErrorDetails]:
    """Return its errors; of equal errors in several items of an array, only the first."""
    found: dict[Key, ErrorDetails] = {}
    for details in error.errors():
        place = [each for each in details["loc"] if isinstance(each, str)]
        found.setdefault((details["type"], *place), details)
    return found.values()


def _build_error(complaints: Iterable[Complaint]) -> ConfigError:
    lines = [each.text for each in sorted(set(complaints))]
    heading = [] if len(lines) == 1 else [f"{len(lines)} problems in the configuration:"]
    return ConfigError("\n".join([*heading, *lines]))


def _explain(
    details: ErrorDetails, raw: Any, sources: Sources, root: type[Section]
) -> Iterator[Complaint]:
    """Translate one pydantic error into complaints about keys of the configuration."""
    place = KeyInfo.at(details["loc"], root=root)
    path, value = place.path, get_value(raw, place.path)
    match details["type"]:
        case "inconsistent":
            for problem in details["ctx"]["all"]:
                keys = [(*path, *key.split(".")) for key in problem.keys]
                yield sources.complain(keys, problem.text)
        case "extra_forbidden":
            yield sources.complain([path], f"unknown key; {_suggest_key(place, value, raw, root)}")
        case "missing":
            text = f"is missing; give {_describe_allowed(place.schema())}"
            yield sources.complain([path, *place.kind_keys], text)
        case "union_tag_invalid":
            assert place.info
            tag = str(get_tag(place.info))
            kinds = [kind for member in place.members for kind in kinds_of(member, tag)]
            yield sources.complain(
                [(*path, tag), path], _describe_error(value[tag], {"enum": kinds})
            )
        case _:
            yield sources.complain([path], _describe_error(value, place.schema()))


def _describe_error(value: Any, schema: Mapping[str, Any]) -> str:
    options = [option["const"] for option in _list_alternatives(schema) if "const" in option]
    text = f"is {quote(value)}; give {_describe_allowed(schema)}"
    nearest = difflib.get_close_matches(str(value), options, n=1)
    return f"{text}; did you mean {quote(nearest[0])}?" if nearest else text


_RANGES = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}
_NOUNS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a table",
}


def _list_alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a JSON schema, constants one by one."""
    constants: list[Mapping[str, Any]] = [{"const": value} for value in schema.get("enum", ())]
    options: Sequence[Mapping[str, Any]] = schema.get("anyOf") or constants or [schema]
    return [option for option in options if option.get("type") != "null"]


def _describe_allowed(schema: Mapping[str, Any]) -> str:
    options = _list_alternatives(schema)
    if len(options) > 1:
        return " or ".join(
            [", ".join(map(_describe_allowed, options[:-1])), _describe_allowed(options[-1])]
        )
    only = options[0]
    if "allowed" in only:
        return str(only["allowed"])
    if "const" in only:
        return quote(only["const"])
    if only.get("type") == "array":
        length, items = "", only.get("items")
        if items is None:  # as many as are listed
            length, items = f" of {len(only['prefixItems'])}", only["prefixItems"][0]
        elif only.get("minItems"):
            length = " that is not empty"
        return f"an array{length}, each of it {_describe_allowed(items)}"
    noun = _NOUNS[only["type"]] if only.get("minLength", 0) == 0 else "a string that is not empty"
    limits = [f"{sign} {only[key]}" for key, sign in _RANGES.items() if key in only]
    return f"{noun} {' and '.join(limits)}".strip()


#: Tables of other files than this one.
_TABLES_ELSEWHERE: Mapping[Key, str] = {
    ("service",): "this is the file of a service, for `fedlearn serve`; an experiment has no such "
    "table",
    ("policy",): "it belongs into a client's file, for `fedlearn join --config`",
    ("conditions",): "it belongs into a client's file, for `fedlearn join --config`",
}


def _suggest_key(place: KeyInfo, value: Any, raw: Any, root: type[Section]) -> str:
    if (now := advise(place.path) or _TABLES_ELSEWHERE.get(place.path)) is not None:
        return now
    # Without validation, since a file may lack keys that it requires.
    defaults = root.model_construct().model_dump(warnings=False)
    known, trees = tuple(walk_keys(root)), (raw, defaults)
    elsewhere = list(
        dict.fromkeys(each.describe_kind() for each in known if each.path == place.path)
    )
    if elsewhere:
        return f"it goes with {' or with '.join(elsewhere)}; remove it or change the kind"
    alike = [each for each in known if each.is_table == isinstance(value, dict)] or known
    best = max(alike, key=lambda each: _score_match(each, place.path, trees))
    if _score_match(best, place.path, trees)[0] < _ALIKE:
        return f"the keys here are {', '.join(place.owner.model_fields)}"
    kind = "" if best.is_in(trees) else f" It goes with {best.describe_kind()}."
    return f"did you mean {join_key(best.path)}?{kind}"


_ALIKE = 0.7  # difflib's ratio after one or two typos in a word


def _score_match(
    known: KeyInfo, path: Key, trees: Iterable[Any]
) -> tuple[float, bool, bool, float]:
    *section, key = path
    name = known.path[-1]
    # "lr" stands for "learning_rate".
    initials = "".join(word[0] for word in name.split("_")) if "_" in name else name
    leaf = 1.0 if key.lower() == initials else _score_similarity(key.lower(), name)
    whole = _score_similarity(join_key(path), join_key(known.path))
    return leaf, known.path[:-1] == tuple(section), known.is_in(trees), whole


def _score_similarity(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
