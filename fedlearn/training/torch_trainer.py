"""A local trainer for any torch module: E epochs of SGD, or as many steps as a client affords."""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedlearn.algorithms.draws import client_seed
from fedlearn.algorithms.knn_per import NearestNeighbors
from fedlearn.algorithms.lanes import size_of
from fedlearn.algorithms.local import (
    LocalReport,
    LocalUpdate,
    LocalWork,
    batch_positions,
    find_client_loss,
    read_only,
)
from fedlearn.algorithms.metrics import Metric
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.objectives import CrossEntropy, Objective
from fedlearn.algorithms.settings import settings_names, update_from
from fedlearn.algorithms.torch_losses import as_objective
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.features import Features
from fedlearn.core.messages import Settings
from fedlearn.core.params import Params
from fedlearn.core.ranges import require_count
from fedlearn.core.soundness import is_sound
from fedlearn.errors import CallError, DataError, ModelMismatch, SettingsRefused
from fedlearn.training.example_gradients import batch_statistics
from fedlearn.training.keyed_dropout import share_key, step_keys, step_seed
from fedlearn.training.local_data import DatasetData, LocalData, TensorData, evaluation_batches
from fedlearn.training.lockstep import Lockstep, share
from fedlearn.training.resident import (
    ClientRound,
    Part,
    Precision,
    ResidentModel,
    Training,
    weighted_mean,
)
from fedlearn.training.trainer import (
    UNATTENDED,
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)

#: Examples in a trial forward pass.
_TRIED = 32
#: Examples, spread over all of them, whose labels are compared to check that trainers which share
#: a training have the same data.
_COMPARED = 64

#: A map-style dataset of pairs (features, label).
Pairs: TypeAlias = Dataset[Any]  # Any: labels are tensors or numbers; items are checked when read

#: Maps a step's number to the context manager in which this process takes the step; ``None`` if
#: another process takes it.
TurnOf: TypeAlias = Callable[[int], AbstractContextManager[object] | None]
#: Takes this process's steps of a training, and reports them to a control.
Take: TypeAlias = Callable[[TurnOf, TaskControl], None]


class Turns(Protocol):
    """Runs the steps of a training, in one process or divided among several."""

    def __call__(self, take: Take, losses: Tensor, *, control: TaskControl) -> None:
        """Run all steps, and return when they are done.

        Args:
            take: Takes some of the steps, in order, each from the current model.
            losses: Receives the loss of each step: shape [steps].
            control: The task's control.
        """


def take_in_order(take: Take, losses: Tensor, *, control: TaskControl) -> None:  # noqa: ARG001 - as Turns
    """Take all steps in this process, one after another."""
    take(lambda _: nullcontext(), control)


