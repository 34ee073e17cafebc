"""Locate the line of the user's code that failed."""

from pathlib import Path

import pytest
import torch

from fedlearn.client.loading import make_trainer
from fedlearn.errors import DataError, DeploymentError
from fedlearn.session.faults import convert_trainer_errors

SOURCE = """import os
import torch

def missing():
    return os.environ["FEDLEARN_NO_SUCH_VARIABLE"]

def inside_a_library():
    torch.zeros(2) @ torch.zeros(3)

def silent():
    raise RuntimeError
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", ":5, in missing: KeyError: 'FEDLEARN_NO_SUCH_VARIABLE'; fix the trainer"),
        ("inside_a_library", ":8, in inside_a_library: RuntimeError: "),
        ("silent", ":11, in silent: RuntimeError; fix"),
    ],
)
def test_the_users_own_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """Not a line of the library that it called."""
    monkeypatch.syspath_prepend(tmp_path)  # undoes what loading adds
    file = tmp_path / "trainer.py"
    file.write_text(SOURCE)
    with pytest.raises(DeploymentError) as caught, convert_trainer_errors():
        make_trainer(f"{file}:{name}")
    assert str(caught.value).startswith(f"{file}{words}")
    assert caught.value.__cause__ is not None


def test_an_error_with_a_remedy_passes() -> None:
    """Its message already says what to do."""
    with pytest.raises(DataError, match="PART is not set"), convert_trainer_errors():
        raise DataError("PART is not set")
    with convert_trainer_errors():
        assert torch.zeros(1).item() == 0.0
