"""The commands of a service's queue, without a service."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedlearn.cli.app import main
from fedlearn.config import load_service
from fedlearn.core.clock import SystemClock
from fedlearn.deployment.hosted_run import keep_bundle
from fedlearn.deployment.places import Places
from fedlearn.deployment.submission import load_config
from fedlearn.errors import ConfigError
from fedlearn.store.bundles import bundle_path
from fedlearn.store.lease import deploy, find_deployment
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database
from tests.bundles import build
from tests.records import RUN

pytestmark = pytest.mark.usefixtures("surroundings")

EXPERIMENT = """
num_rounds = 20
[data]
source = "none"
[model]
kind = "python"
factory = "mine.py:network"
[cohort]
num_wanted = 2
"""
MINE = """
from torch import nn
def network():
    return nn.Linear(3, 2)
"""


@pytest.fixture(autouse=True)
def files(surroundings: None) -> None:
    Path("service.toml").write_text('name = "clinics"\n[service]\n[store]\nruns_dir = "runs"\n')
    Path("experiment.toml").write_text(EXPERIMENT)
    Path("mine.py").write_text(MINE)
    Path("runs").mkdir()  # the service has been started once


def call(capsys: pytest.CaptureFixture[str], command: str, code: int = 0) -> str:
    """Run a command; return its output, or its error message if ``code`` is not 0."""
    assert main(command.split()) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def list_queue(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in call(capsys, "queue --json").splitlines()]


def open_database() -> Database:
    return Places.of(load_service(Path("service.toml")), environ={}).open_database()


def begin(name: str) -> None:
    """Start a run as the service does."""
    with open_database() as database:
        RunQueue(database, SystemClock()).start(name)
        database.create(replace(RUN, name=name), from_queue=True)
        deploy(database, name)


def test_an_experiment_is_queued_with_everything_that_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under its own name or a drawn one; its own code is found from everywhere."""
    assert "queue is empty" in call(capsys, "queue")
    told = call(capsys, "submit experiment.toml --name one --set client.epochs=3 --priority 2")
    assert told == "one is queued: next\n"
    assert "1 run ahead" in call(capsys, "submit experiment.toml")
    one, drawn = list_queue(capsys)
    assert (one["run"], one["priority"], one["waits_for"]) == ("one", 2, "next")
    assert drawn["run"]
    with open_database() as database:
        config = load_config(RunQueue(database, SystemClock()).find("one"))
    assert (config.name, config.client.epochs, config.num_rounds) == ("one", 3, 20)
    assert f"{Path('mine.py').absolute()}:network" in config.canonical_json()
    table = call(capsys, "queue")
    assert len({line.index("queued") for line in table.splitlines()[1:]}) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--set model.factory=mine.py:netwerk", "there is no function netwerk"),
        ("--set coordinator.address=10.0.0.1:1", "coordinator.address is"),
        ("--set store.runs_dir=elsewhere", "store.runs_dir is"),
        ("--after nobody", "--after nobody: there is no such run in the queue"),
        ("--name a/b", "a/b"),
        ("--from nobody", "--from nobody: there is no such run in this database"),
        ("--from mine.safetensors", "cannot read"),
        ("--name clinics", "so is that of the service"),
        ("--set flower.client_apps=own --set client.epochs=2", "flower"),
    ],
)
def test_what_could_not_run_is_not_queued(
    capsys: pytest.CaptureFixture[str], options: str, told: str
) -> None:
    assert told in call(capsys, f"submit experiment.toml --name one {options}", code=2)
    assert list_queue(capsys) == []


