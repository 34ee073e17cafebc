"""Durable records of a deployed run: its open rounds and its current coordinator.

The cohort of a round is recorded before any client is asked
(:class:`fedlearn.deployment.opening.DurableOpening`). A restarted coordinator asks the same
clients, no matter which ones are connected by then, and counts the replies that were logged before
the crash.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from fedlearn.core.messages import ClientId

#: The operator's current instruction to a deployed run.
Control: TypeAlias = Literal["run", "pause", "abort"]


@dataclass(frozen=True, kw_only=True)
class OpenRound:
    """An attempt at a round whose clients have been asked, or are about to be.

    Attributes:
        round_num: Round index, from 0.
        attempt: Retry number of the round, starting at 0.
        cohort: The clients asked, in the sampler's order.
        opened_unix_s: When the cohort was drawn, in seconds since 1970, because monotonic time
            does not survive a restart.
    """

    round_num: int
    attempt: int
    cohort: tuple[ClientId, ...]
    opened_unix_s: float


class RoundJournal(Protocol):
    """The open rounds of one run.

    Every method raises :class:`fedlearn.errors.StoreError` if the journal cannot be read or
    written. Methods that write raise :class:`fedlearn.errors.Fenced` after a takeover.
    """

    def find(self, round_num: int, attempt: int) -> OpenRound | None:
        """Return an attempt as it was opened; ``None`` if it was not."""

    def open(self, opened: OpenRound) -> None:
        """Record an attempt durably before returning; recording the same one again is a no-op.

        Raises:
            StoreError: The attempt is already open with another cohort.
        """

    def last(self) -> OpenRound | None:
        """Return the latest attempt of the latest round; ``None`` if none is open."""

    def forget(self, before_round: int) -> None:
        """Remove the rounds before ``before_round``, which a commit has made durable."""


@dataclass(frozen=True, kw_only=True)
class LeaseState:
    """A row with a lease, through which coordinators and operators interact.

    Attributes:
        name: Name of the run or the service.
        control: The operator's current instruction.
        holder: The coordinator that has the lease; empty after an orderly end.
        epoch: Number of times that a coordinator has taken the lease.
        beat: Heartbeat counter, which grows while the holder is alive.
        status: The holder's latest status report; JSON values only.
    """

    name: str
    control: Control
    holder: str
    epoch: int
    beat: int
    status: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class DeployedRun(LeaseState):
    """The shared row of a deployed run.

    Attributes:
        run_id: Unique id by which clients know the run: 32 hexadecimal digits. A rollback to an
            earlier checkpoint gives the run a new id.
    """

    run_id: str


@dataclass(frozen=True, kw_only=True)
class Service(LeaseState):
    """The shared row of a service, which runs the queue of its database.

    Attributes:
        uuid: Unique id of the service: 32 hexadecimal digits.
    """

    uuid: str
