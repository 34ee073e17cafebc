"""The coordinator's own training on GPUs: in one process, through NCCL, and on meshes of two."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.cli.app import main
from fedlearn.core.randomness import Seed
from fedlearn.errors import Cancelled, ConfigError
from fedlearn.parallel.engine import RankTrainer
from fedlearn.parallel.jobs import Job, train
from fedlearn.parallel.memory import predict
from fedlearn.parallel.mesh import Mesh
from fedlearn.parallel.optimizers import AdamKin
from fedlearn.parallel.plan import TrainingPlan, TrainingPrecision
from fedlearn.parallel.prefetching import prefetch
from fedlearn.parallel.streams import Shuffled
from fedlearn.parallel.task import Progress, Task
from fedlearn.training.local_data import TensorData
from tests.trainings import (
    BATCH_SIZE,
    NUM_STEPS,
    InOrder,
    Outcome,
    alone,
    outcome,
    task_of,
    trained,
)

#: Tolerance for rounding in float64 after six steps.
SAME = 1e-10


class ProgressRecorder:
    """Records progress, and cancels a job after a number of reports.

    Args:
        after: The number of reports; ``None``: never cancel.
    """

    def __init__(self, after: int | None = None) -> None:
        self.told = list[Progress]()
        self._after = after

    def check(self) -> None:
        """Cancel the job if it is due."""
        if len(self.told) == self._after:
            raise Cancelled("nobody wants it any more")


def job_in(
    folder: Path, task: Task, *, name: str | None = None, arguments: dict[str, Any] | None = None
) -> Job:
    """Return a training as a job."""
    return Job(
        make_task=lambda: task,
        name=name,
        arguments=arguments or {},
        folder=folder / "job",
        checkpoint_every=2,
        report_every=1,
        max_restarts=0,
    )


def result_of(job: Job) -> Outcome:
    """Train all steps; return the result."""
    watch = ProgressRecorder()
    state = train(job, start=None, control=watch, report=watch.told.append)
    return outcome([each.loss for each in watch.told], state)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lars"])
def test_a_training_is_that_of_the_cpu(optimizer: str, tmp_path: Path) -> None:
    """Up to rounding in float64; control: another optimizer's result differs."""
    expected = alone(task_of(optimizer=optimizer))
    found = result_of(job_in(tmp_path, task_of(optimizer=optimizer)))
    assert found.apart(expected) < SAME
    other = alone(task_of(optimizer="sgd" if optimizer == "adamw" else "adamw"))
    assert found.losses[-1] != pytest.approx(other.losses[-1], abs=1e-3)
    assert {value.device.type for value in found.model.values()} == {"cpu"}


@pytest.mark.parametrize(
    "spread", [{"recompute": True}, {"num_micro_batches": 4}], ids=["recompute", "micro-batches"]
)
def test_less_memory_changes_nothing(spread: dict[str, Any], gpu: torch.device) -> None:
    """Two runs also agree with dropout, which draws from the GPU's generator."""
    plain, spared = (task_of(dropout=0.3, **each) for each in ({}, spread))
    first, again = (RankTrainer(each, device=gpu) for each in (spared, spared))
    losses = [[told.loss for told in trained(engine)] for engine in (first, again)]
    assert losses[0] == pytest.approx(losses[1], abs=SAME)
    if "recompute" in spread:  # a split batch has other dropout masks
        whole = [told.loss for told in trained(RankTrainer(plain, device=gpu))]
        assert losses[0] == pytest.approx(whole, abs=SAME)


def test_the_generators_stay_where_they_were(gpu: torch.device) -> None:
    """Those of the CPU and of the GPU."""
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    trained(RankTrainer(task_of(dropout=0.3), device=gpu))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])


