"""Lowers the number of clients in flight while replies arrive faster than they are aggregated."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import structlog

_log = structlog.get_logger(__name__)


def _ignore(_: int) -> None:
    """Ignore the limit."""


@dataclass(eq=False)
class InFlightLimit:
    """Limits the clients in flight of an asynchronous run by the length of the reply queue.

    A queue that forms and drains again does no harm: lowering the limit for it would leave the
    coordinator idle. A standing queue does. If the queue stayed longer than one buffer while as
    many replies arrived as clients were in flight at first, so that each client had a turn, then
    the replies beyond one buffer are not needed to keep the coordinator busy: with that many fewer
    clients, updates arrive as fast and are less stale. The limit then drops by that number in one
    step, and does not drop again until all clients that were in flight have replied. One buffer of
    replies remains queued, so that the coordinator is not idle by chance. The limit rises by one
    whenever the queue is empty.

    Attributes:
        most: Upper bound of the limit: the concurrency.
        least: Lower bound, so that a round's buffer can be filled: the buffer size, but at most
            ``most``.
        num_waiting: Returns the number of replies that have arrived and are not yet aggregated.
        on_change: Called with the limit whenever it changes.

    Example:
        >>> limit = InFlightLimit(8, 2, num_waiting=lambda: 1)
        >>> limit.measure_queue()
        >>> limit.update_limit(num_in_flight=8)
        8

    References:
        K. Nichols and V. Jacobson, 2012, "Controlling Queue Delay": a standing queue is congestion,
        and is detected by its minimum length over an interval; a queue that drains is not.
    """

    most: int
    least: int
    _: KW_ONLY
    num_waiting: Callable[[], int]
    on_change: Callable[[int], None] = _ignore
    limit: int = field(init=False)
    _lowest: int = field(init=False)  # lowest limit since it was last at `most`, to log only drops
    _found: int = 0  # queue length at the last look
    _shortest: int = 0  # shortest queue in the current interval
    _num_until_decision: int = 0  # replies until the interval ends; 0: no interval has begun

    def __post_init__(self) -> None:
        self.least = min(self.least, self.most)
        self.limit = self._lowest = self.most
        self.on_change(self.limit)

    def measure_queue(self) -> None:
        """Measure the queue; call this before taking each reply."""
        self._found = self.num_waiting()

    def update_limit(self, *, num_in_flight: int) -> int:
        """Update and return the limit, now that one of ``num_in_flight`` clients has replied."""
        before = self.limit
        if self._found <= self.least:
            # The queue has drained to one buffer: no congestion, so any interval starts over.
            self._num_until_decision = 0
            self.limit = min(self.most, self.limit + (self._found == 0))
        elif self._num_until_decision == 0:
            self._num_until_decision, self._shortest = num_in_flight - 1, self._found
        else:
            self._num_until_decision -= 1
            self._shortest = min(self._shortest, self._found)
            if self._num_until_decision == 0:
                # The queue never drained in this interval: as many clients too many as replies
                # always waited.
                needed = num_in_flight - (self._shortest - self.least)
                self.limit = min(self.limit, max(self.least, needed))
                self._num_until_decision, self._shortest = num_in_flight, self._found
        if self.limit != before:
            self._notify()
        return self.limit

    def _notify(self) -> None:
        self.on_change(self.limit)
        if self.limit == self.most:
            self._lowest = self.most
            _log.info("in_flight_unlimited", limit=self.limit)
        elif self.limit < self._lowest:
            self._lowest = self.limit
            _log.warning("in_flight_limited", limit=self.limit, num_waiting=self._found)
