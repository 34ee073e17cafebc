"""Messages between the coordinator and its clients.

These frozen dataclasses are the whole protocol: :mod:`fedlearn.core.codec` turns them
into bytes, :mod:`fedlearn.transport` moves the bytes, and :mod:`fedlearn.session.session`
answers them. Nothing else crosses the wire.

The ``kind`` of a request names its exchange. ``round_num`` is the round's index, from 0; a reply
repeats that of its request. ``attempt`` is the retry number of the round, from 0: a retry asks
other clients, and in secure aggregation it is a new session.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NewType, TypeAlias

from fedlearn.core.kinds import EVALUATE_KIND, SECURE_KIND, TRAIN_KIND

if TYPE_CHECKING:  # importing this module must not load torch, which is slow
    import torch
    from torch import Tensor

ClientId = NewType("ClientId", int)

Scalar: TypeAlias = int | float | str | bool | None
Settings: TypeAlias = Mapping[str, Scalar]


#: Prefix of the names of broadcast values among a request's constants.
_BROADCAST = "told/"

#: Constants are sent separately if each has at least the first number of bytes, and all of those
#: together at least the second.
_LEAST_TENSOR_BYTES, _LEAST_BYTES = 1 << 10, 64 << 10


def select_constants(
    constants: "Mapping[str, Tensor]", *, local: Collection[str] = ()
) -> "dict[str, Tensor]":
    """Select the constants of a model that a client is sent once instead of in every round.

    Frozen parameters can be most of a model. Small tensors, such as BatchNorm's counters, stay in
    the request: they cost next to nothing, and a change of one must not cause all of the constants
    to be sent again.

    Args:
        constants: The tensors that are not averaged, by name.
        local: Those that each client keeps for itself. Their initial values are always sent
            separately, whatever their size: they must not travel in every round.
    """
    large = {n: value for n, value in constants.items() if value.nbytes >= _LEAST_TENSOR_BYTES}
    if sum(value.nbytes for value in large.values()) < _LEAST_BYTES:
        large = {}
    return {n: value for n, value in constants.items() if n in large or n in local}


def name_sent_once(broadcast: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Give broadcast values that are sent once their names among the constants of a request."""
    return {_BROADCAST + name: value for name, value in broadcast.items()}


