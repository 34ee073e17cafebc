"""Names: a class name has one meaning in the package, and functions are verbs."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fedlearn

ROOT = Path(fedlearn.__file__).parent
#: Past participles that do not end in "ed".
IRREGULAR = frozenset(
    {
        "begun",
        "bound",
        "built",
        "chosen",
        "drawn",
        "found",
        "given",
        "gone",
        "held",
        "kept",
        "known",
        "laid",
        "led",
        "left",
        "lost",
        "made",
        "met",
        "paid",
        "said",
        "seen",
        "sent",
        "shown",
        "spent",
        "taken",
        "told",
        "worn",
        "written",
    }
)
#: Function names that begin like a participle, each with the reason why it stays.
NOUNS = {
    "bound_metrics": "to bound is a verb",
    "bound_sample": "to bound is a verb",
    "bound_update": "to bound is a verb",
    "elapsed_s": "a quantity of a clock",
    "left_s": "a quantity of a clock",
    "weighted_mean": "mathematical noun",
    "weighted_sum": "mathematical noun",
    "squared_distance": "mathematical noun",
}


class Definition(NamedTuple):
    """A class or function of the package."""

    name: str
    place: str
    is_class: bool
    is_property: bool


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node: definitions stand in no expression."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


@cache
def definitions(root: Path) -> list[Definition]:
    """Find the classes and functions below a folder; skip generated code.

    To keep the trees would cost more than to parse: garbage collection scans them again and again.
    """
    return [
        Definition(
            name=node.name,
            place=f"{path.relative_to(root)}:{node.lineno}",
            is_class=isinstance(node, ast.ClassDef),
            is_property=any("property" in ast.unparse(each) for each in node.decorator_list),
        )
        for path in sorted(root.rglob("*.py"))
        if not path.name.endswith("_pb2.py")
        for node in statements(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def shared_class_names(root: Path) -> dict[str, list[str]]:
    """Find class names that are defined more than once, with their places."""
    places = defaultdict[str, list[str]](list)
    for each in definitions(root):
        if each.is_class:
            places[each.name].append(each.place)
    return {name: found for name, found in places.items() if len(found) > 1}


def is_participle(name: str) -> bool:
    """Return whether a function's name begins with a past participle."""
    first = name.strip("_").partition("_")[0]
    return first in IRREGULAR or (first.endswith("ed") and not first.endswith("eed"))


def participles(root: Path) -> dict[str, str]:
    """Find functions, other than properties, that are named by a participle."""
    return {
        each.name: each.place
        for each in definitions(root)
        if is_participle(each.name) and not each.is_class and not each.is_property
    }


def test_a_class_name_has_one_meaning() -> None:
    assert shared_class_names(ROOT) == {}


def test_functions_are_verbs() -> None:
    found = participles(ROOT)
    assert {name: place for name, place in found.items() if name not in NOUNS} == {}
    assert NOUNS.keys() <= found.keys()  # a reason without a function is removed


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two modules that break both rules."""
    (tmp_path / "a.py").write_text("class Place: ...\ndef told(): ...\ndef feed(): ...\n")
    text = "class Place: ...\nclass Other:\n    @property\n    def sent(self): ...\n"
    (tmp_path / "b.py").write_text(text + "    def encoded(self): ...\n")
    return tmp_path


def test_a_second_meaning_and_a_participle_would_be_found(package: Path) -> None:
    """The control of the two tests above. Properties and verbs such as "feed" are fine."""
    assert shared_class_names(package) == {"Place": ["a.py:1", "b.py:1"]}
    assert participles(package) == {"told": "a.py:2", "encoded": "b.py:5"}
