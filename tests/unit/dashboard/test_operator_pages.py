"""The pages of a service: its queue, releases, budgets and audit log; and runs by best value."""

import re
from pathlib import Path

import pytest

from fedlearn.core.clock import VirtualClock
from fedlearn.dashboard.app import build_app
from fedlearn.dashboard.best import find_bests, rank_by_best
from fedlearn.dashboard.log_check import check_log
from fedlearn.dashboard.rendering import Dashboard
from fedlearn.store.run_list import find_runs, list_runs
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.store.schema import AuditRow
from tests.asgi import Browser, rows_of
from tests.large_store import LARGE, write_large_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store with everything that a service has."""
    folder = tmp_path_factory.mktemp("service")
    write_large_store(folder, num_clients=9, num_rounds=3, cohort_size=3, num_small=3)
    return folder


@pytest.fixture
def pages(folder: Path) -> Browser:
    database = Database.open_to_read(sqlite_url(folder / "fedlearn.db"), runs_dir=folder)
    return Browser(build_app(Dashboard(database, VirtualClock(), place="runs")))


def test_the_queue_shows_what_runs_then_whose_turn_is_next_then_what_ended(pages: Browser) -> None:
    running, *rest = rows_of(pages.get("/queue").text)
    assert running.startswith("liver-1 running")
    waiting, ended = rest[:2], rest[2:]
    assert waiting[0].startswith("liver-2 queued after liver-1, which is running")
    assert waiting[1].startswith("lungs-2 queued after lungs-1, which failed: retry lungs-1")
    assert {each.split()[0] for each in ended} == {"lungs-1", "kidney-1"}
    assert "too few reports" in next(each for each in ended if each.startswith("lungs-1"))


def test_the_queue_is_searched_by_name_person_and_state(pages: Browser) -> None:
    assert len(rows_of(pages.get("/queue?search=LIVER").text)) == 2
    assert len(rows_of(pages.get("/queue?search=operator:ann").text)) == 5
    assert len(rows_of(pages.get("/queue?state=failed").text)) == 1
    assert pages.get("/queue?state=lost").status_code == 400


def test_a_release_is_listed_with_its_tag_and_its_card_is_shown(pages: Browser) -> None:
    newest, oldest = rows_of(pages.get("/releases").text)
    assert "champion digits-002 20 accuracy 0.93" in newest
    assert "champion" not in oldest
    link = re.findall(r'href="(/releases/[0-9a-f]{64})"', pages.get("/releases").text)[0]
    card = pages.get(link).text
    assert "\n## Privacy\n" in card
    assert "model.safetensors" in card
    for nowhere in ("/releases/000000", "/releases/champion", "/releases/..%2f..%2fetc"):
        assert pages.get(nowhere).status_code == 404


def test_a_ledger_shows_what_each_run_has_charged(pages: Browser) -> None:
    text = pages.get("/budgets").text
    assert "<h2>patients</h2>" in text
    first, second = text.split("<h2>patients</h2>")
    assert "lungs</a>: ε - of 8.0" in first
    assert "Study" not in second
    [row] = rows_of(second)
    assert row.startswith("digits-001")
    assert " 20 " in row


def test_the_log_is_listed_newest_first_and_filtered(pages: Browser) -> None:
    rows = rows_of(pages.get("/audit").text)
    assert rows[-1].split()[0] == "0"
    assert len(rows_of(pages.get("/audit?kind=release").text)) == 3
    assert "release.tagged" in rows_of(pages.get("/audit?kind=release").text)[0]
    assert len(rows_of(pages.get("/audit?kind=run&subject=kidney-1&actor=ann").text)) == 2
    assert "No entry matches" in pages.get("/audit?until=2001-01-01").text
    assert "No entry matches" not in pages.get("/audit?since=2001-01-01").text
    assert pages.get("/audit?kind=color").status_code == 400
    assert pages.get("/audit?since=31.1.2026").status_code == 400


def test_an_edited_entry_shows(folder: Path) -> None:
    """Control: the log as it was written; the edit is undone again."""
    with Database.open(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        report = check_log(database, VirtualClock()).report
        assert (report.problems, report.num_checkpoints) == ([], 1)
        with database.writing() as session:
            row = session.get_one(AuditRow, 5)
            written, row.actor = row.actor, "operator:eve"
        [problem] = check_log(database, VirtualClock()).report.problems
        assert "entry 5: it was changed" in problem
        with database.writing() as session:
            session.get_one(AuditRow, 5).actor = written


def test_runs_are_ranked_by_their_best_value_over_all_pages(folder: Path) -> None:
    with Database.open_to_read(sqlite_url(folder / "fedlearn.db"), runs_dir=folder) as database:
        runs = find_runs(database, search="", status=None)
        ranked = rank_by_best(database, runs)
        bests = find_bests(database, runs)
        values = [best.value for key in ranked if (best := bests[key])]
        pages = [
            list_runs(database, search="", status=None, order=ranked, page=number, size=3)
            for number in (1, 2)
        ]
    assert values == sorted(values, reverse=True)
    assert [each.run_id for page in pages for each in page.rows] == ranked
    assert {pages[0].total, len(ranked)} == {4}


def test_a_page_offers_no_list_that_is_empty(folder: Path, tmp_path: Path, pages: Browser) -> None:
    """Control: the store of a service has all of them."""
    url = sqlite_url(tmp_path / "fedlearn.db")
    Database.open(url, runs_dir=tmp_path).close()
    with Database.open_to_read(url, runs_dir=tmp_path) as database:
        empty = Browser(build_app(Dashboard(database, VirtualClock(), place=LARGE))).get("/").text
    full = pages.get("/").text
    for each in ("/queue", "/studies", "/clients", "/releases", "/budgets", "/audit"):
        assert f'href="{each}"' in full
        assert f'href="{each}"' not in empty
    assert 'href="/alerts"' in empty