def split_sent_once(
    constants: "Mapping[str, Tensor]",
) -> "tuple[dict[str, Tensor], dict[str, Tensor]]":
    """Split constants into those of the model and the broadcast values among them, by name.

    Example:
        >>> split_sent_once({"base": 1, "told/anchor": 2})
        ({'base': 1}, {'anchor': 2})
    """
    model = {name: t for name, t in constants.items() if not name.startswith(_BROADCAST)}
    rest = {n.removeprefix(_BROADCAST): t for n, t in constants.items() if n not in model}
    return model, rest


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressedModel:
    """The trained tensors of a model in the form in which they are sent.

    Attributes:
        settings: The compressor, in the form of :mod:`fedlearn.algorithms.settings`.
        parts: What it sends, by its own names.
        shapes: Shapes of the trained tensors, in the order of the request.
        dtypes: Their dtypes.
    """

    settings: Settings
    parts: "Mapping[str, Tensor]"
    shapes: Sequence[tuple[int, ...]]
    dtypes: "Sequence[torch.dtype]"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRequest:
    """Asks a client to train locally from ``tensors`` and to return its update.

    Attributes:
        tensors: The global model, by name.
        order: The names of the averaged tensors, in the order in which they form one vector:
            trained parameters, then running statistics.
        settings: How to train: :mod:`fedlearn.algorithms.settings`.
        seed: Public seed of all client-side randomness that need not be secret.
        broadcast: The strategy's broadcast in addition to the model: one vector per name.
        sent_once: Names in ``broadcast`` of what is sent separately, with the model's constants. A
            client receives it whole.
        lacks_constants: Whether ``tensors`` lacks the model's constants, which stay the same in a
            run and were sent separately.
        num_statistics: How many of the last names in ``order`` are running statistics, which
            norms of an update leave out.
        counted: By client, the round of the model on which its last counted update was based;
            clients without one are missing. A client keeps the state of that training and undoes
            the changes of any later one. ``None``: the coordinator does not send this.
        local: Names of the tensors that each client keeps for itself. ``tensors`` has their initial
            values, for a client that has not trained yet.
        compressed: The trained tensors as they are sent; ``None``: they are sent whole. A client
            restores them (:mod:`fedlearn.algorithms.download_compression`): before that,
            ``tensors`` lacks them.
    """

    kind: ClassVar[str] = TRAIN_KIND

    round_num: int
    attempt: int
    tensors: "Mapping[str, Tensor]"
    order: Sequence[str]
    settings: Settings
    seed: int
    broadcast: "Mapping[str, Tensor]" = field(default_factory=dict)
    lacks_constants: bool = False
    num_statistics: int = 0
    counted: Mapping[ClientId, int] | None = None
    local: Sequence[str] = ()
    sent_once: Sequence[str] = ()
    compressed: CompressedModel | None = None

    @property
    def trained(self) -> Sequence[str]:
        """Names of the trained tensors, in the order in which they form the vector."""
        return self.order[: len(self.order) - self.num_statistics]

    @property
    def num_trained(self) -> int:
        """Number of elements of the vector that are trained: the first ones."""
        return sum(math.prod(shape) for shape in self.trained_shapes)

    @property
    def trained_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the trained tensors, in the order in which they form the vector."""
        return [tuple(self.tensors[name].shape) for name in self.trained]

    @property
    def sent_tensors(self) -> "dict[str, Tensor]":
        """The tensors that are sent as they are: all, or those that are not compressed."""
        absent = () if self.compressed is None else set(self.trained)
        return {name: value for name, value in self.tensors.items() if name not in absent}

    @property
    def constants(self) -> "dict[str, Tensor]":
        """What is sent separately: see :func:`select_constants` and :func:`name_sent_once`."""
        averaged = set(self.order)
        own = select_constants(
            {name: t for name, t in self.tensors.items() if name not in averaged},
            local=self.local,
        )
        return own | name_sent_once({name: self.broadcast[name] for name in self.sent_once})


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluateRequest:
    """Asks a client to evaluate the global model on its local data.

    Attributes:
        round_num: Number of rounds that the model has been trained for.
        tensors: The global model, by name.
        order: As in a :class:`TrainRequest`, but not sent to the client. Empty: unknown, so the
            model is sent whole.
        lacks_constants: As in a :class:`TrainRequest`.
        local: As in a :class:`TrainRequest`. If there are any, the client also evaluates its
            personal model: the global one with its own tensors of these names.
        settings: As in a :class:`TrainRequest`, if the local update defines a personal model,
            which the client then evaluates too; otherwise empty.
        trained: Names of the trained parameters, in order, if there are ``settings``.
        counted: As in a :class:`TrainRequest`, if personal models are evaluated.
        fine_tuning: How to train a copy of the model before it is evaluated as the personal one,
            as the ``settings`` of a :class:`TrainRequest`; empty: not at all.
        seed: As in a :class:`TrainRequest`, for the fine-tuning.
        sent_once: What training requests send separately along with the model's constants. A client
            keeps one set of these, so an evaluation that lacks constants names the same set.
    """

    kind: ClassVar[str] = EVALUATE_KIND

    round_num: int
    tensors: "Mapping[str, Tensor]"
    order: Sequence[str] = ()
    lacks_constants: bool = False
    local: Sequence[str] = ()
    settings: Settings = field(default_factory=dict)
    trained: Sequence[str] = ()
    counted: Mapping[ClientId, int] | None = None
    fine_tuning: Settings = field(default_factory=dict)
    seed: int = 0
    sent_once: "Mapping[str, Tensor]" = field(default_factory=dict)

    @property
    def constants(self) -> "dict[str, Tensor]":
        """The tensors that are sent separately, as in a :class:`TrainRequest`."""
        averaged = set(self.order) or self.tensors.keys()
        own = select_constants(
            {name: t for name, t in self.tensors.items() if name not in averaged},
            local=self.local,
        )
        return own | name_sent_once(self.sent_once) if own else {}


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingNotice:
    """Announces a training, before the client agrees to the secure session that will sum it.

    The hash of the training request in the session's terms is computed from both fields, so the
    announced settings are those of the training.

    Attributes:
        settings: How to train.
        rest_hash: Hash of everything else in the training request, 32 bytes.
    """

    settings: Settings
    rest_hash: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationNotice:
    """Announces an evaluation, before the client agrees to the secure session that will sum it.

    Attributes:
        rest_hash: Hash of the evaluation request, 32 bytes.
    """

    rest_hash: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureTermsRequest:
    """Starts a session of secure aggregation: agree to its terms and advertise fresh keys.

    Attributes:
        message: The signed terms, as :mod:`fedlearn.secagg.messages` encodes them.
        notice: The training or evaluation to come. A client whose policy forbids it can refuse
            before others have shared secrets with it.
    """

    kind: ClassVar[str] = SECURE_KIND

    round_num: int
    attempt: int
    message: bytes
    notice: TrainingNotice | EvaluationNotice


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureTrainRequest:
    """Asks a client to train and to send the result masked: the session's stage with the model.

    Attributes:
        message: The packets that are addressed to this client, as
            :mod:`fedlearn.secagg.messages` encodes them. The rest of the request is the same for
            the whole cohort.
        train: The training request; it determines the round and the attempt.
    """

    kind: ClassVar[str] = SECURE_KIND

    message: bytes
    train: TrainRequest

    @property
    def round_num(self) -> int:
        """Round of the training."""
        return self.train.round_num

    @property
    def attempt(self) -> int:
        """Attempt of the training."""
        return self.train.attempt


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureEvaluateRequest:
    """Asks a client to evaluate and to send its metrics masked: the session's stage with the model.

    Attributes:
        message: The packets that are addressed to this client, as in :class:`SecureTrainRequest`.
        evaluate: The evaluation request; it determines the round.
    """

    kind: ClassVar[str] = SECURE_KIND

    message: bytes
    evaluate: EvaluateRequest
    attempt: ClassVar[int] = 0

    @property
    def round_num(self) -> int:
        """Round of the evaluation."""
        return self.evaluate.round_num


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureStageRequest:
    """Continues a session: a stage without a model.

    Attributes:
        message: The roster, the survivors or their signatures, as :mod:`fedlearn.secagg.messages`
            encodes them.
        directory: In a deployment, the identity keys of the clients in the message, for the
            receiver to pin. Each is an encoded lineage (:mod:`fedlearn.identity.lineage`), whose
            last 32 bytes are the key.
    """

    kind: ClassVar[str] = SECURE_KIND

    round_num: int
    attempt: int
    message: bytes
    directory: Mapping[ClientId, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureReply:
    """A client's message in a session, as :mod:`fedlearn.secagg.messages` encodes it."""

    round_num: int
    message: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainReply:
    """A client's contribution to one round.

    Attributes:
        lanes: The vectors to aggregate, by name: ``delta``, which is the local model minus the
            global model in the order of the request, and any others that the algorithm needs.
        num_examples: Local training examples used; the aggregation weight.
        metrics: Local metrics by name.
        encoding: How the delta is compressed; empty: it is not. Otherwise parts of it take its
            place in ``lanes``: see :mod:`fedlearn.algorithms.compression`.
    """

    round_num: int
    lanes: "Mapping[str, Tensor]"
    num_examples: int
    metrics: Mapping[str, float]
    encoding: str = ""


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
    """The reason why a client sends no update. Never contains data or parameters."""

    reason: str


@dataclass(frozen=True)
class Accusation(Failure):
    """A failure that is another client's fault: this client could not use what that one sent.

    Attributes:
        client_id: The accused client. The accuser may be lying.
    """

    client_id: ClientId


SecureRequest: TypeAlias = (
    SecureTermsRequest | SecureTrainRequest | SecureEvaluateRequest | SecureStageRequest
)
Request: TypeAlias = TrainRequest | EvaluateRequest | SecureRequest
Reply: TypeAlias = TrainReply | EvaluateReply | SecureReply | Failure
