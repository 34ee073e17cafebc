"""The commands of studies, without a service: what a study allows its runs."""

import json
from pathlib import Path

import pytest

from fedlearn.algorithms.cohorts import PoissonCohorts
from fedlearn.cli.app import main
from fedlearn.config import load_service
from fedlearn.deployment.places import Places
from fedlearn.privacy.events import Event
from fedlearn.privacy.ledger import Charge
from fedlearn.store.ledger import StoredLedger

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
sampling = "poisson"
[privacy]
mode = "central"
clip_norm = 1.0
noise_multiplier = 4.0
target_delta = 1e-5
num_users = 40
"""
MINE = """
from torch import nn
def network():
    return nn.Linear(3, 2)
"""


@pytest.fixture(autouse=True)
def files(surroundings: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("service.toml").write_text('name = "clinics"\n[service]\n[store]\nruns_dir = "runs"\n')
    Path("experiment.toml").write_text(EXPERIMENT)
    Path("mine.py").write_text(MINE)
    call(capsys, "study create tumours --epsilon 2 --delta 1e-5 --data wards --data clinics")


def call(capsys: pytest.CaptureFixture[str], command: str, code: int = 0) -> str:
    """Run a command; return its output, or its error message if ``code`` is not 0."""
    assert main(command.split()) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def spend(population: str, count: int) -> None:
    with Places.of(load_service(Path("service.toml")), environ={}).open_database() as database:
        ledger = StoredLedger(database, population=population, run="earlier")
        event = Event(PoissonCohorts(40, 2, 40), 4.0)
        charge = Charge(event=event, count=count, clip_norm=1.0, round_num=0, attempt=0)
        assert ledger.charge(charge, known={})


def test_a_run_of_a_study_charges_the_ledger_of_its_data_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spend("wards", 10**4)  # another ledger, of runs without a study
    told = call(capsys, "submit experiment.toml --study tumours --set privacy.population=wards")
    assert "is queued" in told
    assert json.loads(call(capsys, "queue --json"))["study"] == "tumours"
    spend("tumours/wards", 10**4)
    again = "submit experiment.toml --study tumours --set privacy.population="
    assert "has spent ε" in call(capsys, again + "wards", code=2)
    assert "is queued" in call(capsys, again + "clinics")
    shown = json.loads(call(capsys, "study show tumours --json"))
    assert shown["spent"].keys() == {"wards"}
    assert shown["spent"]["wards"] > 2.0
    assert len(shown["runs"]) == 2
    assert "budget  ε 2 at δ 1e-05 per data set" in call(capsys, "study show tumours")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--study tumour", "did you mean 'tumours'"),
        ("--study tumours", "say which one the run is about"),
        ("--study tumours --set privacy.population=beds", "data sets of the study tumours are"),
        ("--study tumours --set privacy.target_delta=1e-6", "is for 1e-05; set it to that"),
        ("--study tumours --set privacy.other_data_because=x", "ledger of a study is that of its"),
        ("--study tumours --set privacy.reproducible=true", "must have secret noise"),
        ("--study tumours --set privacy.population=wards --set privacy.noise_multiplier=0.1",
         "another round would make it"),
        ("--set privacy.population=tumours/wards", "submit the run with --study tumours"),
    ],
)  # fmt: skip
def test_what_would_escape_the_budget_is_not_queued(
    capsys: pytest.CaptureFixture[str], options: str, told: str
) -> None:
    assert told in call(capsys, f"submit experiment.toml --name one {options}", code=2)
    assert "queue is empty" in call(capsys, "queue")


def test_a_run_without_privacy_is_not_of_a_study_with_a_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("open.toml").write_text(EXPERIMENT.partition("[privacy]")[0])
    assert 'privacy.mode is "off"' in call(capsys, "submit open.toml --study tumours", code=2)
    call(capsys, "study create devices")
    assert "is queued" in call(capsys, "submit open.toml --study devices --name one")
    assert "one of the study devices is queued" in call(capsys, "study close devices", code=2)
    call(capsys, "cancel one")
    call(capsys, "study close devices")
    assert "closed" in call(capsys, "study list")
