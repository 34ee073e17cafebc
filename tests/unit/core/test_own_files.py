"""Python files that a user names by their path."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedlearn.core.own_files import import_file


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what loading a file adds to ``sys.path``."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_file_may_import_its_neighbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.py").write_text("from layers_of_mine import WIDTH\n")
    (folder / "layers_of_mine.py").write_text("WIDTH = 3\n")
    monkeypatch.chdir(tmp_path)
    assert import_file(Path("project/model.py")).WIDTH == 3
    assert import_file(folder / "model.py") is import_file(Path("project/model.py"))


def test_a_file_that_raises_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        import_file(path)
    path.write_text("WIDTH = 3\n")
    assert import_file(path).WIDTH == 3


#: For the file below: set when it has begun to execute, and when it may go on.
BEGUN, MAY_GO_ON = threading.Event(), threading.Event()


def test_no_thread_gets_a_file_that_another_is_still_executing(tmp_path: Path) -> None:
    """Runs of a service that use one file may start at once."""
    path = tmp_path / "model.py"
    path.write_text(
        f"from {__name__} import BEGUN, MAY_GO_ON\nBEGUN.set()\nMAY_GO_ON.wait(60)\nWIDTH = 3\n"
    )
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(import_file, path)
        assert BEGUN.wait(60)
        second = threads.submit(lambda: import_file(path).WIDTH)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.1)
        MAY_GO_ON.set()
        assert second.result() == first.result().WIDTH == 3
