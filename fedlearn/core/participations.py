"""The outcome of a round for each client: reported, late, failed or stale."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, NoReturn, overload

from fedlearn.core.messages import ClientId

if TYPE_CHECKING:  # importing this module must not load numpy, which is slow
    import numpy as np
    from numpy.typing import NDArray

#: A failure's reason is cut off after this many characters, since a peer writes it.
MAX_REASON = 300

#: Metrics of a round: the number of reports that were clipped to a norm, and of those whose loss
#: or number of examples was capped for a secure sum. Recorded only where they may be known.
NUM_CLIPPED, NUM_CAPPED = "num_clipped", "num_capped"


class Status(StrEnum):
    """Outcome of a client that was sent a task."""

    REPORTED = "reported"
    LATE = "late"
    FAILED = "failed"
    STALE = "stale"


class Participation(NamedTuple):
    """One client in one round.

    Attributes:
        status: ``reported`` (in the aggregate), ``late`` (missed the end of the round: dropped,
            or awaited in later rounds), ``failed`` (sent a failure or an unusable reply), or
            ``stale`` (dropped, because the model that its update is based on is too old).
        duration_s: Seconds from the broadcast to the reply's arrival, as far as known; virtual
            seconds in a simulation.
        num_examples: Examples trained on; 0 unless reported.
        loss: Mean training loss over the local steps; NaN unless reported.
        reason: Why it failed or is stale; empty otherwise.
    """

    client_id: ClientId
    status: Status
    duration_s: float
    num_examples: int = 0
    loss: float = math.nan
    reason: str = ""


#: Every status. Statuses are stored as their index here, so only ever append to it.
STATUSES = (Status.REPORTED, Status.LATE, Status.FAILED, Status.STALE)
_COLUMNS = ("client_ids", "codes", "durations_s", "num_examples", "losses")


@dataclass(frozen=True, eq=False)
class Participations(Sequence[Participation]):
    """The clients of one round, stored as columns.

    Simulations run hundreds of rounds a second; arrays avoid one object per client.

    Attributes:
        codes: Index of each status in :data:`STATUSES`.
        reasons: Reasons of failures, by position in the columns.

    Example:
        >>> one = Participation(ClientId(7), Status.LATE, 3.0, 0, 0.0, "")
        >>> columns = Participations.of([one])
        >>> columns[0] == one, columns.num(Status.LATE), columns.num(Status.FAILED)
        (True, 1, 0)
    """

    client_ids: "NDArray[np.int64]"
    codes: "NDArray[np.int64]"
    durations_s: "NDArray[np.float64]"
    num_examples: "NDArray[np.int64]"
    losses: "NDArray[np.float64]"
    reasons: Mapping[int, str]

    @classmethod
    def of(cls, rows: Iterable[Participation]) -> "Participations":
        """Convert ``rows`` to columns; columns are returned unchanged."""
        if isinstance(rows, Participations):
            return rows
        import numpy as np  # noqa: PLC0415 (see above)

        # The rows are named tuples, whose fields are the columns, in this order.
        columns = list(zip(*rows, strict=True)) or [()] * len(Participation._fields)
        client_ids, statuses, durations_s, num_examples, losses, reasons = columns
        return cls(
            np.asarray(client_ids, np.int64),
            np.asarray(list(map(STATUSES.index, statuses)), np.int64),
            np.asarray(durations_s, np.float64),
            np.asarray(num_examples, np.int64),
            np.asarray(losses, np.float64),
            {place: reason for place, reason in enumerate(reasons) if reason},
        )

    def num(self, status: Status) -> int:
        """Return the number of clients with ``status``."""
        return self._counts[STATUSES.index(status)]

    @cached_property
    def _counts(self) -> Counter[int]:
        return Counter(self.codes.tolist())

    def mean_loss(self) -> float:
        """Return the mean training loss of the reports, weighted by examples.

        Losses that are not finite are left out; NaN if none is left.
        """
        import numpy as np  # noqa: PLC0415 (see above)

        # 0 is the code of REPORTED.
        known = (self.codes == 0) & np.isfinite(self.losses)
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
        rows = zip(*(getattr(self, name).tolist() for name in _COLUMNS), strict=True)
        for place, (client_id, code, duration_s, num_examples, loss) in enumerate(rows):
            status, reason = STATUSES[code], self.reasons.get(place, "")
            yield Participation(client_id, status, duration_s, num_examples, loss, reason)

    def __eq__(self, other: object) -> bool:
        """Whether the rows are equal; NaN equals NaN."""
        if not isinstance(other, Participations):
            return NotImplemented
        import numpy as np  # noqa: PLC0415 (see above)

        return dict(self.reasons) == dict(other.reasons) and all(
            np.array_equal(getattr(self, name), getattr(other, name), equal_nan=True)
            for name in _COLUMNS
        )

    def __hash__(self) -> NoReturn:
        raise TypeError("participations are compared by value and not hashed")
