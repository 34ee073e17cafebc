"""Runs shown to a person, on a terminal of any width."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.cli.overview import run_page, runs_table
from fedlearn.config import Config
from fedlearn.experiment.run import Run
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from tests.records import RUN


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredRun]:
    """A run of the main job."""
    with Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=tmp_path / "runs") as database:
        yield database.create(replace(RUN, config=Config().model_dump(mode="json")))


def test_a_page_is_broken_for_a_narrow_terminal(stored: StoredRun) -> None:
    """Lines break between words, never in a command or a path; without a terminal nowhere."""
    page = run_page(Run(stored), width=None)
    narrow = run_page(Run(stored), width=60)
    assert narrow.split() == page.split()
    assert max(map(len, page.splitlines())) > 100
    for line in narrow.splitlines():
        assert len(line) <= 60 or line.split()[0] in ("path", "next")
        assert line.startswith(" " * 12) or line[:12].rstrip()


@pytest.mark.parametrize(
    ("table", "mode"),
    [
        ("late_updates", "keep"),
        ("asynchronous", "buffered"),
        ("secure_aggregation", "complete"),
    ],
)
def test_a_page_tells_of_what_is_on_alone(stored: StoredRun, table: str, mode: str) -> None:
    """It mentions how rounds close and what is hidden only where that is not the default."""
    line = re.compile(f"^ *{table}  .*mode={mode}", re.MULTILINE)
    assert table not in run_page(Run(stored), width=None)
    config = Config().model_dump(mode="json")
    config[table] |= {"mode": mode}
    other = stored.database.create(replace(RUN, name="other", config=config))
    assert line.search(run_page(Run(other), width=None))


def test_a_table_is_cut_for_a_narrow_terminal(stored: StoredRun) -> None:
    """Names are never cut, because users type them."""
    table = runs_table([(stored.record, [])], width=50)
    assert max(map(len, table.splitlines())) <= 50
    assert "calm-otter-17" in table
    assert "2026-01-02T03:04:05Z" in runs_table([(stored.record, [])], width=None)
