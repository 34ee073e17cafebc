"""Commands that need only the database start fast: tests check which modules they import."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedlearn.cli.app import main
from fedlearn.config import load
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.deployment.places import Places
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord
from fedlearn.store.lease import deploy
from tests.records import RUN

pytestmark = pytest.mark.slow

#: Modules that take a second or a hundred megabytes, or are not needed to read a database.
HEAVY = (
    *("torch", "scipy", "pyarrow", "matplotlib", "sklearn", "flwr", "grpc", "dp_accounting"),
    *("aiohttp", "prometheus_client", "alembic", "google.protobuf", "numpy"),
)
ONES = torch.ones(3)

#: Commands in the order in which one interpreter runs them; each is charged with what it adds.
OF_DEPLOYMENTS = (
    "--version",
    "--help",
    "invite --help",
    "invite clinic-a",
    "clients",
    "clients --json",
    "rounds",
    "rounds --clients --json",
    "why --json",
    "pause",
    "resume",
    "abort",
    "revoke clinic-a",
    "roster",
)
OF_RUNS = (
    *("runs", "runs --json", "show federation", "show federation --json"),
    "compare federation federation",
)
OF_CLIENTS = ("rotate clinic-x", "pins clinic-x")

_SCRIPT = """
import json, sys
from fedlearn.cli.app import main
for command in json.loads(sys.argv[1]):
    before = set(sys.modules)
    try:
        main(command.split())
    except SystemExit:
        pass
    added = sorted(name for name in json.loads(sys.argv[2]) if name in set(sys.modules) - before)
    print(json.dumps([command, added]), file=sys.stderr)
"""


def list_imports_of(*commands: str) -> dict[str, list[str]]:
    """Return the heavy modules that each command is first to import, in a fresh interpreter."""
    wanted = json.dumps(commands), json.dumps(HEAVY)
    typed = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *wanted],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    told = [json.loads(line) for line in typed.stderr.splitlines() if line.startswith("[")]
    assert [command for command, _ in told] == list(commands)
    return dict(told)


@pytest.fixture
def _deployed_run(surroundings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A deployed run of two rounds in the working directory, without a coordinator."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert main(["init"]) == 0
    places = Places.of(load("coordinator.toml", overrides=()), environ={})
    ended = [Participation(ClientId(0), Status.FAILED, 1.0, reason="no data")]
    with places.open_database() as database:
        run = database.create(replace(RUN, name=places.run_name))
        deploy(database, run.name)
        for round_num in range(2):
            run.commit(Checkpoint(round_num=round_num, tensors={"params/w": ONES}, values={}))
            run.append(
                RoundRecord(
                    round_num=round_num,
                    attempt=0,
                    outcome=Outcome.AGGREGATED,
                    participations=Participations.of(ended),
                    train_loss=math.nan,
                    duration_s=1.0,
                    virtual_s=1.0,
                    seconds=1.0,
                    metrics={"accuracy": 0.5},
                )
            )
        run.commit(Checkpoint(round_num=2, tensors={"params/w": ONES}, values={}))


@pytest.mark.usefixtures("_deployed_run")
def test_operators_commands_import_neither_torch_nor_numpy() -> None:
    """Nor the modules that serve clients, plot, or train."""
    assert list_imports_of(*OF_DEPLOYMENTS) == {command: [] for command in OF_DEPLOYMENTS}


@pytest.mark.usefixtures("_deployed_run")
def test_commands_about_runs_and_keys_import_little() -> None:
    """Participations need numpy, and what a client keeps in its folder needs protobuf."""
    found = list_imports_of(*OF_RUNS, *OF_CLIENTS)
    assert found["runs"] == found["runs --json"] == [], "rounds are summed up by the database"
    of_runs = {name for command in OF_RUNS for name in found[command]}
    of_clients = {name for command in OF_CLIENTS for name in found[command]}
    assert (of_runs, of_clients) == ({"numpy"}, {"google.protobuf"})


@pytest.mark.usefixtures("_deployed_run")
def test_what_a_command_imports_is_seen() -> None:
    """The control: a command that builds a run imports torch."""
    assert "torch" in list_imports_of("runs", "check")["check"]
