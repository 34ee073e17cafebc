"""The coordinator's own training without a run: ``fedlearn train``."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fedlearn import build
from fedlearn.build import Pieces, server_task
from fedlearn.config import Config
from fedlearn.core.files import disk_errors
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.assemble import central_evaluator, initial_params
from fedlearn.experiment.server_training import Place, divergence_explained, job_of
from fedlearn.experiment.site import Site
from fedlearn.parallel.jobs import train
from fedlearn.parallel.server_steps import with_state
from fedlearn.parallel.task import Progress, TrainingState
from fedlearn.parallel.worker import train_as_rank
from fedlearn.simulation.cluster import Alone, under_torchrun
from fedlearn.store.holding import held
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.training.trainer import UNATTENDED


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training came to.

    Attributes:
        state: Where it stands.
        metrics: Of the model on the test set, by name; none without one.
    """

    state: TrainingState
    metrics: Mapping[str, float]


def train_alone(
    config: Config, site: Site, folder: Path, *, report: Callable[[Progress], None]
) -> Trained | None:
    """Run the coordinator's own training without a run, or go on with one that was cut off.

    Under torchrun this process is one of its ranks.

    Args:
        config: The resolved tree.
        site: What surrounds it.
        folder: Of its files: its own, held meanwhile, and removed at its end; ranks on several
            machines see the same one.
        report: Told how far it is.

    Returns:
        What was trained, and how the model does on the test set; ``None`` in a rank that is not
        the first.

    Raises:
        RunHeld: Another process trains there.
        FedlearnError: As :func:`fedlearn.parallel.jobs.train`.
    """
    pieces = build.alone(config, data_dir=site.addresses.data_dir)
    task = server_task(pieces)
    if not task.plan.num_steps:
        raise ConfigError(
            "coordinator.training.num_steps is 0: there is nothing to train; give the number of "
            "steps, as with --set coordinator.training.num_steps=1000"
        )
    params = initial_params(pieces, torch.device("cpu"))
    place = Place(
        kind="alone",
        folder=folder / "job",
        data_dir=site.addresses.data_dir,
        is_described=True,
        cluster=Alone(),
    )
    job = job_of(pieces, task, place, until=task.plan.num_steps)
    start = TrainingState(model=params.named())
    with _held(folder, site.environ), divergence_explained():
        if under_torchrun(site.environ) is None:
            state = train(job, start=start, control=UNATTENDED, report=report)
        else:
            found = train_as_rank(job, start=start, report=report)
            if found is None:
                return None
            state = found
    return Trained(state, _measured(pieces, state))


@contextmanager
def _held(folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """Hold the folder in rank 0; remove it when the block has ended without an error."""
    if environ.get("RANK", "0") != "0":
        yield
        return
    with disk_errors(folder, raises=StoreError):
        folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        yield
        shutil.rmtree(folder, ignore_errors=True)


def _measured(pieces: Pieces, state: TrainingState) -> Mapping[str, float]:
    if pieces.test is None:
        return {}
    cpu, batch_size = torch.device("cpu"), pieces.config.evaluation.batch_size
    model = ResidentModel(
        pieces.make_model,
        pieces.objective,
        device=cpu,
        precision=Precision.FLOAT32,
        metrics=pieces.metrics,
    )
    params = with_state(initial_params(pieces, cpu), state)
    evaluator = central_evaluator(pieces.test, model, Alone(), batch_size=batch_size)
    return evaluator.evaluate(params, round_num=0)
