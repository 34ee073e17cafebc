"""A service of many runs with real processes: the queue, kills, cancelled runs."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from fedlearn import assembly
from fedlearn.config import for_service, load
from fedlearn.config.serving import ServiceConfig, load_service
from fedlearn.core.clock import SystemClock
from fedlearn.experiment.simulate import new_record
from fedlearn.privacy.accounting import epsilon_of_release
from fedlearn.rounds.records import RunStatus
from fedlearn.rounds.scheduling import QueueState, Submission
from fedlearn.store.ledger import StoredLedger
from fedlearn.store.queue import RunQueue
from fedlearn.store.studies import NewStudy, StudyStore
from tests.e2e.deployed import SMALL, Site, site_in, until_said
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


PRIVATE = (
    "num_rounds=40",
    "cohort.sampling=poisson",
    "privacy.mode=central",
    "privacy.clip_norm=1.0",
    "privacy.noise_multiplier=4.0",
    "privacy.target_delta=1e-3",
    f"privacy.num_users={NUM_CLIENTS}",
    "privacy.population=wards",
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
            f'name = "clinics"\n[service]\n[coordinator]\naddress = "{section.address}"\n'
            f'http_address = "{section.http_address}"\nlease_ttl_s = 3.0\n'
            f'[store]\nruns_dir = "{self.folder / "runs"}"\n'
        )

    @property
    def service_file(self) -> Path:
        return self.folder / "service.toml"

    @property
    def of_it(self) -> tuple[str, str]:
        return "--config", str(self.service_file)

    @property
    def service(self) -> ServiceConfig:
        return load_service(self.service_file)

    def serve(self) -> Process:
        process = self.start("service", "serve", str(self.service_file), "--json")
        until_said(process, "serving")
        return process

    def submit(self, name: str, *overrides: str, after: str = "", study: str = "") -> None:
        experiment = load(self.folder / "experiment.toml", overrides=(f"name={name}", *overrides))
        config = for_service(experiment, self.service)
        components = assembly.build_deployment(config, data_dir=self.folder)
        tree = new_record(components, extra={}).config
        with self.database() as database:
            RunQueue(database, SystemClock()).submit(
                Submission(name=name, config=tree, after=after, start_from={}, study=study)
            )

    def states(self) -> dict[str, QueueState]:
        with self.database() as database:
            return {each.name: each.state for each in RunQueue(database, SystemClock()).list()}

    def until_state(self, name: str, state: QueueState, process: Process) -> None:
        until(lambda: self.states()[name] is state, told=process.tail)

    def is_over(self, name: str) -> bool:
        return self.states()[name].is_over

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


def test_only_clients_whose_owners_consent_work_for_a_study(served: Served) -> None:
    """One consents by command, one in its policy; a third does, too, but is not invited."""
    with served.database() as database:
        StudyStore(database, SystemClock()).create(NewStudy(name="tumours"))
    policy = served.folder / "policy.toml"
    policy.write_text(f'{SMALL}\n[policy]\nstudies = ["tumours"]\n')
    service = served.serve()
    served.join(0)
    for number in (1, 2):  # there are data of two clients
        served.join(number, "--config", str(policy), FEDLEARN_DEMO_CLIENT=str(number % 2))
    served.type("study", "invite", "tumours", "client-0", "client-1", *served.of_it)
    served.submit("one", study="tumours")
    served.submit("other")  # in which all take part
    served.until_state("other", QueueState.DONE, service)
    assert served.num_rounds("one") == 0, "one client consents, and two are needed"
    served.type("consent", "tumours", str(served.folder / "client-0"))
    served.until_state("one", QueueState.DONE, service)
    with served.database() as database:
        run = database.run("one")
        asked = {each.client_id for one in run.rounds() for each in one.participations}
        study = StudyStore(database, SystemClock()).find("tumours")
    assert (asked, run.record.study) == ({0, 1}, "tumours")
    said = {each.client: each.consent for each in study.members}
    assert said == {"client-0": "given", "client-1": "given"}
    served.type("consent", "tumours", str(served.folder / "client-1"), "--withdraw")
    until(lambda: "consent.withdrawn" in served.type("audit-log", *served.of_it), told=service.tail)


def test_private_runs_of_a_study_stay_within_its_budget_through_kills(served: Served) -> None:
    """Two are at work at the same time, and together could not afford all of their rounds."""
    with served.database() as database:
        StudyStore(database, SystemClock()).create(
            NewStudy(name="tumours", epsilon=4.0, target_delta=1e-3, data=("wards",))
        )
    policy = served.folder / "policy.toml"
    policy.write_text(f'{SMALL}\n[policy]\nstudies = ["tumours"]\n')
    service = served.serve()
    for number in range(NUM_CLIENTS):
        served.join(number, "--config", str(policy))
    served.type("study", "invite", "tumours", "client-0", "client-1", *served.of_it)
    for name in ("one", "two"):
        served.submit(name, *PRIVATE, study="tumours")
    for num_rounds in (1, 2):
        served.until_rounds("one", num_rounds, service)
        service.kill()
        service = served.serve()
    for name in ("one", "two"):
        until(partial(served.is_over, name), told=service.tail)
    with served.database() as database:
        spent = StoredLedger(database, population="tumours/wards", run="").load_spent()
        num_released = sum(len(list(database.run(name).rounds())) for name in ("one", "two"))
        reasons = [each.reason for each in RunQueue(database, SystemClock()).list()]
    assert num_released <= sum(spent.values())
    assert 0.0 < epsilon_of_release(spent, target_delta=1e-3) <= 4.0
    assert any("budget of the study tumours is spent" in each for each in reasons), reasons


def test_a_run_starts_from_the_model_of_another(served: Served) -> None:
    service = served.serve()
    for number in range(NUM_CLIENTS):
        served.join(number)
    experiment = str(served.folder / "experiment.toml")
    served.type("submit", experiment, "--name", "one", *served.of_it)
    served.type(
        "submit", experiment, "--name", "two", "--after", "one", "--from", "one", *served.of_it
    )
    served.until_state("two", QueueState.DONE, service)
    with served.database() as database:
        first, second = (list(database.run(name).rounds()) for name in ("one", "two"))
        assert database.run("two").record.start_from["round"] == str(NUM_ROUNDS)
    assert second[0].train_loss < first[-1].train_loss
