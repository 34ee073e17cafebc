"""What an evaluation asks of secure aggregation: the clients' mean of each measure, and no more.

Each measure has a lane of two numbers: a client's value, cut off at a bound, and 1; or twice 0
where it has no value. So the sum over all, by how many had one, is the mean over clients that a
coordinator would otherwise compute from values in the clear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedlearn.core.ranges import Positive, out_of_range
from fedlearn.errors import ConfigError
from fedlearn.secagg.fixed_point import METRIC_SIZE, Lane, LaneRole, vector_lane
from fedlearn.secagg.parameters import Parameters
from fedlearn.secagg.terms import Terms, Total, propose

#: Width of a lane: it costs nothing that it is precise.
_BITS = 40
#: Of a mean, relative to its bound, over what rounding makes of it.
_TOLERANCE = 1e-3


class ClientMean(NamedTuple):
    """The mean of one measure over the clients that have a value of it.

    Attributes:
        num_clients: How many have one, >= 1.
    """

    value: float
    num_clients: int


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What one evaluation sums.

    Attributes:
        parameters: n, k, t, q and what they rest on.
        measures: Their names; clients may measure others, which they keep to themselves.
        max_loss: A client's value, of whatever measure, is cut off here, > 0.

    Raises:
        ConfigError: The bound is out of range; from its methods: a name is no lane's.
    """

    parameters: Parameters
    measures: Sequence[str]
    max_loss: Positive

    def __post_init__(self) -> None:
        if wrong := out_of_range(self):
            raise ConfigError(f"secure aggregation: {wrong}")

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What is summed, a lane a measure."""
        return tuple(
            vector_lane(
                name,
                size=METRIC_SIZE,
                bound=max(self.max_loss, 1.0),  # whether there is a value has room as well
                modulus_bits=_BITS,
                num_clients=self.parameters.num_clients,
                weighted=False,
                role=LaneRole.METRIC,
            )
            for name in self.measures
        )

    def terms(self, *, run_id: bytes, round_num: int, request_hash: bytes) -> Terms:
        """Return the terms of the one session that evaluates after ``round_num`` rounds."""
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
        """Return the mean of each measure over the clients that have a value of it.

        A measure of which no client has a value is absent.

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
