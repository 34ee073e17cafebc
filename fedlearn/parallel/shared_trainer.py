"""A local trainer whose trainings several processes of one machine share."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedlearn.algorithms.transforms import Transform
from fedlearn.errors import DeploymentError, ProcessesParted
from fedlearn.parallel.workers import Resumed, WorkerProcess, Workers
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)


class SharedTrainer:
    """Trains as a :class:`~fedlearn.training.torch_trainer.TorchTrainer`, with workers beside it.

    All processes have the same examples and take the same steps; the gradient of a batch is the
    sum of what each computes of its share of the rows. A result is that of one process but for
    rounding, as gradients are added up in another order. Evaluation is the first process's.

    Args:
        make_trainer: Makes this process's; what it raises passes.
        start: Starts the workers, one or more, each of which makes such a trainer, too. Called once
            more where workers have ended.

    Raises:
        DeploymentError: The trainer's trainings cannot be shared, or a worker has ended, or has
            made another trainer.
    """

    def __init__(
        self,
        make_trainer: Callable[[], LocalTrainer],
        *,
        start: Callable[[], Sequence[WorkerProcess]],
    ) -> None:
        self._start = start
        processes = start()  # they read their examples while this one does
        try:
            self._trainer = _shareable(make_trainer(), num_workers=len(processes) + 1)
            self._workers: Workers | None = Workers.meeting(processes, self._trainer)
        except BaseException:
            _end(processes)
            raise

    @property
    def honours(self) -> Collection[str]:
        """Those settings that the trainer does."""
        return self._trainer.honours

    @property
    def own_transforms(self) -> Collection[type[Transform]]:
        """Those that the trainer names."""
        return self._trainer.own_transforms

    @property
    def num_examples(self) -> int:
        """Number of training examples, which all processes have."""
        return self._trainer.num_examples

    @property
    def device(self) -> torch.device:
        """Where the first process computes."""
        return self._trainer.device

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model that all processes have trained; must not modify ``tensors``.

        Workers that have ended are started anew first.

        Raises:
            Cancelled: The task was called off; no process computes a further batch.
            ProcessesParted: A worker failed or ended in the middle; the next training has new ones.
            DeploymentError: Workers that were started anew ended, or made another trainer.
            FedlearnError: What the trainer raises otherwise.
        """
        workers = self._ready()
        saved = context.control.saved()
        own = replace(context, control=Resumed(context.control, saved))
        try:
            workers.begin(tensors, context=context, saved=saved)
            result = self._trained(tensors, own, workers)
            workers.agree(result)
        except ProcessesParted:
            self.close()
            raise
        except BaseException:
            if not workers.have_parted():
                self.close()
            raise
        return result

    def evaluate(
        self, tensors: Mapping[str, Tensor], *, control: TaskControl = UNATTENDED
    ) -> LocalEvaluation:
        """Return what the trainer of the first process finds."""
        return self._trainer.evaluate(tensors, control=control)

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.end()
            self._workers = None

    def _trained(
        self, tensors: Mapping[str, Tensor], context: TrainContext, workers: Workers
    ) -> LocalResult:
        """Train with the others; who fails is named."""
        try:
            return self._trainer.train_with(workers.group, tensors, context=context)
        except ProcessesParted as error:
            if (words := workers.culprit()) is not None:
                raise ProcessesParted(words) from error
            raise

    def _ready(self) -> Workers:
        if self._workers is None:
            processes = self._start()
            try:
                self._workers = Workers.meeting(processes, self._trainer)
            except BaseException:
                _end(processes)
                raise
        return self._workers


def _end(processes: Sequence[WorkerProcess]) -> None:
    for process in processes:
        process.end()


def _shareable(trainer: LocalTrainer, *, num_workers: int) -> TorchTrainer:
    """Return a trainer whose trainings several processes can share.

    Raises:
        DeploymentError: It is no such.
    """
    if not isinstance(trainer, TorchTrainer) or type(trainer).train is not TorchTrainer.train:
        raise DeploymentError(
            f"num_workers is {num_workers}, but the trainer is a {type(trainer).__name__} with a "
            "training of its own, which only itself can share; take a TorchTrainer, or set "
            "num_workers to 1"
        )
    if (what := trainer.coupling) is not None:
        raise DeploymentError(
            f"num_workers is {num_workers}, but {what} computes with all examples of a batch, of "
            "which each process has a share; set num_workers to 1, or take a loss that is a mean "
            "over examples and GroupNorm or LayerNorm in place of BatchNorm"
        )
    return trainer
