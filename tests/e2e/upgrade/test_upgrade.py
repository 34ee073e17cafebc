"""A deployment of an earlier revision is killed, upgraded, and continues: real processes.

The recordings have a database, folders of coordinator and clients, and what was on the way between
them; ``record.py`` makes one.
"""

import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from fedlearn.config import load_service
from fedlearn.core.clock import SystemClock
from fedlearn.core.participations import Status
from fedlearn.deployment.places import Places
from fedlearn.rounds.scheduling import QueueState
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import StoredRun
from tests.addresses import free_addresses
from tests.e2e.deployed import until_said
from tests.e2e.survival import ballots
from tests.e2e.upgrade.record import NUM_CLIENTS, SERVICE
from tests.processes import Launcher, Process, until

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parent / "recorded"
NUM_ROUNDS = 6
#: Starts the command where modules next to it are found.
SCRIPT = """
import sys
sys.path.insert(0, __file__.rpartition("/")[0])
from fedlearn.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def restore(recording: str, folder: Path) -> None:
    """Put a recording in place, with the model's file and the trainer's."""
    with tarfile.open(RECORDED / recording) as archive:
        archive.extractall(folder, filter="data")
    shutil.copy(Path(ballots.__file__), folder / "ballots.py")
    (folder / "stage").mkdir()
    (folder / "command.py").write_text(SCRIPT)


def audit(run: StoredRun) -> None:
    """Check that each client was counted once in each round."""
    rounds = run.rounds()
    assert [each.round_num for each in rounds] == list(range(NUM_ROUNDS))
    for each in rounds:
        statuses = {p.client_id: p.status for p in each.participations}
        assert statuses == dict.fromkeys(range(NUM_CLIENTS), Status.REPORTED)
    checkpoint = run.load()
    assert checkpoint is not None
    votes = checkpoint.tensors["params/votes"]
    expected = torch.zeros_like(votes)
    expected[:NUM_ROUNDS, :NUM_CLIENTS] = 1.0 / NUM_CLIENTS
    assert torch.equal(votes, expected)


def count_trainings(folder: Path, number: int) -> int:
    """Return how often a client has trained since the upgrade."""
    return len((folder / "stage" / f"trained-{number}").read_text().splitlines())


@pytest.mark.parametrize("recording", sorted(each.name for each in RECORDED.iterdir()))
def test_runs_of_an_earlier_revision_continue_where_they_were(
    launcher: Launcher, tmp_path: Path, recording: str
) -> None:
    """One is inside a round with two of three replies; its third client was training for it.

    What had arrived counts, and is not asked for again.
    """
    restore(recording, tmp_path)
    addresses = free_addresses(2)
    (tmp_path / "service.toml").write_text(
        SERVICE.format(address=addresses[0], http_address=addresses[1])
    )
    environ = os.environ | {ballots.STAGE: str(tmp_path / "stage")}
    started = list[Process]()

    def start(name: str, *arguments: str) -> Process:
        script = tmp_path / "command.py"
        process = launcher.launch(tmp_path / name, *arguments, environ=environ, script=script)
        started.append(process)
        return process

    places = Places.of(load_service(tmp_path / "service.toml"), environ={})
    try:
        service = start("service", "serve", "service.toml", "--insecure", "--json")
        until_said(service, "serving")
        for number in range(NUM_CLIENTS):
            home = f"client-{number}"
            invitation = f"{home}/identity/invitation.json"
            own = ("--task", "ballots:Voter", "--home", home, "--address", addresses[0])
            start(f"{home}.log", "join", invitation, *own)
        with places.open_database() as database:
            queue = RunQueue(database, SystemClock())
            until(lambda: all(each.state.is_over for each in queue.list()), told=service.tail)
            assert {each.state for each in queue.list()} == {QueueState.DONE}, service.tail()
            for each in queue.list():
                audit(database.run(each.name))
    finally:
        for process in started:
            process.kill()
            process.close()
    first, *_, last = (count_trainings(tmp_path, number) for number in range(NUM_CLIENTS))
    assert last == first + 1
