"""The pages show what the store has, down-sampled and cut by the database."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedlearn.core.clock import VirtualClock
from fedlearn.core.participations import STATUSES, Status
from fedlearn.dashboard.app import build_app
from fedlearn.dashboard.pulse import Pulse
from fedlearn.dashboard.rendering import Dashboard
from fedlearn.errors import StoreError
from fedlearn.experiment.figures import RUN_COLORS
from fedlearn.experiment.plot import STATUS_COLORS
from fedlearn.rounds.journal import DeployedRun
from fedlearn.store.attendance import AttendanceOrder, Window, list_attendance
from fedlearn.store.curves import read_participation
from fedlearn.store.run_list import RunOrder, list_runs
from fedlearn.store.runs import Database, sqlite_url
from tests.asgi import Browser
from tests.large_store import LARGE, write_large_store
from tests.records import RUN
from tests.unit.dashboard.test_security import DATA, PAGES

STATIC = Path(__file__).parents[3] / "fedlearn" / "dashboard" / "static"


def load(browser: Browser, target: str) -> Any:  # Any: JSON
    return json.loads(browser.get(target).text)


def test_a_curve_keeps_the_extremes_of_each_group_of_rounds(
    browser: Browser, database: Database
) -> None:
    rounds = database.run(LARGE).rounds()
    panels = {each["title"]: each for each in load(browser, f"/runs/{LARGE}/curves.json")["panels"]}
    [line] = [each for each in panels["Loss"]["lines"] if each["label"] == "loss"]
    losses = [each.metrics["loss"] for each in rounds]
    assert len(line["rounds"]) <= 400 < len(losses)
    assert math.isclose(max(line["highs"]), max(losses), rel_tol=1e-5)
    assert math.isclose(min(line["lows"]), min(losses), rel_tol=1e-5)
    assert math.isclose(line["values"][0], sum(losses[:3]) / 3, rel_tol=1e-5)
    assert line["rounds"][-1] == len(losses)


def test_a_map_shows_the_worst_status_of_each_group_of_rounds(
    browser: Browser, database: Database
) -> None:
    found = load(browser, f"/runs/{LARGE}/map.json?first=0&end=1000&client=3&client=7")
    width = found["rounds_per_column"]
    expected = dict[tuple[int, int], int]()
    for each in database.run(LARGE).rounds():
        for one in each.participations:
            if one.client_id in (3, 7):
                unused = each.outcome.value == "skipped" and one.status is Status.REPORTED
                code = -1 if unused else STATUSES.index(one.status)
                place = one.client_id, each.round_num // width
                expected[place] = max(expected.get(place, -1), code)
    assert {(client, column): code for client, column, code in found["cells"]} == expected


def test_pages_of_clients_cover_all_once_with_the_worst_first(database: Database) -> None:
    window = Window(first=900, end=1000)
    pages = [
        list_attendance(
            database,
            LARGE,
            window,
            order=AttendanceOrder.MISSED,
            clients=None,
            page=number,
            size=25,
        )
        for number in (1, 2, 3)
    ]
    rows = [row for page in pages for row in page.rows]
    missed = [row.num_asked - row.reported for row in rows]
    assert len({row.client_id for row in rows}) == len(rows) == pages[0].total
    assert missed == sorted(missed, reverse=True)
    assert sum(row.num_asked for row in rows) == 6 * window.num_rounds


@pytest.mark.parametrize(("search", "names"), [("S-00", 3), ("s_0", 0), ("%", 0), ("002", 1)])
def test_a_search_is_literal_and_in_any_case(database: Database, search: str, names: int) -> None:
    found = list_runs(database, search=search, status=None, order=RunOrder.NAME, page=1, size=50)
    assert found.total == names


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("/?page=0", "page"),
        ("/?page=1e3", "page"),
        ("/?order=color", "newest, oldest, name, rounds"),
        ("/?colour=red", "search, status, order, page"),
        (f"/runs/{LARGE}/clients?span=7", "100, 500, 2000, all"),
        ("/compare?" + "&".join(f"with=r{number}" for number in range(8)), "at most 7"),
    ],
)
def test_a_parameter_that_is_invalid_is_named(browser: Browser, target: str, named: str) -> None:
    answer = browser.get(target)
    assert answer.status_code == 400
    assert named in answer.text


def test_an_unknown_run_is_not_found_and_a_similar_name_suggested(browser: Browser) -> None:
    for target in ("/runs/digits-01", f"/runs/{LARGE}?with=digits-01", "/compare?with=digits-01"):
        answer = browser.get(target)
        assert answer.status_code == 404
        assert "digits-001" in answer.text


def test_only_a_store_of_this_version_is_opened_to_read(tmp_path: Path) -> None:
    """And nothing is created or migrated; control: a store that a writer has made."""
    url = sqlite_url(tmp_path / "fedlearn.db")
    with pytest.raises(StoreError, match="no such file"):
        Database.open_to_read(url, runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "fedlearn.db").touch()
    with pytest.raises(StoreError, match="holds no runs"):
        Database.open_to_read(url, runs_dir=tmp_path)
    Database.open(url, runs_dir=tmp_path).close()
    Database.open_to_read(url, runs_dir=tmp_path).close()


def test_a_coordinator_is_given_up_after_a_silence() -> None:
    """Control: a heartbeat in time, and one after the silence, revive it."""
    clock = VirtualClock()
    pulse = Pulse(clock)

    def is_alive(beat: int, holder: str = "a") -> bool:
        run = DeployedRun(
            name="r", run_id="", control="run", holder=holder, epoch=1, beat=beat, status={}
        )
        return pulse.is_alive(run, lease_ttl_s=5.0)

    assert is_alive(1)
    clock.sleep(14.0)
    assert is_alive(1)
    clock.sleep(2.0)
    assert not is_alive(1)
    assert is_alive(2)
    assert not is_alive(3, holder="")


def test_colors_are_those_of_reports() -> None:
    css = (STATIC / "dashboard.css").read_text()
    light = css[: css.index("@media")]
    for number, color in enumerate(RUN_COLORS):
        assert f"--run-{number}: {color.lower()};" in light
    for status, color in STATUS_COLORS.items():
        assert f"--{status.value}: {color.lower()};" in light


def test_a_page_and_what_it_loads_stay_small(browser: Browser) -> None:
    """At most 200 KB, uncompressed, and all of it from here."""
    for target in ("/", f"/runs/{LARGE}", f"/runs/{LARGE}/clients"):
        page = browser.get(target).text
        loaded = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page))
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
        size = len(page) + sum(len(browser.get(each).body) for each in loaded)
        assert loaded
        assert size < 200_000, (target, size)


@pytest.mark.slow
def test_pages_are_the_same_on_postgresql(
    postgresql_url: str, browser: Browser, tmp_path: Path
) -> None:
    write_large_store(
        tmp_path, num_clients=60, num_rounds=1000, cohort_size=6, num_small=3, url=postgresql_url
    )
    with Database.open_to_read(postgresql_url, runs_dir=tmp_path) as database:
        other = Browser(build_app(Dashboard(database, VirtualClock(), place="runs")))
        for target in PAGES:
            assert other.get(target).status_code == 200, target
        for target in DATA:
            cells = [load(each, target).get("cells") for each in (browser, other)]
            assert (cells[0] and sorted(cells[0])) == (cells[1] and sorted(cells[1]))
        with pytest.raises(StoreError, match="read-only"):
            database.create(RUN)


def test_the_curves_of_participation_count_each_client_of_each_round(database: Database) -> None:
    """In buckets of rounds, of which the last is shorter."""
    rounds = database.run(LARGE).rounds()
    curves = read_participation(database, LARGE, rounds_per_bucket=7)
    assert len(curves) > 1
    for status, curve in curves.items():
        buckets = [rounds[begin : begin + 7] for begin in range(0, len(rounds), 7)]
        assert curve.means == [
            sum(p.status.value == status for each in bucket for p in each.participations)
            / len(bucket)
            for bucket in buckets
        ]
