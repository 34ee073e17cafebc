"""Lines of keys agree with tomllib, rendering with loading, and bad input gives a clear error."""

import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fedlearn.config import Config, config_hash, load, render
from fedlearn.config.toml import Key, key_lines
from fedlearn.config.training import MODELS
from fedlearn.errors import ConfigError

BARE = st.text("abXY09_-", min_size=1, max_size=3)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
BLANKS = st.sampled_from(["", " ", "\t ", "  "])
GAPS = st.sampled_from(["", " ", "\n", " # ] } = [x]\n", "\n\n\t", "# \"'''\n"])
ENDS = st.sampled_from(["\n", " # [c] = 1\n", "\n\n", '\t# """\n'])


def basic(text: str) -> str:
    """Return ``text`` as a basic TOML string, with all unusual characters escaped."""
    return (
        '"' + "".join(c if c.isalnum() and c.isascii() else f"\\U{ord(c):08x}" for c in text) + '"'
    )


KEYS = st.one_of(
    BARE.map(lambda name: (name, name)),
    TEXT.map(lambda name: (basic(name), name)),
    st.sampled_from([("'a.b'", "a.b"), ('"a\\"]="', 'a"]='), ("'#'", "#"), ('""', "")]),
)
SCALARS = st.one_of(
    st.sampled_from(
        [
            "1",
            "-1_000",
            "0x1F",
            "1e-05",
            "inf",
            "true",
            "1979-05-27 07:32:00",
            "07:32:00.5",
            "'lit # ] }'",
            '"a \\" ] , # = \\\\"',
            "'''m\n[x]\ny = 1 ''''",
            '"""\n[x]\n z = "1" \\""" """""',
            "''''''",
            '""""""',
            '"""\\\n   """',
        ]
    ),
    TEXT.map(basic),
)


class Writer:
    """Writes a TOML document piece by piece, and records the line of the statement of each key."""

    def __init__(self) -> None:
        self.text = ""
        self.lines: dict[Key, int] = {}
        self.start = 1  # first line of the current statement

    def begin(self) -> None:
        """Start a statement on the current line."""
        self.start = self.text.count("\n") + 1

    def key(self, draw: st.DrawFn, path: Key | None, *, depth: int) -> Key | None:
        """Write a dotted key and record all its parts; in an array, which has no path, none."""
        parts = draw(st.lists(KEYS, min_size=1, max_size=depth))
        for index, (written, name) in enumerate(parts):
            self.text += (draw(BLANKS) + "." + draw(BLANKS) if index else "") + written
            if path is not None:
                path = (*path, name)
                self.lines.setdefault(path, self.start)
        return path

    def pair(self, draw: st.DrawFn, path: Key | None, *, depth: int) -> None:
        """Write ``key = value``."""
        inner = self.key(draw, path, depth=2)
        self.text += draw(BLANKS) + "=" + draw(BLANKS)
        self.value(draw, inner, depth=depth)

    def value(self, draw: st.DrawFn, path: Key | None, *, depth: int) -> None:
        kind = draw(st.sampled_from(["scalar", "array", "table"] if depth else ["scalar"]))
        if kind == "scalar":
            self.text += draw(SCALARS)
        elif kind == "array":
            self.text += "["
            for index in range(draw(st.integers(0, 3))):
                self.text += ("," if index else "") + draw(GAPS)
                self.value(draw, None, depth=depth - 1)
                self.text += draw(GAPS)
            self.text += "]"
        else:
            self.text += "{" + draw(BLANKS)
            for index in range(draw(st.integers(0, 3))):
                self.text += ("," if index else "") + draw(BLANKS)
                self.pair(draw, path, depth=depth - 1)
                self.text += draw(BLANKS)
            self.text += "}"


@st.composite
def documents(draw: st.DrawFn) -> Writer:
    """Draw pairs and tables; a few documents are not valid TOML, because a key occurs twice."""
    writer = Writer()
    for _ in range(draw(st.integers(0, 3))):
        writer.begin()
        writer.text += draw(BLANKS)
        writer.pair(draw, (), depth=3)
        writer.text += draw(ENDS)
    for _ in range(draw(st.integers(0, 3))):
        writer.begin()
        writer.text += draw(BLANKS) + "[" + draw(BLANKS)
        table = writer.key(draw, (), depth=3)
        writer.text += draw(BLANKS) + "]" + draw(ENDS)
        for _ in range(draw(st.integers(0, 3))):
            writer.begin()
            writer.pair(draw, table, depth=2)
            writer.text += draw(ENDS)
    return writer


