"""The plan of a run's secure aggregation: turns its settings into the terms of every session.

A model delta travels in two lanes, so that parameters and statistics each have a clip, and each
further lane of the strategy travels in its own. Values that a coordinator would otherwise read in
the clear (examples, loss) travel next to them:

============ =============================== =============== ==============================
lane         one client's value              bound           weighted by examples
============ =============================== =============== ==============================
parameters   delta of the parameters, or the clip_norm       as the algorithm says
             compressor's part of it
statistics   delta of the statistics         statistics_norm as the algorithm says
(others)     what the algorithm asks for     its own         as the algorithm says
loss         mean training loss, or 0        max_loss        as the algorithm says
has_loss     1 if the client measured one    1               as the algorithm says
weight       examples                        max_examples    where the algorithm weighs
num_examples examples                        max_examples    where it does not weigh
============ =============================== =============== ==============================

In privacy mode "distributed" each client adds noise to all that it sends (in
:func:`fedlearn.secagg.terms.encode_contribution`), so it sends only what can have noise: the delta
in one lane (parameters), and the further lanes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge, Le, MultipleOf, doc
from torch import Tensor

from fedlearn.algorithms.aggregations import require_weighted_mean
from fedlearn.algorithms.compression import Compressor
from fedlearn.algorithms.lanes import DELTA, LaneSpec
from fedlearn.core.codec import encode
from fedlearn.core.messages import (
    EvaluateRequest,
    EvaluationNotice,
    TrainingNotice,
    TrainRequest,
)
from fedlearn.core.params import Layout
from fedlearn.core.ranges import Positive, describe_out_of_range
from fedlearn.errors import ConfigError, RoundError
from fedlearn.secagg.fixed_point import (
    Lane,
    LaneRole,
    build_noisy_lane,
    build_vector_lane,
    build_weight_lane,
)
from fedlearn.secagg.keys import digest
from fedlearn.secagg.min_cohort import USUAL_MIN_COHORT
from fedlearn.secagg.parameters import Parameters, num_assured
from fedlearn.secagg.terms import Terms, propose

PARAMETERS = "parameters"
STATISTICS = "statistics"
LOSS = "loss"
HAS_LOSS = "has_loss"
NUM_EXAMPLES = "num_examples"
WEIGHT = "weight"

#: Width of the lanes of one number, in bits: high precision costs nothing there.
_METRIC_BITS = 40


@dataclass(frozen=True, kw_only=True)
class SecurePlan:
    """The settings that all sessions of a run share.

    Raises:
        ConfigError: A number is out of range, weights are combined with noise, or a further lane
            has no bound or one of the names above. Methods raise it if a lane could overflow or has
            no room for a level.
    """

    parameters: Annotated[Parameters, doc("n, k, t and q, with the assumptions behind them.")]
    min_survivors: Annotated[
        int, doc("Fewest clients in a released sum; at least that of ``parameters``.")
    ]
    clip_norm: Annotated[
        Positive, doc("Largest L2 norm of a client's update; clients scale theirs down to it, > 0.")
    ]
    statistics_norm: Annotated[
        Positive,
        doc("The same for the change in statistics, such as those of batch normalization, > 0."),
    ]
    max_loss: Annotated[Positive, doc("A client's training loss is cut off at this value, > 0.")]
    max_examples: Annotated[
        int,
        Ge(1),
        Le(10**9),
        doc(
            "A client with more examples counts as if it had this many, >= 1; smaller is more "
            "precise."
        ),
    ]
    by_examples: Annotated[bool, doc("Whether clients are weighted by their examples.")]
    modulus_bits: Annotated[
        int,
        Ge(16),
        Le(40),
        MultipleOf(8),
        doc(
            "Bits of one number in an upload: 16, 24, 32 or 40; bits that the sum does not need "
            "add precision."
        ),
    ]
    further: Annotated[Sequence[LaneSpec], doc("The strategy's lanes other than the delta.")] = ()
    has_model: Annotated[bool, doc("Whether clients send a delta; for a query they do not.")] = True
    compressor: Annotated[
        Compressor | None, doc("Makes the part of the parameters that is summed; not set: all.")
    ] = None
    noise_multiplier: Annotated[
        Positive | None,
        doc(
            "Standard deviation of the noise in a sum, relative to the largest norm of one "
            "client's contribution, > 0; not set: clients add none."
        ),
    ] = None
    hides_examples: Annotated[
        bool, doc("Whether the noise hides one example of a client, rather than the client.")
    ] = False

    def __post_init__(self) -> None:
        if wrong := describe_out_of_range(self):
            raise ConfigError(f"secure aggregation: {wrong}")
        taken = {PARAMETERS, STATISTICS, LOSS, HAS_LOSS, NUM_EXAMPLES, WEIGHT}
        for lane in self.further:
            if lane.bound is None:
                raise ConfigError(
                    f"secure aggregation sums numbers of a known size, but the lane {lane.name!r} "
                    f"of the algorithm has no bound; {lane.bound_remedy}, or switch secure "
                    "aggregation off"
                )
            if lane.name in taken:
                raise ConfigError(
                    f"the algorithm has a lane {lane.name!r}, but secure aggregation "
                    "reserves this name; choose another"
                )
        if self.noise_multiplier is not None and self.by_examples:
            raise ConfigError(
                "secure aggregation: weights by examples have no noise, and would reveal how many "
                "examples clients have; weight all clients equally"
            )

    def require_same_mean(self, aggregation: object) -> None:
        """Check the aggregation of one round, since a strategy may use another one in each.

        Raises:
            RoundError: It is not the weighted mean that the sessions compute.
        """
        try:
            mean = require_weighted_mean(aggregation)
        except ConfigError as error:
            raise RoundError(f"secure aggregation: {error}") from error
        if mean.by_examples != self.by_examples:
            raise RoundError(
                f"secure aggregation: the strategy weights clients with "
                f"by_examples={mean.by_examples}, but the sessions of this run with "
                f"by_examples={self.by_examples}; use the same in all rounds"
            )

    @property
    def session_parameters(self) -> Parameters:
        """The parameters of all sessions of the run.

        The guarantee of the noise depends on how many clients are in a sum. Where clients cannot
        count the survivors, that many must sign instead.
        """
        quorum = self.parameters.quorum
        if self.noise_multiplier is not None and self._count_assured(quorum) < self.min_survivors:
            quorum = self.min_survivors
        return replace(self.parameters, min_survivors=self.min_survivors, quorum=quorum)

    @property
    def num_assured(self) -> int:
        """Least number of clients in a released sum, even if the coordinator of this plan lies."""
        return self._count_assured(self.session_parameters.quorum)

    def _count_assured(self, quorum: int) -> int:
        given = self.parameters.assumptions
        return num_assured(
            given.adversary, given.topology, quorum=quorum, min_survivors=self.min_survivors
        )

    @property
    def num_noisy(self) -> int:
        """Least number of clients in a released sum whose noise the coordinator does not know.

        It is at least one, since opening a sum takes more than A shares.
        """
        return self.min_survivors - self.parameters.num_corrupted

    @property
    def noise_share(self) -> float:
        """Standard deviation of a client's noise in a lane, divided by what it hides; 0: none.

        That is the norm of the lane, or the largest norm of one example in it.
        """
        if self.noise_multiplier is None:
            return 0.0
        # Scaled to norm 1 each, k lanes together have norm √k. Noise of independent clients adds up
        # in variance, and only that of `num_noisy` clients counts.
        num_lanes = int(self.has_model) + len(self.further)
        return self.noise_multiplier * math.sqrt(num_lanes / self.num_noisy)

    @property
    def further_bounds(self) -> dict[str, float]:
        """The largest L2 norm of a client's part of each of the strategy's further lanes."""
        return {lane.name: lane.bound for lane in self.further if lane.bound is not None}

    def vector_lanes(self, layout: Layout) -> dict[str, tuple[Lane, ...]]:
        """Return, for each lane of the strategy, the session's lanes that carry it end to end."""
        lanes = {DELTA.name: self._build_delta_lanes(layout)} if self.has_model else {}
        for lane in self.further:
            lanes[lane.name] = (self._build_further_lane(lane, lane.size(layout)),)
        return lanes

    def lanes(self, layout: Layout) -> tuple[Lane, ...]:
        """Return all lanes of a session."""
        lanes = [lane for parts in self.vector_lanes(layout).values() for lane in parts]
        if self.noise_multiplier is not None:
            # Nothing without noise may travel next to the noisy lanes.
            return tuple(lanes)
        # A client without a loss sends 0 in both lanes, so that it does not lower the mean.
        metrics = {LOSS: self.max_loss, HAS_LOSS: 1.0}
        if not self.by_examples:
            metrics[NUM_EXAMPLES] = float(self.max_examples)
        lanes += [self._build_metric_lane(name, most) for name, most in metrics.items()]
        if self.by_examples:
            num_clients = self.parameters.num_clients
            lanes.append(build_weight_lane(max_weight=self.max_examples, num_clients=num_clients))
        return tuple(lanes)

    def upload_bytes(self, layout: Layout) -> int:
        """Return the size of one client's masked update."""
        return sum(lane.num_bytes for lane in self.lanes(layout))

    def terms(
        self, layout: Layout, *, run_id: bytes, round_num: int, attempt: int, request_hash: bytes
    ) -> Terms:
        """Return the terms of one session."""
        return propose(
            self.session_parameters,
            run_id=run_id,
            round_num=round_num,
            attempt=attempt,
            request_hash=request_hash,
            max_weight=self.max_examples if self.by_examples else 0,
            lanes=self.lanes(layout),
        )

    def explain(self) -> list[tuple[str, str]]:
        """Explain all choices with their formulas, as pairs of a label and a text.

        Raises:
            ConfigError: A sum could overflow.
        """
        lane, n = self._build_first_lane(), self.parameters.num_clients
        clip = "clip_norm" if self.has_model else "bound"
        what = "delta" if self.has_model else lane.name
        rms = math.sqrt(n) * lane.step / 2.0
        is_less = self.num_assured < self.min_survivors
        assured = f"; {self.num_assured} if the coordinator lies" if is_less else ""
        scale = "x examples / max_examples" if self.by_examples else "x 1"
        whose = "the norm of one of its examples" if self.hides_examples else "its norm"
        of_each = f"of each client: {self.noise_share:.4g} times {whose}"
        levels = f"levels up to {lane.max_level}, n levels < 2^{lane.modulus_bits - 1}"
        step = f"step = {clip} / levels = {lane.step:.3g}"
        largest = f"at most n steps = {lane.largest_error(n):.3g}"
        mean = f"rms sqrt(n) step / 2 = {rms:.3g}"
        facts = replace(
            self.session_parameters, min_survivors=self.parameters.min_survivors
        ).explain()
        facts += [
            ("released", f"with at least {self.min_survivors} clients in the sum{assured}"),
            ("hides", self._hides),
        ]
        if self.noise_multiplier is not None:
            enough = f"so that {self.num_noisy} = {self.min_survivors} - A clients together have"
            whose = "one example" if self.hides_examples else "all lanes"
            times = f"{self.noise_multiplier:.4g} times that of {whose}"
            facts += [("noise", f"{of_each}, {enough} {times}")]
        return [
            *facts,
            ("fixed point", f"b = {lane.modulus_bits}, {levels}; {step}"),
            ("error", f"of one element of the sum of {what} {scale}: {largest}, {mean}"),
        ]

    @property
    def _hides(self) -> str:
        """Describe how many other updates hide a client's update in a sum."""
        corrupted = self.parameters.num_corrupted
        others = self.num_assured - corrupted - 1
        words = (
            f"one update among those of {others} others, if the coordinator knows the updates of "
            f"A = {corrupted}"
            if others > 0
            else f"nothing, if the coordinator knows the updates of A = {corrupted}"
        )
        if self.num_assured < USUAL_MIN_COHORT:
            words += (
                f"; by default clients refuse sums of fewer than {USUAL_MIN_COHORT} (min_cohort)"
            )
        return words

    def _build_delta_lanes(self, layout: Layout) -> tuple[Lane, ...]:
        num_parameters, num_statistics = layout.num_trainable, layout.size - layout.num_trainable
        if self.compressor is not None:
            shapes = layout.trainable_shapes
            num_parameters = self.compressor.count_summed(shapes, layout.dtype)
        if self.noise_multiplier is not None:
            # One lane for both: each lane more would multiply the noise (see `noise_share`).
            size = num_parameters + num_statistics
            return (self._build_lane(PARAMETERS, size, self.clip_norm),)
        parameters = self._build_lane(PARAMETERS, num_parameters, self.clip_norm)
        if not num_statistics:
            return (parameters,)
        return (parameters, self._build_lane(STATISTICS, num_statistics, self.statistics_norm))

    def _build_first_lane(self) -> Lane:
        """Build the lane of one number of the delta, or of a query's first sum, to explain it."""
        if self.has_model:
            return self._build_lane(PARAMETERS, 1, self.clip_norm)
        return self._build_further_lane(self.further[0], 1)

    def _build_further_lane(self, spec: LaneSpec, size: int) -> Lane:
        assert spec.bound is not None  # checked when this was made
        hidden_norm = spec.example_bound if self.hides_examples else None
        return self._build_lane(
            spec.name, size, spec.bound, weighted=spec.weighted, hidden_norm=hidden_norm
        )

    def _build_lane(
        self,
        name: str,
        size: int,
        bound: float,
        *,
        weighted: bool = True,
        hidden_norm: float | None = None,
    ) -> Lane:
        num_clients = self.parameters.num_clients
        if self.noise_multiplier is not None:
            return build_noisy_lane(
                name,
                size=size,
                bound=bound,
                modulus_bits=self.modulus_bits,
                num_clients=num_clients,
                noise_share=self.noise_share,
                hidden_norm=hidden_norm,
            )
        return build_vector_lane(
            name,
            size=size,
            bound=bound,
            modulus_bits=self.modulus_bits,
            num_clients=num_clients,
            weighted=self.by_examples and weighted,
        )

    def _build_metric_lane(self, name: str, most: float) -> Lane:
        return build_vector_lane(
            name,
            size=1,
            bound=most,
            modulus_bits=_METRIC_BITS,
            num_clients=self.parameters.num_clients,
            weighted=self.by_examples,
            role=LaneRole.METRIC,
        )


