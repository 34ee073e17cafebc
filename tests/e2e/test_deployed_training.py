"""A deployed coordinator that trains: stopped, killed, and with several processes."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlearn.parallel import jobs
from fedlearn.parallel.engine import RankTrainer
from fedlearn.store.lease import find_deployment
from tests.e2e.deployed import Site, site_in
from tests.processes import Change, Crash, Function, Launcher, Process, until

pytestmark = pytest.mark.slow

NUM_CLIENTS, NUM_STEPS = 2, 60
HANDLERS = Path("handlers")


@pytest.fixture
def site(launcher: Launcher, tmp_path: Path) -> Iterator[Site]:
    """A deployment with two rounds of two clients after a warm start."""
    overrides = (
        *("num_rounds=2", f"cohort.num_wanted={NUM_CLIENTS}", "stragglers.over_selection=1.0"),
        *(f"coordinator.training.num_steps={NUM_STEPS}", "coordinator.training.report_every=5"),
        "coordinator.training.checkpoint_every=10",
    )
    with site_in(launcher, tmp_path, *overrides) as site:
        yield site


def steps(coordinator: Process) -> list[int]:
    """Return the steps of the coordinator's progress reports."""
    return [line["step_num"] for line in coordinator.log() if line["message"] == "server_training"]


def test_a_training_is_parked_by_a_stop_and_goes_on(site: Site) -> None:
    """In the warm start and again between rounds; every round is recorded once."""
    between = ("coordinator.training.every_rounds=1", "coordinator.training.round_steps=30")
    site.change(*between)
    stop = Crash("in the warm start", RankTrainer.take_step, "after", 27, by=signal.SIGTERM)
    first = site.coordinator(crash=stop)
    assert first.wait() == 0, first.tail()
    assert first.said("parked") == 1
    assert 20 < steps(first)[-1] < NUM_STEPS
    again = Crash("between", RankTrainer.take_step, "after", NUM_STEPS - 20 + 13, by=signal.SIGTERM)
    second = site.coordinator(crash=again)
    for number in range(NUM_CLIENTS):
        site.join(number)
    assert second.wait() == 0, second.tail()
    assert steps(second)[0] in range(25, NUM_STEPS), "not from the beginning"
    assert NUM_STEPS < steps(second)[-1] < NUM_STEPS + 30
    third = site.coordinator()
    assert third.wait() == 0, third.tail()
    assert steps(third)[0] > NUM_STEPS
    assert steps(third)[-1] == NUM_STEPS + 2 * 30
    assert [record.round_num for record in site.rounds()] == [0, 1]
    assert "warm_start_loss" in site.rounds()[0].metrics, "though the process is another"
    with site.database() as database:
        told = find_deployment(database, "federation").status["training"]
    assert isinstance(told, dict)
    assert told["steps"]["step_num"] == told["steps"]["num_steps"] == NUM_STEPS + 2 * 30


def watched(train: Function) -> Function:
    """Let a job record whether it restores the signal handlers."""

    def handlers() -> list[object]:
        return [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]

    def call(*arguments: object, **named: object) -> object:
        before = handlers()
        try:
            return train(*arguments, **named)
        finally:
            HANDLERS.write_text("as before" if handlers() == before else "changed")

    return call


def processes_of(folder: Path) -> list[str]:
    """Return the commands of processes that have a folder in their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if str(folder) in command:
            found.append(command)
    return found


def test_two_processes_train_beside_a_coordinator_that_serves(site: Site) -> None:
    """None outlives it; it renews the lease meanwhile, and restores its signal handlers."""
    ttl = "coordinator.lease_ttl_s=1.0"  # starting the processes takes longer
    site.change("coordinator.training.replicate=2", ttl)
    training = site.folder / "runs" / "federation" / "training"
    first = site.serving()
    until(lambda: steps(first) != [], told=first.tail)
    assert len(processes_of(training)) == 3, "torchrun and two ranks"
    first.kill()
    took_s = until(lambda: processes_of(training) == [])
    assert took_s < 1.0
    second = site.coordinator(changes=[Change(jobs.train, watched)])
    until(lambda: len(processes_of(training)) == 3, told=second.tail)
    with site.database() as database:
        before = find_deployment(database, "federation").beat
        until(lambda: find_deployment(database, "federation").beat > before + 2)
    assert steps(second) == [], "the ranks begin yet"
    for number in range(NUM_CLIENTS):
        site.join(number)
    assert second.wait() == 0, second.tail()
    assert steps(second)[-1] == NUM_STEPS
    assert [record.round_num for record in site.rounds()] == [0, 1]
    assert (site.folder / HANDLERS).read_text() == "as before"
    assert processes_of(training) == []
