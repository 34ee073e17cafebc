"""A client's training as its contribution to a secure sum, and what it keeps between messages."""

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
from fedlearn.secagg.client_state import ClientState, Confirmed, Masked, Released, Shared
from fedlearn.secagg.fixed_point import LaneRole
from fedlearn.secagg.plan import (
    HAS_LOSS,
    LOSS,
    NUM_EXAMPLES,
    PARAMETERS,
    STATISTICS,
    clip,
    noticed_hash,
)
from fedlearn.secagg.session import Session
from fedlearn.secagg.terms import Contribution, Terms
from fedlearn.session.pins import Pins

#: Among a trainer's tensors; a model's names have no such prefix.
_SESSION = "fedlearn/secagg"
_PINS = "fedlearn/pins"
_BASED_ON, _BEFORE = "fedlearn/based_on", "fedlearn/before/"


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptState:
    """What a client keeps from one message to the next.

    Attributes:
        trainer: What the trainer keeps.
        session: Its part in sessions of secure aggregation; ``None``: it has never had any.
        pins: Identity keys of other clients, unless they are kept where they outlive the run.
        based_on: The round of the last training, as long as it is not known whether its update
            counted; ``None``: nothing is open.
        before: What the trainer kept before that training.

    Example:
        >>> KeptState.of(b"").to_bytes()
        b''
    """

    trainer: Mapping[str, Tensor]
    session: ClientState | None
    pins: Pins = field(default_factory=Pins)
    based_on: int | None = None
    before: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes) -> "KeptState":
        """Return what :meth:`to_bytes` wrote; ProtocolError where it is of another version."""
        tensors = safetensors.torch.load(data) if data else {}
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

    def settled(self, request: TrainRequest, client_id: ClientId) -> "KeptState":
        """Return what this client begins a training with: it knows now which update counted.

        What it changed in its last training stays if that update counted, and is undone if not:
        it was refused, came late, or its attempt was thrown away.
        """
        if self.based_on is None:
            return self
        counts = request.counted is None or request.counted.get(client_id) == self.based_on
        trainer = self.trainer if counts else self.before
        return replace(self, trainer=trainer, based_on=None, before={})

    def after(self, request: TrainRequest, trainer: Mapping[str, Tensor]) -> "KeptState":
        """Return what is kept after a training, of which it is not known yet whether it counts."""
        if request.counted is None or not (trainer or self.trainer):
            return replace(self, trainer=trainer)
        return replace(self, trainer=trainer, based_on=request.round_num, before=self.trainer)

    def to_bytes(self) -> bytes:
        """Return this as bytes; with a session they hold secret keys."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.trainer.items()}
        if self.based_on is not None:
            tensors[_BASED_ON] = torch.tensor(self.based_on)
            for name, value in self.before.items():
                # A copy: tensors that share their memory cannot be written.
                tensors[_BEFORE + name] = value.detach().cpu().clone().contiguous()
        if self.session is not None:
            tensors[_SESSION] = _octets(self.session.to_bytes())
        if self.pins.clients:
            tensors[_PINS] = _octets(self.pins.to_bytes())
        return safetensors.torch.save(tensors) if tensors else b""

    def session_for(self, message: messages.Message) -> ClientState:
        """Return the state to answer a message from; terms alone begin one, and name the run."""
        if self.session is not None:
            return self.session
        if not isinstance(message, messages.SignedTerms):
            raise ProtocolError(f"{type(message).__name__} begins no session of secure aggregation")
        return ClientState.fresh(message.terms.run_id)


def after_failure(data: bytes) -> bytes:
    """Return the state after a failure: a session under way is over, or it were answered twice."""
    if not is_in_session(data):
        return data
    kept = KeptState.of(data)
    assert kept.session is not None  # it is under way
    return replace(kept, session=kept.session.at(None)).to_bytes()


def is_in_session(data: bytes) -> bool:
    """Return whether a session is under way in a state; there is none in one of no use."""
    try:
        kept = KeptState.of(data)
    except (ProtocolError, safetensors.SafetensorError):
        return False  # nothing that could be answered from
    return kept.session is not None and kept.session.is_in_session


def has_sent_masked(data: bytes) -> bool:
    """Return whether a client has been in a sum that it helped to open, by its state alone."""
    try:
        kept = KeptState.of(data)
    except (ProtocolError, safetensors.SafetensorError):
        return False  # nothing that could be answered from
    if kept.session is None:
        return False
    is_in_a_sum = isinstance(kept.session.step, Masked | Confirmed | Released)
    return is_in_a_sum or bool(kept.session.releases.last)


def session_to_mask_for(data: bytes) -> Session | None:
    """Return the session whose sum a client adds to next; ``None``: there is none."""
    try:
        kept = KeptState.of(data)
    except (ProtocolError, safetensors.SafetensorError):
        return None  # nothing that could be answered from
    step = None if kept.session is None else kept.session.step
    return step.session if isinstance(step, Shared) else None


def _octets(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def message_in(request: SecureRequest) -> messages.Message:
    """Return the message of secure aggregation in a request.

    Raises:
        ProtocolError: There is none, or one that belongs into another kind of request; or the
            announced work is not what the terms name, or what their lanes are for.
    """
    message = messages.decode(request.message)
    match request, message:
        case SecureTermsRequest(), messages.SignedTerms():
            if noticed_hash(request.notice) != message.terms.request_hash:
                raise ProtocolError("the terms name other work than what is announced")
            if message.terms.evaluates != isinstance(request.notice, EvaluationNotice):
                raise ProtocolError("metrics alone are summed for an evaluation, and only for one")
        case SecureTrainRequest() | SecureEvaluateRequest(), messages.Packets():
            pass
        case SecureStageRequest(), messages.Roster() | messages.Survivors() | messages.Signatures():
            pass
        case _:
            raise ProtocolError(
                f"{type(message).__name__} in a {type(request).__name__}: it belongs elsewhere"
            )
    return message


def contribution(terms: Terms, update: TrainReply) -> Contribution:
    """Return what training adds to the sum, clipped: fixed point and the mask come next.

    The order is fixed: clip, fixed point, mask. Each vector is clipped in its L2 norm to the bound
    of its lane, the loss and the examples to theirs.

    Raises:
        ValueError: The update has no examples, or lacks what the terms ask for.
    """
    if update.num_examples < 1:
        raise ValueError("a client without examples has nothing to add")
    loss = float(update.metrics.get("loss", math.nan))
    has_loss = math.isfinite(loss)
    metrics = {
        LOSS: loss if has_loss else 0.0,
        HAS_LOSS: float(has_loss),
        NUM_EXAMPLES: float(update.num_examples),
    }
    values: dict[str, NDArray[np.floating]] = {}
    vectors, clipped, capped = _vectors(terms, update), list[str](), list[str]()
    for lane in terms.lanes:
        if lane.role is LaneRole.VECTOR:
            vector, was_longer = clip(vectors[lane.name].detach().cpu(), lane.bound)
            values[lane.name] = vector.numpy()
            clipped += [lane.name] * was_longer
        elif lane.role is LaneRole.METRIC:
            if lane.name not in metrics:
                raise ValueError(f"the terms ask for a metric {lane.name!r} that is unknown")
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


def measured(terms: Terms, reply: EvaluateReply) -> Contribution:
    """Return what an evaluation adds to the sum: each measure, cut off, and whether there is one.

    The lanes of the terms are metrics, as :func:`message_in` has checked.
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


def _vectors(terms: Terms, update: TrainReply) -> dict[str, Tensor]:
    """Return by vector lane of the terms what training gave: the delta in its two parts."""
    sizes = {lane.name: lane.size for lane in terms.lanes if lane.role is LaneRole.VECTOR}
    delta = update.lanes[DELTA.name]
    parts = [name for name in (PARAMETERS, STATISTICS) if name in sizes]
    if sum(sizes[name] for name in parts) != len(delta):
        raise ValueError(
            f"the terms have room for {[sizes[name] for name in parts]} numbers of a delta of "
            f"{len(delta)}"
        )
    cut = dict(zip(parts, delta.split([sizes[name] for name in parts]), strict=True))
    found = {**update.lanes, **cut}
    for name, size in sizes.items():
        if name not in found or len(found[name]) != size:
            raise ValueError(f"lane {name!r} is to hold {size} numbers that training did not give")
    return found
