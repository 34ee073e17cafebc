"""A service of many runs with real processes: the queue, kills, cancelled runs."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedlearn import assembly
from fedlearn.config import for_service, load
from fedlearn.config.serving import ServiceConfig, load_service
from fedlearn.core.clock import SystemClock
from fedlearn.experiment.simulate import new_record
from fedlearn.rounds.records import RunStatus
from fedlearn.rounds.scheduling import QueueState, Submission
from fedlearn.store.queue import RunQueue
from tests.e2e.deployed import Site, site_in, until_said
from tests.processes import Launcher, Process, until

pytestmark = pytest.mark.slow

NUM_CLIENTS, NUM_ROUNDS = 2, 4
RUN = (
    f"num_rounds={NUM_ROUNDS}",
    f"cohort.num_wanted={NUM_CLIENTS}",
    "stragglers.over_selection=1.0",
    "stragglers.deadline_s=none",
    f"data.partition.num_clients={NUM_CLIENTS}",
)


SOUND_MODEL = """
from torch import nn
def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
"""


class Served(Site):
    """A service, its clients, and the queue."""

    def write_service(self) -> None:
        section = self.config.coordinator
        self.service_file.write_text(
            f'name = "clinics"\n[coordinator]\naddress = "{section.address}"\n'
            f'http_address = "{section.http_address}"\nlease_ttl_s = 3.0\n'
            f'[store]\nruns_dir = "{self.folder / "runs"}"\n'
        )

    @property
    def service_file(self) -> Path:
        return self.folder / "service.toml"

    @property
    def service(self) -> ServiceConfig:
        return load_service(self.service_file)

    def serve(self) -> Process:
        process = self.start("service", "serve", str(self.service_file), "--json")
        until_said(process, "serving")
        return process

    def submit(self, name: str, *overrides: str, after: str = "") -> None:
        experiment = load(self.folder / "experiment.toml", overrides=(f"name={name}", *overrides))
        config = for_service(experiment, self.service)
        components = assembly.build_deployment(config, data_dir=self.folder)
        tree = new_record(components, extra={}).config
        with self.database() as database:
            RunQueue(database, SystemClock()).submit(
                Submission(name=name, config=tree, after=after, start_from={})
            )

    def states(self) -> dict[str, QueueState]:
        with self.database() as database:
            return {each.name: each.state for each in RunQueue(database, SystemClock()).list()}

    def until_state(self, name: str, state: QueueState, process: Process) -> None:
        until(lambda: self.states()[name] is state, told=process.tail)

    def until_rounds(self, name: str, num_rounds: int, process: Process) -> None:
        until(lambda: self.num_rounds(name) >= num_rounds, told=process.tail)

    def num_rounds(self, name: str) -> int:
        with self.database() as database:
            if not any(run.name == name for run in database.runs()):
                return 0
            return len(list(database.run(name).rounds()))


@pytest.fixture
def served(launcher: Launcher, tmp_path: Path) -> Iterator[Served]:
    with site_in(launcher, tmp_path, *RUN) as site:
        found = Served(launcher, tmp_path)
        found.write(site.config)
        experiment = "\n".join(
            (
                f"num_rounds = {NUM_ROUNDS}",
                f'[data]\nsource = "digits"\n[data.partition]\nnum_clients = {NUM_CLIENTS}',
                f"[cohort]\nnum_wanted = {NUM_CLIENTS}",
                '[stragglers]\nover_selection = 1.0\ndeadline_s = "none"',
                f"min_reports = {NUM_CLIENTS}",
            )
        )
        (tmp_path / "experiment.toml").write_text(experiment)
        found.write_service()
        with found:
            yield found


def test_three_runs_survive_the_kills_of_their_service(served: Served) -> None:
    service = served.serve()
    clients = [served.join(number) for number in range(NUM_CLIENTS)]
    served.submit("one")
    served.submit("two")
    served.submit("three", after="one")
    for num_rounds in (1, 3):
        served.until_rounds("two", num_rounds, service)
        service.kill()
        service = served.serve()
    for name in ("one", "two", "three"):
        served.until_state(name, QueueState.DONE, service)
    with served.database() as database:
        found = {name: database.run(name) for name in ("one", "two", "three")}
        for run in found.values():
            rounds = list(run.rounds())
            assert [each.round_num for each in rounds] == list(range(NUM_ROUNDS))
            assert all(len(each.participations) == NUM_CLIENTS for each in rounds)
        models = [run.load() for run in found.values()]
    first, *others = (each.select_tensors("params/") for each in models if each is not None)
    assert len(others) == 2
    for other in others:
        torch.testing.assert_close(other, first, rtol=0.0, atol=1e-6)
    assert all(each.is_running for each in clients), "one process a client, from first to last"


def test_a_cancelled_run_is_retried_from_where_it_was(served: Served) -> None:
    service = served.serve()
    for number in range(NUM_CLIENTS):
        served.join(number)
    served.submit("long", "num_rounds=1000")
    served.submit("short")
    served.until_rounds("long", 2, service)
    with served.database() as database:
        RunQueue(database, SystemClock()).cancel("long")
    served.until_state("long", QueueState.CANCELLED, service)
    done = served.num_rounds("long")
    served.until_state("short", QueueState.DONE, service)
    assert served.num_rounds("long") == done, "a cancelled run does not go on"
    with served.database() as database:
        RunQueue(database, SystemClock()).retry("long")
    served.until_rounds("long", done + 1, service)
    service.send(signal.SIGTERM)
    assert service.wait() == 0, service.tail()
    with served.database() as database:
        assert database.run("long").record.status is not RunStatus.FAILED
    assert served.states()["long"] is QueueState.RUNNING, "the next service continues it"


def test_own_code_that_fails_ends_its_run_and_no_other(served: Served) -> None:
    model = served.folder / "model.py"
    model.write_text(SOUND_MODEL)
    served.submit("broken", f'model={{kind="python", factory="{model}:make"}}')
    served.submit("sound")
    model.write_text("def make():\n    raise SystemExit(3)\n")
    service = served.serve()
    for number in range(NUM_CLIENTS):
        served.join(number)
    served.until_state("broken", QueueState.FAILED, service)
    served.until_state("sound", QueueState.DONE, service)
    with served.database() as database:
        assert "SystemExit" in RunQueue(database, SystemClock()).find("broken").reason
