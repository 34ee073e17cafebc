"""Secure evaluation: the coordinator learns the mean of each measure over clients, and no more.

Each measure has a lane of two numbers: the client's value, cut off at a bound, and 1; or two zeros
if the client has no value. So the summed values divided by the number of clients that have one give
the same mean that a coordinator would otherwise compute from values in the clear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedlearn.core.ranges import Positive, describe_out_of_range
from fedlearn.errors import ConfigError
from fedlearn.secagg.fixed_point import METRIC_SIZE, Lane, LaneRole, build_vector_lane
from fedlearn.secagg.parameters import Parameters
from fedlearn.secagg.terms import Terms, Total, propose

#: Width of a lane in bits: such a lane has two numbers, so high precision costs nothing.
_BITS = 40
#: Relative excess over its bound at which a mean is refused, on top of the rounding error.
_TOLERANCE = 1e-3


class ClientMean(NamedTuple):
    """The mean of one measure over the clients that have a value for it.

    Attributes:
        num_clients: Number of clients that have a value, >= 1.
    """

    value: float
    num_clients: int


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """The lanes and terms of one evaluation.

    Attributes:
        parameters: n, k, t, q and their assumptions.
        measures: Their names; clients may compute others, which they keep to themselves.
        max_loss: A client's value, of any measure, is cut off here, > 0.

    Raises:
        ConfigError: The bound is out of range; from its methods: a name cannot be that of a lane.
    """

    parameters: Parameters
    measures: Sequence[str]
    max_loss: Positive

    def __post_init__(self) -> None:
        if wrong := describe_out_of_range(self):
            raise ConfigError(f"secure aggregation: {wrong}")

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of the sum, one per measure."""
        return tuple(
            build_vector_lane(
                name,
                size=METRIC_SIZE,
                bound=max(self.max_loss, 1.0),  # the second number of the lane is 0 or 1
                modulus_bits=_BITS,
                num_clients=self.parameters.num_clients,
                weighted=False,
                role=LaneRole.METRIC,
            )
            for name in self.measures
        )

    def terms(self, *, run_id: bytes, round_num: int, request_hash: bytes) -> Terms:
        """Return the terms of the session that evaluates the model after ``round_num`` rounds."""
        return propose(
            self.parameters,
            run_id=run_id,
            round_num=round_num,
            attempt=0,
            request_hash=request_hash,
            max_weight=0,
            lanes=self.lanes,
        )

    def means(self, total: Total) -> dict[str, ClientMean]:
        """Compute the mean of each measure over the clients that have a value for it.

        A measure for which no client has a value is left out.

        Raises:
            ValueError: The sum cannot be that of honest clients.
        """
        found = dict[str, ClientMean]()
        for lane in self.lanes:
            value, counted = total.sums[lane.name].tolist()
            num_clients, error = round(counted), lane.largest_error(self.parameters.num_clients)
            if abs(value) > (lane.bound * num_clients + error) * (1.0 + _TOLERANCE):
                raise ValueError(f"the mean of {lane.name!r} lies outside its bound")
            if num_clients > 0:
                found[lane.name] = ClientMean(value / num_clients, num_clients)
        return found