@pytest.mark.parametrize("precision", [TrainingPrecision.BFLOAT16, TrainingPrecision.FLOAT16])
def test_half_precision_is_close(precision: TrainingPrecision, gpu: torch.device) -> None:
    """Weights stay float32; the float16 loss is scaled for training and reported unscaled."""
    expected = alone(task_of(dtype=torch.float32))
    task = task_of(dtype=torch.float32, precision=precision, initial_loss_scale=1024.0)
    engine = RankTrainer(task, device=gpu)
    told = trained(engine)
    assert [each.loss for each in told] == pytest.approx(expected.losses, abs=0.05)
    assert told[-1].loss_scale == (1024.0 if precision is TrainingPrecision.FLOAT16 else 1.0)
    assert told[-1].num_skipped == 0
    assert {value.dtype for value in engine.state().model.values()} == {torch.float32}


def test_a_loss_scale_that_overflows_is_lowered(gpu: torch.device) -> None:
    """The step is skipped and counted."""
    task = task_of(
        dtype=torch.float32, precision=TrainingPrecision.FLOAT16, initial_loss_scale=2.0**60
    )
    told = trained(RankTrainer(task, device=gpu), until=2)
    assert told[-1].num_skipped == 2
    assert told[-1].loss_scale < 2.0**60


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_checkpoint_of_a_gpu_is_gone_on_from(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU and on the CPU."""
    first, second = ProgressRecorder(after=5), ProgressRecorder()
    with pytest.raises(Cancelled):
        train(job_in(tmp_path, task_of()), start=None, control=first, report=first.told.append)
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    job = job_in(tmp_path, task_of())
    state = train(job, start=None, control=second, report=second.told.append)
    assert [each.step_num for each in second.told] == [5, 6]
    losses = [each.loss for each in first.told[:4] + second.told]
    assert outcome(losses, state).apart(alone(task_of())) < SAME


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_are_read_ahead_come_to_the_gpu(num_workers: int, gpu: torch.device) -> None:
    """Through pinned memory."""
    examples = InOrder.small()
    steps = range(3)

    def positions(step: int) -> range:
        return range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)

    with prefetch(
        examples,
        steps=steps,
        share=positions,
        num_workers=num_workers,
        device=gpu,
        check=lambda _: None,
    ) as batches:
        for step in steps:
            features, labels = next(batches)
            expected, classes = examples.batch(positions(step))
            assert isinstance(features, Tensor)
            assert (features.device, labels.device) == (gpu, gpu)
            assert torch.equal(features.cpu(), expected)
            assert torch.equal(labels.cpu(), classes)


def test_examples_that_lie_on_the_gpu_are_trained_on(gpu: torch.device) -> None:
    """Such tensors cannot be pinned."""
    examples = InOrder.small()

    def task_on(device: torch.device) -> Task:
        data = TensorData(examples.features, examples.labels, device=device)
        return replace(task_of(), stream=Shuffled(data, seed=Seed(2)))

    found = [each.loss for each in trained(RankTrainer(task_on(gpu), device=gpu))]
    assert found == pytest.approx(alone(task_on(torch.device("cpu"))).losses, abs=SAME)


MEBIBYTE = 1 << 20


def wide() -> nn.Module:
    """Return a model next to which an allocator's rounding is small."""
    layers = (nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(1024, 16))


def test_predicted_memory_is_what_the_allocator_tells(gpu: torch.device) -> None:
    """Within a third: it leaves out operations' workspaces and the allocator's rounding."""
    features, labels = torch.zeros(2048, 1024), torch.zeros(2048, dtype=torch.int64)
    data = TensorData(features, labels, device=torch.device("cpu"))
    plan = TrainingPlan(
        batch_size=1024, num_steps=4, optimizer=AdamKin(learning_rate=0.01), seed=Seed(0)
    )
    stream = Shuffled(data, seed=Seed(0))
    task = Task(make_model=wide, objective=CrossEntropy(), stream=stream, plan=plan)
    (found,) = predict(
        wide, plan, features=features, labels=labels, objective=CrossEntropy(), device="cuda"
    )
    before = torch.cuda.memory_allocated(gpu)
    engine = RankTrainer(task, device=gpu)
    fixed = torch.cuda.memory_allocated(gpu) - before
    assert fixed == pytest.approx(found.parameters + found.optimizer_state, rel=0.05)
    with engine.reading(until=2):
        engine.take_step()  # libraries allocate their workspaces, and gradients stay
        kept = torch.cuda.memory_allocated(gpu) - found.gradients - fixed
        torch.cuda.reset_peak_memory_stats(gpu)
        engine.take_step()
    peak = torch.cuda.max_memory_allocated(gpu) - kept
    assert peak == pytest.approx(found.peak, rel=0.35)
    assert peak > 40 * MEBIBYTE  # the control: far more than the model


def test_a_mesh_of_more_processes_than_gpus_is_refused(tmp_path: Path) -> None:
    """Before any process starts."""
    mesh = Mesh(replicate=torch.cuda.device_count() + 1)
    task = replace(task_of(), plan=replace(task_of().plan, batch_size=48 * mesh.replicate))
    spread = replace(task.plan.spread, mesh=mesh)
    job = job_in(tmp_path, replace(task, plan=replace(task.plan, spread=spread)), name="not:called")
    with pytest.raises(ConfigError, match=r"each of .* processes needs one"):
        result_of(job)


MESHES = {
    "replicate": ({"replicate": 2}, {}),
    "replicate, micro-batches": ({"replicate": 2}, {"num_micro_batches": 2}),
    "shard": ({"shard": 2}, {}),
    "shard, recompute": ({"shard": 2}, {"recompute": True}),
    "shard, offload": ({"shard": 2}, {"offload": True}),
    "tensor": ({"tensor": 2}, {}),
    "pipeline, 1f1b": ({"pipeline": 2}, {"num_micro_batches": 4}),
    "pipeline, gpipe": ({"pipeline": 2}, {"num_micro_batches": 4, "schedule": "gpipe"}),
}


@pytest.mark.slow
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("mesh", "spread"), MESHES.values(), ids=list(MESHES))
def test_a_training_on_two_gpus_is_that_of_one_process(
    mesh: dict[str, int], spread: dict[str, Any], tmp_path: Path
) -> None:
    """Through NCCL, with checkpoints on the way; the optimizer state is that of the whole model."""
    job = job_in(
        tmp_path,
        task_of(Mesh(**mesh), **spread),
        name="tests.trainings:name_task",
        arguments={"mesh": mesh, "spread": spread},
    )
    assert result_of(job).apart(alone(task_of())) < SAME


