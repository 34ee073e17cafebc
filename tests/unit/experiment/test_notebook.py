"""A run in a notebook: its result and its curves, and no output on demand."""

from pathlib import Path

import pytest

import fedlearn as fl
from fedlearn.store.runs import Database, sqlite_url
from tests.tracking import Stop, simulate


def test_a_run_shows_its_result_and_two_curves(tmp_path: Path) -> None:
    run = simulate(tmp_path, [], name="shown", num_rounds=2, progress=False)
    shown = run._repr_html_()
    assert "shown done after 2/2 rounds" in shown
    assert shown.count("<svg ") == 2


def test_a_run_without_rounds_shows_no_curves(tmp_path: Path) -> None:
    """It failed in its first one; the error is shown as text."""
    with pytest.raises(ZeroDivisionError):
        simulate(
            tmp_path,
            [Stop(1, ZeroDivisionError("<script>"))],
            name="failed",
            progress=False,
            store={"runs_dir": str(tmp_path)},
        )
    url = sqlite_url(tmp_path / "fedlearn.db")
    with Database.open(url, runs_dir=tmp_path) as database:
        shown = fl.Run(database.run("failed"))._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown
    assert "<svg" not in shown


def test_nothing_is_printed_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control: the same run with the default and with ``True``."""
    for name, progress, is_shown in (("a", False, False), ("b", None, True), ("c", True, True)):
        simulate(tmp_path, [], name=name, num_rounds=1, progress=progress)
        assert bool(capsys.readouterr().out) is is_shown
