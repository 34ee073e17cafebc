"""A local trainer for any torch module: E epochs of SGD, or as many steps as a client affords."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedlearn.algorithms.local import LocalSgd, batch_positions
from fedlearn.algorithms.objectives import CrossEntropy, Objective
from fedlearn.core.collecting import is_sound
from fedlearn.core.params import Layout, Params
from fedlearn.errors import DataError, ModelMismatch
from fedlearn.training.keyed_dropout import step_keys
from fedlearn.training.local_data import DatasetData, LocalData, TensorData
from fedlearn.training.resident import Part, Precision, ResidentModel, weighted_mean
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalEvaluation,
    LocalResult,
    TaskControl,
    TrainContext,
)

#: Examples evaluated at a time; bounds memory, changes nothing else.
_EVALUATION_BATCH = 256

#: Examples that are tried out before joining.
_TRIED = 32

#: A map-style dataset of pairs (features, label).
Pairs: TypeAlias = Dataset[Any]  # Any: labels are tensors or numbers; items are checked when read


class TorchTrainer:
    """Trains a torch module on one client's examples as the coordinator asks.

    Applications make one with :meth:`of`.

    Args:
        model: What trains; several trainers may share one, a client at a time.
        data: The examples it trains on.
        test: Those it evaluates on; without them, ``data``.
        gradient_accumulation: k >= 1: a batch goes through the model in parts of a k-th.
        max_steps: Most steps of one task, >= 1; ``None`` for no limit.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(
        self,
        model: ResidentModel,
        data: LocalData,
        *,
        test: LocalData | None = None,
        gradient_accumulation: int = 1,
        max_steps: int | None = None,
    ) -> None:
        if gradient_accumulation < 1:
            raise ValueError(f"gradient_accumulation is {gradient_accumulation}; it is at least 1")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it is at least 1, or None for no limit")
        self._model, self._data, self._test = model, data, data if test is None else test
        self._num_parts, self._max_steps = gradient_accumulation, max_steps

    @classmethod
    def of(
        cls,
        make_model: Callable[[], nn.Module],
        examples: Tensor | Pairs,
        labels: Tensor | None = None,
        *,
        test: tuple[Tensor, Tensor] | Pairs | None = None,
        objective: Objective | None = None,
        device: str = "auto",
        precision: str = "float32",
        gradient_accumulation: int = 1,
        max_steps: int | None = None,
    ) -> Self:
        """Return the trainer of a model on tensors or on a dataset.

        How to train (epochs, batch size, learning rate, ...) is the coordinator's to say. What
        this device can do is said here, and only ``max_steps`` and ``precision`` change what
        comes out.

        Args:
            make_model: Builds the network, as the coordinator does.
            examples: Features [n, ...], or a map-style dataset of pairs (features, label) that
                is read batch by batch and may be larger than memory.
            labels: Shape [n, ...], with features; none with a dataset.
            test: What the global model is evaluated on when the coordinator asks, as
                (features, labels) or as a dataset; without it, the training examples.
            objective: What is minimised; without one, cross-entropy.
            device: "auto" (a GPU where there is one), or a name such as "cpu" or "cuda:1".
            precision: "float32", or "bfloat16" for automatic mixed precision.
            gradient_accumulation: k >= 1: the coordinator's batch goes through the model in
                parts of a k-th, of which one is in memory at a time, and together they make
                the step of the whole batch. (BatchNorm alone sees the parts.)
            max_steps: Most steps of one task, >= 1, where all epochs would take too long.

        Raises:
            DataError: There are no examples, or not one label each.
            ValueError: The device or the precision is unknown, or a number is below 1.

        Example:
            >>> features, labels = torch.randn(30, 4), torch.randint(0, 3, (30,))
            >>> trainer = TorchTrainer.of(lambda: nn.Linear(4, 3), features, labels)
            >>> weights = nn.Linear(4, 3).state_dict()
            >>> trainer.evaluate(weights).num_examples
            30

            A dataset is read batch by batch:

            >>> dataset = torch.utils.data.TensorDataset(features, labels)
            >>> lazy = TorchTrainer.of(lambda: nn.Linear(4, 3), dataset, gradient_accumulation=2)
            >>> lazy.evaluate(weights) == trainer.evaluate(weights)
            True
        """
        if precision not in tuple(Precision):
            raise ValueError(f'precision is {precision!r}; it is "float32" or "bfloat16"')
        place = _device(device)
        model = ResidentModel(
            make_model,
            CrossEntropy() if objective is None else objective,
            device=place,
            precision=Precision(precision),
        )
        return cls(
            model,
            _data(examples, labels, place),
            test=None if test is None else _test_data(test, place),
            gradient_accumulation=gradient_accumulation,
            max_steps=max_steps,
        )

    @property
    def num_examples(self) -> int:
        """Number of training examples: a coordinator may ask for a least one."""
        return len(self._data)

    @property
    def device(self) -> torch.device:
        """Where it computes: a coordinator may ask for some."""
        return self._model.device

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model after ``context.settings.epochs`` passes over the examples.

        Between batches it listens to ``context.control``, tells it how far it is, and lets it
        keep what a restarted task continues from: to the bits of one that never stopped.

        Raises:
            Cancelled: The task was called off; no further batch is computed.
            ValueError: The settings are not those of :class:`~fedlearn.algorithms.local.LocalSgd`.
            ModelMismatch: The tensors are those of another model.
            DataError: The dataset's items are not pairs.
        """
        local = LocalSgd.from_settings(context.settings)
        params = self._params(tensors)
        velocity = self._velocity(local, context.state)
        with self._model.training(params):
            losses, sizes = self._run(params, velocity, local=local, context=context)
        return LocalResult(
            tensors=self._model.layout.views(self._model.vector_P.clone()),
            num_examples=min(len(self._data), sum(sizes)),
            metrics={"loss": weighted_mean(losses.cpu().numpy(), np.asarray(sizes))},
            state=self._kept(velocity, context.state) if local.keep_momentum else {},
        )

    def evaluate(
        self, tensors: Mapping[str, Tensor], *, control: TaskControl = UNATTENDED
    ) -> LocalEvaluation:
        """Return the loss and metrics of the model in ``tensors`` on the test examples.

        Raises:
            Cancelled: The task was called off; no further batch is computed.
            ModelMismatch: The tensors are those of another model.
            DataError: The dataset's items are not pairs.
        """
        values = self._model.measure_batches(self._params(tensors), self._test_batches(control))
        means = {name: float(each.mean(dtype=torch.float64)) for name, each in values.items()}
        return LocalEvaluation(num_examples=len(self._test), metrics=means)

    def try_out(self) -> None:
        """Put a first few examples, of training and of test, through the model.

        Whoever diagnoses this device calls it, before there is a global model: the weights are
        some or other, all above zero and each another.

        Raises:
            Exception: What the model, the objective or the dataset raises.
        """
        layout = self._model.layout
        vector = torch.linspace(0.01, 0.1, layout.size).to(self._model.vector_P)
        params = Params(layout, vector, {})
        for data in (self._data, self._test):
            rows = np.arange(min(len(data), _TRIED))
            self._model.measure_batches(params, [data.batch(rows, key=0)])

    def _test_batches(self, control: TaskControl) -> Iterator[tuple[Tensor, Tensor]]:
        """Read the test examples batch by batch; the task can be called off before each."""
        rows = np.arange(len(self._test))
        for start in range(0, len(rows), _EVALUATION_BATCH):
            control.check()
            yield self._test.batch(rows[start : start + _EVALUATION_BATCH], key=start)

    def _params(self, tensors: Mapping[str, Tensor]) -> Params:
        layout = self._model.layout
        _require_same_model(tensors, layout)
        vector = layout.pack(tensors, out=torch.empty_like(self._model.vector_P))
        constants = {name: t for name, t in tensors.items() if name not in layout.by_name}
        return Params(layout, vector, constants)

    def _velocity(self, local: LocalSgd, state: Mapping[str, Tensor]) -> list[Tensor]:
        velocity = self._model.new_velocity() if local.momentum else []
        if local.keep_momentum and state:
            for name, value in zip(self._model.trainable_names, velocity, strict=True):
                value.copy_(state[name])
        return velocity

    def _kept(
        self, velocity: Sequence[Tensor], state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        # A velocity that diverged would spoil every later round; what it was is kept.
        if not all(is_sound(value) for value in velocity):
            return state
        return dict(zip(self._model.trainable_names, velocity, strict=True))

    def _run(
        self, params: Params, velocity: Sequence[Tensor], *, local: LocalSgd, context: TrainContext
    ) -> tuple[Tensor, list[int]]:
        """Take the steps that are left; return each step's loss, [steps], and examples."""
        control, num_parts = context.control, self._num_parts
        num_steps = self._num_steps(local)
        part_size = -(-(local.batch_size or len(self._data)) // num_parts)
        losses = torch.zeros(num_steps, dtype=torch.float64, device=self._model.vector_P.device)
        done = self._restore(control.saved(), velocity, losses)
        masks = context.seed.derive("masks", context.round_num, context.client_id)
        keys = step_keys([masks], num_steps * num_parts)[0].tolist()
        anchor, sizes = self._model.anchor(params, local), list[int]()
        for step, rows in enumerate(islice(self._batches(local, context), num_steps)):
            sizes.append(len(rows))
            if step < done:
                continue
            own_keys = keys[step * num_parts : (step + 1) * num_parts]
            losses[step] = self._model.step(
                self._parts(rows, own_keys, size=part_size, control=control),
                num_examples=len(rows),
                local=local,
                anchor=anchor,
                velocity=velocity,
            )
            control.save(self._snapshot(velocity, losses, step + 1))
            control.report(fraction=(step + 1) / num_steps, loss=float(losses[step]))
        return losses, sizes

    def _num_steps(self, local: LocalSgd) -> int:
        of_epochs = int(local.num_steps(np.asarray([len(self._data)]))[0])
        return of_epochs if self._max_steps is None else min(self._max_steps, of_epochs)

    def _batches(self, local: LocalSgd, context: TrainContext) -> Iterator[NDArray[np.int64]]:
        return batch_positions(
            local,
            seed=context.seed,
            round_num=context.round_num,
            client_id=context.client_id,
            num_examples=len(self._data),
        )

    def _parts(
        self, rows: NDArray[np.int64], keys: Sequence[int], *, size: int, control: TaskControl
    ) -> Iterator[Part]:
        """Read a batch part by part; the task can be called off before each."""
        shares = (rows[start : start + size] for start in range(0, len(rows), size))
        for share, key in zip(shares, keys, strict=False):
            control.check()
            yield Part(*self._data.batch(share, key=key), key)

    def _plan(self, losses: Tensor) -> Tensor:
        """Return what a checkpoint must agree with, or its steps are not those of this task."""
        num_elements = self._model.layout.size
        return torch.tensor([len(self._data), len(losses), self._num_parts, num_elements])

    def _snapshot(self, velocity: Sequence[Tensor], losses: Tensor, done: int) -> dict[str, Tensor]:
        names = self._model.trainable_names
        velocities = {f"velocity.{n}": v for n, v in zip(names, velocity, strict=False)}
        progress = {"losses": losses[:done], "plan": self._plan(losses)}
        return self._model.snapshot() | velocities | progress

    def _restore(
        self, saved: Mapping[str, Tensor], velocity: Sequence[Tensor], losses: Tensor
    ) -> int:
        """Take back a snapshot of this task, if there is one; return the steps it has done."""
        plan = saved.get("plan")
        if plan is None or not torch.equal(plan.cpu(), self._plan(losses)):
            return 0
        self._model.restore(saved)
        for name, value in zip(self._model.trainable_names, velocity, strict=False):
            value.copy_(saved[f"velocity.{name}"])
        done = len(saved["losses"])
        losses[:done] = saved["losses"]
        return done


def _require_same_model(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Compare names and shapes of all that is averaged; a tensor must not be broadcast.

    Raises:
        ModelMismatch: They differ.
    """
    theirs = {name: tuple(t.shape) for name, t in tensors.items() if t.is_floating_point()}
    mine = {spec.name: spec.shape for spec in layout.specs}
    if theirs != mine:
        raise ModelMismatch(
            theirs={name: each for name, each in theirs.items() if mine.get(name) != each},
            mine={name: each for name, each in mine.items() if theirs.get(name) != each},
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'device is "{name}"; it is "auto", "cpu", "cuda" or "cuda:N"') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'device is "{name}", but torch sees no GPU; use "auto" or "cpu"')
    return device


def _data(examples: Tensor | Pairs, labels: Tensor | None, device: torch.device) -> LocalData:
    if isinstance(examples, Tensor):
        if labels is None:
            raise DataError("features without labels; give both, or a dataset of pairs")
        return TensorData(examples, labels, device=device)
    if labels is not None:
        raise DataError("a dataset has its labels in its items; give none beside it")
    return DatasetData(examples, device=device)


def _test_data(test: tuple[Tensor, Tensor] | Pairs, device: torch.device) -> LocalData:
    if isinstance(test, tuple):
        return TensorData(*test, device=device)
    return DatasetData(test, device=device)
