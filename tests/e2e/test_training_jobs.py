"""Training jobs in separate processes: killed ones resume, cancelled ones leave no process.

Each start of torchrun costs tens of seconds of a core, so there are few, and each test checks
several things.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from fedlearn.errors import Cancelled, Diverged, EngineError
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.jobs import Job, train
from fedlearn.parallel.local_world import run_in_processes
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.task import Progress
from tests.processes import Launcher, until
from tests.trainings import NUM_STEPS, fragile_task, task_of, trained

pytestmark = pytest.mark.slow

#: Seconds within which all processes of a killed job must end.
GONE_S = 1.0


@dataclass
class ProgressRecorder:
    """Records a job's reports, and may cancel it.

    Attributes:
        calls_off: Called at each check; cancels the job if true.
        steps: Steps that the job has reported.
    """

    calls_off: Callable[[], bool] = lambda: False
    steps: list[int] = field(default_factory=list)

    def check(self) -> None:
        if self.calls_off():
            raise Cancelled("nobody wants it any more")

    def report(self, progress: Progress) -> None:
        self.steps.append(progress.step_num)


def job_in(folder: Path, *, faults: Mapping[str, str], max_restarts: int = 1) -> Job:
    """Build a job of two processes with a checkpoint every second step."""
    (folder / "marks").mkdir(exist_ok=True)
    marks = str(folder / "marks")
    return Job(
        make_task=lambda: fragile_task(faults=faults, marks=marks),
        name="tests.trainings:fragile_task",
        arguments={"faults": dict(faults), "marks": marks},
        folder=folder / "job",
        checkpoint_every=2,
        report_every=1,
        max_restarts=max_restarts,
    )


def list_left_processes(folder: Path) -> list[int]:
    """Return the processes of a job, recognized by its folder in their arguments."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            if (
                each.name.isdigit()
                and str(folder / "job").encode() in (each / "cmdline").read_bytes()
            ):
                found.append(int(each.name))
        except OSError:  # it has ended
            continue
    return found


def count_processes_made(folder: Path) -> int:
    """Return the number of processes that have built the task."""
    return len(list((folder / "marks").glob("made-*")))


def train_uninterrupted() -> dict[str, torch.Tensor]:
    """Run the same training without any faults, and return the weights."""

    def body() -> dict[str, torch.Tensor]:
        engine = RankTrainer(task_of(Mesh(replicate=2)), device=torch.device("cpu"))
        trained(engine)
        return {name: each.detach().clone() for name, each in engine.tensors().items()}

    first, second = run_in_processes(body, world_size=2, timeout_s=300.0)
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first


#: Runs the job whose folder is the argument, until this process kills itself.
KILLED = """
    import os, signal, sys
    from pathlib import Path
    from fedlearn.parallel.jobs import train
    from tests.e2e.test_training_jobs import ProgressRecorder, job_in

    class Killed(ProgressRecorder):
        def report(self, progress):
            if progress.step_num == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    watch = Killed()
    job = job_in(Path(sys.argv[1]), faults={"3": "stall", "5": "kill"})
    train(job, start=None, control=watch, report=watch.report)
"""


def test_whoever_is_killed_the_model_is_the_same_to_the_bit(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the process that has started the job is killed, and then one of the ranks."""
    done = launcher.run(dedent(KILLED), str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    took_s = until(lambda: not list_left_processes(tmp_path))
    assert took_s < GONE_S
    assert sorted(path.name for path in (tmp_path / "job" / "checkpoints").iterdir()) == ["step-2"]

    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    watch = ProgressRecorder()
    job = job_in(tmp_path, faults={"3": "stall", "5": "kill"})
    state = train(job, start=None, control=watch, report=watch.report)
    assert [signal.getsignal(each) for each in signal.valid_signals()] == handlers
    assert watch.steps == [3, 4, 5, 5, 6]  # from the checkpoint after step 2, then after step 4
    until(lambda: not list_left_processes(tmp_path))  # a busy machine takes a while to end them
    assert not job.folder.exists()
    ended = list((tmp_path / "marks").glob("ended-1-*"))
    assert not ended, "threads that are still at work would abort the interpreter"
    assert state.step_num == NUM_STEPS
    expected = train_uninterrupted()
    named = {f"model/{name}": each for name, each in state.model.items()}
    named |= {f"optimizer/{name}": each for name, each in state.optimizer.items()}
    assert named.keys() == expected.keys()
    assert all(torch.equal(named[name], expected[name]) for name in named)


def test_without_torchrun_the_job_ends_with_an_error_and_nobody_is_left(tmp_path: Path) -> None:
    """Otherwise its ranks would continue, and no process would end them."""
    watch = ProgressRecorder()
    job = job_in(tmp_path, faults={"3": "kill torchrun", "4": "stall"})
    with pytest.raises(EngineError, match=r"failed \(exit code -9\)"):
        train(job, start=None, control=watch, report=watch.report)
    until(lambda: not list_left_processes(tmp_path))  # a busy machine takes a while to end them
    assert (job.folder / "checkpoints" / "step-2" / ".metadata").exists()


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("bug", EngineError, r"^\S+trainings\.py:\d+, in batch: KeyError: 'age'$"),
        ("shapes", EngineError, r"^\S+trainings\.py:\d+, in batch: RuntimeError: mat1 and"),
        ("nan", Diverged, "^the loss is nan after step 4; lower the learning rate"),
    ],
)
def test_an_error_of_a_rank_arrives_as_it_is_and_is_not_tried_again(
    fault: str, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    watch = ProgressRecorder()
    job = job_in(tmp_path, faults={"3": fault}, max_restarts=3)
    with pytest.raises(kind, match=message):
        train(job, start=None, control=watch, report=watch.report)
    until(lambda: not list_left_processes(tmp_path))  # a busy machine takes a while to end them
    assert count_processes_made(tmp_path) == 3  # this process, to check it, and two ranks
    # No step twice. The error may overtake the report of the last step.
    assert watch.steps == list(range(1, len(watch.steps) + 1))
    assert len(watch.steps) >= 2


def test_a_job_that_is_called_off_leaves_nobody(tmp_path: Path) -> None:
    """Even while its processes are about to start."""
    watch = ProgressRecorder(calls_off=lambda: bool(list_left_processes(tmp_path)))
    job = job_in(tmp_path, faults={})
    with pytest.raises(Cancelled):
        train(job, start=None, control=watch, report=watch.report)
    until(lambda: not list_left_processes(tmp_path))  # a busy machine takes a while to end them
