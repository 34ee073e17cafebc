"""What a coordinator must still know after a crash inside a round, and who coordinates.

The cohort of a round is written down before anyone is asked: a restart asks the same
clients, whoever is connected by then, and counts the replies that were logged before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.core.clock import WallClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import StoreError

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
class JournaledSampler:
    """A :class:`fedlearn.algorithms.sampling.CohortSampler` that never asks twice.

    Attributes:
        sampler: Chooses the cohort of a round that is not open yet.
        journal: Where cohorts are written down.
        clock: The time of day.
    """

    sampler: CohortSampler
    journal: RoundJournal
    clock: WallClock

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the cohort in the journal, else choose one and write it down first.

        Raises:
            CohortTooSmall: As the sampler.
            StoreError: The journal cannot be read or written.
        """
        opened = self.journal.find(round_num, attempt)
        if opened is not None:
            return opened.cohort
        cohort = self.sampler.sample(
            available, num_asked=num_asked, round_num=round_num, attempt=attempt, seed=seed
        )
        self.journal.open(
            OpenRound(
                round_num=round_num,
                attempt=attempt,
                cohort=cohort,
                opened_unix_s=self.clock.unix_s(),
            )
        )
        return cohort


class MemoryJournal:
    """A :class:`RoundJournal` that ends with its process.

    Example:
        >>> journal = MemoryJournal()
        >>> journal.open(OpenRound(round_num=3, attempt=0, cohort=(), opened_unix_s=0.0))
        >>> journal.forget(before_round=4)
        >>> journal.last() is None
        True
    """

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], OpenRound] = {}

    def find(self, round_num: int, attempt: int) -> OpenRound | None:
        """Return the round as it was opened."""
        return self._rounds.get((round_num, attempt))

    def open(self, opened: OpenRound) -> None:
        """Keep a round."""
        key = opened.round_num, opened.attempt
        check_same(self._rounds.setdefault(key, opened), opened)

    def last(self) -> OpenRound | None:
        """Return the latest attempt of the latest round."""
        return self._rounds[max(self._rounds)] if self._rounds else None

    def forget(self, before_round: int) -> None:
        """Remove the rounds before ``before_round``."""
        self._rounds = {key: each for key, each in self._rounds.items() if key[0] >= before_round}


def check_same(known: OpenRound, opened: OpenRound) -> None:
    """Check that a round that is open is not opened with another cohort.

    Raises:
        StoreError: It is.
    """
    if known.cohort != opened.cohort:
        raise StoreError(
            f"round {opened.round_num}, attempt {opened.attempt}, is open with another cohort: "
            f"{len(known.cohort)} clients, not these {len(opened.cohort)}; ask those of the "
            "journal"
        )


@dataclass(frozen=True, kw_only=True)
class Deployment:
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
