"""What the coordinator and a client say to each other.

These frozen dataclasses are the whole protocol: :mod:`fedlearn.core.codec` turns them
into bytes, :mod:`fedlearn.transport` moves the bytes, and :mod:`fedlearn.client.session`
answers them. Nothing else crosses the wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


Request: TypeAlias = TrainRequest | EvaluateRequest
Reply: TypeAlias = TrainReply | EvaluateReply | Failure
