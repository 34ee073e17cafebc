"""Jobs in this process: cancelled between steps, resumed, or refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlearn.errors import Cancelled, ConfigError, DataError, Diverged, StoreError
from fedlearn.parallel import jobs
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.jobs import Folder, Job, follow, train
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.task import Progress, Task
from tests.trainings import BATCH_SIZE, NUM_STEPS, InOrder, alone, outcome, task_of


class ProgressRecorder:
    """Records the reports of a job, and cancels it after a number of them.

    Args:
        after: The number of reports; ``None``: never cancel.
    """

    def __init__(self, after: int | None = None) -> None:
        self.told = list[Progress]()
        self._after = after

    def check(self) -> None:
        if len(self.told) == self._after:
            raise Cancelled("nobody wants it any more")


def job_in(folder: Path, task: Task | None = None, **changes: Any) -> Job:  # Any: as Job's fields
    fields: dict[str, Any] = {
        "make_task": lambda: task or task_of(),
        "name": None,
        "arguments": {},
        "folder": folder / "job",
        "checkpoint_every": 2,
        "report_every": 1,
        "max_restarts": 0,
    }
    return Job(**{**fields, **changes})


def test_a_job_that_was_called_off_goes_on_where_it_stood(tmp_path: Path) -> None:
    first, second = ProgressRecorder(after=5), ProgressRecorder()
    with pytest.raises(Cancelled):
        train(job_in(tmp_path), start=None, control=first, report=first.told.append)
    state = train(job_in(tmp_path), start=None, control=second, report=second.told.append)
    assert [each.step_num for each in second.told] == [5, 6]
    losses = [each.loss for each in first.told[:4] + second.told]
    assert outcome(losses, state).apart(alone(task_of())) == 0.0
    assert not (tmp_path / "job").exists()


def test_a_folder_of_another_job_is_begun_anew(tmp_path: Path) -> None:
    first, second = ProgressRecorder(after=5), ProgressRecorder()
    with pytest.raises(Cancelled):
        train(job_in(tmp_path), start=None, control=first, report=first.told.append)
    other = job_in(tmp_path, arguments={"of": "another"})
    train(other, start=None, control=second, report=second.told.append)
    assert [each.step_num for each in second.told] == [1, 2, 3, 4, 5, 6]


def test_a_job_may_begin_where_another_ended(tmp_path: Path) -> None:
    first, second = ProgressRecorder(), ProgressRecorder()
    begun = train(job_in(tmp_path, until=3), start=None, control=first, report=first.told.append)
    assert begun.step_num == 3
    state = train(job_in(tmp_path), start=begun, control=second, report=second.told.append)
    losses = [each.loss for each in first.told + second.told]
    assert outcome(losses, state).apart(alone(task_of())) == 0.0


def test_a_first_checkpoint_that_was_cut_off_is_not_begun_from(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (folder.checkpoints / "step-2").mkdir(parents=True)
    told = list[Progress]()
    job = jobs.build_spec(job_in(tmp_path), None)
    engine = RankTrainer(task_of(), device=torch.device("cpu"))
    follow(
        engine,
        folder,
        job=job,
        saves_last=False,
        control=ProgressRecorder(),
        report=told.append,
    )
    assert [each.step_num for each in told] == list(range(1, NUM_STEPS + 1))


def test_a_start_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.start.mkdir()
    job = jobs.build_spec(job_in(tmp_path), None)
    engine = RankTrainer(task_of(), device=torch.device("cpu"))
    with pytest.raises(StoreError, match="start cannot be read"):
        follow(
            engine,
            folder,
            job=job,
            saves_last=False,
            control=ProgressRecorder(),
            report=lambda _: None,
        )


def test_a_loss_that_is_not_finite_ends_the_job(tmp_path: Path) -> None:
    job, watch = (
        job_in(tmp_path, replace(task_of(), stream=_infinite(BATCH_SIZE))),
        ProgressRecorder(),
    )
    with pytest.raises(Diverged, match="the loss is nan after step 2; lower the learning rate"):
        train(job, start=None, control=watch, report=watch.told.append)
    assert [each.step_num for each in watch.told] == [1, 2]


def test_a_first_loss_that_is_not_finite_is_no_matter_of_the_learning_rate(tmp_path: Path) -> None:
    job, watch = job_in(tmp_path, replace(task_of(), stream=_infinite(0))), ProgressRecorder()
    with pytest.raises(DataError, match=r"first batch is not finite, .* look for NaN"):
        train(job, start=None, control=watch, report=watch.told.append)
    assert not watch.told


def _infinite(first: int) -> InOrder:
    """Return examples with infinite features from the ``first`` on."""
    examples = InOrder.small()
    examples.features[first:] = torch.inf
    return examples


def test_other_processes_need_names(tmp_path: Path) -> None:
    watch = ProgressRecorder()
    job = job_in(tmp_path, task_of(Mesh(shard=2)))
    with pytest.raises(ConfigError, match=r"the mesh is shard 2, .*\"module:function\""):
        train(job, start=None, control=watch, report=watch.told.append)


def test_each_process_needs_a_gpu_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    watch = ProgressRecorder()
    job = job_in(tmp_path, task_of(Mesh(replicate=4)), name="tests.trainings:fragile_task")
    with pytest.raises(ConfigError, match="the mesh is replicate 4, but this machine has 3 GPUs"):
        train(job, start=None, control=watch, report=watch.told.append)


def test_what_does_not_fit_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)  # starting a process would fail
    watch = ProgressRecorder()
    job = job_in(tmp_path, task_of(Mesh(tensor=8)), name="tests.trainings:fragile_task")
    with pytest.raises(ConfigError, match="tensor is 8"):
        train(job, start=None, control=watch, report=watch.told.append)
    assert not job.folder.exists()
