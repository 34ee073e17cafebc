"""Measure the coordinator's own work per round, without the time spent waiting for clients."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fedlearn.core.clock import Clock
from fedlearn.gateway.counters import Histogram

#: Bucket bounds in seconds: from a small tabular model to one that takes an hour to evaluate.
_WORK_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@dataclass(kw_only=True)
class RoundTimes:
    """Measures the work of each round, on the thread that runs them.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> clock = VirtualClock()
        >>> times = RoundTimes(clock=clock)
        >>> times.begin()
        >>> with times.waiting():
        ...     clock.sleep(60.0)
        >>> clock.sleep(2.0)
        >>> times.finish()
        >>> times.histogram.total
        2.0
    """

    clock: Clock
    histogram: Histogram = field(default_factory=lambda: Histogram(_WORK_S))
    _begun_s: float | None = None
    _waited_s: float = 0.0

    def begin(self) -> None:
        """Start timing a round; another attempt at the same round continues the timing."""
        if self._begun_s is None:
            self._begun_s, self._waited_s = self.clock.now_s(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the duration of the block."""
        begun_s = self.clock.now_s()
        try:
            yield
        finally:
            self._waited_s += self.clock.now_s() - begun_s

    def finish(self) -> None:
        """Record the duration of the round, which has been committed."""
        if self._begun_s is not None:
            self.histogram.observe(self.clock.now_s() - self._begun_s - self._waited_s)
            self._begun_s = None
