"""Waiting for a database that is away, or for space, so that a round outlives that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from structlog.typing import FilteringBoundLogger

from fedlearn.core.clock import Clock
from fedlearn.errors import NoSpace, StoreUnavailable
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStatus, RunStore

T = TypeVar("T")

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


def patient(
    operation: Callable[[], T], *, clock: Clock, give_up_s: float, log: FilteringBoundLogger
) -> T:
    """Return what ``operation`` returns, tried again while the database is away or a disk full.

    Args:
        operation: Does the same, once or twice: its answer may have been lost.
        clock: Measures and waits.
        give_up_s: Seconds from the first failure after which the error is raised.
        log: Told when the database goes, and when it is back.

    Raises:
        StoreUnavailable: It is still away after ``give_up_s``.

    Example:
        >>> import structlog
        >>> from fedlearn.core.clock import VirtualClock
        >>> log = structlog.get_logger()
        >>> patient(lambda: 3, clock=VirtualClock(), give_up_s=60.0, log=log)
        3
    """
    away_since_s: float | None = None
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            result = operation()
        except StoreUnavailable as error:
            now_s = clock.now_s()
            if away_since_s is None:
                away_since_s = now_s
                what = "the disk is full" if isinstance(error, NoSpace) else "the database is away"
                log.warning(what, error=str(error), give_up_s=give_up_s)
            left_s = away_since_s + give_up_s - now_s
            if left_s <= 0:
                raise
            clock.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            if away_since_s is not None:
                log.info("the store is back", away_s=round(clock.now_s() - away_since_s, 1))
            return result


@dataclass(frozen=True, kw_only=True)
class PatientStore:
    """A :class:`fedlearn.rounds.records.RunStore` that waits for its database.

    Attributes:
        store: Whose commits may be tried again.
        clock: Measures and waits.
        give_up_s: How long the database may be away.
        log: Told of it.
    """

    store: RunStore
    clock: Clock
    give_up_s: float
    log: FilteringBoundLogger

    def append(self, record: RoundRecord) -> None:
        """Take the record of a finished round."""
        self.store.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` and all records so far durable."""
        self._patiently(lambda: self.store.commit(checkpoint))

    def finish(self, status: RunStatus, *, error: str) -> None:
        """Record how the run ended."""
        self._patiently(lambda: self.store.finish(status, error=error))

    def _patiently(self, operation: Callable[[], None]) -> None:
        patient(operation, clock=self.clock, give_up_s=self.give_up_s, log=self.log)


@dataclass(frozen=True, kw_only=True)
class PatientJournal:
    """A :class:`fedlearn.rounds.journal.RoundJournal` that waits for its database.

    Attributes:
        journal: Whose operations may be tried again.
        clock: Measures and waits.
        give_up_s: How long the database may be away.
        log: Told of it.
    """

    journal: RoundJournal
    clock: Clock
    give_up_s: float
    log: FilteringBoundLogger

    def find(self, round_num: int, attempt: int) -> OpenRound | None:
        """Return the round as it was opened."""
        return self._patiently(lambda: self.journal.find(round_num, attempt))

    def open(self, opened: OpenRound) -> None:
        """Write a round down."""
        self._patiently(lambda: self.journal.open(opened))

    def last(self) -> OpenRound | None:
        """Return the latest attempt of the latest round."""
        return self._patiently(self.journal.last)

    def forget(self, before_round: int) -> None:
        """Remove the rounds before ``before_round``."""
        self._patiently(lambda: self.journal.forget(before_round))

    def _patiently(self, operation: Callable[[], T]) -> T:
        return patient(operation, clock=self.clock, give_up_s=self.give_up_s, log=self.log)
