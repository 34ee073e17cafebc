"""Jobs that find files in their folder: the same job resumes, another one starts over."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.core.randomness import Seed
from fedlearn.errors import Diverged, StoreError
from fedlearn.parallel.jobs import Control, Job, train
from fedlearn.parallel.optimizers import Sgd
from fedlearn.parallel.plan import TrainingPlan
from fedlearn.parallel.streams import Shuffled
from fedlearn.parallel.task import Progress, Task, TrainingState
from fedlearn.training.local_data import TensorData
from fedlearn.training.trainer import UNATTENDED

NUM_STEPS = 6


class CalledOff(Exception):
    """The job was cancelled."""


class After:
    """Cancels a job after some steps."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def check(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise CalledOff


def task(*, learning_rate: float = 0.1, scale: float = 1.0) -> Task:
    generator = torch.Generator().manual_seed(0)
    features = scale * torch.randn(12, 4, generator=generator)
    labels = torch.arange(12) % 3
    return Task(
        make_model=lambda: nn.Linear(4, 3),
        objective=CrossEntropy(),
        stream=Shuffled(TensorData(features, labels, device=labels.device), seed=Seed(1)),
        plan=TrainingPlan(
            batch_size=4,
            num_steps=NUM_STEPS,
            optimizer=Sgd(learning_rate=learning_rate),
            seed=Seed(2),
        ),
    )


def start(value: float) -> TrainingState:
    return TrainingState(
        model={"weight": torch.full((3, 4), value), "bias": torch.full((3,), value)}
    )


def trained(
    folder: Path,
    begun: TrainingState,
    *,
    control: Control = UNATTENDED,
    of: Task | None = None,
    every: int = 2,
) -> tuple[TrainingState, list[int]]:
    """Run a job; return its final state, and the steps that it took this time."""
    steps = list[int]()

    def report(progress: Progress) -> None:
        steps.append(progress.step_num)

    job = Job(
        make_task=lambda: of or task(),
        name=None,
        arguments={},
        folder=folder,
        checkpoint_every=every,
        report_every=1,
        max_restarts=0,
    )
    return train(job, start=begun, control=control, report=report), steps


@pytest.mark.parametrize(("value", "first"), [(0.5, 5), (0.25, 1)], ids=["same", "other"])
def test_a_job_goes_on_only_if_it_began_with_the_same_weights(
    tmp_path: Path, value: float, first: int
) -> None:
    """A round that is repeated may produce another model; its training must then start over."""
    whole, _ = trained(tmp_path / "whole", start(value))
    with pytest.raises(CalledOff):
        trained(tmp_path / "job", start(0.5), control=After(5))
    found, steps = trained(tmp_path / "job", start(value))
    assert steps == list(range(first, NUM_STEPS + 1))
    assert torch.equal(found.model["weight"], whole.model["weight"])


def test_a_job_without_checkpoints_does_not_go_on_from_those_of_another(tmp_path: Path) -> None:
    """Those checkpoints may belong to any training."""
    with pytest.raises(CalledOff):
        trained(tmp_path / "job", start(0.5), control=After(5))
    _, steps = trained(tmp_path / "job", start(0.5), every=0)
    assert steps == list(range(1, NUM_STEPS + 1))
    assert not (tmp_path / "job").exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*file/job"):
        trained(tmp_path / "file" / "job", start(0.5))


def test_a_model_that_is_not_finite_is_no_result(tmp_path: Path) -> None:
    """The loss of the last step is finite, because it is that of the model before the step."""
    plan = task(learning_rate=3e38, scale=1e3).plan
    once = Task(
        make_model=lambda: nn.Linear(4, 3),
        objective=CrossEntropy(),
        stream=task(scale=1e3).stream,
        plan=TrainingPlan(batch_size=4, num_steps=1, optimizer=plan.optimizer, seed=plan.seed),
    )
    with pytest.raises(Diverged, match=r"is not finite after step 1; lower the learning rate"):
        trained(tmp_path / "job", start(0.0), of=once, every=0)
