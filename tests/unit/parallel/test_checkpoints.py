"""Checkpoints of a training in one process: complete, incomplete and damaged ones."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fedlearn.errors import StoreError
from fedlearn.parallel import checkpoints
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.local_world import run_in_processes
from tests.trainings import Outcome, alone, outcome, task_of, trained


def engine() -> RankTrainer:
    return RankTrainer(task_of(), device=torch.device("cpu"))


def save_steps(folder: Path, *steps: int, keep: int = 9) -> RankTrainer:
    """Train, with a checkpoint after each of these steps."""
    made = engine()
    for step in steps:
        trained(made, until=step)
        checkpoints.save(made, folder, keep=keep)
    return made


def resume_from(checkpoint: Path) -> Outcome:
    """Resume a training from a checkpoint; return its outcome."""
    made = engine()
    checkpoints.restore(made, checkpoint)
    trained(made)
    return outcome([], made.state())


@pytest.mark.slow
def test_a_training_that_goes_on_ends_in_the_same_bits(tmp_path: Path) -> None:
    save_steps(tmp_path, 4)
    newest = checkpoints.latest(tmp_path)
    assert newest == tmp_path / "step-4"
    assert resume_from(newest).apart(replace(alone(task_of()), losses=[])) == 0.0


@pytest.mark.slow
def test_one_of_several_processes_may_train_alone(tmp_path: Path) -> None:
    """As rank 0 of a simulation under torchrun does; waiting for the others would never end."""

    def body() -> Outcome | None:
        if dist.get_rank() > 0:
            return None
        save_steps(tmp_path, 4)
        return resume_from(tmp_path / "step-4")

    ended, _ = run_in_processes(body, world_size=2, timeout_s=60.0)
    assert ended is not None
    assert ended.apart(replace(alone(task_of()), losses=[])) == 0.0


@pytest.mark.slow
def test_the_newest_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]


@pytest.mark.slow
def test_one_that_was_cut_off_does_not_count_and_is_written_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4)
    (tmp_path / "step-4" / ".metadata").unlink()
    newest = checkpoints.latest(tmp_path)
    assert newest == tmp_path / "step-2"
    made = engine()
    checkpoints.restore(made, newest)
    trained(made, until=4)
    checkpoints.save(made, tmp_path, keep=2)
    assert checkpoints.latest(tmp_path) == tmp_path / "step-4"
    ended = resume_from(tmp_path / "step-4")
    assert ended.apart(replace(alone(task_of()), losses=[])) == 0.0


def test_there_is_none_where_nothing_is(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path / "nowhere") is None
    (tmp_path / "step-9").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoints.latest(tmp_path) is None


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("size", [0, 100])
def test_one_that_is_damaged_is_refused_by_name(tmp_path: Path, name: str, size: int) -> None:
    save_steps(tmp_path, 2)
    damaged = tmp_path / "step-2" / name
    damaged.write_bytes(damaged.read_bytes()[:size])
    for look in (resume_from, checkpoints.read):
        with pytest.raises(StoreError, match=r"step-2 cannot be read .*; remove the folder"):
            look(tmp_path / "step-2")


def test_one_of_another_model_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    task = replace(task_of(), make_model=lambda: nn.Sequential(nn.Linear(3, 3)).double())
    other = RankTrainer(task, device=torch.device("cpu"))
    with pytest.raises(StoreError, match="step-2 cannot be read"):
        checkpoints.restore(other, tmp_path / "step-2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happens", "passes", "said"),
    [
        (OSError(errno.ENOSPC, "No space left"), StoreError, "step-4 cannot be written .*No space"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
    ids=["disk full", "Ctrl-C"],
)
def test_what_happens_as_one_is_written_is_told_as_what_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    happens: BaseException,
    passes: type[BaseException],
    said: str,
) -> None:
    """The checkpoint before it stays the latest."""
    save_steps(tmp_path, 2)

    def fails(_descriptor: int) -> None:
        raise happens

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(passes, match=said):
        save_steps(tmp_path, 4)
    assert checkpoints.latest(tmp_path) == tmp_path / "step-2"
