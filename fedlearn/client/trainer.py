"""The seam an application fills in: how one client trains and evaluates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedlearn.core.messages import ClientId, Settings
from fedlearn.core.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """What surrounds one local training.

    Attributes:
        client_id: This client.
        round_num: Round index, from 0.
        settings: How the coordinator asks to train.
        seed: Public seed of everything random that need not be secret.
        state: What this client returned as its state the last time; empty at first.
    """

    client_id: ClientId
    round_num: int
    settings: Settings
    seed: Seed
    state: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalResult:
    """What local training produced.

    Attributes:
        tensors: The local model after training, by name.
        num_examples: Examples trained on.
        metrics: Local metrics by name; ``loss`` is the mean training loss.
        state: What this client keeps for its next round; it never leaves the client.
    """

    tensors: Mapping[str, Tensor]
    num_examples: int
    metrics: Mapping[str, float]
    state: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LocalEvaluation:
    """What local evaluation produced.

    Attributes:
        num_examples: Examples evaluated.
        metrics: Means over them, by name.
    """

    num_examples: int
    metrics: Mapping[str, float]


class LocalTrainer(Protocol):
    """Trains and evaluates on this client's data."""

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Return the model trained from ``tensors``; must not modify them."""

    def evaluate(self, tensors: Mapping[str, Tensor]) -> LocalEvaluation:
        """Return how the model in ``tensors`` does on this client's data."""
