"""What a run asks of secure aggregation, round after round: from its settings to terms.

A model delta travels in two lanes, so that parameters and statistics have a clip each; what a
coordinator would otherwise read in the clear (examples, loss) travels beside them:

============ =============================== =============== ==============================
lane         one client's value              bound           weighted by examples
============ =============================== =============== ==============================
parameters   delta of the parameters         clip_norm       as the algorithm says
statistics   delta of the statistics         statistics_norm as the algorithm says
loss         mean training loss, or 0        max_loss        as the algorithm says
has_loss     1 if the client measured one    1               as the algorithm says
weight       examples                        max_examples    where the algorithm weighs
num_examples examples                        max_examples    where it does not
============ =============================== =============== ==============================
"""

import json
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlearn.core.codec import encode
from fedlearn.core.messages import SecureRequest, TrainingNotice
from fedlearn.core.params import Layout
from fedlearn.errors import ProtocolError
from fedlearn.secagg.fixed_point import (
    MAX_LEVEL,
    Lane,
    LaneRole,
    QuantisationError,
    vector_lane,
    weight_lane,
)
from fedlearn.secagg.keys import digest
from fedlearn.secagg.messages import SignedTerms, decode
from fedlearn.secagg.parameters import Parameters
from fedlearn.secagg.terms import Terms, propose

PARAMETERS = "parameters"
STATISTICS = "statistics"
LOSS = "loss"
HAS_LOSS = "has_loss"
NUM_EXAMPLES = "num_examples"

#: Width of the lanes of one number: it costs nothing that they are precise.
_METRIC_BITS = 40


@dataclass(frozen=True, kw_only=True)
class SecurePlan:
    """What is the same in every session of a run.

    Attributes:
        parameters: n, k, t, q and what they rest on.
        min_survivors: Fewest clients in a released sum; at least that of ``parameters``.
        clip_norm: Largest L2 norm of the parameters' delta; clients clip to it.
        statistics_norm: Likewise of the statistics' delta.
        max_loss: Largest training loss; a client sends at most this.
        max_examples: W: a client with more examples counts as one with so many.
        by_examples: Whether clients are weighted by their examples.
        modulus_bits: Bits of one number of the vector on the wire.
    """

    parameters: Parameters
    min_survivors: int
    clip_norm: float
    statistics_norm: float
    max_loss: float
    max_examples: int
    by_examples: bool
    modulus_bits: int

    def lanes(self, layout: Layout) -> tuple[Lane, ...]:
        """Return what is summed.

        Raises:
            ConfigError: A lane could overflow, or has no room for a level.
        """
        num_statistics = layout.size - layout.num_parameters
        lanes = [self._vector(PARAMETERS, layout.num_parameters, self.clip_norm)]
        if num_statistics:
            lanes.append(self._vector(STATISTICS, num_statistics, self.statistics_norm))
        lanes += [self._metric(LOSS, self.max_loss), self._metric(HAS_LOSS, 1.0)]
        if self.by_examples:
            num_clients = self.parameters.num_clients
            lanes.append(weight_lane(max_weight=self.max_examples, num_clients=num_clients))
        else:
            lanes.append(self._metric(NUM_EXAMPLES, float(self.max_examples)))
        return tuple(lanes)

    def terms(
        self, layout: Layout, *, run_id: bytes, round_num: int, attempt: int, request_hash: bytes
    ) -> Terms:
        """Return the terms of one session.

        Raises:
            ConfigError: Something does not fit, such as a lane that could overflow.
        """
        return propose(
            replace(self.parameters, min_survivors=self.min_survivors),
            run_id=run_id,
            round_num=round_num,
            attempt=attempt,
            request_hash=request_hash,
            max_weight=self.max_examples if self.by_examples else 0,
            lanes=self.lanes(layout),
        )

    def explain(self) -> str:
        """Return all choices with their formulas, one a line."""
        lane, n = self._vector(PARAMETERS, 1, self.clip_norm), self.parameters.num_clients
        error = QuantisationError.of_sum(lane, num_clients=n)
        scale = "x examples / max_examples" if self.by_examples else "x 1"
        return (
            f"{self.parameters.explain()}\n"
            f"released     with at least {self.min_survivors} clients in the sum\n"
            f"fixed point  b = {lane.modulus_bits}, levels up to {lane.max_level}, "
            f"n levels < 2^{lane.modulus_bits - 1}; step = clip_norm / levels = {lane.step:.3g}\n"
            f"error        of one element of the sum of delta {scale}: at most n steps = "
            f"{error.largest:.3g}, rms sqrt(n) step / 2 = {error.rms:.3g}"
        )

    def _vector(self, name: str, size: int, bound: float) -> Lane:
        return vector_lane(
            name,
            size=size,
            bound=bound,
            quantisation_bits=self._level_bits(self.modulus_bits),
            weight_bits=0,
            num_clients=self.parameters.num_clients,
            weighted=self.by_examples,
        )

    def _metric(self, name: str, bound: float) -> Lane:
        return vector_lane(
            name,
            size=1,
            bound=bound,
            quantisation_bits=self._level_bits(_METRIC_BITS),
            weight_bits=0,
            num_clients=self.parameters.num_clients,
            weighted=self.by_examples and name != NUM_EXAMPLES,
            role=LaneRole.METRIC,
        )

    def _level_bits(self, modulus_bits: int) -> int:
        """Return all bits of a number that the sum of n clients leaves."""
        carries = math.ceil(math.log2(self.parameters.num_clients))
        return min(modulus_bits - carries, MAX_LEVEL.bit_length() + 1)


