"""Adoption of runs that have a folder but no record in the database."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedlearn.config import Config
from fedlearn.experiment.adoption import adopt_all
from fedlearn.rounds.records import Checkpoint, RunStatus
from fedlearn.store.holding import hold_run
from fedlearn.store.runs import Database, StoredRun, sqlite_url
from tests.damage import damaged
from tests.records import RUN

_CONFIG = Config().model_dump(mode="json")


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Database]:
    """A database that replaces a lost one."""
    with Database.open(sqlite_url(tmp_path / "new.db"), runs_dir=tmp_path / "runs") as database:
        yield database


def orphan(folder: Path, *, num_finished: int, **config: object) -> StoredRun:
    """Create a run of 20 rounds with checkpoints, whose record is in another database."""
    with Database.open(sqlite_url(folder / "lost.db"), runs_dir=folder / "runs") as database:
        run = database.create(replace(RUN, config=_CONFIG | config))
        for round_num in range(num_finished + 1):
            weights = torch.full((8,), float(round_num))
            run.commit(Checkpoint(round_num=round_num, tensors={"params/w": weights}, values={}))
        return run


@pytest.mark.parametrize(("num_finished", "status"), [(3, "interrupted"), (20, "done")])
def test_a_run_is_adopted_with_its_configuration_and_model(
    fresh: Database, tmp_path: Path, num_finished: int, status: str
) -> None:
    """It can resume from the last checkpoint or the one before, and is no longer an orphan."""
    lost = orphan(tmp_path, num_finished=num_finished)
    (adopted,) = adopt_all(fresh)
    assert adopted.text() == f"calm-otter-17 is adopted after {num_finished} rounds"
    run = fresh.run(lost.name)
    assert (run.record.status, run.record.config) == (RunStatus(status), lost.record.config)
    assert run.checkpoints() == lost.checkpoints()
    assert run.weights(best=False)["w"].tolist() == [num_finished] * 8
    assert run.rewind().round_num == num_finished - 1
    assert fresh.orphans() == []


def test_a_damaged_checkpoint_is_passed_over(fresh: Database, tmp_path: Path) -> None:
    """The hash in its name does not match its bytes."""
    orphan(tmp_path, num_finished=3).checkpoints()[-1].path.write_bytes(b"damaged")
    (adopted,) = adopt_all(fresh)
    assert adopted.num_finished == 2


def test_what_nobody_can_vouch_for_is_not_adopted(fresh: Database, tmp_path: Path) -> None:
    """A lost ledger, no checkpoint, or no configuration; each has its own message."""
    privacy = {"mode": "central", "reproducible": False}
    folder = orphan(tmp_path, num_finished=1, privacy=privacy).path
    for name, content in (("empty", '{"num_rounds": 3}'), ("torn", "{")):
        folder.with_name(name).mkdir()
        (folder.with_name(name) / "config.json").write_text(content)
    refused = {each.name: each.refused for each in adopt_all(fresh)}
    assert "ledger" in refused["calm-otter-17"]
    assert "no checkpoint of it is complete" in refused["empty"]
    assert "config.json does not hold a run's configuration" in refused["torn"]
    assert fresh.runs() == []


def test_a_damaged_configuration_is_told(fresh: Database, tmp_path: Path) -> None:
    """The run is adopted once the file is restored."""
    path = orphan(tmp_path, num_finished=1).path / "config.json"
    whole = path.read_bytes()
    for content, says in damaged(whole, key="num_rounds"):
        path.write_bytes(content)
        (adopted,) = adopt_all(fresh)
        words = rf"{path} does not hold a run's configuration \({says}.*put a copy of it back"
        assert re.search(words, adopted.refused)
    path.write_bytes(whole)
    (adopted,) = adopt_all(fresh)
    assert not adopted.refused


def test_a_run_that_is_alive_is_not_adopted(fresh: Database, tmp_path: Path) -> None:
    """Its process may still write to the run."""
    folder = orphan(tmp_path, num_finished=1).path
    with hold_run(folder):
        (adopted,) = adopt_all(fresh)
    assert "is alive" in adopted.refused
    assert fresh.orphans() == ["calm-otter-17"]
