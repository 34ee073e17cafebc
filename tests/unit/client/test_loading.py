"""Conversion between trainers and their names."""

import functools
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedlearn.client.loading import make_trainer, name_of, require_trainer
from fedlearn.errors import DeploymentError
from fedlearn.training.trainer import LocalEvaluation

SOURCE = """
from dataclasses import dataclass
from neighbor import NUM

@dataclass
class Trainer:
    num_examples: int = NUM
    honors = ("epochs", "batch_size", "learning_rate")
    def train(self, tensors, *, context): ...
    def evaluate(self, tensors, *, control): ...

class Half:
    honors = ()
    def train(self, tensors, *, context): ...

class Silent:
    def train(self, tensors, *, context): ...
    def evaluate(self, tensors, *, control): ...

class Text(Silent):
    honors = ("epochs")

value = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a trainer, next to a module that it imports."""
    monkeypatch.syspath_prepend(tmp_path)  # undoes what loading adds
    (tmp_path / "neighbor.py").write_text("NUM = 17\n")
    path = tmp_path / "my_trainer.py"
    path.write_text(SOURCE)
    return path


def test_a_trainer_is_made_from_a_file(file: Path) -> None:
    """The file may import modules next to it, as a script may."""
    assert vars(make_trainer(f"{file}:Trainer")) == {"num_examples": 17}


def test_a_class_is_named_by_its_module() -> None:
    """A string is returned unchanged."""
    factory: Any = LocalEvaluation  # Any: not a trainer, which is not checked here
    assert name_of(factory) == "fedlearn.training.trainer:LocalEvaluation"
    assert name_of("a.b:C") == "a.b:C"


@pytest.mark.parametrize(
    "trainer", [lambda: None, functools.partial(LocalEvaluation), Path().exists]
)
def test_what_another_process_cannot_import_is_refused(trainer: Any) -> None:  # Any: wrong
    """Refused at once, not when the process starts."""
    with pytest.raises(DeploymentError, match="top level of a module"):
        name_of(trainer)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A main program that defines a trainer."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    vars(main)["Trainer"] = type("Trainer", (), {"__module__": "__main__"})
    return main


def test_a_trainer_typed_into_a_session_is_refused(main: ModuleType) -> None:
    """No other process could import it."""
    with pytest.raises(DeploymentError, match="interactive session"):
        name_of(main.Trainer)


def test_a_trainer_in_a_module_that_is_run_is_found_by_its_name(main: ModuleType) -> None:
    """With ``python -m``: loaded as a file, it could not import its package."""
    main.__file__ = "/app/my_package/app.py"
    main.__spec__ = ModuleSpec("my_package.app", None)
    assert name_of(main.Trainer) == "my_package.app:Trainer"


def test_a_trainer_in_a_script_is_found_by_its_file(main: ModuleType) -> None:
    """So is a trainer in the ``__main__.py`` of a folder that is run."""
    main.__file__ = "/app/app.py"
    main.__spec__ = None
    assert name_of(main.Trainer) == "/app/app.py:Trainer"
    main.__file__ = "/app/__main__.py"
    main.__spec__ = ModuleSpec("__main__", None)
    assert name_of(main.Trainer) == "/app/__main__.py:Trainer"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Trainer", 'write "module:Class"'),
        ("no.such.module:Trainer", "no module no.such.module"),
        ("{file}:Missing", "no class or function Missing"),
        ("{file}:value", "no class or function value"),
        ("{file}:Half", "without a method evaluate"),
        ("{file}:Silent", "without `honors`, .*; add them, such as `honors = "),
        ("{file}:Text", "without `honors`, a tuple of the settings"),
        ("nowhere.py:Trainer", r"no file /.*/nowhere\.py; check the"),
    ],
)
def test_what_is_not_there_is_said(file: Path, name: str, words: str) -> None:
    """The message says what to check."""
    with pytest.raises(DeploymentError, match=words):
        make_trainer(name.format(file=file))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Trainer", 'write "module:Class"'),
        ("no.such.module:Trainer", "no module no.such.module"),
        ("fedlearn.no_such:Trainer", "no module fedlearn.no_such"),
        ("nowhere.py:Trainer", r"no file /.*/nowhere\.py; check the"),
        ("{file}:Trainor", r"my_trainer.py has no .* Trainor; did you mean Trainer \(line 6\)"),
        ("my_trainer:make", "my_trainer.py has no class or function make; check its spelling"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_before_anything_is_imported(
    file: Path, name: str, words: str
) -> None:
    """The message has the file, and the line of a similar name."""
    file.write_text(SOURCE + "exit('this was imported')\n")
    with pytest.raises(DeploymentError, match=words):
        require_trainer(name.format(file=file))


@pytest.mark.parametrize("name", ["{file}:Trainer", "my_trainer:NUM", "json:loads", "sys:exit"])
def test_what_is_there_is_not_refused(file: Path, name: str) -> None:
    """Nor are imported names, or names in modules without source."""
    require_trainer(name.format(file=file))


@pytest.mark.parametrize(
    "line",
    ["from neighbor import *", "if True: from neighbor import *", "def __getattr__(n): ..."],
)
def test_a_name_that_may_come_into_being_is_not_refused(file: Path, line: str) -> None:
    """A module that creates names at run time cannot be checked by reading it."""
    file.write_text(f"{SOURCE}{line}\n")
    require_trainer(f"{file}:Other")


def test_a_trainer_that_is_no_python_is_told_with_its_line(file: Path) -> None:
    """Before a process starts."""
    file.write_text(f"{SOURCE}def make(:\n")
    with pytest.raises(DeploymentError, match=f"my_trainer.py:{len(SOURCE.splitlines()) + 1}: "):
        require_trainer(f"{file}:make")


def test_a_missing_library_of_the_users_is_theirs(file: Path) -> None:
    """The error must not blame the trainer's name."""
    file.write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        make_trainer(f"{file}:Trainer")
