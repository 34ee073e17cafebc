"""A coordinator's process from start to end: stopped, killed, paused, aborted and resumed."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlearn.cli.failures import RUN_FAILED
from fedlearn.experiment.run import Run
from fedlearn.rounds import evaluation
from fedlearn.rounds.records import RunStatus
from fedlearn.store.lease import find_deployment
from tests.addresses import free_addresses
from tests.e2e.deployed import OK, UNAVAILABLE, Site, asked, site_in
from tests.processes import Crash, Launcher, until

#: More rounds than can finish while a test waits for some seconds.
NUM_CLIENTS, NUM_ROUNDS = 2, 50

pytestmark = pytest.mark.slow


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    """A deployment of two clients, which must both report."""
    counts = (f"num_rounds={NUM_ROUNDS}", f"cohort.num_wanted={NUM_CLIENTS}")
    with site_in(launcher, tmp_path, *counts, "stragglers.over_selection=1.0") as site:
        yield site


def load_stored_rounds(site: Site) -> tuple[RunStatus, list[int]]:
    with site.database() as database:
        run = database.run("federation")
        return run.record.status, [record.round_num for record in run.rounds()]


def park_after(site: Site, num_rounds: int) -> None:
    """Run a coordinator with clients, and stop it after some rounds."""
    coordinator = site.serving()
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(coordinator, num_rounds)
    coordinator.send(signal.SIGTERM)
    assert coordinator.wait() == 0, coordinator.tail()


def test_a_run_goes_on_after_a_stop_and_after_a_kill(site: Site) -> None:
    """Clients reconnect by themselves, and every round is recorded once."""
    park_after(site, 2)
    second = site.serving()
    site.until_round(second, 4)
    second.kill()
    third = site.coordinator()
    assert third.wait() == 0, third.tail()
    assert load_stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))
    with site.database() as database:
        run = Run(database.run("federation"))
        clients, metrics = run.clients, run.history[-1].metrics
    assert clients.measured_after == NUM_ROUNDS
    assert {each["name"] for each in clients} <= {"client-0", "client-1"}
    assert clients.mean("accuracy") == metrics["clients/accuracy_mean"]
    until(lambda: site.log("client-*").count("the run is done") == NUM_CLIENTS)


def test_a_run_goes_back_from_a_damaged_checkpoint(site: Site) -> None:
    """Clients see it as another run. Every round is recorded once, and the spool is empty."""
    spool = site.folder / "coordinator" / "spool"
    park_after(site, 3)
    with site.database() as database:
        last = database.run("federation").checkpoints()[-1].path
        dropped = find_deployment(database, "federation").run_id
    assert [path.name for path in spool.iterdir()] == [dropped]
    last.write_bytes(last.read_bytes()[:-1])
    second = site.coordinator()
    assert second.wait() not in (0, None)
    assert "--from-previous" in second.err()
    third = site.coordinator("--from-previous")
    assert third.wait() == 0, third.tail()
    assert load_stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))
    with site.database() as database:
        assert find_deployment(database, "federation").run_id != dropped
    assert list(spool.iterdir()) == []


def test_a_run_goes_on_from_a_backup(site: Site, tmp_path: Path) -> None:
    """Clients see it as another run, and reconnect with the keys that they have."""
    park_after(site, 2)
    kept = [site.folder / name for name in ("runs", "coordinator")]
    for folder in kept:
        shutil.copytree(folder, tmp_path / "backup" / folder.name)
    with site.database() as database:
        dropped = find_deployment(database, "federation").run_id
    num_finished = len(load_stored_rounds(site)[1])
    second = site.serving()
    site.until_round(second, num_finished + 1)
    second.kill()
    for folder in kept:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "backup" / folder.name, folder)
    third = site.coordinator("--restored")
    assert third.wait() == 0, third.tail()
    assert load_stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))
    with site.database() as database:
        assert find_deployment(database, "federation").run_id != dropped


def test_an_operator_pauses_resumes_looks_and_aborts(site: Site) -> None:
    """From another process, through the database."""
    coordinator = site.serving("--set", "num_rounds=5000")
    waiting = site.type("why")
    assert "it needs 2 eligible clients" in waiting
    assert "continues" in site.type("resume")
    site.type("pause")
    until(lambda: "it is paused" in site.type("why"))
    for number in range(NUM_CLIENTS):
        site.type("invite", f"client-{number}")
        site.join(number)
    until(lambda: site.type("clients", "--json").count('"connected": true') == NUM_CLIENTS)
    site.type("resume")
    site.until_round(coordinator, 1)
    site.type("abort")
    assert coordinator.wait() == RUN_FAILED
    status, rounds = load_stored_rounds(site)
    assert status is RunStatus.FAILED
    listed = site.type("rounds", "--json", "--last", "5000").splitlines()
    assert len(listed) == len(rounds) >= 1
    assert "aborted by the operator" in site.type("why")
    clients = [json.loads(line) for line in site.type("clients", "--json").splitlines()]
    for each in clients:
        assert not each["connected"]
        assert each["software"].startswith("fedlearn ")
        assert each["num_examples"] > 0
        assert each["reported"] + each["failed"] + each["late"] == len(rounds)


FAILING = """
class Trainer:
    num_examples = 3
    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors, *, context):
        raise ValueError("no data")

    def evaluate(self, tensors, *, control):
        raise ValueError("no data")
