"""A client's contribution to a secure sum, and the state that it keeps between messages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.lanes import DELTA
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    EvaluationNotice,
    SecureEvaluateRequest,
    SecureRequest,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    TrainReply,
    TrainRequest,
)
from fedlearn.errors import ProtocolError
from fedlearn.secagg import messages
from fedlearn.secagg.client_state import (
    ClientState,
    ConfirmedStep,
    MaskedStep,
    ReleasedStep,
    SharedStep,
)
from fedlearn.secagg.fixed_point import LaneRole
from fedlearn.secagg.plan import (
    HAS_LOSS,
    LOSS,
    NUM_EXAMPLES,
    PARAMETERS,
    STATISTICS,
    clip,
    hash_notice,
)
from fedlearn.secagg.session import Session
from fedlearn.secagg.terms import Contribution, Terms
from fedlearn.session.pins import Pins

#: Keys stored next to the trainer's tensors; no name in a model has this prefix.
_SESSION = "fedlearn/secagg"
_PINS = "fedlearn/pins"
_BASED_ON, _BEFORE = "fedlearn/based_on", "fedlearn/before/"


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionState:
    """A client's state between two messages.

    Attributes:
        trainer: The trainer's own state.
        session: The client's state in secure aggregation; ``None`` if it has never taken part.
        pins: Identity keys of other clients, unless a :class:`PinFile` keeps them across runs.
        based_on: Round of the last training, while it is unknown whether its update counted;
            ``None`` if no update is undecided.
        before: The trainer's state before that training.

    Example:
        >>> SessionState.of(b"").to_bytes()
        b''
    """

    trainer: Mapping[str, Tensor]
    session: ClientState | None
    pins: Pins = field(default_factory=Pins)
    based_on: int | None = None
    before: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes) -> "SessionState":
        """Decode the output of :meth:`to_bytes`; ProtocolError if it is of another version."""
        tensors = safetensors.torch.load(data) if data else {}
        # Take out fedlearn's own keys first; what remains is the trainer's.
        kept, pins = tensors.pop(_SESSION, None), tensors.pop(_PINS, None)
        based_on = tensors.pop(_BASED_ON, None)
        before = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_BEFORE)}
        return cls(
            based_on=None if based_on is None else int(based_on),
            before={name.removeprefix(_BEFORE): value for name, value in before.items()},
            trainer=tensors,
            session=None if kept is None else ClientState.from_bytes(kept.numpy().tobytes()),
            pins=Pins() if pins is None else Pins.from_bytes(pins.numpy().tobytes()),
        )

    def find_counted(self, request: EvaluateRequest, client_id: ClientId) -> Mapping[str, Tensor]:
        """Return the trainer's state after the last training whose update counted."""
        counted = request.counted
        if self.based_on is None or counted is None or counted.get(client_id) == self.based_on:
            return self.trainer
        return self.before

    def settle(self, request: TrainRequest, client_id: ClientId) -> "SessionState":
        """Return the state to start training from, now that the request says which update counted.

        The trainer's state from the last training is kept if that update counted. Otherwise (the
        update was refused or late, or its attempt was discarded) it is rolled back.
        """
        if self.based_on is None:
            return self
        counts = request.counted is None or request.counted.get(client_id) == self.based_on
        trainer = self.trainer if counts else self.before
        return replace(self, trainer=trainer, based_on=None, before={})

    def record_training(
        self, request: TrainRequest, trainer: Mapping[str, Tensor]
    ) -> "SessionState":
        """Return the state after training, while it is still unknown whether the update counts."""
        if request.counted is None or not (trainer or self.trainer):
            return replace(self, trainer=trainer)
        return replace(self, trainer=trainer, based_on=request.round_num, before=self.trainer)

    def to_bytes(self) -> bytes:
        """Encode the state; if it has a session, the bytes contain secret keys."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.trainer.items()}
        if self.based_on is not None:
            tensors[_BASED_ON] = torch.tensor(self.based_on)
            for name, value in self.before.items():
                # Clone: safetensors refuses to save tensors that share memory.
                tensors[_BEFORE + name] = value.detach().cpu().clone().contiguous()
        if self.session is not None:
            tensors[_SESSION] = _to_octets(self.session.to_bytes())
        if self.pins.clients:
            tensors[_PINS] = _to_octets(self.pins.to_bytes())
        return safetensors.torch.save(tensors) if tensors else b""

    def find_session(self, message: messages.Message) -> ClientState:
        """Return the secure-aggregation state for answering a message.

        Without a state, only signed terms start one, since they name the run.
        """
        if self.session is not None:
            return self.session
        if not isinstance(message, messages.SignedTerms):
            raise ProtocolError(
                f"{type(message).__name__} cannot start a secure-aggregation session"
            )
        return ClientState.fresh(message.terms.run_id)


def end_session_after_failure(data: bytes) -> bytes:
    """Return the state after a failure, with any session under way ended.

    Keeping the session would allow a second answer from the same state.
    """
    if not is_in_session(data):
        return data
    state = SessionState.of(data)
    assert state.session is not None  # it is under way
    return replace(state, session=state.session.with_step(None)).to_bytes()


def is_in_session(data: bytes) -> bool:
    """Check whether a secure-aggregation session is under way; an unreadable state has none."""
    try:
        state = SessionState.of(data)
    except (ProtocolError, safetensors.SafetensorError):
        return False  # nothing that could be answered from
    return state.session is not None and state.session.is_in_session


def has_sent_masked(data: bytes) -> bool:
    """Check whether a client has sent a masked vector, judging by its state alone."""
    try:
        state = SessionState.of(data)
    except (ProtocolError, safetensors.SafetensorError):
        return False  # nothing that could be answered from
    if state.session is None:
        return False
    is_in_a_sum = isinstance(state.session.step, MaskedStep | ConfirmedStep | ReleasedStep)
    return is_in_a_sum or bool(state.session.releases.last)


def find_session_to_mask(data: bytes) -> Session | None:
    """Return the session that a client sends its masked vector to next; ``None`` if none."""
    try:
        state = SessionState.of(data)
    except (ProtocolError, safetensors.SafetensorError):
        return None  # nothing that could be answered from
    step = None if state.session is None else state.session.step
    return step.session if isinstance(step, SharedStep) else None


def _to_octets(data: bytes) -> Tensor:
    # A copy, since a buffer of bytes is read-only.
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def decode_message(request: SecureRequest) -> messages.Message:
    """Decode the secure-aggregation message in a request and check that it belongs there.

    Raises:
        ProtocolError: The message cannot be decoded or belongs in another kind of request, or the
            announced work is not the work that the terms name or that their lanes are for.
    """
    message = messages.decode(request.message)
    match request, message:
        case SecureTermsRequest(), messages.SignedTerms():
            if hash_notice(request.notice) != message.terms.request_hash:
                raise ProtocolError("the terms name another request than the announced one")
            if message.terms.is_evaluation != isinstance(request.notice, EvaluationNotice):
                raise ProtocolError(
                    "terms that sum only metrics are for evaluations, and vice versa"
                )
        case SecureTrainRequest() | SecureEvaluateRequest(), messages.Packets():
            pass
        case SecureStageRequest(), messages.Roster() | messages.Survivors() | messages.Signatures():
            pass
        case _:
            raise ProtocolError(
                f"a {type(request).__name__} must not contain a {type(message).__name__}"
            )
    return message


def bound_update(terms: Terms, update: TrainReply) -> Contribution:
    """Clip a training result to the bounds of the terms, ready to be added to the sum.

    The order is fixed: clip, convert to fixed point, mask. Each vector is clipped in L2 norm to the
    bound of its lane; the loss and the number of examples are clamped to theirs.

    Raises:
        ValueError: The update has no examples, or lacks a value that the terms ask for.
    """
    if update.num_examples < 1:
        raise ValueError("the update has no examples, so it cannot be added to the sum")
    loss = float(update.metrics.get("loss", math.nan))
    has_loss = math.isfinite(loss)
    # A sum cannot leave a client out, so a missing loss is sent as 0, with a flag of 0.
    metrics = {
        LOSS: loss if has_loss else 0.0,
        HAS_LOSS: float(has_loss),
        NUM_EXAMPLES: float(update.num_examples),
    }
    values: dict[str, NDArray[np.floating]] = {}
    vectors, clipped, capped = _split_vectors(terms, update), list[str](), list[str]()
    for lane in terms.lanes:
        if lane.role is LaneRole.VECTOR:
            vector, was_longer = clip(vectors[lane.name].detach().cpu(), lane.bound)
            values[lane.name] = vector.numpy()
            clipped += [lane.name] * was_longer
        elif lane.role is LaneRole.METRIC:
            if lane.name not in metrics:
                raise ValueError(f"the terms ask for the unknown metric {lane.name!r}")
            bounded = min(max(metrics[lane.name], -lane.bound), lane.bound)
            values[lane.name] = np.array([bounded])
            capped += [lane.name] * (bounded != metrics[lane.name])
    if 0 < terms.max_weight < update.num_examples:
        capped.append("weight")
    return Contribution(
        values=values,
        weight=min(update.num_examples, terms.max_weight),
        request_hash=terms.request_hash,
        clipped=tuple(clipped),
        capped=tuple(capped),
    )


def bound_metrics(terms: Terms, reply: EvaluateReply) -> Contribution:
    """Clamp an evaluation's metrics to the bounds of the terms, ready to be added to the sum.

    Each lane gets the value and a flag for whether the client has one. All lanes are metrics, as
    :func:`decode_message` has checked.
    """
    values, capped = dict[str, NDArray[np.floating]](), list[str]()
    for lane in terms.lanes:
        value = reply.metrics.get(lane.name, math.nan)
        has_value = math.isfinite(value)
        bounded = min(max(value, -lane.bound), lane.bound) if has_value else 0.0
        values[lane.name] = np.array([bounded, float(has_value)])
        capped += [lane.name] * (has_value and bounded != value)
    return Contribution(
        values=values, weight=0, request_hash=terms.request_hash, capped=tuple(capped)
    )


def _split_vectors(terms: Terms, update: TrainReply) -> dict[str, Tensor]:
    """Map each vector lane of the terms to its values, with the delta split into its two parts."""
    sizes = {lane.name: lane.size for lane in terms.lanes if lane.role is LaneRole.VECTOR}
    delta = update.lanes.get(DELTA.name)
    if delta is None:  # the answer to a query
        delta = torch.empty(0)
    parts = [name for name in (PARAMETERS, STATISTICS) if name in sizes]
    if sum(sizes[name] for name in parts) != len(delta):
        raise ValueError(
            f"the terms expect {[sizes[name] for name in parts]} numbers, the delta has "
            f"{len(delta)}"
        )
    cut = dict(zip(parts, delta.split([sizes[name] for name in parts]), strict=True))
    found = {**update.lanes, **cut}
    for name, size in sizes.items():
        if name not in found or len(found[name]) != size:
            raise ValueError(f"training returned no lane {name!r} of {size} numbers")
    return found