def train_words(*sets: str) -> list[str]:
    """Return the command line of a small training of the coordinator."""
    training = ("num_steps=20", "report_every=10", "batch_size=32", "share=0.5", *sets)
    return ["train", "--json", *(f"--set=coordinator.training.{each}" for each in training)]


def losses(lines: Sequence[str]) -> list[float]:
    """Return the losses that a training has printed."""
    return [found["loss"] for found in map(json.loads, lines) if "loss" in found]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.usefixtures("surroundings")
def test_a_training_under_torchrun_is_that_of_one_process(
    processes: int, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Each rank joins an NCCL world, even if it is the only one."""
    if processes == 2:
        request.getfixturevalue("two_gpus")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    words = train_words(*([] if processes == 1 else ["replicate=2"]))
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "fedlearn", *words, "--output=spread.safetensors"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert main([*train_words(), "--output=alone.safetensors"]) == 0
    expected = losses(capsys.readouterr().out.splitlines())
    assert losses(done.stdout.splitlines()) == pytest.approx(expected, abs=1e-3)
    assert len(expected) >= 2


def test_the_steps_are_all_taken(tmp_path: Path) -> None:
    """The other tests compare a training of several steps whose loss falls."""
    found = result_of(job_in(tmp_path, task_of())).losses
    assert len(found) == NUM_STEPS
    assert found[-1] < found[0]
