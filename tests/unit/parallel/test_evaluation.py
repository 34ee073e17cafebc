"""Trainings with evaluation, which return the best model and may end early."""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import pytest
import torch
import torch.distributed as dist

from fedlearn.core.improvement import Goal
from fedlearn.errors import Cancelled, ConfigError, StoreError
from fedlearn.parallel import evaluation, jobs, worker
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.jobs import Folder, Job, build_spec, follow, train
from fedlearn.parallel.local_world import run_in_processes
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.task import Evaluation, Progress, TrainingState
from tests import damage
from tests.trainings import NUM_STEPS, alone, task_of

NAN = math.nan
T = TypeVar("T")
Measure: TypeAlias = Callable[[TrainingState], Mapping[str, float]]


@dataclass
class Scores:
    """Evaluates each step with a given loss, and records the steps."""

    by_step: Sequence[float]
    asked: list[int] = field(default_factory=list)

    def __call__(self, state: TrainingState) -> Mapping[str, float]:
        self.asked.append(state.step_num)
        return {"loss": self.by_step[state.step_num - 1]}


@dataclass
class Log:
    """Records the reports of a training, and cancels it after a number of them."""

    after: int | None = None
    told: list[Progress] = field(default_factory=list)

    def check(self) -> None:
        if len(self.told) == self.after:
            raise Cancelled("nobody wants it any more")


def job_in(
    folder: Path,
    measure: Measure,
    *,
    every: int = 1,
    patience: int | None = None,
    target: float | None = None,
    checkpoint_every: int = 0,
    until: int = NUM_STEPS,
    is_kept: bool = False,
) -> Job:
    goal = Goal(metric="loss", direction="min", min_improvement=0.0, target=target)
    measured = Evaluation(measure=measure, every=every, goal=goal, patience=patience)
    return Job(
        make_task=lambda: replace(task_of(), evaluation=measured),
        name=None,
        arguments={},
        folder=folder / "job",
        checkpoint_every=checkpoint_every,
        report_every=1,
        max_restarts=0,
        until=until,
        is_kept=is_kept,
    )


def run(job: Job, log: Log | None = None) -> TrainingState:
    log = log or Log()
    return train(job, start=None, control=log, report=log.told.append)


@pytest.mark.parametrize(
    ("losses", "every", "patience", "target", "asked", "best", "checkpoint_every"),
    [
        ([6, 5, 4, 3, 2, 1], 1, None, None, [1, 2, 3, 4, 5, 6], 6, 0),
        ([6, 2, 4, 3, 2, 5], 1, None, None, [1, 2, 3, 4, 5, 6], 2, 0),
        ([6, 2, 4, 3, 9, 1], 1, 2, None, [1, 2, 3, 4], 2, 0),
        ([6, 2, 4, 3, 9, 1], 1, 2, None, [1, 2, 3, 4], 2, 2),
        ([6, 2, 4, 1, 9, 9], 1, 2, None, [1, 2, 3, 4, 5, 6], 4, 0),
        ([6, 2, 4, 1, 0, 0], 1, None, 2.0, [1, 2], 2, 0),
        ([6, 5, 4, 3, 2, 1], 4, None, None, [4, 6], 6, 2),
        ([NAN, 5, NAN, NAN, 4, 9], 1, 3, None, [1, 2, 3, 4, 5, 6], 5, 0),
        ([NAN] * 6, 1, 2, None, [1, 2], 2, 0),
        ([NAN] * 6, 1, 2, None, [1, 2], 2, 2),
    ],
    ids=[
        *("falls", "rises", "patience", "patience, files", "patience lasts", "target"),
        *("every, files", "some NaN", "all NaN", "all NaN, files"),
    ],
)
def test_the_best_model_is_the_result(
    tmp_path: Path,
    *,
    losses: Sequence[float],
    every: int,
    patience: int | None,
    target: float | None,
    asked: list[int],
    best: int,
    checkpoint_every: int,
) -> None:
    """With and without files. If no loss was a number, the result is the last model."""
    scores, log = Scores(losses), Log()
    job = job_in(
        tmp_path,
        scores,
        every=every,
        patience=patience,
        target=target,
        checkpoint_every=checkpoint_every,
    )
    state = run(job, log)
    assert scores.asked == asked
    assert state.step_num == best
    expected = alone(task_of(), until=best)
    assert all(torch.equal(state.model[name], each) for name, each in expected.model.items())
    told = {each.step_num: each.metrics for each in log.told}
    assert [step for step, metrics in told.items() if metrics] == asked
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    "dies_in",
    [
        *("measure", "write_durably"),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("_write_best", "_remove_all_but")
        ),
    ],
)
@pytest.mark.parametrize(
    "at", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_training_that_dies_in_an_evaluation_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str, at: int
) -> None:
    """It may die at any point: the checkpoint is written first, then the best model and its row."""
    losses, num_calls = [6, 4, 5, 3, 9, 9], 0

    def dying(function: Callable[..., T]) -> Callable[..., T]:
        def dies(*args: object, **kwargs: object) -> T:
            nonlocal num_calls
            num_calls += 1
            if num_calls == at:
                raise Cancelled("dead")
            return function(*args, **kwargs)

        return dies

    measure: Measure = Scores(losses)
    with monkeypatch.context() as patched:
        if dies_in == "measure":
            measure = dying(measure)
        else:
            patched.setattr(evaluation, dies_in, dying(getattr(evaluation, dies_in)))
        with pytest.raises(Cancelled):
            run(job_in(tmp_path, measure, patience=2, checkpoint_every=6))
    scores = Scores(losses)
    state = run(job_in(tmp_path, scores, patience=2, checkpoint_every=6))
    assert state.step_num == 4
    expected = alone(task_of(), until=4)
    assert all(torch.equal(state.model[name], each) for name, each in expected.model.items())
    assert scores.asked[-1] == 6
    assert scores.asked[0] >= at, "the control: it did not begin again"


