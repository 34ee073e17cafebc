"""What the coordinator and a client say to each other.

These frozen dataclasses are the whole protocol: :mod:`fedlearn.core.codec` turns them
into bytes, :mod:`fedlearn.transport` moves the bytes, and :mod:`fedlearn.session.session`
answers them. Nothing else crosses the wire.

The ``kind`` of a request is what its exchange is called. ``round_num`` is the round's index, from
0, and in a reply that of the request; ``attempt`` says how often this round was tried before: a
retry asks other clients, and in secure aggregation is a session of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NewType, TypeAlias

from fedlearn.core.kinds import EVALUATE_KIND, SECURE_KIND, TRAIN_KIND

if TYPE_CHECKING:  # who names clients does not wait for torch
    from torch import Tensor

ClientId = NewType("ClientId", int)

Scalar: TypeAlias = int | float | str | bool | None
Settings: TypeAlias = Mapping[str, Scalar]


#: Bytes of a tensor, and of all of them, from which constants are sent apart.
_LEAST_TENSOR_BYTES, _LEAST_BYTES = 1 << 10, 64 << 10


def sent_apart(constants: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Return the constants of a model that a client is sent once, and not in every round.

    Frozen parameters can be most of a model. Small tensors, such as BatchNorm's counters, stay with
    the request: what they cost is nothing, and a change of one must not cost all the others again.

    Args:
        constants: The tensors that are not averaged, by name.
    """
    large = {n: value for n, value in constants.items() if value.nbytes >= _LEAST_TENSOR_BYTES}
    return large if sum(value.nbytes for value in large.values()) >= _LEAST_BYTES else {}


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRequest:
    """Train locally from ``tensors`` and return what that contributes.

    Attributes:
        tensors: The global model by name.
        order: The names of what is averaged, in the order in which they make one vector: parameters
            that train, then running statistics.
        settings: How to train: :mod:`fedlearn.algorithms.settings`.
        seed: Public seed of all client-side randomness that need not be secret.
        told: What the strategy tells beside the model, by name: one vector each.
        lacks_constants: Whether ``tensors`` has what is averaged alone: the rest of the model stays
            the same in a run, and was sent apart.
        num_statistics: How many of the last names in ``order`` are running statistics, which no
            norm of an update counts.
        counted: By client, the round whose model the last of its updates that counted was based
            on; clients without any are missing. A client keeps what it changed in that training,
            and undoes what it changed in another one since. ``None``: clients are not told.
    """

    kind: ClassVar[str] = TRAIN_KIND

    round_num: int
    attempt: int
    tensors: "Mapping[str, Tensor]"
    order: Sequence[str]
    settings: Settings
    seed: int
    told: "Mapping[str, Tensor]" = field(default_factory=dict)
    lacks_constants: bool = False
    num_statistics: int = 0
    counted: Mapping[ClientId, int] | None = None

    @property
    def num_trained(self) -> int:
        """Elements of the vector that train: the first ones."""
        trained = self.order[: len(self.order) - self.num_statistics]
        return sum(self.tensors[name].numel() for name in trained)

    @property
    def constants(self) -> "dict[str, Tensor]":
        """The tensors that are sent apart: see :func:`sent_apart`."""
        averaged = set(self.order)
        return sent_apart({name: t for name, t in self.tensors.items() if name not in averaged})


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluateRequest:
    """Evaluate the global model on local data.

    Attributes:
        round_num: How many rounds it has seen.
        tensors: The global model by name.
        order: As in a :class:`TrainRequest`; it stays with the coordinator. Empty: unknown, and
            the model is sent whole.
        lacks_constants: As in a :class:`TrainRequest`.
    """

    kind: ClassVar[str] = EVALUATE_KIND

    round_num: int
    tensors: "Mapping[str, Tensor]"
    order: Sequence[str] = ()
    lacks_constants: bool = False

    @property
    def constants(self) -> "dict[str, Tensor]":
        """As of a :class:`TrainRequest`."""
        averaged = set(self.order) or self.tensors.keys()
        return sent_apart({name: t for name, t in self.tensors.items() if name not in averaged})


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
class EvaluationNotice:
    """What a client is told of an evaluation before it agrees to the session that will sum it.

    Attributes:
        rest_hash: Of the request to evaluate, 32 bytes.
    """

    rest_hash: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureTermsRequest:
    """Begin a session of secure aggregation: agree to its terms and advertise fresh keys.

    Attributes:
        message: The signed terms, as :mod:`fedlearn.secagg.messages` encodes them.
        notice: What will be trained, or evaluated: a client whose policy forbids it says so before
            others have shared secrets with it.
    """

    kind: ClassVar[str] = SECURE_KIND

    round_num: int
    attempt: int
    message: bytes
    notice: TrainingNotice | EvaluationNotice


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureTrainRequest:
    """Train, and send the result masked: the stage of a session that has the model.

    Attributes:
        message: The packets that are addressed to this client, encoded likewise. What a whole
            cohort is sent alike is the request without them.
        train: What to train on; the round and the attempt are its own.
    """

    kind: ClassVar[str] = SECURE_KIND

    message: bytes
    train: TrainRequest

    @property
    def round_num(self) -> int:
        """That of the training."""
        return self.train.round_num

    @property
    def attempt(self) -> int:
        """That of the training."""
        return self.train.attempt


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureEvaluateRequest:
    """Evaluate, and send what was measured masked: the stage with the model, as in training.

    Attributes:
        message: The packets that are addressed to this client, as in :class:`SecureTrainRequest`.
        evaluate: What to evaluate; the round is its own.
    """

    kind: ClassVar[str] = SECURE_KIND

    message: bytes
    evaluate: EvaluateRequest
    attempt: ClassVar[int] = 0

    @property
    def round_num(self) -> int:
        """That of the evaluation."""
        return self.evaluate.round_num


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureStageRequest:
    """Go on with a session: a stage in which the message is all that there is.

    Attributes:
        message: The roster, the survivors or their signatures, encoded likewise.
        directory: In a deployment, the identity keys of the clients that the message is about, to
            pin: each a lineage in bytes (:mod:`fedlearn.identity.lineage`), whose last 32 bytes are
            the key.
    """

    kind: ClassVar[str] = SECURE_KIND

    round_num: int
    attempt: int
    message: bytes
    directory: Mapping[ClientId, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureReply:
    """A client's message in a session: what :mod:`fedlearn.secagg.messages` encoded."""

    round_num: int
    message: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainReply:
    """A client's contribution to one round.

    Attributes:
        lanes: What is aggregated, by name one vector: ``delta``, local model minus global model in
            the order of the request, and what else the algorithm asks for.
        num_examples: Local training examples used; the aggregation weight.
        metrics: Local metrics by name.
    """

    round_num: int
    lanes: "Mapping[str, Tensor]"
    num_examples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluateReply:
    """A client's evaluation of the global model.

    Attributes:
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


@dataclass(frozen=True)
class Accusation(Failure):
    """A failure that another client is to blame for: what it sent this one was of no use.

    Attributes:
        client_id: Who; this client says so, and may lie.
    """

    client_id: ClientId


SecureRequest: TypeAlias = (
    SecureTermsRequest | SecureTrainRequest | SecureEvaluateRequest | SecureStageRequest
)
Request: TypeAlias = TrainRequest | EvaluateRequest | SecureRequest
Reply: TypeAlias = TrainReply | EvaluateReply | SecureReply | Failure
