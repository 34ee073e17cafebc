"""Retry while the database is unreachable or the disk full, so that a round survives it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from structlog.typing import FilteringBoundLogger

from fedlearn.core.clock import Clock
from fedlearn.errors import NoSpace, StoreUnavailable
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.rounds.opening import Charges

T = TypeVar("T")

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Retries an operation for ``give_up_s`` while the database is unreachable or a disk full.

    Example:
        >>> import structlog
        >>> from fedlearn.core.clock import VirtualClock
        >>> patiently = Patience(clock=VirtualClock(), give_up_s=60.0, log=structlog.get_logger())
        >>> patiently(lambda: 3)
        3
    """

    clock: Clock
    give_up_s: float
    log: FilteringBoundLogger

    def __call__(self, operation: Callable[[], T]) -> T:
        """Call ``operation`` until it succeeds, and return its result.

        The operation must be idempotent: an attempt that raised may have been committed.

        Raises:
            StoreUnavailable: The operation still fails after ``give_up_s`` seconds.
        """
        away_since_s: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                result = operation()
            except StoreUnavailable as error:
                now_s = self.clock.now_s()
                if away_since_s is None:
                    away_since_s = now_s
                    is_full = isinstance(error, NoSpace)
                    what = "the disk is full" if is_full else "the database is away"
                    self.log.warning(what, error=str(error), give_up_s=self.give_up_s)
                left_s = away_since_s + self.give_up_s - now_s
                if left_s <= 0:
                    raise
                # Not beyond the limit: the last attempt comes when the time is up.
                self.clock.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                if away_since_s is not None:
                    away_s = round(self.clock.now_s() - away_since_s, 1)
                    self.log.info("the store is back", away_s=away_s)
                return result


@dataclass(frozen=True, kw_only=True)
class PatientJournal:
    """A :class:`fedlearn.rounds.journal.RoundJournal` that waits for its database."""

    journal: RoundJournal
    patiently: Patience

    def find(self, round_num: int, attempt: int) -> OpenRound | None:
        """Return the round as it was opened."""
        return self.patiently(lambda: self.journal.find(round_num, attempt))

    def open(self, opened: OpenRound) -> None:
        """Record a round as open."""
        self.patiently(lambda: self.journal.open(opened))

    def last(self) -> OpenRound | None:
        """Return the latest attempt of the latest round."""
        return self.patiently(self.journal.last)

    def forget(self, before_round: int) -> None:
        """Remove the rounds before ``before_round``."""
        self.patiently(lambda: self.journal.forget(before_round))


@dataclass(frozen=True, kw_only=True)
class PatientCharges:
    """:class:`~fedlearn.rounds.opening.Charges` that wait for their database.

    Attributes:
        charges: The underlying charges.
        patiently: Retries while the database is unreachable.
    """

    charges: Charges
    patiently: Patience

    def charge(self, *, round_num: int, attempt: int) -> None:
        """Charge an attempt at a round; see :class:`~fedlearn.rounds.opening.Charges`."""
        self.patiently(partial(self.charges.charge, round_num=round_num, attempt=attempt))

    def can_afford_round(self) -> bool:
        """Whether another round can be charged; see :class:`~fedlearn.rounds.opening.Charges`."""
        return self.charges.can_afford_round()

    def report_spending(self, *, is_last: bool) -> Mapping[str, float]:
        """Return the spending so far; see :class:`~fedlearn.rounds.opening.Charges`."""
        return self.charges.report_spending(is_last=is_last)