def test_a_training_that_is_kept_takes_more_steps(tmp_path: Path) -> None:
    """It ends with the same model as a single training; fewer steps than it has are refused."""
    scores, log = Scores([6, 5, 4, 3, 2, 1]), Log()
    assert run(job_in(tmp_path, scores, until=3, is_kept=True)).step_num == 3
    state = run(job_in(tmp_path, scores, is_kept=True), log)
    assert [each.step_num for each in log.told] == [4, 5, 6]
    expected = alone(task_of())
    assert all(torch.equal(state.model[name], each) for name, each in expected.model.items())
    again = Log()
    same = run(job_in(tmp_path, scores, is_kept=True), again)
    assert again.told == []
    assert all(torch.equal(same.model[name], each) for name, each in expected.model.items())
    with pytest.raises(ConfigError, match="has taken 6 steps, but 5 are requested"):
        run(job_in(tmp_path, scores, until=5, is_kept=True))


@pytest.mark.parametrize("name", ["job.json", "evaluations.json"])
def test_a_damaged_file_of_a_kept_training_is_told(tmp_path: Path, name: str) -> None:
    """The error names the path and a remedy; the damaged file is not overwritten."""
    job = job_in(tmp_path, Scores([6, 5, 4, 3, 2, 1]), is_kept=True)
    run(job)
    [damaged] = tmp_path.rglob(name)
    damaged.write_text('{"identity": "cut o')
    with pytest.raises(StoreError, match=rf"{name} does not hold .*: remove the training's folder"):
        run(job)
    assert damaged.exists()


def test_a_process_of_a_job_whose_file_is_damaged_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is not restarted, because it would fail the same way."""
    said = build_spec(job_in(tmp_path, Scores([1])), None)
    folder = Folder(tmp_path)
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path)])
    for content, says in damage.damaged(json.dumps(asdict(said)).encode(), key="report_every"):
        folder.job.write_bytes(content)
        with pytest.raises(SystemExit):
            worker.main()
        words = (
            rf"StoreError\n{folder.job} does not hold a training \({says}.*: remove the training"
        )
        assert re.match(words, folder.failure.read_text())
        folder.failure.unlink()


def test_a_rank_that_hangs_is_waited_for_as_long_as_its_steps_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first step determines the timeout. Control: without a hanging rank, no wait times out."""
    monkeypatch.setattr(jobs, "_TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(jobs, "_STEPS", 0)
    begun = build_spec(job_in(tmp_path, Scores([])), None)

    def body(*, hangs: bool) -> str:
        class Control:
            num_steps = 0

            def check(self) -> None:
                self.num_steps += 1
                if hangs and self.num_steps == 3 and dist.get_rank() == 1:
                    dist.barrier()  # the other rank waits for a gradient and never gets here

        engine = RankTrainer(task_of(Mesh(replicate=2)), device=torch.device("cpu"))
        try:
            follow(
                engine,
                Folder(tmp_path / "none"),
                job=begun,
                saves_last=False,
                control=Control(),
                report=lambda _: None,
            )
        except RuntimeError as error:
            return str(error)
        return ""

    assert run_in_processes(partial(body, hangs=False), world_size=2, timeout_s=60.0) == ["", ""]
    first, second = run_in_processes(partial(body, hangs=True), world_size=2, timeout_s=60.0)
    assert "imed out" in first + second