"""


def test_who_keeps_failing_is_known_to_the_next_coordinator(site: Site) -> None:
    """Failures in a row are counted across coordinators, so no client gets a fresh start."""
    (site.folder / "failing.py").write_text(FAILING)
    site.change("stragglers.min_reports=1", "coordinator.set_aside_after=1000", "num_rounds=5000")
    first = site.serving()
    site.join(0)
    site.join(1, task=f"{site.folder / 'failing.py'}:Trainer")
    site.until_round(first, 3)
    first.kill()
    second = site.serving()
    number = len(load_stored_rounds(site)[1])
    site.until_round(second, number + 2)
    why = json.loads(site.type("why", "--json"))
    (failing,) = why["failing"]
    assert failing["name"] == "client-1"
    assert failing["in_a_row"] >= why["status"]["round"] > number, "in each round of both"


def test_a_second_coordinator_takes_over(site: Site) -> None:
    """It is live but not ready while the first one leads; the clients find it by themselves."""
    gateway, http = free_addresses(2)
    both = [site.config.coordinator.address, gateway]
    site.change(f"coordinator.public_addresses={both}", "coordinator.lease_ttl_s=6.0")
    first = site.serving()
    own = {"address": gateway, "http_address": http}
    options = [f"--set=coordinator.{key}={value}" for key, value in own.items()]
    second = site.coordinator(*options)
    until(lambda: asked(http, "/livez") == OK)
    assert asked(http, "/readyz") == UNAVAILABLE
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.until_round(first, 2)
    assert asked(http, "/readyz") == UNAVAILABLE
    first.kill()
    assert second.wait() == 0, second.tail()
    assert load_stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))


def test_fine_tuned_clients_of_a_killed_coordinator_measure_what_a_simulation_does(
    site: Site,
) -> None:
    """It dies while clients evaluate: they keep their heads, and answer again."""
    site.change(
        "num_rounds=3",
        "algorithm.name=fedper",
        'algorithm.personal_layers=["3.*"]',
        f"evaluation.clients={NUM_CLIENTS}",
        "evaluation.fine_tune_epochs=1",
        f"data.partition.num_clients={NUM_CLIENTS}",
    )
    third_reply = Crash(
        "clients evaluate", evaluation.check_evaluation, "after", 2 * NUM_CLIENTS - 1
    )
    first = site.serving(crash=third_reply)
    for number in range(NUM_CLIENTS):
        site.join(number)
    first.wait()
    assert first.has_crashed_itself(), first.tail()
    assert len(site.rounds()) == 1
    second = site.coordinator()
    assert second.wait() == 0, second.tail()
    site.type("simulate", str(site.file), "--name", "same", "--set", "engine.transport=memory")
    with site.database() as database:
        expected = list(database.run("same").rounds())
    names = ("clients/loss_mean", "clients/personal_loss_mean")
    # The second round is evaluated by those that have reconnected by then, perhaps by none.
    for number in (0, 2):
        found, same = site.rounds()[number].metrics, expected[number].metrics
        for name in names:
            assert found[name] == pytest.approx(same[name], abs=1e-4)
        assert same[names[1]] < same[names[0]]