def test_a_queued_run_is_extended_cancelled_and_retried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And listed with all other runs."""
    call(capsys, "submit experiment.toml --name one")
    assert "has 20 rounds already" in call(capsys, "extend one --rounds 20", code=2)
    assert "one now has 30 rounds; it is in the queue" in call(capsys, "extend one --rounds 30")
    listed = json.loads(call(capsys, "runs --json"))
    assert (listed["run"], listed["status"], listed["num_rounds"]) == ("one", "queued", 30)
    assert "one is cancelled" in call(capsys, "cancel one")
    assert "cancelled" in call(capsys, "runs")
    assert "one is queued again: next" in call(capsys, "retry one")
    assert "'one'" in call(capsys, "retry on", code=2)


def test_commands_about_a_run_name_one_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    """The only one at work may be left out."""
    for name in ("one", "two"):
        call(capsys, f"submit experiment.toml --name {name}")
    assert "one is queued: next" in call(capsys, "why one")
    assert "one is queued; `fedlearn cancel`" in call(capsys, "pause one", code=2)
    assert "none is at work" in call(capsys, "why", code=2)
    begin("one")
    assert "one has no coordinator" in call(capsys, "why")
    assert "`fedlearn serve`" in call(capsys, "why")
    assert "no round is finished yet" in call(capsys, "rounds")
    assert "the next one will know" in call(capsys, "pause")
    assert "the next one will know" in call(capsys, "resume one")
    begin("two")
    assert "at work: one, two" in call(capsys, "abort", code=2)
    call(capsys, "abort two")
    assert "two is being ended" in call(capsys, "cancel two")
    with open_database() as database:
        controls = [find_deployment(database, name).control for name in ("one", "two")]
        assert controls == ["run", "abort"]
    assert "otherwise `fedlearn serve` continues it" in call(capsys, "extend one --rounds 40")
    assert "no clients yet" in call(capsys, "clients one")
    assert "max_concurrent_runs = 2" in call(capsys, "check service.toml")
    Path("coordinator.toml").write_text('name = "single"\n')
    assert "that of the run 'single', not of 'one'" in call(capsys, "why one", code=2)


def test_a_schedule_is_made_listed_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no schedules" in call(capsys, "schedules")
    made = ["schedule", "experiment.toml", "--name", "nightly", "--cron", "0 2 * * *"]
    assert main([*made, "--timezone", "Europe/Berlim"]) == 2
    assert "no such time zone" in capsys.readouterr().err
    assert main(made) == 0
    assert "nightly is first due at" in capsys.readouterr().out
    listed = json.loads(call(capsys, "schedules --json"))
    assert (listed["name"], listed["cron"], listed["timezone"]) == ("nightly", "0 2 * * *", "UTC")
    assert "queue is empty" in call(capsys, "queue"), "only the service queues its runs"
    assert "did you mean 'nightly'" in call(capsys, "unschedule nightli", code=2)
    call(capsys, "unschedule nightly")
    assert "no schedules" in call(capsys, "schedules")


def test_a_run_keeps_the_bundle_that_it_was_submitted_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whatever becomes of the file. Control: the copy was changed."""
    first, other = build(tmp_path / "a"), build(tmp_path / "b", version="2.0")
    Path("a.bundle").write_bytes(first.content)
    call(capsys, "submit experiment.toml --name one --set client.bundle=a.bundle")
    wrong = f"--set client.bundle=a.bundle --set client.bundle_digest={other.digest}"
    told = call(capsys, f"submit experiment.toml --name two {wrong}", code=2)
    assert "not that of client.bundle_digest" in told
    with open_database() as database:
        [queued] = RunQueue(database, SystemClock()).list()
        runs_dir = database.runs_dir
    section, stored = load_config(queued).client, bundle_path(runs_dir, first.digest)
    assert section.bundle_digest == first.digest
    Path("a.bundle").write_bytes(other.content)
    for folder in ("one", "two"):
        Path(folder).mkdir()
    keep_bundle(section, Path("one"), runs_dir=runs_dir)
    assert Path("one/trainer.bundle").read_bytes() == first.content
    stored.write_bytes(other.content)
    with pytest.raises(ConfigError, match="does not have the digest"):
        keep_bundle(section, Path("two"), runs_dir=runs_dir)