def clip(values: Tensor, bound: float) -> tuple[Tensor, bool]:
    """Clip ``values`` to an L2 norm of ``bound``, in float64; also return whether it was larger.

    Values that are not finite stay so, for :func:`~fedlearn.secagg.fixed_point.encode` to refuse.

    Example:
        >>> values, was_longer = clip(torch.tensor([3.0, 4.0]), 2.5)
        >>> values.tolist(), was_longer
        ([1.5, 2.0], True)
    """
    values = values.double()
    norm = float(torch.linalg.vector_norm(values))
    return (values, False) if norm <= bound else (values * (bound / norm), True)


def hash_request(work: TrainRequest | EvaluateRequest) -> bytes:
    """Return the hash by which the terms of a session identify a request."""
    return hash_notice(build_notice(work))


def hash_notice(notice: TrainingNotice | EvaluationNotice) -> bytes:
    """Return the :func:`hash_request` of the request that a notice announces."""
    if isinstance(notice, EvaluationNotice):
        return digest(b"evaluation", notice.rest_hash)
    # Sorted, since the client hashes a dict that it has decoded.
    settings = json.dumps(dict(notice.settings), sort_keys=True).encode()
    return digest(b"training settings and request", settings, notice.rest_hash)


def build_notice(work: TrainRequest | EvaluateRequest) -> TrainingNotice | EvaluationNotice:
    """Build the notice of a request, which clients receive before the model."""
    # Sorted by name: at a client, tensors that were sent separately come last.
    tensors = dict(sorted(work.tensors.items()))
    if isinstance(work, EvaluateRequest):
        rest = encode(replace(work, tensors=tensors))
        return EvaluationNotice(rest_hash=digest(b"evaluation request", rest))
    broadcast = dict(sorted(work.broadcast.items()))
    rest = encode(replace(work, tensors=tensors, broadcast=broadcast, settings={}))
    return TrainingNotice(settings=work.settings, rest_hash=digest(b"training request", rest))
