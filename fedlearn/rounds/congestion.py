"""How many clients are in flight: fewer while replies come faster than they are folded in."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import structlog

_LESS = 0.5

_log = structlog.get_logger(__name__)


def _tell_nobody(_: int) -> None:
    """Tell nobody of the limit."""


@dataclass(eq=False)
class InFlightLimit:
    """Halves while a buffer's worth of replies waits, and grows by one with each that finds none.

    As a sender on a network that is congested: it is halved at most once while as many clients land
    as may be in flight, since what it does is seen only then.

    Attributes:
        most: It is never more: the concurrency.
        least: Nor less, so that a round can be filled: the buffer's size, if that is not more.
        num_waiting: Returns how many replies are here and not folded in.
        told: Told the limit whenever it changes.

    Example:
        >>> limit = InFlightLimit(8, 2, num_waiting=lambda: 1)
        >>> limit.landed(), limit.limit
        (8, 8)

    References:
        D. Chiu and R. Jain, 1989, "Analysis of the Increase and Decrease Algorithms for Congestion
        Avoidance in Computer Networks".
    """

    most: int
    least: int
    _: KW_ONLY
    num_waiting: Callable[[], int]
    told: Callable[[int], None] = _tell_nobody
    limit: int = field(init=False)
    _num_landed: int = field(init=False)  # since it was halved

    def __post_init__(self) -> None:
        self.least = min(self.least, self.most)
        self.limit = self._num_landed = self.most
        self.told(self.limit)

    def landed(self) -> int:
        """Return how many clients may be in flight, now that one has landed."""
        self._num_landed += 1
        num_waiting, before = self.num_waiting(), self.limit
        if num_waiting >= self.least and self._num_landed >= self.limit:
            self.limit, self._num_landed = max(self.least, int(self.limit * _LESS)), 0
        elif num_waiting == 0:
            self.limit = min(self.most, self.limit + 1)
        if self.limit != before:
            self.told(self.limit)
        if self.limit < before:
            _log.warning("in_flight_limited", limit=self.limit, num_waiting=num_waiting)
        return self.limit
