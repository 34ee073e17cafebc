"""What a coordinator must still know after a crash inside a round, and who coordinates.

The cohort of a round is written down before anyone is asked
(:class:`fedlearn.deployment.opening.DurableOpening`): a restart asks the same clients, whoever is
connected by then, and counts the replies that were logged before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from fedlearn.core.messages import ClientId

#: What an operator wants of a deployed run.
Control: TypeAlias = Literal["run", "pause", "abort"]


@dataclass(frozen=True, kw_only=True)
class OpenRound:
    """A round that clients have been, or are about to be, asked to take part in.

    Attributes:
        round_num: Index, from 0.
        attempt: How often this round was tried before.
        cohort: Who is asked, in the sampler's order.
        opened_unix_s: When the cohort was chosen, seconds since 1970: monotonic time does
            not outlive a process.
    """

    round_num: int
    attempt: int
    cohort: tuple[ClientId, ...]
    opened_unix_s: float


class RoundJournal(Protocol):
    """The open rounds of one run.

    Every method raises :class:`fedlearn.errors.StoreError` if the journal cannot be read or
    written, and those that write :class:`fedlearn.errors.Fenced` after a takeover.
    """

    def find(self, round_num: int, attempt: int) -> OpenRound | None:
        """Return the round as it was opened; ``None`` if it was not."""

    def open(self, opened: OpenRound) -> None:
        """Write a round down, durably before returning; the same one again changes nothing.

        Raises:
            StoreError: It is open with another cohort.
        """

    def last(self) -> OpenRound | None:
        """Return the latest attempt of the latest round; ``None`` if none is open."""

    def forget(self, before_round: int) -> None:
        """Remove the rounds before ``before_round``: they are part of a commit."""


@dataclass(frozen=True, kw_only=True)
class DeployedRun:
    """A deployed run, as operators see it and as its coordinators agree on it.

    Attributes:
        name: Of the run.
        run_id: Names the run to clients: 32 hexadecimal digits, of no other run. One that goes
            back to an earlier checkpoint has another from then on.
        control: What an operator wants of it.
        holder: The coordinator that runs it; empty after an orderly end.
        epoch: How often a coordinator has taken it over.
        beat: Grows while the holder lives.
        status: What the holder last said of itself; JSON values only.
    """

    name: str
    run_id: str
    control: Control
    holder: str
    epoch: int
    beat: int
    status: Mapping[str, object]
