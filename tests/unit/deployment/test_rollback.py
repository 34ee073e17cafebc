"""Rolling a run back: refused while a coordinator is alive; clients then see a new run id."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fedlearn.core.clock import VirtualClock
from fedlearn.deployment.rollback import roll_back
from fedlearn.errors import DeploymentError, Fenced, RunHeld, StoreError
from fedlearn.rounds.records import Checkpoint
from fedlearn.store.lease import Lease, deploy, find_deployment
from fedlearn.store.runs import Database, sqlite_url
from tests.records import RUN


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A store with a run that has two rounds."""
    with Database.open(sqlite_url(tmp_path / "runs.db"), runs_dir=tmp_path / "runs") as database:
        run = database.create(RUN)
        for round_num in (1, 2):
            tensors = {"params/w": torch.full((1,), float(round_num))}
            run.commit(Checkpoint(round_num=round_num, tensors=tensors, values={}))
        yield database


@dataclass
class Beating(VirtualClock):
    """A clock in whose sleeps the holder of a lease renews it."""

    lease: Lease | None = None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.lease is not None:
            self.lease.renew({})


def test_a_simulated_run_goes_back_once_no_process_runs_it(database: Database) -> None:
    with database.run(RUN.name).hold(), pytest.raises(RunHeld, match="let it end, or stop it"):
        roll_back(database, RUN.name, to=1, clock=VirtualClock())
    assert len(database.run(RUN.name).checkpoints()) == 2
    assert roll_back(database, RUN.name, to=1, clock=VirtualClock()).round_num == 1
    assert [each.round_num for each in database.run(RUN.name).checkpoints()] == [1]


def test_a_deployed_run_goes_back_once_nobody_coordinates_it(database: Database) -> None:
    """A killed coordinator's lease must expire first; a live one's does not."""
    before = deploy(database, RUN.name).run_id
    clock = Beating()
    holder = Lease(database, RUN.name, holder="one", ttl_s=5.0, clock=clock)
    assert holder.try_acquire()
    clock.lease = holder
    with pytest.raises(DeploymentError, match="coordinated by one; stop that coordinator first"):
        roll_back(database, RUN.name, to=1, clock=clock)
    assert len(database.run(RUN.name).checkpoints()) == 2
    clock.lease = None
    assert roll_back(database, RUN.name, to=1, clock=clock).round_num == 1
    after = find_deployment(database, RUN.name)
    assert after.run_id != before, "what clients hold answers the model that is dropped"
    assert after.holder == "", "the next coordinator need not wait"
    with pytest.raises(Fenced):
        holder.renew({})


def test_a_checkpoint_that_is_not_kept_lets_go_of_the_lease(database: Database) -> None:
    deploy(database, RUN.name)
    with pytest.raises(StoreError, match=r"no earlier checkpoint after 0; .* earlier ones after 1"):
        roll_back(database, RUN.name, to=0, clock=VirtualClock())
    assert find_deployment(database, RUN.name).holder == ""
    assert len(database.run(RUN.name).checkpoints()) == 2


@pytest.mark.parametrize("given", [None, "kept"])
def test_what_clients_had_sent_to_what_is_forgotten_is_removed(
    database: Database, tmp_path: Path, given: str | None
) -> None:
    """In the coordinator's folder; data of other runs is kept."""
    folder = tmp_path / "coordinator" if given is None else tmp_path / given
    section = {"folder": None if given is None else str(folder)}
    run = database.create(replace(RUN, name="deployed", config={"coordinator": section}))
    for round_num in (1, 2):
        run.commit(Checkpoint(round_num=round_num, tensors={}, values={}))
    spool = folder / "spool" / deploy(database, "deployed").run_id
    for each in (spool, folder / "spool" / "of another"):
        (each / "replies" / "TrainRequest-000002-0-0").mkdir(parents=True)
    with pytest.raises(StoreError):
        roll_back(database, "deployed", to=7, clock=VirtualClock())
    assert spool.exists(), "nothing is forgotten"
    roll_back(database, "deployed", to=1, clock=VirtualClock())
    assert [each.name for each in (folder / "spool").iterdir()] == ["of another"]
