"""What the coordinator and a client say to each other.

These frozen dataclasses are the whole protocol: :mod:`fedlearn.core.codec` turns them
into bytes, :mod:`fedlearn.transport` moves the bytes, and :mod:`fedlearn.session.session`
answers them. Nothing else crosses the wire.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NewType, TypeAlias

from torch import Tensor

from fedlearn.errors import ProtocolError

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
class TrainingNotice:
    """What a client is told of a training before it agrees to the session that will sum it.

    Both together give the hash by which the terms name the request to train, so the settings told
    are those of the training.

    Attributes:
        settings: How it will be asked to train.
        rest_hash: Of all else in the request, 32 bytes.
    """

    settings: Settings
    rest_hash: bytes


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
        directory: In the first stage of a deployment, the cohort's identity keys, for clients to
            pin: each a lineage in bytes (:mod:`fedlearn.identity.lineage`), whose last 32 bytes
            are the key.
        notice: In the first stage, what will be trained: a client whose policy forbids it says so
            before others have shared secrets with it.
    """

    round_num: int
    attempt: int
    message: bytes
    train: TrainRequest | None = None
    lanes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    directory: Mapping[ClientId, bytes] = field(default_factory=dict)
    notice: TrainingNotice | None = None


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


def apart(request: Request) -> tuple[Request, bytes]:
    """Return what a whole cohort can be sent alike, and what is for one client alone.

    The second part is empty, save where a message of secure aggregation comes with the model:
    then it is that message, and a cohort's requests have one encoded model between them. All
    other values of the first part are the very objects of ``request``.

    Example:
        >>> terms = SecureRequest(round_num=0, attempt=0, message=b"terms")
        >>> apart(terms)[1]
        b''
    """
    if isinstance(request, SecureRequest) and request.train is not None:
        return replace(request, message=b""), request.message
    return request, b""


def together(shared: Request | Reply, personal: bytes) -> Request | Reply:
    """Return the message whose two parts :func:`apart` returned.

    Raises:
        ProtocolError: There is no place in ``shared`` for a personal part.
    """
    if not personal:
        return shared
    if not isinstance(shared, SecureRequest) or shared.train is None or shared.message:
        raise ProtocolError(
            f"{len(personal)} bytes for this client alone beside a {type(shared).__name__} that "
            "has no place for them"
        )
    return replace(shared, message=personal)


def settings_in(message: Request | Reply) -> Settings | None:
    """Return how a message asks to train, now or later; ``None`` if it says nothing of that."""
    train = training_in(message)
    if train is not None:
        return train.settings
    if isinstance(message, SecureRequest) and message.notice is not None:
        return message.notice.settings
    return None
