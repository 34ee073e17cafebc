"""Time as a dependency, so deadlines can be tested without waiting."""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary fixed point."""

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""


class SystemClock:
    """The clock of a deployment, and of the wall time a simulation reports."""

    def now_s(self) -> float:
        """Return the monotonic time."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)


@dataclass
class VirtualClock:
    """The clock of a simulation: sleeping takes no time.

    Example:
        >>> clock = VirtualClock()
        >>> clock.sleep(3600.0)
        >>> clock.now_s()
        3600.0
    """

    elapsed_s: float = 0.0

    def now_s(self) -> float:
        """Return the virtual seconds slept so far."""
        return self.elapsed_s

    def sleep(self, seconds: float) -> None:
        """Advance the virtual time at once."""
        self.elapsed_s += seconds


def utc_now() -> str:
    """Return the wall-clock date and time in UTC, ISO 8601 with seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
