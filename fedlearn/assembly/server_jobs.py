"""Runs the coordinator's own training inside a run."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import structlog

from fedlearn.algorithms.strategy import Strategy, StrategyWrapper
from fedlearn.assembly.components import Components
from fedlearn.assembly.deployed import build_deployment
from fedlearn.assembly.server_training import build_server_task
from fedlearn.assembly.simulated import build_simulation
from fedlearn.config import Config
from fedlearn.core.cluster import Cluster
from fedlearn.core.kinds import DISTILLATION, STEPS
from fedlearn.errors import Diverged
from fedlearn.parallel.distillation import DistillationObserver, Distilling
from fedlearn.parallel.jobs import Control, Job, train
from fedlearn.parallel.server_steps import ServerSteps, Trains
from fedlearn.parallel.task import Progress, Task, TrainingState
from fedlearn.training.trainer import UNATTENDED

#: How to read a configuration, so that other processes build the same task from it.
Kind: TypeAlias = Literal["simulation", "deployment"]

_TASK = "fedlearn.assembly.server_jobs:task_of"
#: Subfolder of the run's folder for the coordinator's own training.
FOLDER = "training"

#: Receives the kind of a training and its progress.
ReportTraining: TypeAlias = Callable[[str, Progress], None]

_log = structlog.get_logger(__name__)


def task_of(kind: Kind, config: str, data_dir: str) -> Task:
    """Build the coordinator's training task from a configuration, in any process.

    Args:
        kind: How to read the configuration.
        config: The output of :meth:`~fedlearn.config.Config.canonical_json`.
        data_dir: Directory of data sets that the configuration names without a path.
    """
    make: Mapping[str, Callable[..., Components]] = {
        "simulation": build_simulation,
        "deployment": build_deployment,
    }
    return build_server_task(make[kind](Config.from_json(config), data_dir=Path(data_dir)))


def _ignore_report(_kind: str, _progress: Progress) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrainingHost:
    """Where and how the coordinator's own training inside a run is executed.

    Attributes:
        kind: Whether the run is a simulation or a deployment.
        folder: Folder of the training's files alone, which is removed at its end.
        data_dir: Directory of the data sets.
        is_described: Whether the configuration describes the model and the data. If not, they are
            Python objects, which other processes cannot rebuild.
        control: Signals that the training is cancelled.
        cluster: The processes of the simulation; only the first trains.
        report: Receives the progress of each training.
    """

    kind: Kind
    folder: Path
    data_dir: Path
    is_described: bool
    cluster: Cluster
    control: Control = UNATTENDED
    report: ReportTraining = _ignore_report


def add_server_steps(
    components: Components, strategy: Strategy, host: TrainingHost | None
) -> Strategy:
    """Add the coordinator's own training to the strategy of a run, if it is configured.

    The coordinator trains on the model that the innermost strategy computes. The strategies around
    it then see the model from which clients will start, and those that bound updates and keep them
    private stay outermost.

    Args:
        components: The components of the run.
        strategy: The strategy of its rounds.
        host: Where the coordinator trains; ``None``: its training must be off.

    Raises:
        ConfigError: The mesh does not fit the model, the data or this machine.
    """
    section = components.config.coordinator.training
    if not section.is_on:
        return strategy
    assert host is not None  # every caller that runs a configuration gives a host
    if section.distil_steps:
        strategy = _watch_distillation(strategy, host, report_every=section.report_every)
    if not section.has_steps:
        return strategy
    task = build_server_task(components)
    task.require_fitting()
    trains = _share_result(_build_trains(components, task, host), host.cluster)

    def add_inside(inner: Strategy) -> Strategy:
        if isinstance(inner, StrategyWrapper):
            return replace(inner, inner=add_inside(inner.inner))
        return ServerSteps(
            inner,
            trains,
            num_steps=task.plan.num_steps,
            every_rounds=section.every_rounds,
            round_steps=section.round_steps,
        )

    return add_inside(strategy)


def _watch_distillation(strategy: Strategy, host: TrainingHost, *, report_every: int) -> Strategy:
    """Report the progress of distillation, and cancel it together with the run."""
    if isinstance(strategy, Distilling):
        watch = DistillationObserver(control=host.control, report_every=report_every)
        if host.cluster.rank == 0:  # the other processes distil the same, and stay silent
            watch = replace(watch, report=partial(_report, host, DISTILLATION))
        return replace(strategy, watch=watch)
    if isinstance(strategy, StrategyWrapper):
        inner = _watch_distillation(strategy.inner, host, report_every=report_every)
        return replace(strategy, inner=inner)
    return strategy


def _report(host: TrainingHost, kind: str, progress: Progress) -> None:
    facts = {
        name: _round_value(value) for name, value in asdict(progress).items() if name != "metrics"
    }
    _log.info("server_training", kind=kind, **facts)
    host.report(kind, progress)


def build_job(components: Components, task: Task, host: TrainingHost, *, until: int) -> Job:
    """Describe the coordinator's own training up to the step ``until`` as a job."""
    section = components.config.coordinator.training
    described: dict[str, object] = {
        "kind": host.kind,
        "config": components.config.canonical_json(),
        "data_dir": str(host.data_dir),
    }
    return Job(
        make_task=lambda: task,
        name=_TASK if host.is_described else None,
        arguments=described if host.is_described else {},
        folder=host.folder,
        checkpoint_every=section.checkpoint_every,
        report_every=section.report_every,
        max_restarts=section.max_restarts,
        until=until,
    )


def _build_trains(components: Components, task: Task, host: TrainingHost) -> Trains:
    def trains(start: TrainingState, until: int) -> tuple[TrainingState, float]:
        losses = list[float]()

        def report_progress(progress: Progress) -> None:
            losses.append(progress.loss)
            _report(host, STEPS, replace(progress, num_steps=until))

        job = build_job(components, task, host, until=until)
        with explain_divergence():
            trained = train(job, start=start, control=host.control, report=report_progress)
        return trained, losses[-1] if losses else math.nan

    return trains


@contextmanager
def explain_divergence() -> Iterator[None]:
    """Name the configuration key to change in the error of a training that diverges."""
    try:
        yield
    except Diverged as error:
        raise Diverged(f"coordinator.training.learning_rate: {error}") from error


def _round_value(value: float) -> int | float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _share_result(trains: Trains, cluster: Cluster) -> Trains:
    """Train in the first process of a simulation only, and broadcast the result to the others."""

    def train_once(start: TrainingState, until: int) -> tuple[TrainingState, float]:
        return cluster.broadcast(trains(start, until) if cluster.rank == 0 else None)

    return train_once