def tensors_of(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Return by vector lane the tensors that are laid end to end in it."""
    names: dict[str, list[str]] = {PARAMETERS: [], STATISTICS: []}
    for spec in layout.specs:
        lane = PARAMETERS if spec.offset < layout.num_parameters else STATISTICS
        if spec.size:
            names[lane].append(spec.name)
    return {lane: tuple(found) for lane, found in names.items() if found}


def clipped(values: Tensor, bound: float) -> Tensor:
    """Return ``values``, scaled down to an L2 norm of ``bound`` if it is larger; float64.

    A value that is not finite stays so, for fixed point to refuse.

    Example:
        >>> clipped(torch.tensor([3.0, 4.0]), 2.5).tolist()
        [1.5, 2.0]
    """
    values = values.double()
    norm = float(torch.linalg.vector_norm(values))
    return values if norm <= bound else values * (bound / norm)


def request_hash(request: SecureRequest) -> bytes:
    """Return the hash by which terms name what is trained on, whatever else is sent with it."""
    return noticed_hash(notice_of(request))


def noticed_hash(notice: TrainingNotice) -> bytes:
    """Return :func:`request_hash` of the request that a notice is about."""
    settings = json.dumps(dict(notice.settings), sort_keys=True).encode()
    return digest(b"training settings and request", settings, notice.rest_hash)


def notice_of(request: SecureRequest) -> TrainingNotice:
    """Return what clients are told of a request to train before they are sent the model."""
    train = request.train
    bare = SecureRequest(
        round_num=request.round_num,
        attempt=request.attempt,
        message=b"",
        train=None if train is None else replace(train, settings={}),
        lanes=request.lanes,
    )
    return TrainingNotice(
        settings={} if train is None else train.settings,
        rest_hash=digest(b"training request", encode(bare)),
    )


def require_as_named(notice: TrainingNotice, message: bytes) -> None:
    """Check that a notice is of the request to train that the terms beside it name.

    Args:
        notice: What a client is told of the training.
        message: The message of the session that it came with.

    Raises:
        ProtocolError: It is of another request, or came with no terms.
    """
    first = decode(message)
    if not isinstance(first, SignedTerms) or noticed_hash(notice) != first.terms.request_hash:
        raise ProtocolError("the training that was announced is not the one that the terms name")
