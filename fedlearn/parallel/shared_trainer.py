"""A local trainer that divides each batch among several processes of one machine."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.transforms import Transform
from fedlearn.errors import DeploymentError, ProcessesParted
from fedlearn.parallel.workers import ResumeControl, WorkerProcess, Workers
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
    """Trains like a :class:`~fedlearn.training.torch_trainer.TorchTrainer`, together with workers.

    All processes have the same examples and take the same steps. Each computes the gradient of its
    share of a batch's rows, and the gradients are summed. The result equals that of one process up
    to rounding, as gradients are added in another order. Evaluation runs in the first process.

    Args:
        make_trainer: Creates this process's trainer; its errors are propagated.
        start: Starts the workers, at least one, each of which creates the same trainer. Called
            again to replace workers after a failure.

    Raises:
        DeploymentError: The trainer's trainings cannot be shared, or a worker has exited or has
            created a different trainer.
    """

    def __init__(
        self,
        make_trainer: Callable[[], LocalTrainer],
        *,
        start: Callable[[], Sequence[WorkerProcess]],
    ) -> None:
        self._start = start
        processes = start()  # first: they load their examples while this process does
        try:
            self._trainer = _require_shareable(make_trainer(), num_workers=len(processes) + 1)
            self._workers: Workers | None = Workers.meeting(processes, self._trainer)
        except BaseException:
            _end(processes)
            raise

    @property
    def honors(self) -> Collection[str]:
        """Settings that the trainer acts on."""
        return self._trainer.honors

    @property
    def own_updates(self) -> Collection[type[LocalUpdate]]:
        """The user's own local-update classes that the trainer runs."""
        return self._trainer.own_updates

    @property
    def own_transforms(self) -> Collection[type[Transform]]:
        """Custom transforms of the trainer."""
        return self._trainer.own_transforms

    @property
    def answers(self) -> LocalTrainer | None:
        """Answers queries in this process alone; ``None``: the client answers none."""
        return self._trainer.answers

    @property
    def num_examples(self) -> int:
        """Number of training examples, all of which every process has."""
        return self._trainer.num_examples

    @property
    def device(self) -> torch.device:
        """Device of the first process."""
        return self._trainer.device

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Train the model in all processes; must not modify ``tensors``.

        If an earlier training has lost its workers, new ones are started first.

        Raises:
            Cancelled: The task was cancelled; no process computes another batch.
            ProcessesParted: A worker failed or exited; the next training starts new ones.
            DeploymentError: A new worker exited, or created a different trainer.
            FedlearnError: Any other error of the trainer.
        """
        workers = self._get_workers()
        # Loaded once and sent to all: processes that resumed from different steps would not meet
        # again.
        saved = context.control.load()
        own = replace(context, control=ResumeControl(context.control, saved))
        try:
            workers.begin(tensors, context=context, saved=saved)
            result = self._train(tensors, own, workers)
            workers.agree(result)
        except ProcessesParted:
            self.close()
            raise
        except BaseException:
            # After a cancellation or an error that all share, the workers wait for the next
            # training. One that does not answer may be stuck in a sum, so all are replaced.
            if not workers.wait_until_ready():
                self.close()
            raise
        return result

    def evaluate(
        self, tensors: Mapping[str, Tensor], *, control: TaskControl = UNATTENDED
    ) -> LocalEvaluation:
        """Evaluate with the trainer of the first process."""
        return self._trainer.evaluate(tensors, control=control)

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.end()
            self._workers = None

    def _train(
        self, tensors: Mapping[str, Tensor], context: TrainContext, workers: Workers
    ) -> LocalResult:
        """Train with the workers; if one of them fails, raise an error that names it."""
        try:
            return self._trainer.train_with(workers.group, tensors, context=context)
        except ProcessesParted as error:
            if (words := workers.culprit()) is not None:
                raise ProcessesParted(words) from error
            raise

    def _get_workers(self) -> Workers:
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


def _require_shareable(trainer: LocalTrainer, *, num_workers: int) -> TorchTrainer:
    """Return the trainer if several processes can share its trainings.

    Raises:
        DeploymentError: They cannot.
    """
    if not isinstance(trainer, TorchTrainer) or type(trainer).train is not TorchTrainer.train:
        raise DeploymentError(
            f"num_workers is {num_workers}, but the trainer is a {type(trainer).__name__} with "
            "its own training loop, which cannot be shared; use a TorchTrainer, or set "
            "num_workers to 1"
        )
    if (what := trainer.coupling) is not None:
        raise DeploymentError(
            f"num_workers is {num_workers}, but {what} computes with all examples of a batch, of "
            "which each process has a share; set num_workers to 1, or use a loss that is a mean "
            "over examples and GroupNorm or LayerNorm instead of BatchNorm"
        )
    return trainer