class TorchTrainer:
    """Trains a torch module on one client's examples, as the coordinator's settings ask.

    Applications create one with :meth:`of`.

    Args:
        model: The model to train. Several trainers may share one and train one at a time.
        data: Training examples.
        test: Test examples; ``None``: evaluate on ``data``.
        gradient_accumulation: See :meth:`of`, as for the remaining arguments.

    Attributes:
        answers: Answers queries in place of this trainer; ``None``: it answers none.

    Raises:
        ValueError: A number is below 1, or ``gradient_accumulation`` would cut batches whose loss
            couples the examples.

    Example:
        >>> import torch
        >>> import fedlearn as fl
        >>> from fedlearn.algorithms.settings import settings_of
        >>> from fedlearn.client import TorchTrainer, TrainContext
        >>> features, labels = torch.randn(30, 4), torch.randint(0, 3, (30,))
        >>> trainer = TorchTrainer.of(lambda: torch.nn.Linear(4, 3), features, labels)
        >>> context = TrainContext(
        ...     client_id=7, round_num=0, seed=fl.Seed(0), state={},
        ...     settings=settings_of(fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)),
        ... )
        >>> trainer.train(torch.nn.Linear(4, 3).state_dict(), context=context).num_examples
        30
    """

    def __init__(
        self,
        model: ResidentModel,
        data: LocalData,
        *,
        test: LocalData | None = None,
        gradient_accumulation: int = 1,
        max_steps: int | None = None,
        local_updates: Collection[type[LocalUpdate]] = (),
        transforms: Collection[type[Transform]] = (),
        answers: LocalTrainer | None = None,
    ) -> None:
        if not isinstance(model, ResidentModel):
            raise CallError(
                "TorchTrainer() takes a prepared model and prepared data; write "
                "TorchTrainer.of(make_model, features, labels)"
            )
        require_count(gradient_accumulation, name="gradient_accumulation")
        if max_steps is not None:
            require_count(max_steps, name="max_steps")
        _require_classes(local_updates, name="local_updates")
        _require_classes(transforms, name="transforms")
        if answers is not None and not hasattr(answers, "train"):
            raise CallError(
                f"answers is {answers!r}; give QueryTrainer(features, labels, queries=[MyQuery]), "
                "which lists what this client answers"
            )
        if gradient_accumulation > 1 and not model.measures.objective.per_example:
            raise ValueError(
                f"gradient_accumulation is {gradient_accumulation}, but the loss couples the "
                "examples of a batch, so it would differ for a batch in parts; set it to 1, and "
                "have the coordinator ask for smaller batches if memory is short"
            )
        self._model, self._data, self._test = model, data, data if test is None else test
        self._num_parts, self._max_steps = gradient_accumulation, max_steps
        self._local_updates, self._transforms = tuple(local_updates), tuple(transforms)
        self.answers = answers

    @classmethod
    def of(
        cls,
        make_model: Callable[[], nn.Module],
        examples: Features | Pairs,
        labels: Tensor | None = None,
        *,
        test: tuple[Features, Tensor] | Pairs | None = None,
        objective: Objective | nn.Module | None = None,
        metrics: Mapping[str, Metric] | None = None,
        device: str = "auto",
        precision: str = "float32",
        gradient_accumulation: int = 1,
        max_steps: int | None = None,
        local_updates: Collection[type[LocalUpdate]] = (),
        transforms: Collection[type[Transform]] = (),
        answers: LocalTrainer | None = None,
    ) -> Self:
        """Create a trainer for a model on tensors or on a dataset.

        The coordinator decides how to train (epochs, batch size, learning rate, ...). The arguments
        here describe what this device can do; among ``device``, ``precision``,
        ``gradient_accumulation`` and ``max_steps``, only ``precision`` and ``max_steps`` change the
        result.

        Args:
            make_model: Builds the same network as the coordinator's; called once. If your code
                keeps a reference to the network or a part of it, the trainer uses a copy.
            examples: Features [n, ...], or a map-style dataset of pairs (features, label) that
                is read batch by batch and may be larger than memory. A tuple of tensors is passed
                to ``forward`` as positional arguments, a dict as keyword arguments.
            labels: Shape [n, ...], with features; ``None`` with a dataset.
            test: Examples on which to evaluate the global model when the coordinator asks, as
                (features, labels) or as a dataset; ``None``: the training examples.
            objective: The loss to minimize, which may be a torch loss module; ``None``:
                cross-entropy.
            metrics: Additional metrics for evaluation, by name: see
                :class:`~fedlearn.algorithms.metrics.Metric`.
            device: "auto" (a GPU if there is one), or a name such as "cpu" or "cuda:1".
            precision: "float32", or "bfloat16" for automatic mixed precision.
            gradient_accumulation: Number of parts k >= 1 into which each batch is cut. One part
                is in memory at a time, and their gradients add up to that of the whole batch.
                (Only BatchNorm sees the parts.) Must be 1 for a loss that couples the examples of
                a batch.
            max_steps: Most steps of one task, >= 1, for devices on which all epochs would take too
                long.
            local_updates: Your own local-update classes, which the coordinator may request by name.
            transforms: Your own classes that transform an update before it leaves the client,
                which the coordinator may request by name.
            answers: Answers the coordinator's queries, from these examples or others: a
                :class:`~fedlearn.training.query_trainer.QueryTrainer` or a
                :class:`~fedlearn.training.table_trainer.TableTrainer`; ``None``: this client
                answers none.

        Raises:
            ConfigError: The objective does not declare its measures, a metric's name is malformed
                or taken, or your code keeps the network and it cannot be copied.
            DataError: There are no examples, or not exactly one label for each.
            ValueError: The device or the precision is unknown, a number is below 1, or
                ``gradient_accumulation`` would cut batches whose loss couples the examples.

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
            raise ValueError(f'precision is {precision!r}; give "float32" or "bfloat16"')
        place, test_data = _parse_device(device), None
        if test is not None:
            test_data = _data(place, *test) if isinstance(test, tuple) else _data(place, test)
        model = ResidentModel(
            make_model,
            CrossEntropy() if objective is None else as_objective(objective),
            device=place,
            precision=Precision(precision),
            metrics=metrics,
        )
        if (dtypes := model.layout.dtypes()) is not None:
            structlog.get_logger(__name__).info("model_dtypes", note=f"the model {dtypes}")
        return cls(
            model,
            _data(place, examples, labels),
            test=test_data,
            gradient_accumulation=gradient_accumulation,
            max_steps=max_steps,
            local_updates=local_updates,
            transforms=transforms,
            answers=answers,
        )

    @property
    def own_updates(self) -> Collection[type[LocalUpdate]]:
        """The user's own local-update classes that this trainer runs."""
        return self._local_updates

    @property
    def own_transforms(self) -> Collection[type[Transform]]:
        """Custom transforms that the coordinator may request."""
        return self._transforms

    @property
    def honors(self) -> Collection[str]:
        """All settings of the known local updates; any other setting is refused."""
        return settings_names(self._local_updates)

    @property
    def num_examples(self) -> int:
        """Number of training examples; a coordinator may require a minimum."""
        return len(self._data)

    @property
    def device(self) -> torch.device:
        """Device of the model; a coordinator may require a kind of device."""
        return self._model.device

    @property
    def coupling(self) -> str | None:
        """What couples the examples of a batch, so that processes cannot share it; or ``None``."""
        if not self._model.measures.objective.per_example:
            return "the loss"
        return self.batch_statistics

    @property
    def batch_statistics(self) -> str | None:
        """Name, for messages, of the first layer that uses batch statistics, if any."""
        return batch_statistics(self._model.module)

    def update_of(self, settings: Settings) -> LocalUpdate:
        """Build the local update that the settings ask for; raise SettingsRefused if unknown."""
        return update_from(settings, known=self._local_updates)

    def share_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """Move the model to shared memory, so that forks of this process train it, not copies.

        Args:
            tensors: The global model, on which memory formats are tried first, as in a training.

        Raises:
            ModelMismatch: The tensors belong to a different model.
        """
        self._model.load(self._params(tensors))
        rows = np.arange(min(len(self._data), _TRIED))
        self._model.share_memory(*self._data.batch(rows, key=0))

    def plan(self) -> list[int]:
        """Return a fingerprint that trainers must have in common to share a training.

        It contains the sizes of data and model, the step settings, and a checksum of some labels.
        """
        rows = np.unique(np.linspace(0, len(self._data) - 1, _COMPARED).astype(np.int64))
        _, labels = self._data.batch(rows, key=0)
        bits = labels.cpu().flatten().view(torch.uint8).numpy().tobytes()
        most = -1 if self._max_steps is None else self._max_steps
        return [len(self._data), self._num_parts, most, self._model.layout.size, zlib.crc32(bits)]

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Train the model for ``context.settings.epochs`` passes over the examples.

        Between batches, it checks ``context.control`` for cancellation, reports progress and offers
        a checkpoint. A task resumed from a checkpoint gives the same bits as one that never
        stopped.

        Raises:
            Cancelled: The task was cancelled; no further batch is computed.
            SettingsRefused: The settings ask for an unknown local update.
            ModelMismatch: The tensors belong to a different model.
            DataError: The dataset's items are not pairs.
        """
        return self.train_with(Alone(), tensors, context=context)

    def train_with(
        self,
        processes: Cluster,
        tensors: Mapping[str, Tensor],
        *,
        context: TrainContext,
        turns: Turns = take_in_order,
    ) -> LocalResult:
        """Train like :meth:`train`, up to rounding, in several processes that share the work.

        All processes call this with the same arguments, except for ``context.control``. Each
        computes its share of the rows of every batch, and all return the same bits. Alternatively,
        a single process calls this with ``turns`` that divide whole steps among its forks, which
        have the model in shared memory.

        Raises:
            Cancelled: As for :meth:`train`, as are the errors not listed here.
            ProcessesParted: Another process has left the training, or died.
        """
        local = self.update_of(context.settings)
        self._require_whole_batches(local, processes)
        # Sums of clipped per-example gradients lie on a grid finer than the model's dtype.
        dtype = torch.float64 if isinstance(local, NoisedGradients) else self._model.layout.dtype
        with Lockstep(processes, self._model.trainable, dtype=dtype) as together:
            return self._train(tensors, local, context, together, turns)

    def _require_whole_batches(self, local: LocalUpdate, processes: Cluster) -> None:
        """Check that batches are not cut if the local update's own loss needs them whole.

        Raises:
            SettingsRefused: They are cut, into parts or among processes.
        """
        own = find_client_loss(local)
        num_parts = self._num_parts * processes.world_size
        if own is not None and num_parts > 1:
            raise SettingsRefused(
                f"{type(own).__name__} has its own loss (client_loss), which may couple the "
                f"examples of a batch, but each batch is cut into {num_parts} parts; set "
                "gradient_accumulation and num_workers to 1"
            )

    def _train(
        self,
        tensors: Mapping[str, Tensor],
        local: LocalUpdate,
        context: TrainContext,
        together: Lockstep,
        turns: Turns,
    ) -> LocalResult:
        params = self._params(tensors)
        device = params.vector.device
        broadcast = {name: value.to(device) for name, value in context.broadcast.items()}
        unwritten = read_only(
            (params.vector, *broadcast.values()), who=f"{type(local).__name__}.step"
        )
        training = Training(
            self._model,
            params,
            local=local,
            broadcast=broadcast,
            round_num=context.round_num,
            together=together,
        )
        client_state = self._select_client_state(local, context.state)
        client = self._client_round(local.work, context, together.processes)
        with unwritten, training.client(client_state, client=client):
            losses, sizes = self._run(training, local.work, context, together.processes, turns)

            def mean_loss() -> float:
                return weighted_mean(losses.cpu().numpy(), np.asarray(sizes))

            report = training.report(mean_loss=mean_loss)
        return LocalResult(
            # A clone, since the next training overwrites the vector.
            tensors={**params.constants, **params.layout.views(self._model.vector_P.clone())},
            # With max_steps, a client may not get to all its examples.
            num_examples=min(self._count_used(local.work), sum(sizes)),
            metrics={"loss": weighted_mean(losses.cpu().numpy(), np.asarray(sizes))},
            state=_select_state(report, context.state),
            lanes={name: rows[0] for name, rows in report.lanes.items()},
        )

    def evaluate(
        self, tensors: Mapping[str, Tensor], *, control: TaskControl = UNATTENDED
    ) -> LocalEvaluation:
        """Measure the loss and metrics of the model in ``tensors`` on the test examples.

        A loss that couples examples, and a metric of whole sets, are computed over all test
        examples at once.

        Raises:
            Cancelled: The task was cancelled; no further batch is computed.
            ModelMismatch: The tensors belong to a different model.
            DataError: The dataset's items are not pairs.
        """
        measures = self._model.measures
        found = self._model.measure_batches(
            self._params(tensors), self._iter_batches(self._test, control)
        )
        values = found.means() | measures.whole(found.outputs, found.labels)
        return LocalEvaluation(num_examples=len(self._test), metrics=values)

    def evaluate_with_neighbors(
        self,
        tensors: Mapping[str, Tensor],
        neighbors: NearestNeighbors,
        *,
        control: TaskControl = UNATTENDED,
    ) -> LocalEvaluation:
        """Measure the model like :meth:`evaluate`, with the vote of the training examples.

        Raises:
            Cancelled: The task was cancelled; no further batch is computed.
            ModelMismatch: The tensors belong to a different model.
            ValueError: The model has no such submodule, or does not classify examples.
        """
        is_same = self._test is self._data
        found = self._model.measure_with_neighbors(
            self._params(tensors),
            neighbors,
            stored=self._iter_batches(self._data, control),
            evaluated=None if is_same else self._iter_batches(self._test, control),
        )
        values = found.means() | self._model.measures.whole(found.outputs, found.labels)
        return LocalEvaluation(num_examples=len(self._test), metrics=values)

    def try_out(self) -> None:
        """Send a few training and test examples through the model, to find errors before joining.

        It needs no global model: the weights are arbitrary distinct positive numbers.

        Raises:
            Exception: What the model, the objective or the dataset raises.
        """
        layout, objective = self._model.layout, self._model.measures.objective
        vector = torch.linspace(0.01, 0.1, layout.size).to(self._model.vector_P)
        params = Params(layout, vector, {})
        for data in (self._data, self._test):
            rows = np.arange(min(len(data), _TRIED))
            found = self._model.measure_batches(params, [data.batch(rows, key=0)])
            if not objective.per_example:  # metrics may be undefined on so few
                objective.losses(found.outputs, found.labels)

    @staticmethod
    def _iter_batches(data: LocalData, control: TaskControl) -> Iterator[tuple[Features, Tensor]]:
        """Read examples batch by batch, checking for cancellation before each."""
        for batch in evaluation_batches(len(data)):
            control.check()
            yield data.batch(batch.rows, key=batch.key)

    def _params(self, tensors: Mapping[str, Tensor]) -> Params:
        layout = self._model.layout
        _require_same_model(tensors, self._model.shapes)
        vector = layout.pack(tensors, out=torch.empty_like(self._model.vector_P))
        constants = {name: t for name, t in tensors.items() if name not in layout.by_name}
        return Params(layout, vector, constants)

    def _select_client_state(
        self, local: LocalUpdate, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Select the client state that the update declares; drop that of a different update."""
        own_state = [name for name, spec in local.memory.items() if spec.is_kept]
        sizes = [(size_of(local.memory[name].over, self._model.layout),) for name in own_state]
        if [state[name].shape for name in own_state if name in state] != sizes:
            return {}  # all or nothing: a part of the state would be a state that never existed
        return {name: state[name].to(self._model.vector_P)[None] for name in own_state}

    def _client_round(
        self, work: LocalWork, context: TrainContext, processes: Cluster
    ) -> ClientRound:
        client_id, round_num = context.client_id, context.round_num
        steps_per_epoch = int(work.steps_per_epoch(np.asarray([len(self._data)]))[0])
        num_steps = self._num_steps(work)
        return ClientRound(
            client_id=client_id,
            seed=client_seed(context.seed, round_num=round_num, client_id=client_id),
            num_steps=num_steps,
            steps_per_epoch=steps_per_epoch,
            read_epoch=partial(
                self._batches,
                work,
                context,
                num_steps=min(num_steps, steps_per_epoch),
                control=context.control,
                processes=processes,
            ),
        )

    def _num_steps(self, work: LocalWork) -> int:
        num_steps = int(work.num_steps(np.asarray([len(self._data)]))[0])
        return num_steps if self._max_steps is None else min(self._max_steps, num_steps)

    def _run(
        self,
        training: Training,
        work: LocalWork,
        context: TrainContext,
        processes: Cluster,
        turns: Turns,
    ) -> tuple[Tensor, list[int]]:
        """Take the remaining steps; return each step's loss, [steps], and number of examples."""
        num_steps = self._num_steps(work)
        losses = torch.zeros(num_steps, dtype=torch.float64, device=self._model.vector_P.device)
        done = self._restore(context.control.load(), training, losses)

        def take(turn_of: TurnOf, control: TaskControl) -> None:
            batches = self._batches(
                work, context, num_steps=num_steps, control=control, processes=processes
            )
            for step, (parts, num_examples) in enumerate(batches):
                # Steps of other processes, and those done before a restart, are skipped but still
                # counted.
                turn = turn_of(step) if step >= done else None
                if turn is None:
                    continue
                training.num_steps = step
                with turn:
                    losses[step] = training.step(parts, num_examples=num_examples)
                control.save(self._take_snapshot(training, losses))
                control.report(fraction=(step + 1) / num_steps, loss=float(losses[step]))

        turns(take, losses, control=context.control)
        sizes = _batch_sizes(work, num_examples=self._count_used(work))
        return losses, sizes[:num_steps]

    def _count_used(self, work: LocalWork) -> int:
        return int(work.count_used_per_epoch(np.asarray(len(self._data))))

    def _batches(
        self,
        work: LocalWork,
        context: TrainContext,
        *,
        num_steps: int,
        control: TaskControl,
        processes: Cluster,
    ) -> Iterator[tuple["_Parts", int]]:
        """Yield the batches of the first steps, each in parts, with its number of examples."""
        num_parts = self._num_parts
        part_size = -(-(work.batch_size or len(self._data)) // num_parts)
        own = step_seed(context.seed, round_num=context.round_num, client_id=context.client_id)
        # A key for each part of a batch, since a part is one forward pass.
        keys = step_keys([own], num_steps * num_parts)[0].tolist()
        batches = batch_positions(
            work,
            seed=context.seed,
            round_num=context.round_num,
            client_id=context.client_id,
            num_examples=len(self._data),
        )
        for step, rows in enumerate(islice(batches, num_steps)):
            parts = _Parts(
                data=self._data,
                rows=rows,
                keys=keys[step * num_parts : (step + 1) * num_parts],
                size=part_size,
                control=control,
                processes=processes,
            )
            yield parts, len(rows)

    def _compute_fingerprint(self, losses: Tensor) -> Tensor:
        """Return a fingerprint of the task; a checkpoint with a different one is not resumed."""
        num_elements = self._model.layout.size
        return torch.tensor([len(self._data), len(losses), self._num_parts, num_elements])

    def _take_snapshot(self, training: Training, losses: Tensor) -> dict[str, Tensor]:
        progress = {
            "losses": losses[: training.num_steps],
            "plan": self._compute_fingerprint(losses),
        }
        return self._model.snapshot() | _name_memory(training) | progress

    def _restore(self, saved: Mapping[str, Tensor], training: Training, losses: Tensor) -> int:
        """Load a snapshot of this task, if there is one; return the number of steps it has done."""
        plan = saved.get("plan")
        if plan is None or not torch.equal(plan.cpu(), self._compute_fingerprint(losses)):
            return 0
        self._model.restore(saved)
        for name, value in _name_memory(training).items():
            value.copy_(saved[name])
        training.num_steps = len(saved["losses"])
        losses[: training.num_steps] = saved["losses"]
        return training.num_steps


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts:
    """This process's share of the parts of a batch, read when it is iterated.

    Attributes:
        data: The client's examples.
        rows: Numbers of the batch's examples.
        keys: A 32-bit key for each part.
        size: Number of examples in a part; the last one may be smaller.
        control: Checked for cancellation before each part.
        processes: The processes that share each part.
    """

    data: LocalData
    rows: NDArray[np.int64]
    keys: Sequence[int]
    size: int
    control: TaskControl
    processes: Cluster

    def __iter__(self) -> Iterator[Part]:
        """Read the parts."""
        starts = range(0, len(self.rows), self.size)
        parts = (self.rows[start : start + self.size] for start in starts)
        for part, key in zip(parts, self.keys, strict=False):
            self.control.check()
            processes = self.processes
            own = share(len(part), rank=processes.rank, world_size=processes.world_size)
            # A share may be empty: a batch can have fewer rows than there are processes.
            if own.start < own.stop:
                drawn = share_key(key, own.start)
                yield Part(*self.data.batch(part[own], key=drawn), key, own.start)


def _batch_sizes(work: LocalWork, *, num_examples: int) -> list[int]:
    size = work.batch_size or num_examples
    epoch = [min(size, num_examples - start) for start in range(0, num_examples, size)]
    return epoch * work.epochs


def _name_memory(training: Training) -> dict[str, Tensor]:
    """Return the local update's memory, by its names in a snapshot."""
    return {
        f"memory.{name}.{place}": value
        for name, values in training.remembered.items()
        for place, value in enumerate(values)
    }


def _select_state(report: LocalReport, before: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the client's state for its next round.

    A state that diverged would spoil every later round, so the previous state is kept instead.
    """
    if not all(is_sound(rows) for rows in report.client_state.values()):
        return before
    return {name: rows[0] for name, rows in report.client_state.items()}


def _require_same_model(tensors: Mapping[str, Tensor], mine: Mapping[str, tuple[int, ...]]) -> None:
    """Check that names and shapes of all floating-point tensors are the same.

    Shapes are compared exactly, because copying a tensor of another shape might broadcast it.

    Raises:
        ModelMismatch: They differ.
    """
    theirs = {name: tuple(t.shape) for name, t in tensors.items() if t.is_floating_point()}
    if theirs != mine:
        raise ModelMismatch(
            theirs={name: each for name, each in theirs.items() if mine.get(name) != each},
            mine={name: each for name, each in mine.items() if theirs.get(name) != each},
        )


def _require_classes(given: object, *, name: str) -> None:
    """Check that an argument is a list of classes.

    Raises:
        CallError: It is a single class, a string, or a list of anything else.
    """
    remedy = f"give a list of classes, such as {name}=[MyClass]"
    if not isinstance(given, Collection) or isinstance(given, str):
        raise CallError(f"{name} is {given!r}; {remedy}")
    for each in given:
        if not isinstance(each, type):
            raise CallError(f"{name} has {each!r}; {remedy}")


def _parse_device(name: str) -> torch.device:
    name = str(name)  # a torch.device too
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'device is "{name}"; give "auto", "cpu", "cuda" or "cuda:N"') from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f'device is "{name}", but torch sees no GPU; use "auto" or "cpu"')
    if ":" not in name:  # with several GPUs, the one that this process was assigned
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= (found := torch.cuda.device_count()):
        raise ValueError(
            f'device is "{name}", but torch sees {found} GPU{"s" if found > 1 else ""}, from '
            '"cuda:0" on; name one of them, or use "auto"'
        )
    return device


def _data(
    device: torch.device, examples: Features | Pairs, labels: Tensor | None = None
) -> LocalData:
    if isinstance(examples, Tensor | tuple | Mapping):
        if labels is None:
            raise DataError("features without labels; give both, or a dataset of pairs")
        return TensorData(examples, labels, device=device)
    if labels is not None and isinstance(examples, Dataset):
        raise DataError("the items of a dataset include its labels; do not give labels as well")
    if labels is not None:
        raise DataError(
            f"features are a {type(examples).__name__}; give a tensor, as "
            "torch.as_tensor(features) makes one, in the dtype of the model"
        )
    return DatasetData(examples, device=device)
