"""The interface that an application implements: how one client trains and evaluates."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from fedlearn.algorithms.knn_per import NearestNeighbors
from fedlearn.core.messages import ClientId, Settings
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError


class TaskControl(Protocol):
    """How a running task learns that it is cancelled, reports progress and saves checkpoints.

    Example:
        >>> def train_batches(losses, *, control):
        ...     for number, loss in enumerate(losses, start=1):
        ...         control.check()
        ...         control.report(fraction=number / len(losses), loss=loss)
        ...     return number
        >>> train_batches([0.7, 0.5, 0.4], control=UNATTENDED)
        3
    """

    def check(self) -> None:
        """Raise if the task was cancelled; call it before every batch.

        Raises:
            Cancelled: The task was cancelled. Do not catch it.
        """

    def report(self, *, fraction: float, loss: float) -> None:
        """Report progress.

        Args:
            fraction: Share of the work done, [0, 1].
            loss: Mean training loss of the latest batch.
        """

    def load(self) -> Mapping[str, Tensor]:
        """Return the checkpoint that :meth:`save` wrote for this task before a restart, or {}."""

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the task's checkpoint; it is durable until the task is done.

        May be called after every step: the runtime writes as many checkpoints as it can afford and
        skips the others.

        Args:
            tensors: Tensors that the training changes afterwards, so the runtime writes or copies
                them before this returns.
        """


class NullControl:
    """The control of a task that is never cancelled, watched or resumed, such as a simulated one.

    Example:
        >>> control = NullControl()
        >>> control.check(), control.load()
        (None, {})
    """

    def check(self) -> None:
        """Do nothing."""

    def report(self, *, fraction: float, loss: float) -> None:
        """Do nothing."""

    def load(self) -> Mapping[str, Tensor]:
        """Return no tensors."""
        return {}

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class CancelOnly(NullControl):
    """Cancels a task as another control does, but takes no progress and no checkpoints.

    Attributes:
        control: The other control.
    """

    control: TaskControl

    def check(self) -> None:
        """Raise Cancelled if the other control does."""
        self.control.check()


@runtime_checkable
class NeighborEvaluator(Protocol):
    """A trainer that lets a client's nearest training examples vote: see kNN-Per."""

    def evaluate_with_neighbors(
        self, tensors: Mapping[str, Tensor], neighbors: NearestNeighbors, *, control: TaskControl
    ) -> "LocalEvaluation":
        """Measure the model in ``tensors`` with the vote of the training examples."""


#: Shared by all tasks, since it has no state.
UNATTENDED = NullControl()


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """Everything that one local training receives besides the model.

    Attributes:
        client_id: This client.
        round_num: Round index, from 0.
        settings: How the coordinator asks to train.
        seed: Public seed of all random draws that need not be secret.
        state: The state that this client returned the last time; empty at first.
        broadcast: What the strategy broadcasts along with the model: by name, one vector of the
            extent that the strategy declares, or else over the trainable parameters.
        control: Cancels the task, and takes its progress and checkpoints.
        extra: The coordinator's free-form ``client.extra`` settings, by name.

    Example:
        >>> context = TrainContext(
        ...     client_id=7, round_num=0, settings={"epochs": 2, "learning_rate": 0.1},
        ...     seed=Seed(0), state={},
        ... )
        >>> context.settings["epochs"]
        2
    """

    client_id: ClientId
    round_num: int
    settings: Settings
    seed: Seed
    state: Mapping[str, Tensor]
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    control: TaskControl = UNATTENDED
    extra: Settings = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalResult:
    """The result of one local training.

    Attributes:
        tensors: The local model after training, by name.
        num_examples: Examples trained on.
        metrics: Local metrics by name; ``loss`` is the mean training loss.
        state: The client's state for its next round; it never leaves the client.
        lanes: What the client sends besides the model: one vector for each lane, shape [n].

    Example:
        >>> import torch
        >>> result = LocalResult(
        ...     tensors={"weight": torch.ones(2)}, num_examples=120, metrics={"loss": 0.4}, state={}
        ... )
        >>> result.num_examples, result.metrics["loss"]
        (120, 0.4)
    """

    tensors: Mapping[str, Tensor]
    num_examples: int
    metrics: Mapping[str, float]
    state: Mapping[str, Tensor]
    lanes: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LocalEvaluation:
    """The result of one local evaluation: the number of examples, and means over them by name.

    Example:
        >>> evaluation = LocalEvaluation(num_examples=120, metrics={"loss": 0.4, "accuracy": 0.9})
        >>> evaluation.metrics["accuracy"]
        0.9
    """

    num_examples: int
    metrics: Mapping[str, float]


class LocalTrainer(Protocol):
    """Trains and evaluates on this client's data.

    A trainer may have an attribute ``own_transforms``: custom transform classes that the
    coordinator may then request by name for the client's update. With an attribute ``answers``, a
    :class:`~fedlearn.training.query_trainer.QueryTrainer`, the client also answers queries.

    Example:
        >>> class MeanTrainer:
        ...     honors = ("epochs",)
        ...     def train(self, tensors, *, context):
        ...         new = {"mean": (tensors["mean"] + 2.0) / 2}
        ...         return LocalResult(tensors=new, num_examples=3, metrics={"loss": 0.0}, state={})
        ...     def evaluate(self, tensors, *, control):
        ...         return LocalEvaluation(num_examples=3, metrics={"loss": 0.0})
        >>> require_trainer(MeanTrainer()).honors
        ('epochs',)
    """

    @property
    def honors(self) -> Collection[str]:
        """Names of the settings that :meth:`train` acts on.

        A request with any other setting that would change the training, such as ``proximal``, is
        refused, so that a setting is never silently ignored. Free-form settings are named
        ``extra.NAME`` here; ``extra`` stands for all of them.
        """

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model trained from ``tensors``; must not modify them."""

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        """Measure the model in ``tensors`` on this client's data.

        Args:
            tensors: The global model.
            control: Cancels the evaluation, as it does a training.
        """


def require_trainer(made: LocalTrainer) -> LocalTrainer:
    """Check that an object made by a custom function is a trainer, and return it.

    Raises:
        ConfigError: It lacks a method or attribute of :class:`LocalTrainer`.
    """
    missing = [name for name in ("train", "evaluate", "honors") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"trainer: the function returned a {type(made).__name__}, which has no {missing[0]}; "
            "return a LocalTrainer, with train, evaluate and honors"
        )
    return made
