"""A coordinator's /livez reports a stuck thread, and /metrics what it measures."""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fedlearn.deployment import part
from fedlearn.deployment.opening import DurableOpening
from fedlearn.gateway.meanings import MEANINGS
from tests.e2e.deployed import OK, UNAVAILABLE, Site, asked, site_in, until_said
from tests.processes import Change, Function, Launcher, until

pytestmark = pytest.mark.slow

HELD = "held"

#: Days of validity of certificates that were issued today.
DAYS = {"authority": 3652, "server": 365, "client": 365}


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    """A deployment whose coordinator counts as stuck after five seconds."""
    one = ("cohort.num_wanted=1", "stragglers.over_selection=1.0", "stragglers.min_reports=1")
    with site_in(launcher, tmp_path, "coordinator.stuck_after_s=5.0", *one) as site:
        yield site


def hold_calls(function: Function) -> Function:
    """Block the call until the test writes to the pipe next to the configuration."""

    def waiting(*given: object, **named: object) -> object:
        Path(os.environ[part.CONFIG]).with_name(HELD).read_bytes()
        return function(*given, **named)

    return waiting


def read_body(site: Site, path: str) -> str:
    """Return the body of the coordinator's answer, for any status."""
    try:
        with urlopen(f"http://{site.config.coordinator.http_address}{path}", timeout=30) as answer:
            found: bytes = answer.read()
            return found.decode()
    except HTTPError as error:
        with error:
            return error.read().decode()


def test_a_thread_of_the_rounds_that_is_stuck_is_told(site: Site) -> None:
    """The other threads continue: it answers requests and holds the lease."""
    os.mkfifo(site.folder / HELD)
    coordinator = site.serving(changes=[Change(DurableOpening.draw_cohort, hold_calls)])
    http = site.config.coordinator.http_address
    until(lambda: asked(http, "/livez") == UNAVAILABLE, told=coordinator.tail)
    assert "the thread of the rounds has shown no sign of life for" in read_body(site, "/livez")
    until(lambda: asked(http, "/readyz") == OK, told=coordinator.tail)
    (site.folder / HELD).write_bytes(b"go on")
    until(lambda: asked(http, "/livez") == OK, told=coordinator.tail)


def test_a_thread_of_the_database_that_is_stuck_is_told(site: Site) -> None:
    """The database does not answer at all; when it does again, the coordinator continues."""
    file = site.folder / "locked.db"
    site.store_url = f"sqlite:///{file}?timeout=600"
    coordinator = site.serving()
    http = site.config.coordinator.http_address
    is_waiting = 'fedlearn_phase{phase="waiting",run="federation"} 1.0'
    until(lambda: is_waiting in read_body(site, "/metrics"), told=coordinator.tail)
    with closing(sqlite3.connect(file, isolation_level=None, timeout=600)) as other:
        other.execute("BEGIN IMMEDIATE")
        until(lambda: asked(http, "/livez") == UNAVAILABLE, told=coordinator.tail)
        assert "the thread of the database has shown no sign of life for" in read_body(
            site, "/livez"
        )
    until(lambda: asked(http, "/livez") == OK, told=coordinator.tail)


def test_all_that_a_coordinator_measures_has_its_meaning(site: Site) -> None:
    """With the label of its run; durations of rounds and uploads, certificates and free disk."""
    site.change("num_rounds=2", "model.hidden=[2000]")  # more than fits into a message
    coordinator = site.serving("--serve-on")
    site.join(0)
    until_said(coordinator, "serving_on")
    page = read_body(site, "/metrics")
    found = dict(re.findall(r"^# HELP fedlearn_(\w+?)(?:_total)? (.+)$", page, re.MULTILINE))
    assert found == {name: MEANINGS[name].text for name in found}
    conditional = {
        "refused",
        "privacy_epsilon",
        "updates",
        "secure_dropouts",
        "privacy_epsilon_budget",
        "in_flight_limit",
        "check_in_seconds",
    }
    trained = {name for name in MEANINGS if name.startswith("server_training")}
    of_services = {"runs_at_work", "runs_queued"}
    assert found.keys() == MEANINGS.keys() - conditional - trained - of_services
    samples = dict(re.findall(r"^fedlearn_(\S+) (\S+)$", page, re.MULTILINE))
    assert all('run="federation"' in each for each in samples)
    run = '{run="federation"}'
    assert float(samples[f"upload_seconds_count{run}"]) == 2
    assert float(samples[f"upload_bytes_sum{run}"]) > 2 * 4 * 64 * 2000
    assert float(samples[f"round_work_seconds_count{run}"]) == 2
    assert float(samples[f"round_work_seconds_sum{run}"]) > 0
    for who, days in DAYS.items():
        left = float(samples[f'certificate_days{{of="{who}",run="federation"}}'])
        assert round(left) == days
    for folder in ("coordinator", "runs"):
        assert float(samples[f'disk_free_bytes{{folder="{folder}",run="federation"}}']) > 0
    assert "process_resident_memory_bytes " in page
