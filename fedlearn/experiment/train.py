"""Runs the coordinator's own training outside a run: ``fedlearn train``."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedlearn import assembly
from fedlearn.algorithms.collector import GlobalModel
from fedlearn.assembly import Components, build_server_task
from fedlearn.assembly.plan import build_central_evaluator, build_initial_params
from fedlearn.assembly.server_jobs import explain_divergence
from fedlearn.config import Config
from fedlearn.core.cluster import Alone
from fedlearn.core.distribution import split_statistic
from fedlearn.core.files import explain_disk_errors
from fedlearn.core.params import Params
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.site import Site
from fedlearn.parallel.jobs import Folder, Job, digest_of, read_job, train
from fedlearn.parallel.server_steps import load_trained
from fedlearn.parallel.task import Evaluation, Progress, Task, TrainingState
from fedlearn.parallel.worker import train_as_rank
from fedlearn.simulation.cluster import read_torchrun_size
from fedlearn.store.holding import hold_run
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.training.trainer import UNATTENDED

#: Rebuilds the task in other processes.
_TASK = "fedlearn.experiment.train:task_of"
#: Keys of coordinator.training that may change when a training is resumed: its length, processes,
#: use of memory, checkpoints and reports.
_FREE = (
    *("num_steps", "pipeline", "replicate", "shard", "tensor", "num_micro_batches", "schedule"),
    *("recompute", "offload", "num_readers"),
    *("checkpoint_every", "report_every", "max_restarts"),
)
_MOST_NAMES = 5


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a training that are not in its configuration.

    Attributes:
        folder: Folder that keeps the training, so that it can take more steps later; ``None``: its
            files are in the directory of the runs, and are removed at its end.
        weights: A safetensors file with the initial weights; ``None``: the model's own.
        evaluate_every: Steps between evaluations on the test set, >= 0. With 0 the result is the
            last model; otherwise it is the best one.
        patience: Evaluations without improvement after which training ends; ``None``: no limit.
    """

    folder: Path | None = None
    weights: Path | None = None
    evaluate_every: int = 0
    patience: int | None = None


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The result of a training.

    Attributes:
        state: The last state; that of the best model if the training evaluates on the way.
        metrics: Metrics of that model on the test set, by name; empty without a test set.
    """

    state: TrainingState
    metrics: Mapping[str, float]


def train_alone(
    config: Config, site: Site, request: Request, *, report: Callable[[Progress], None]
) -> TrainingResult | None:
    """Run the coordinator's own training outside a run, or resume one that was interrupted.

    Under torchrun this process is one of the ranks, all of which must see the same folder.

    Args:
        config: The resolved configuration.
        site: The environment on this machine.
        request: Options that are not in the configuration.
        report: Receives the progress of the training.

    Returns:
        The trained state and its metrics on the test set; ``None`` in a rank that is not the first.

    Raises:
        RunHeld: Another process is training in the same folder.
        ConfigError: The request does not fit the model, the data, or the training in the folder.
        FedlearnError: As :func:`fedlearn.parallel.jobs.train`.
    """
    components = assembly.build_standalone(config, data_dir=site.addresses.data_dir)
    task = build_server_task(components)
    if not task.plan.num_steps:
        raise ConfigError(
            "coordinator.training.num_steps is 0: there is nothing to train; give the number of "
            "steps, as with --set coordinator.training.num_steps=1000"
        )
    task = _add_evaluation(
        task, components, every=request.evaluate_every, patience=request.patience
    )
    params = build_initial_params(components, torch.device("cpu"))
    model = (
        params.to_tensors() if request.weights is None else _read_weights(request.weights, params)
    )
    start = TrainingState(model=model)
    identity = _identity(config, start)
    folder = (request.folder or site.addresses.runs_dir) / f"training-{identity[:12]}"
    job = Job(
        make_task=lambda: task,
        name=_TASK,
        arguments={
            "config": config.canonical_json(),
            "data_dir": str(site.addresses.data_dir),
            "evaluate_every": request.evaluate_every,
            "patience": request.patience,
        },
        folder=folder / "job",
        checkpoint_every=config.coordinator.training.checkpoint_every,
        report_every=config.coordinator.training.report_every,
        max_restarts=config.coordinator.training.max_restarts,
        until=task.plan.num_steps,
        identity=identity,
        is_kept=request.folder is not None,
    )
    is_rank = read_torchrun_size(site.environ) is not None
    with _lock_folder(folder, site.environ, is_kept=job.is_kept), explain_divergence():
        # Under the lock, since it reads the job that another process may be writing.
        _require_same_decay(job, task)
        if is_rank:
            state = train_as_rank(job, start=start, report=report)
        else:
            state = train(job, start=start, control=UNATTENDED, report=report)
    return None if state is None else TrainingResult(state, _build_measure(components)(state))


def task_of(config: str, data_dir: str, evaluate_every: int, patience: int | None) -> Task:
    """Build the coordinator's training task outside a run, in any process.

    Args:
        config: The output of :meth:`~fedlearn.config.Config.canonical_json`.
        data_dir: Directory of data sets that the configuration names without a path.
        evaluate_every: As in :class:`Request`.
        patience: As in :class:`Request`.
    """
    components = assembly.build_standalone(Config.from_json(config), data_dir=Path(data_dir))
    return _add_evaluation(
        build_server_task(components), components, every=evaluate_every, patience=patience
    )


def _identity(config: Config, start: TrainingState) -> str:
    """Return a hash, in hexadecimal, shared by all trainings that may resume each other."""
    tree = json.loads(config.canonical_json())
    for name in _FREE:
        tree["coordinator"]["training"].pop(name, None)
    text = json.dumps([tree, digest_of(start)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _require_same_decay(job: Job, task: Task) -> None:
    """Refuse a different number of steps if the learning rate depends on it.

    Raises:
        ConfigError: The rate of the training in the folder decays over another number of steps.
    """
    decay, earlier = task.plan.rate.decay, read_job(Folder(job.folder))
    if decay == "none" or earlier is None:
        return
    before = earlier.until
    if before != job.until:
        raise ConfigError(
            f'coordinator.training.decay is "{decay}", and the training in {job.folder} was '
            f"started with a rate that falls over {before} steps; num_steps {job.until} would "
            f'change it: set num_steps to {before}, or decay to "none" from the start, or remove '
            "the folder to train from the start"
        )


def _read_weights(path: Path, params: Params) -> dict[str, Tensor]:
    """Read initial weights from a safetensors file.

    Raises:
        ConfigError: They do not fit this model, or are not finite.
        StoreError: The file cannot be read.
    """
    with explain_disk_errors(path, raises=StoreError, doing="read"):
        try:
            given: dict[str, Tensor] = load_file(path)
        except SafetensorError as error:
            raise StoreError(
                f"{path} is not a safetensors file ({error}); give one written by fedlearn train "
                "or fedlearn export"
            ) from error
    own = params.to_tensors()
    wrong = [f"{name} is missing" for name in own.keys() - given.keys()]
    wrong += [f"{name} is not part of the model" for name in given.keys() - own.keys()]
    wrong += [
        f"{name} is {given[name].dtype} {tuple(given[name].shape)} not {value.dtype} "
        f"{tuple(value.shape)}"
        for name, value in own.items()
        if name in given and (given[name].shape, given[name].dtype) != (value.shape, value.dtype)
    ]
    wrong += [
        f"{name} is not finite"
        for name, value in given.items()
        if value.is_floating_point() and not bool(value.isfinite().all())
    ]
    if wrong:
        listed = "; ".join(sorted(wrong)[:_MOST_NAMES])
        more = f"; and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        raise ConfigError(f"the weights in {path} do not fit this model: {listed}{more}")
    return given


def _add_evaluation(
    task: Task, components: Components, *, every: int, patience: int | None
) -> Task:
    """Add evaluations on the test set to a training task, if requested.

    Raises:
        ConfigError: There is no test set, the watched metric is not measured on it, or ``patience``
            is given without evaluations.
    """
    if not every:
        if patience is not None:
            raise ConfigError(
                f"patience is {patience}, but there are no evaluations to count; give the number "
                "of steps between them, as with --evaluate-every 100"
            )
        return task
    if components.test is None:
        raise ConfigError(
            f"the model is to be evaluated every {every} steps, but the data have no test set; "
            "name one in the table data, or leave --evaluate-every out"
        )
    stopping = components.early_stopping()
    if split_statistic(stopping.metric)[1] is not None:
        raise ConfigError(
            f'early_stopping.metric is "{stopping.metric}", which clients measure, but no client '
            "is asked; use a metric of the test set"
        )
    measure = _build_measure(components)
    evaluation = Evaluation(measure=measure, every=every, goal=stopping, patience=patience)
    return replace(task, evaluation=evaluation)


def _build_measure(components: Components) -> Callable[[TrainingState], Mapping[str, float]]:
    """Return a function that evaluates a model on the CPU; it returns {} without a test set."""
    if components.test is None:
        return lambda _: {}
    cpu, batch_size = torch.device("cpu"), components.config.evaluation.batch_size
    model = ResidentModel(
        components.make_model,
        components.objective,
        device=cpu,
        precision=Precision.FLOAT32,
        metrics=components.metrics,
    )
    evaluator = build_central_evaluator(components.test, model, Alone(), batch_size=batch_size)
    params = build_initial_params(components, cpu)

    def measure(state: TrainingState) -> Mapping[str, float]:
        model = GlobalModel(params=load_trained(params, state), round_num=0)
        return evaluator.evaluate(model).metrics

    return measure


@contextmanager
def _lock_folder(folder: Path, environ: Mapping[str, str], *, is_kept: bool) -> Iterator[None]:
    """Hold the folder's lock in rank 0; on success, remove the folder unless it is kept."""
    # The other ranks of torchrun train in the same folder, and would lock each other out.
    if environ.get("RANK", "0") != "0":
        yield
        return
    with explain_disk_errors(folder, raises=StoreError):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_run(folder):
        yield
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