LINES = st.sampled_from(
    [
        "[a]",
        "[a.b]",
        "[ a . 'b.c' ]",
        "[[t]]",
        "[[t.u]]",
        "[t.v]",
        "[t.u.w]",
        "[[ 'x y'.z ]]",
        "x = 1",
        "y.z = [1, {q = 2},\n [3,\n], # c\n]",
        "w = '''\n[a]\n'''",
        "'k' = {m = {n = []}, o.p = 1}",
        '"\\u0041" = ""',
        "# comment = 1",
        "",
    ]
)


def paths(table: Any, path: Key = (), *, arrays: bool = False) -> Iterator[Key]:
    """Yield the path of every table and key of parsed TOML; with ``arrays`` also inside arrays."""
    for key, each in table.items():
        yield (*path, key)
        for inner in each if arrays and isinstance(each, list) else [each]:
            if isinstance(inner, Mapping):
                yield from paths(inner, (*path, key), arrays=arrays)


def parse(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


@pytest.mark.slow
@given(documents())
def test_each_key_is_on_the_line_it_was_written_on(writer: Writer) -> None:
    """Finds all keys and no others; the parser decides which documents are TOML."""
    document = parse(writer.text)
    assume(document is not None)
    assert key_lines(writer.text) == writer.lines
    assert set(writer.lines) == set(paths(document))
    assert key_lines(writer.text.replace("\n", "\r\n")) == writer.lines


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(LINES, max_size=8).map("\n".join))
@example("[[t]]\n[[t.u]]\n[t.u.w]\n[[t.u]]\n[[t]]\n[t.v]")
def test_keys_are_those_of_the_parser_through_arrays_of_tables(text: str) -> None:
    """Keys under the headers of arrays of tables are found, too."""
    document = parse(text)
    assume(document is not None)
    found = set(key_lines(text))
    assert set(paths(document)) <= found <= set(paths(document, arrays=True))


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(
    st.dictionaries(TEXT, VALUES, max_size=4), st.integers(0, 2**63 - 1), st.floats(1e-300, 1e300)
)
def test_a_rendered_tree_loads_to_an_equal_tree(
    args: dict[str, Any], seed: int, learning_rate: float
) -> None:
    """For any keys and strings in it; the stored form as well, with an equal hash."""
    config = Config.model_validate(
        {
            "seed": seed,
            "client": {"learning_rate": learning_rate},
            "model": MODELS.of("python", factory="module:make", args=args),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.toml"
        file.write_text(render(config), encoding="utf-8", newline="")
        loaded = load(file, overrides=[])
    assert loaded == config
    assert config_hash(loaded) == config_hash(config)
    assert Config.from_json(config.canonical_json()) == config


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{path}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")


NAMES = st.sampled_from([*leaves(Config().model_dump()), "data.path", "data.args", "lr", "a.b"])
WORDS = st.sampled_from(
    [
        "0",
        "-1",
        "1.5",
        "inf",
        "nan",
        "auto",
        "all",
        "none",
        "fedsgd",
        "npz",
        "python",
        "natural",
        "memory",
        "[]",
        "[1, 'a']",
        "{}",
        "{kind='python'}",
        "{a={b=1}}",
        "1979-05-27",
        "m:f",
    ]
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(st.tuples(NAMES, WORDS | TEXT).map("=".join) | TEXT, max_size=4))
def test_any_override_gives_a_valid_tree_or_a_clear_error(overrides: list[str]) -> None:
    """No other exception is raised; an accepted configuration survives being stored."""
    try:
        config = load(None, overrides=overrides)
    except ConfigError as error:
        problems = [text for text in overrides if f"--set {text}: " in str(error)]
        assert problems or "://" in "".join(overrides)
    else:
        assert Config.from_json(config.canonical_json()) == config


def in_a_file(word: str) -> str:
    """Return a word as a TOML value: quoted, unless it already is one."""
    return f'"{word}"' if parse(f"a = {word}") is None else word


@example(["algorithm.name = []"])
@given(
    st.lists(
        st.tuples(NAMES, WORDS.map(in_a_file)).map(" = ".join),
        max_size=4,
        unique_by=lambda pair: pair.partition(" ")[0],
    )
)
def test_any_toml_file_gives_a_valid_tree_or_an_error_with_its_line(pairs: list[str]) -> None:
    """The message names a line for every problem of the file."""
    assume(parse("\n".join(pairs)) is not None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.toml"
        file.write_text("\n".join(pairs), encoding="utf-8")
        try:
            load(file, overrides=[])
        except ConfigError as error:
            listed = str(error).splitlines()
            for line in listed[1:] if len(listed) > 1 else listed:
                number = line.removeprefix(f"{file}:").partition(":")[0]
                assert number.isdigit()
                assert 1 <= int(number) <= len(pairs)
