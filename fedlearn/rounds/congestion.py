"""How many clients are in flight: fewer while replies come faster than they are folded in."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import structlog

_log = structlog.get_logger(__name__)


def _tell_nobody(_: int) -> None:
    """Tell nobody of the limit."""


@dataclass(eq=False)
class InFlightLimit:
    """Falls by the replies that always wait, and grows by one with each that is waited for.

    Replies that come together and are folded in before the next do no harm: a limit that falls for
    them leaves the coordinator idle. But if more than a buffer's worth were found waiting while
    as many landed as were in flight at first, that is while everybody had a turn, those beyond it
    are not needed to keep the coordinator busy: with as many clients fewer, updates come as fast,
    and are younger. So the limit falls to where these are gone, in one step, and is not looked at
    again before all who were in flight have landed. A buffer's worth stays, so that chance leaves
    nobody idle.

    Attributes:
        most: It is never more: the concurrency.
        least: Nor less, so that a round can be filled: the buffer's size, if that is not more.
        num_waiting: Returns how many replies are here and not folded in.
        told: Told the limit whenever it changes.

    Example:
        >>> limit = InFlightLimit(8, 2, num_waiting=lambda: 1)
        >>> limit.look()
        >>> limit.landed(num_in_flight=8)
        8

    References:
        K. Nichols and V. Jacobson, 2012, "Controlling Queue Delay": a queue that stands is
        congestion, and is seen by its least length over a while; one that is worked off is not.
    """

    most: int
    least: int
    _: KW_ONLY
    num_waiting: Callable[[], int]
    told: Callable[[int], None] = _tell_nobody
    limit: int = field(init=False)
    _lowest: int = field(init=False)  # since it was the most
    _found: int = 0
    _standing: int = 0  # the fewest found since there were no more than a buffer's worth
    _num_to_land: int = 0  # until all have landed who were in flight then

    def __post_init__(self) -> None:
        self.least = min(self.least, self.most)
        self.limit = self._lowest = self.most
        self.told(self.limit)

    def look(self) -> None:
        """Note how many replies wait; before each is taken."""
        self._found = self.num_waiting()

    def landed(self, *, num_in_flight: int) -> int:
        """Return how many may be in flight, now that one of ``num_in_flight`` has landed."""
        before = self.limit
        if self._found <= self.least:
            self._num_to_land = 0
            self.limit = min(self.most, self.limit + (self._found == 0))
        elif self._num_to_land == 0:
            self._num_to_land, self._standing = num_in_flight - 1, self._found
        else:
            self._num_to_land -= 1
            self._standing = min(self._standing, self._found)
            if self._num_to_land == 0:
                needed = num_in_flight - (self._standing - self.least)
                self.limit = min(self.limit, max(self.least, needed))
                self._num_to_land, self._standing = num_in_flight, self._found
        if self.limit != before:
            self._tell()
        return self.limit

    def _tell(self) -> None:
        self.told(self.limit)
        if self.limit == self.most:
            self._lowest = self.most
            _log.info("in_flight_unlimited", limit=self.limit)
        elif self.limit < self._lowest:
            self._lowest = self.limit
            _log.warning("in_flight_limited", limit=self.limit, num_waiting=self._found)
