"""Where the user's code went wrong."""

from pathlib import Path

import pytest
import torch

from fedlearn.client.loading import make_trainer
from fedlearn.errors import DataError, DeploymentError
from fedlearn.session.faults import in_users_code

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
        ("missing", ":5, in missing: KeyError: 'FEDLEARN_NO_SUCH_VARIABLE'; mend the trainer"),
        ("inside_a_library", ":8, in inside_a_library: RuntimeError: "),
        ("silent", ":11, in silent: RuntimeError; mend"),
    ],
)
def test_the_users_own_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """Not that of the library which it called."""
    monkeypatch.syspath_prepend(tmp_path)  # undoes what loading adds
    file = tmp_path / "trainer.py"
    file.write_text(SOURCE)
    with pytest.raises(DeploymentError) as caught, in_users_code():
        make_trainer(f"{file}:{name}")
    assert str(caught.value).startswith(f"{file}{words}")
    assert caught.value.__cause__ is not None


def test_an_error_with_a_remedy_passes() -> None:
    """It says already what to do."""
    with pytest.raises(DataError, match="PART is not set"), in_users_code():
        raise DataError("PART is not set")
    with in_users_code():
        assert torch.zeros(1).item() == 0.0
