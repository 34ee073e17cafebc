r"""Hogwild in one client: several processes train one model in shared memory, without locks.

The steps of a training are assigned to the processes in turn. Each process computes a gradient at
the current model, perhaps while another process is in the middle of a step, and adds its own step.
No process waits for another; if two write the same number at once, one addition may be lost.

References:
    Niu, Recht, Ré and Wright, 2011, `Hogwild!: A Lock-Free Approach to Parallelizing Stochastic
    Gradient Descent <https://arxiv.org/abs/1106.5730>`_.
"""

import math
import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.cluster import Alone
from fedlearn.errors import DeploymentError, EngineError, ProcessesParted, SettingsRefused
from fedlearn.parallel.local_world import run_in_forks
from fedlearn.training.torch_trainer import Take, TorchTrainer
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    NullControl,
    TaskControl,
    TrainContext,
)


class Hogwild:
    """Trains like a :class:`~fedlearn.training.torch_trainer.TorchTrainer`, by several processes.

    The processes are forks of this one, which end with each training, and with this process. The
    result depends on which process is faster, so it is not reproducible; only with one process it
    has the same bits as plain SGD. An interrupted task starts from the beginning. Evaluation runs
    in this process.

    Args:
        trainer: This client's trainer, on the CPU.
        num_processes: Number of processes that take the steps, >= 1.
        is_locked: Let only one process step at a time, from reading the model to writing it. Then
            no addition is lost and no gradient is stale, but nothing is gained, either: it is for
            comparison.

    Raises:
        DeploymentError: The trainer is not a TorchTrainer, computes on a GPU, or has batch
            statistics, which all processes would write.
        ValueError: ``num_processes`` is below 1.

    Example:
        >>> features, labels = torch.randn(30, 4), torch.randint(0, 3, (30,))
        >>> trainer = TorchTrainer.of(lambda: torch.nn.Linear(4, 3), features, labels, device="cpu")
        >>> Hogwild(trainer, num_processes=2).num_examples
        30
    """

    def __init__(
        self, trainer: TorchTrainer, *, num_processes: int, is_locked: bool = False
    ) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes is {num_processes}; give a number >= 1")
        self._trainer = _require_divisible(trainer)
        self._num_processes, self._is_locked = num_processes, is_locked
        self._is_shared = False

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
        """Number of training examples; a coordinator may require a minimum."""
        return self._trainer.num_examples

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self._trainer.device

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Train the model in all processes; must not modify ``tensors``.

        Raises:
            Cancelled: The task was cancelled; the processes are ended.
            ProcessesParted: A process failed or died.
            SettingsRefused: The local update has memory from step to step, of which each process
                would have its own, or adds noise to gradients.
            FedlearnError: Any other error of the trainer.
        """
        _require_memoryless(self._trainer.update_of(context.settings))
        # Before the first fork: memory that is shared later would be copied on write instead.
        if not self._is_shared:
            self._trainer.share_memory(tensors)
            self._is_shared = True
        return self._trainer.train_with(Alone(), tensors, context=context, turns=self._divide_steps)

    def evaluate(
        self, tensors: Mapping[str, Tensor], *, control: TaskControl = UNATTENDED
    ) -> LocalEvaluation:
        """Evaluate with the trainer, in this process."""
        return self._trainer.evaluate(tensors, control=control)

    def _divide_steps(self, take: Take, losses: Tensor, *, control: TaskControl) -> None:
        """Divide the steps among forks; see :class:`~fedlearn.training.torch_trainer.Turns`."""
        losses.share_memory_()
        done = torch.zeros(self._num_processes, 2, dtype=torch.float64).share_memory_()
        turn = _Token() if self._is_locked else nullcontext()
        bodies = [partial(self._take_some, take, rank, turn, done) for rank in range(len(done))]
        look = partial(_look, control, done, num_steps=len(losses))
        try:
            run_in_forks(bodies, timeout_s=math.inf, meanwhile=look)
        except EngineError as error:
            # Drop the process's own message, which may contain training data: this error goes to
            # the coordinator.
            which = str(error).partition(":")[0]
            raise ProcessesParted(f"of the processes of a Hogwild training, {which}") from error
        look()

    def _take_some(
        self, take: Take, rank: int, turn: AbstractContextManager[object], done: Tensor
    ) -> None:
        """Take one fork's share of the steps; runs in the fork."""
        take(lambda step: turn if step % len(done) == rank else None, _Counting(done[rank]))


class _Token:
    """A lock for forks of the process that created it: a byte in a pipe, which the holder takes."""

    def __init__(self) -> None:
        self._end, self._begin = os.pipe()
        os.write(self._begin, b"t")

    def __enter__(self) -> None:
        os.read(self._end, 1)  # blocks until the byte is there

    def __exit__(self, *_: object) -> None:
        os.write(self._begin, b"t")

    def __del__(self) -> None:
        os.close(self._begin)
        os.close(self._end)


class _Counting(NullControl):
    """Task control of a fork, which counts its steps in memory that it shares with its parent."""

    def __init__(self, done: Tensor) -> None:
        self._done = done

    def report(self, *, fraction: float, loss: float) -> None:  # noqa: ARG002 - its own steps
        """Count a step, and record its loss."""
        # One operation that counts the step and replaces the loss: old + (new - old).
        self._done += torch.tensor([1.0, loss - float(self._done[1])], dtype=torch.float64)


def _look(control: TaskControl, done: Tensor, *, num_steps: int) -> None:
    """Report the progress of all processes; raise an error if the task was cancelled."""
    control.check()
    counts, losses = done.unbind(1)
    if (total := float(counts.sum())) > 0.0:
        control.report(fraction=total / num_steps, loss=float(losses[counts > 0.0].mean()))


def _require_divisible(trainer: LocalTrainer) -> TorchTrainer:
    """Return the trainer if several processes can take its steps; else raise DeploymentError."""
    if not isinstance(trainer, TorchTrainer) or type(trainer).train is not TorchTrainer.train:
        raise DeploymentError(
            f"the trainer is a {type(trainer).__name__} with its own training loop, which cannot "
            "be shared; use a TorchTrainer"
        )
    if trainer.device.type != "cpu":
        raise DeploymentError(
            f"the trainer computes on {trainer.device}, whose memory forked processes cannot use; "
            'set device="cpu", or share each batch among GPUs (num_workers)'
        )
    if (layer := trainer.batch_statistics) is not None:
        raise DeploymentError(
            f"{layer} has batch statistics, which all processes would write at once; use "
            "GroupNorm or LayerNorm instead"
        )
    return trainer


def _require_memoryless(local: LocalUpdate) -> None:
    """Check that a local update has nothing of which each process would need its own copy."""
    lasting = [name for name, spec in local.memory.items() if spec.draws is None]
    remembered = [*lasting, *(lane.name for lane in local.lanes)]
    if remembered:
        raise SettingsRefused(
            f"the local update remembers {remembered[0]!r} from step to step, but each process of "
            "Hogwild would keep its own, from some of the steps; use SGD without momentum, or "
            "train with one process"
        )
    if isinstance(local, NoisedGradients):
        raise SettingsRefused(
            "privacy accounting assumes that steps with noise follow each other; train with one "
            "process, or share each batch (num_workers)"
        )
