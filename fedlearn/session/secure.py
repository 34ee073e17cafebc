"""A client's training as its contribution to a secure sum, and what it keeps between messages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.messages import SecureRequest, TrainReply
from fedlearn.errors import ProtocolError
from fedlearn.secagg import messages
from fedlearn.secagg.client_state import ClientState
from fedlearn.secagg.fixed_point import LaneRole
from fedlearn.secagg.plan import HAS_LOSS, LOSS, NUM_EXAMPLES, clipped
from fedlearn.secagg.terms import Contribution, Terms
from fedlearn.session.pins import Pins

#: Among a trainer's tensors; a model's names have no such prefix.
_SESSION = "fedlearn/secagg"
_PINS = "fedlearn/pins"


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What a client keeps from one message to the next.

    Attributes:
        trainer: What the trainer keeps.
        session: Its part in sessions of secure aggregation; ``None``: it has never had any.
        pins: Identity keys of other clients, unless they are kept where they outlive the run.

    Example:
        >>> Kept.of(b"").to_bytes()
        b''
    """

    trainer: Mapping[str, Tensor]
    session: ClientState | None
    pins: Pins = field(default_factory=Pins)

    @classmethod
    def of(cls, data: bytes) -> "Kept":
        """Return what :meth:`to_bytes` returned; nothing at first.

        Raises:
            ProtocolError: It holds no state of this version.
        """
        tensors = safetensors.torch.load(data) if data else {}
        kept, pins = tensors.pop(_SESSION, None), tensors.pop(_PINS, None)
        return cls(
            trainer=tensors,
            session=None if kept is None else ClientState.from_bytes(kept.numpy().tobytes()),
            pins=Pins() if pins is None else Pins.from_bytes(pins.numpy().tobytes()),
        )

    def to_bytes(self) -> bytes:
        """Return this as bytes; with a session they hold secret keys."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.trainer.items()}
        if self.session is not None:
            tensors[_SESSION] = _octets(self.session.to_bytes())
        if self.pins.clients:
            tensors[_PINS] = _octets(self.pins.to_bytes())
        return safetensors.torch.save(tensors) if tensors else b""

    def session_for(self, message: bytes) -> ClientState:
        """Return the state to answer a message from; the first terms name the run.

        Raises:
            ProtocolError: There is no session, and this message begins none.
        """
        if self.session is not None:
            return self.session
        first = messages.decode(message)
        if not isinstance(first, messages.SignedTerms):
            raise ProtocolError(f"{type(first).__name__} begins no session of secure aggregation")
        return ClientState.fresh(first.terms.run_id)


def after_failure(data: bytes) -> bytes:
    """Return the state after a message that failed: a session under way is over.

    What it kept would else be answered from twice.
    """
    if not is_in_session(data):
        return data
    kept = Kept.of(data)
    assert kept.session is not None  # it is under way
    return replace(kept, session=kept.session.at(None)).to_bytes()


def is_in_session(data: bytes) -> bool:
    """Return whether a session is under way in a state; there is none in one of no use."""
    try:
        kept = Kept.of(data)
    except (ProtocolError, safetensors.SafetensorError):
        return False  # nothing that could be answered from
    return kept.session is not None and kept.session.step is not None


def _octets(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def contribution(
    terms: Terms, request: SecureRequest, update: TrainReply, *, request_hash: bytes
) -> Contribution:
    """Return what training adds to the sum, clipped: fixed point and the mask come next.

    The order is fixed: clip, fixed point, mask. Each vector is clipped in its L2 norm to the bound
    of its lane, the loss and the examples to theirs.

    Args:
        terms: Of the session.
        request: That was trained on.
        update: What training gave.
        request_hash: Of the request.

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
    for lane in terms.lanes:
        if lane.role is LaneRole.VECTOR:
            values[lane.name] = _vector(request, update, lane.name, bound=lane.bound)
        elif lane.role is LaneRole.METRIC:
            if lane.name not in metrics:
                raise ValueError(f"the terms ask for a metric {lane.name!r} that is unknown")
            bounded = min(max(metrics[lane.name], -lane.bound), lane.bound)
            values[lane.name] = np.array([bounded])
    weight = min(update.num_examples, terms.max_weight)
    return Contribution(values=values, weight=weight, request_hash=request_hash)


def _vector(
    request: SecureRequest, update: TrainReply, lane: str, *, bound: float
) -> NDArray[np.floating]:
    names = request.lanes.get(lane, ())
    missing = [name for name in names if name not in update.delta]
    if missing or not names:
        raise ValueError(f"lane {lane!r} is to hold tensors {missing} that training did not give")
    vector = torch.cat([update.delta[name].detach().double().reshape(-1).cpu() for name in names])
    flat: NDArray[np.floating] = clipped(vector, bound).numpy()
    return flat
