"""The seam of a round: from a cohort and a request to an aggregate.

A :class:`Collector` over a channel talks to client sessions; the simulation engine
trains whole blocks of clients in one tensor operation. The round does not know which one
it has.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.messages import ClientId, Settings
from fedlearn.core.params import Params

StateT = TypeVar("StateT")
StateT_co = TypeVar("StateT_co", covariant=True)


@dataclass(frozen=True, eq=False)
class Block:
    """A stack of validated client updates.

    Attributes:
        deltas_BP: Local minus global, one row a client: shape [B, P], or B rows of shape [P],
            each where it lies.
        weights_B: Aggregation weights, > 0: shape [B], the dtype of ``deltas_BP``.
    """

    deltas_BP: Tensor | Sequence[Tensor]
    weights_B: Tensor


#: No honest delta has an element above this; sums of weighted deltas below it cannot overflow.
MAX_DELTA = 1e20

#: Why a client whose update must not reach the aggregate failed.
UNSOUND_DELTA = f"the delta is not finite or exceeds {MAX_DELTA:g}"


def is_sound(delta: Tensor) -> bool:
    """Return whether every element is finite and at most :data:`MAX_DELTA` in size."""
    if float(torch.linalg.vector_norm(delta)) <= MAX_DELTA:  # bounds every element; rarely not
        return True
    low, high = torch.aminmax(delta)
    return float(low) >= -MAX_DELTA and float(high) <= MAX_DELTA  # a NaN is neither


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


#: Every status; a status is stored and compared as its index here. May only be appended to.
STATUSES = (Status.REPORTED, Status.LATE, Status.FAILED)


@dataclass(frozen=True, eq=False)
class Participations(Sequence[Participation]):
    """The clients of one round as columns: hundreds of rounds a second leave no objects.

    Attributes:
        client_ids: int64, shape [n].
        codes: Index of each status in :data:`STATUSES`: shape [n].
        durations_s: Shape [n].
        num_examples: int64, shape [n].
        losses: Shape [n].
        reasons: By position in the columns; only of those that failed.

    Example:
        >>> one = Participation(ClientId(7), Status.LATE, 3.0, 0, 0.0, "")
        >>> columns = Participations.of([one])
        >>> columns[0] == one, columns.num(Status.LATE), columns.num(Status.FAILED)
        (True, 1, 0)
    """

    client_ids: NDArray[np.int64]
    codes: NDArray[np.int64]
    durations_s: NDArray[np.float64]
    num_examples: NDArray[np.int64]
    losses: NDArray[np.float64]
    reasons: Mapping[int, str]

    @classmethod
    def of(cls, rows: Iterable[Participation]) -> "Participations":
        """Return ``rows`` as columns; columns as they are."""
        if isinstance(rows, Participations):
            return rows
        rows = list(rows)
        return cls(
            np.asarray([row.client_id for row in rows], np.int64),
            np.asarray([STATUSES.index(row.status) for row in rows], np.int64),
            np.asarray([row.duration_s for row in rows], np.float64),
            np.asarray([row.num_examples for row in rows], np.int64),
            np.asarray([row.loss for row in rows], np.float64),
            {place: row.reason for place, row in enumerate(rows) if row.reason},
        )

    def num(self, status: Status) -> int:
        """Return how many clients ended with ``status``."""
        return int(np.count_nonzero(self.codes == STATUSES.index(status)))

    def mean_loss(self) -> float:
        """Return the mean training loss of the reports, weighted by examples; NaN if none."""
        known = (self.codes == 0) & ~np.isnan(self.losses)
        weights = np.where(known, self.num_examples, 0)
        total = int(weights.sum())
        return float(np.where(known, self.losses, 0.0) @ weights) / total if total else math.nan

    def __len__(self) -> int:
        return len(self.client_ids)

    @overload
    def __getitem__(self, index: int) -> Participation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Participation]: ...
    def __getitem__(self, index: int | slice) -> Participation | Sequence[Participation]:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Participation]:
        rows = zip(
            self.client_ids.tolist(),
            self.codes.tolist(),
            self.durations_s.tolist(),
            self.num_examples.tolist(),
            self.losses.tolist(),
            strict=True,
        )
        for place, (client_id, code, duration_s, num_examples, loss) in enumerate(rows):
            yield Participation(
                ClientId(client_id),
                STATUSES[code],
                duration_s,
                num_examples,
                loss,
                self.reasons.get(place, ""),
            )

    def __eq__(self, other: object) -> bool:
        """Whether the rows are equal, a NaN being equal to a NaN."""
        if not isinstance(other, Participations):
            return NotImplemented
        columns = ("client_ids", "codes", "durations_s", "num_examples", "losses")
        return dict(self.reasons) == dict(other.reasons) and all(
            np.array_equal(getattr(self, name), getattr(other, name), equal_nan=True)
            for name in columns
        )

    def __hash__(self) -> NoReturn:
        raise TypeError("participations are compared by value and not hashed")


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
    participations: Participations
    duration_s: float

    def count(self, status: Status) -> int:
        """Return how many clients ended with ``status``."""
        return self.participations.num(status)


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
