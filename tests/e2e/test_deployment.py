"""A coordinator's process from start to end: stopped, killed, paused, aborted, and gone on with."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlearn.rounds.records import RunStatus
from fedlearn.store.lease import deployment
from tests.addresses import free_addresses
from tests.e2e.deployed import LONG_S, OK, UNAVAILABLE, Site, asked, site_in

#: More rounds than end while a test looks away for some seconds.
NUM_CLIENTS, NUM_ROUNDS = 2, 50

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two clients are asked, and both must report."""
    counts = (f"num_rounds={NUM_ROUNDS}", f"cohort.num_wanted={NUM_CLIENTS}")
    with site_in(tmp_path, *counts, "stragglers.over_selection=1.0") as site:
        yield site


def stored_rounds(site: Site) -> tuple[RunStatus, list[int]]:
    with site.database() as database:
        run = database.run("federation")
        return run.record.status, [record.round_num for record in run.rounds()]


def parked_after(site: Site, num_rounds: int) -> None:
    """Have clients, and a coordinator that is told to stop when a round is finished."""
    coordinator = site.coordinator()
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(coordinator, num_rounds)
    coordinator.send_signal(signal.SIGTERM)
    coordinator.wait(LONG_S)
    assert coordinator.returncode == 0


def test_a_run_goes_on_after_a_stop_and_after_a_kill(site: Site) -> None:
    """Clients come back without being told; every round is there once."""
    parked_after(site, 2)
    second = site.coordinator()
    site.until_round(second, 4)
    second.kill()
    second.wait()
    third = site.coordinator()
    third.wait(LONG_S)
    assert third.returncode == 0
    assert stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))
    site.until(lambda: site.log("client-*").count("the run is done") == NUM_CLIENTS)


def test_a_run_goes_back_from_a_damaged_checkpoint(site: Site) -> None:
    """As another run to its clients, with every round once; nothing of either is in the spool."""
    spool = site.folder / "coordinator" / "spool"
    parked_after(site, 3)
    with site.database() as database:
        last = database.run("federation").checkpoints()[-1].path
        dropped = deployment(database, "federation").run_id
    assert [path.name for path in spool.iterdir()] == [dropped]
    last.write_bytes(last.read_bytes()[:-1])
    second = site.start("coordinator", "coordinator", str(site.file), "--json")
    second.wait(LONG_S)
    assert second.returncode != 0
    assert "--from-previous" in site.log("coordinator")
    third = site.coordinator("--from-previous")
    third.wait(LONG_S)
    assert third.returncode == 0, site.log()[-3000:]
    assert stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))
    with site.database() as database:
        assert deployment(database, "federation").run_id != dropped
    assert list(spool.iterdir()) == []


def test_a_run_goes_on_from_a_backup(site: Site, tmp_path: Path) -> None:
    """As another run to its clients, which come back with the keys that they had."""
    parked_after(site, 2)
    kept = [site.folder / name for name in ("runs", "coordinator")]
    for folder in kept:
        shutil.copytree(folder, tmp_path / "backup" / folder.name)
    with site.database() as database:
        dropped = deployment(database, "federation").run_id
    num_finished = len(stored_rounds(site)[1])
    second = site.coordinator()
    site.until_round(second, num_finished + 1)
    second.kill()
    second.wait()
    for folder in kept:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "backup" / folder.name, folder)
    third = site.coordinator("--restored")
    third.wait(LONG_S)
    assert third.returncode == 0, site.log()[-3000:]
    assert stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))
    with site.database() as database:
        assert deployment(database, "federation").run_id != dropped


def test_an_operator_pauses_resumes_looks_and_aborts(site: Site) -> None:
    """From another process, through the database."""
    coordinator = site.coordinator("--set", "num_rounds=5000")
    waiting = site.type("why")
    assert "it needs 2 clients" in waiting
    assert "goes on" in site.type("resume")
    site.type("pause")
    site.until(lambda: "it is paused" in site.type("why"))
    for number in range(NUM_CLIENTS):
        site.type("invite", f"client-{number}")
        site.join(number)
    site.until(lambda: site.type("clients", "--json").count('"active"') == NUM_CLIENTS)
    site.type("resume")
    site.until_round(coordinator, 1)
    site.type("abort")
    coordinator.wait(LONG_S)
    assert coordinator.returncode == 3
    status, rounds = stored_rounds(site)
    assert status is RunStatus.FAILED
    listed = site.type("rounds", "--json", "--last", "5000").splitlines()
    assert len(listed) == len(rounds) >= 1
    assert "aborted by the operator" in site.type("why")


def test_a_second_coordinator_takes_over(site: Site) -> None:
    """It lives and is not ready while the first one leads; the clients find it by themselves."""
    door, enrolment, http = free_addresses(3)
    both = [site.config().coordinator.address, door]
    site.change(f"coordinator.public_addresses={both}", "coordinator.lease_ttl_s=6.0")
    first = site.coordinator()
    own = {"address": door, "enrolment_address": enrolment, "http_address": http}
    options = [f"--set=coordinator.{key}={value}" for key, value in own.items()]
    second = site.start("second", "coordinator", str(site.file), "--json", *options)
    site.until(lambda: asked(http, "/livez") == OK)
    assert asked(http, "/readyz") == UNAVAILABLE
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(first, 2)
    assert asked(http, "/readyz") == UNAVAILABLE
    first.kill()
    second.wait(LONG_S)
    assert second.returncode == 0
    assert stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))
