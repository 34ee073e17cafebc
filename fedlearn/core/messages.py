"""What the coordinator and a client say to each other.

These frozen dataclasses are the whole protocol: :mod:`fedlearn.core.codec` turns them
into bytes, :mod:`fedlearn.transport` moves the bytes, and :mod:`fedlearn.client.session`
answers them. Nothing else crosses the wire.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

from torch import Tensor

ClientId = NewType("ClientId", int)

Scalar: TypeAlias = int | float | str | bool | None
Settings: TypeAlias = Mapping[str, Scalar]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRequest:
    """Train locally from ``tensors`` and return a model delta.

    Attributes:
        round_num: Round index, from 0.
        attempt: How often this round was tried before; a retry asks other clients.
        tensors: The global model by name.
        settings: How to train: the fields of the algorithm's local update.
        seed: Public seed of all client-side randomness that need not be secret.
    """

    round_num: int
    attempt: int
    tensors: Mapping[str, Tensor]
    settings: Settings
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluateRequest:
    """Evaluate the model in ``tensors`` on local data; nothing is trained.

    Attributes:
        round_num: Rounds that the model has seen.
        tensors: The global model by name.
    """

    round_num: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureRequest:
    """One message of a session of secure aggregation, from the coordinator to a client.

    Attributes:
        round_num: Round index, from 0.
        attempt: How often this round was tried before; each attempt is a session of its own.
        message: What :mod:`fedlearn.secagg.messages` encoded.
        train: What to train on, in the stage where that happens; else ``None``. Of the same round
            and attempt.
        lanes: With ``train``: by lane of the sum the tensors that are laid end to end in it.
        directory: In the first stage of a deployment, the cohort's identity keys (Ed25519, 32 bytes
            each), for clients to pin.
    """

    round_num: int
    attempt: int
    message: bytes
    train: TrainRequest | None = None
    lanes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    directory: Mapping[ClientId, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureReply:
    """One message of a session of secure aggregation, from a client to the coordinator.

    Attributes:
        round_num: As in the request.
        message: What :mod:`fedlearn.secagg.messages` encoded.
    """

    round_num: int
    message: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainReply:
    """A client's contribution to one round.

    Attributes:
        round_num: The round this reply belongs to.
        delta: Local model minus global model, by name.
        num_examples: Local training examples used; the aggregation weight.
        metrics: Local metrics by name.
    """

    round_num: int
    delta: Mapping[str, Tensor]
    num_examples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluateReply:
    """A client's evaluation of the global model.

    Attributes:
        round_num: As in the request.
        num_examples: Local examples evaluated.
        metrics: Means over those examples, by name.
    """

    round_num: int
    num_examples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """Why a client has no contribution. Never carries data or parameters."""

    reason: str


Request: TypeAlias = TrainRequest | EvaluateRequest | SecureRequest
Reply: TypeAlias = TrainReply | EvaluateReply | SecureReply | Failure


def training_in(message: Request | Reply) -> TrainRequest | None:
    """Return what a message asks to train on; ``None`` if it asks for no training."""
    match message:
        case TrainRequest():
            return message
        case SecureRequest():
            return message.train
        case _:
            return None
