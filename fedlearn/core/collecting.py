"""The seam of a round: from a cohort and a request to an aggregate.

A :class:`Collector` over a channel talks to client sessions; the simulation engine
trains whole blocks of clients in one tensor operation. The round does not know which one
it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fedlearn.core.messages import ClientId, Settings
from fedlearn.core.params import Params

StateT = TypeVar("StateT")
StateT_co = TypeVar("StateT_co", covariant=True)


@dataclass(frozen=True, eq=False)
class Block:
    """A stack of validated client updates.

    Attributes:
        deltas_BP: Local minus global, one row a client: shape [B, P].
        weights_B: Aggregation weights, > 0: shape [B], the dtype of ``deltas_BP``.
    """

    deltas_BP: Tensor
    weights_B: Tensor


class Status(StrEnum):
    """What became of a client that was asked."""

    REPORTED = "reported"
    LATE = "late"
    FAILED = "failed"


class Participation(NamedTuple):
    """One client in one round.

    Attributes:
        client_id: Who.
        status: ``reported`` (in the aggregate), ``late`` (missed the close of the round:
            dropped), or ``failed`` (answered with a failure or an unusable reply).
        duration_s: Seconds from the broadcast to the reply's arrival, as far as known:
            virtual in a simulation.
        num_examples: Examples trained on; 0 unless reported.
        loss: Mean training loss over the local steps; NaN unless reported.
        reason: Why it failed; empty otherwise.
    """

    client_id: ClientId
    status: Status
    duration_s: float
    num_examples: int
    loss: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """What a round asks of its cohort.

    Attributes:
        round_num: Round index, from 0.
        attempt: 0, or how often the round was retried.
        params: The global model.
        settings: The algorithm's local update, as settings.
        seed: Public seed of client-side randomness.
    """

    round_num: int
    attempt: int
    params: Params
    settings: Settings
    seed: int


@dataclass(frozen=True, kw_only=True)
class Collected(Generic[StateT_co]):
    """The outcome of one collection.

    Attributes:
        aggregate: The aggregator's state; ``finalize`` reads it out.
        participations: One a client asked, in order of arrival.
        duration_s: Seconds from the broadcast to the close of the round.
    """

    aggregate: StateT_co
    participations: tuple[Participation, ...]
    duration_s: float

    def count(self, status: Status) -> int:
        """Return how many clients ended with ``status``."""
        return sum(p.status is status for p in self.participations)


class Collector(Protocol[StateT_co]):
    """Turns a request to a cohort into one aggregate."""

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""

    def collect(self, cohort: Sequence[ClientId], request: RoundRequest) -> Collected[StateT_co]:
        """Return what was aggregated, who took part, and who failed and why."""

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Return what must be saved with a checkpoint for an exact resume.

        A simulation also plays the clients, so it saves what they keep between rounds;
        over a channel the clients keep it themselves and this is empty.
        """

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state_tensors` returned."""
