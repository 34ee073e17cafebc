"""The seam an application fills in: how one client trains and evaluates."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedlearn.core.messages import ClientId, Settings
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError


class TaskControl(Protocol):
    """What a running task hears from outside, and what it tells."""

    def check(self) -> None:
        """Do nothing, or end the task: call it before every batch.

        Raises:
            Cancelled: The task was called off; let it pass.
        """

    def report(self, *, fraction: float, loss: float) -> None:
        """Tell how far the task is.

        Args:
            fraction: Share of the work done, [0, 1].
            loss: Mean training loss of the latest batch.
        """

    def saved(self) -> Mapping[str, Tensor]:
        """Return what :meth:`save` kept of this very task before a restart; empty at first."""

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep ``tensors`` durably until the task is done, in place of what was kept before.

        May be called after every step: a runtime keeps as many of them as it can afford.

        Args:
            tensors: The training's own, which it changes afterwards: what is kept is written
                or copied before this returns.
        """


class Unattended:
    """A task that nobody watches or calls off: simulated, or run to its end in one go.

    Example:
        >>> control = Unattended()
        >>> control.check(), control.saved()
        (None, {})
    """

    def check(self) -> None:
        """Do nothing."""

    def report(self, *, fraction: float, loss: float) -> None:
        """Tell nobody."""

    def saved(self) -> Mapping[str, Tensor]:
        """Return nothing."""
        return {}

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep nothing."""


#: It holds nothing, so one is enough.
UNATTENDED = Unattended()


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """What surrounds one local training.

    Attributes:
        client_id: This client.
        round_num: Round index, from 0.
        settings: How the coordinator asks to train.
        seed: Public seed of everything random that need not be secret.
        state: What this client returned as its state the last time; empty at first.
        told: What the strategy tells beside the model, by name one vector over the trainable
            parameters.
        control: How the task hears that it is called off, and tells how far it is.
        extra: What the coordinator's ``client.extra`` says, free-form, by name.
    """

    client_id: ClientId
    round_num: int
    settings: Settings
    seed: Seed
    state: Mapping[str, Tensor]
    told: Mapping[str, Tensor] = field(default_factory=dict)
    control: TaskControl = UNATTENDED
    extra: Settings = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalResult:
    """What local training produced.

    Attributes:
        tensors: The local model after training, by name.
        num_examples: Examples trained on.
        metrics: Local metrics by name; ``loss`` is the mean training loss.
        state: What this client keeps for its next round; it never leaves the client.
        lanes: What it contributes beside the model, by lane one vector: shape [n].
    """

    tensors: Mapping[str, Tensor]
    num_examples: int
    metrics: Mapping[str, float]
    state: Mapping[str, Tensor]
    lanes: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LocalEvaluation:
    """What local evaluation produced: how many examples there were, and means over them by name."""

    num_examples: int
    metrics: Mapping[str, float]


class LocalTrainer(Protocol):
    """Trains and evaluates on this client's data.

    One with an attribute ``own_transforms`` names classes of transforms of the user's own in it,
    which the coordinator may then have applied to what it trains.
    """

    @property
    def honours(self) -> Collection[str]:
        """Names of the settings that :meth:`train` acts on.

        A request with a setting that would change the training and is not among them is refused,
        not answered as if it had been obeyed: such as ``proximal``, or ``epochs`` by a trainer
        that has none. Free-form settings are called ``extra.NAME`` here; ``extra`` is all of them.
        """

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model trained from ``tensors``; must not modify them."""

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        """Return how the model in ``tensors`` does on this client's data.

        Args:
            tensors: The global model.
            control: How the evaluation hears that it is called off: as a training does.
        """


def require_trainer(made: LocalTrainer) -> LocalTrainer:
    """Return what a user's function made for a client; raise ConfigError if it is no trainer."""
    missing = [name for name in ("train", "evaluate", "honours") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"trainer: the function returned a {type(made).__name__}, which has no {missing[0]}; "
            "return a LocalTrainer, with train, evaluate and honours"
        )
    return made
