"""A trainer's name, and the trainer of a name."""

import functools
from pathlib import Path
from typing import Any

import pytest

from fedlearn.client.loading import make_trainer, name_of
from fedlearn.client.trainer import LocalEvaluation
from fedlearn.errors import DeploymentError

SOURCE = """
from dataclasses import dataclass
from neighbour import NUM

@dataclass
class Trainer:
    num_examples: int = NUM
    def train(self, tensors, *, context): ...
    def evaluate(self, tensors, *, control): ...

class Half:
    def train(self, tensors, *, context): ...

value = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a trainer, and its neighbour."""
    monkeypatch.syspath_prepend(tmp_path)  # undoes what loading adds
    (tmp_path / "neighbour.py").write_text("NUM = 17\n")
    path = tmp_path / "my_trainer.py"
    path.write_text(SOURCE)
    return path


def test_a_trainer_is_made_from_a_file(file: Path) -> None:
    """Which may import its neighbours, as a script may."""
    assert vars(make_trainer(f"{file}:Trainer")) == {"num_examples": 17}


def test_a_class_is_named_by_its_module() -> None:
    """A name is its own name."""
    factory: Any = LocalEvaluation  # Any: no trainer, which is not looked at here
    assert name_of(factory) == "fedlearn.client.trainer:LocalEvaluation"
    assert name_of("a.b:C") == "a.b:C"


@pytest.mark.parametrize(
    "trainer", [lambda: None, functools.partial(LocalEvaluation), Path().exists]
)
def test_what_another_process_cannot_import_is_refused(trainer: Any) -> None:  # Any: wrong
    """At once, not when the process starts."""
    with pytest.raises(DeploymentError, match="top level of a module"):
        name_of(trainer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Trainer", 'write "module:Class"'),
        ("no.such.module:Trainer", "no module no.such.module"),
        ("{file}:Missing", "no class or function Missing"),
        ("{file}:value", "no class or function value"),
        ("{file}:Half", "without a method evaluate"),
        ("nowhere.py:Trainer", "no file nowhere.py"),
    ],
)
def test_what_is_not_there_is_said(file: Path, name: str, words: str) -> None:
    """With what to check."""
    with pytest.raises(DeploymentError, match=words):
        make_trainer(name.format(file=file))


def test_a_missing_library_of_the_users_is_theirs(file: Path) -> None:
    """It is not the trainer's name that is wrong."""
    file.write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        make_trainer(f"{file}:Trainer")
