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
from fedlearn.assembly.deployed import deployment
from fedlearn.assembly.pieces import Pieces
from fedlearn.assembly.server_training import server_task
from fedlearn.assembly.simulated import simulation
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
Told: TypeAlias = Callable[[str, Progress], None]

_log = structlog.get_logger(__name__)


def task_of(kind: Kind, config: str, data_dir: str) -> Task:
    """Build the coordinator's training task from a configuration, in any process.

    Args:
        kind: How to read the configuration.
        config: The output of :meth:`~fedlearn.config.Config.canonical_json`.
        data_dir: Directory of data sets that the configuration names without a path.
    """
    make: Mapping[str, Callable[..., Pieces]] = {
        "simulation": simulation,
        "deployment": deployment,
    }
    return server_task(make[kind](Config.from_json(config), data_dir=Path(data_dir)))


def _tell_nobody(_kind: str, _progress: Progress) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and how the coordinator's own training inside a run is executed.

    Attributes:
        kind: Whether the run is a simulation or a deployment.
        folder: Folder of the training's files alone, which is removed at its end.
        data_dir: Directory of the data sets.
        is_described: Whether the configuration describes the model and the data. If not, they are
            Python objects, which other processes cannot rebuild.
        control: Signals that the training is cancelled.
        cluster: The processes of the simulation; only the first trains.
        told: Receives the progress of each training.
    """

    kind: Kind
    folder: Path
    data_dir: Path
    is_described: bool
    cluster: Cluster
    control: Control = UNATTENDED
    told: Told = _tell_nobody


def with_server_steps(pieces: Pieces, strategy: Strategy, place: Place | None) -> Strategy:
    """Add the coordinator's own training to the strategy of a run, if it is configured.

    The coordinator trains on the model that the innermost strategy computes. The strategies around
    it then see the model from which clients will start, and those that bound updates and keep them
    private stay outermost.

    Args:
        pieces: The components of the run.
        strategy: The strategy of its rounds.
        place: Where the coordinator trains; ``None``: its training must be off.

    Raises:
        ConfigError: The mesh does not fit the model, the data or this machine.
    """
    section = pieces.config.coordinator.training
    if not section.is_on:
        return strategy
    assert place is not None  # every caller that runs a configuration gives a place
    if section.distil_steps:
        strategy = _watched(strategy, place, report_every=section.report_every)
    if not section.has_steps:
        return strategy
    task = server_task(pieces)
    task.require_fitting()
    trains = _shared(_trains(pieces, task, place), place.cluster)

    def training(inner: Strategy) -> Strategy:
        if isinstance(inner, StrategyWrapper):
            return replace(inner, inner=training(inner.inner))
        return ServerSteps(
            inner,
            trains,
            num_steps=task.plan.num_steps,
            every_rounds=section.every_rounds,
            round_steps=section.round_steps,
        )

    return training(strategy)


def _watched(strategy: Strategy, place: Place, *, report_every: int) -> Strategy:
    """Report the progress of distillation, and cancel it together with the run."""
    if isinstance(strategy, Distilling):
        watch = DistillationObserver(control=place.control, report_every=report_every)
        if place.cluster.rank == 0:  # the other processes distil the same, and stay silent
            watch = replace(watch, report=partial(_tell, place, DISTILLATION))
        return replace(strategy, watch=watch)
    if isinstance(strategy, StrategyWrapper):
        inner = _watched(strategy.inner, place, report_every=report_every)
        return replace(strategy, inner=inner)
    return strategy


def _tell(place: Place, kind: str, progress: Progress) -> None:
    facts = {name: _rounded(value) for name, value in asdict(progress).items() if name != "metrics"}
    _log.info("server_training", kind=kind, **facts)
    place.told(kind, progress)


def job_of(pieces: Pieces, task: Task, place: Place, *, until: int) -> Job:
    """Describe the coordinator's own training up to the step ``until`` as a job."""
    section = pieces.config.coordinator.training
    described: dict[str, object] = {
        "kind": place.kind,
        "config": pieces.config.canonical_json(),
        "data_dir": str(place.data_dir),
    }
    return Job(
        make_task=lambda: task,
        name=_TASK if place.is_described else None,
        arguments=described if place.is_described else {},
        folder=place.folder,
        checkpoint_every=section.checkpoint_every,
        report_every=section.report_every,
        max_restarts=section.max_restarts,
        until=until,
    )


def _trains(pieces: Pieces, task: Task, place: Place) -> Trains:
    def trains(start: TrainingState, until: int) -> tuple[TrainingState, float]:
        losses = list[float]()

        def tell(progress: Progress) -> None:
            losses.append(progress.loss)
            _tell(place, STEPS, replace(progress, num_steps=until))

        job = job_of(pieces, task, place, until=until)
        with divergence_explained():
            trained = train(job, start=start, control=place.control, report=tell)
        return trained, losses[-1] if losses else math.nan

    return trains


@contextmanager
def divergence_explained() -> Iterator[None]:
    """Name the configuration key to change in the error of a training that diverges."""
    try:
        yield
    except Diverged as error:
        raise Diverged(f"coordinator.training.learning_rate: {error}") from error


def _rounded(value: float) -> int | float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _shared(trains: Trains, cluster: Cluster) -> Trains:
    """Train in the first process of a simulation only, and broadcast the result to the others."""

    def shared(start: TrainingState, until: int) -> tuple[TrainingState, float]:
        return cluster.broadcast(trains(start, until) if cluster.rank == 0 else None)

    return shared
