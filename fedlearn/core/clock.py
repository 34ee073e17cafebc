"""Time as a dependency, so deadlines can be tested without waiting."""

import errno
import sys
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary fixed point."""

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""


class WallClock(Protocol):
    """The time of day, for timestamps that outlive a process.

    It can jump when the system clock is set, so do not measure durations with it.
    """

    def unix_s(self) -> float:
        """Return seconds since 1970 in UTC."""


class RealClock(Clock, WallClock, Protocol):
    """Monotonic time, and the time of day."""


class SystemClock:
    """The clock of a deployment, and of the wall time a simulation reports."""

    def now_s(self) -> float:
        """Return the monotonic time."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)

    def unix_s(self) -> float:
        """Return the wall-clock time."""
        return time.time()


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

    def unix_s(self) -> float:
        """Return the virtual seconds slept so far: the simulation begins in 1970."""
        return self.elapsed_s


def thread_processor_s(thread: int) -> float:
    """Return the CPU time in seconds of a thread of this process, by its native id; Linux only.

    Raises:
        OSError: The thread has ended, or this is another operating system.
    """
    # time.pthread_getcpuclockid may crash if the thread has ended, so the clock's id is computed
    # here as the kernel does: MAKE_THREAD_CPUCLOCK.
    # 6 = CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED.
    if sys.platform == "linux":
        return time.clock_gettime(~thread << 3 | 6)
    raise OSError(errno.ENOSYS, "this system has no clock for a thread")


def process_processor_s() -> float:
    """Return the CPU time in seconds that this process has used."""
    return time.process_time()


def utc_now() -> str:
    """Return the wall-clock date and time in UTC, ISO 8601 with seconds."""
    return utc(time.time())


def utc(unix_s: float) -> str:
    """Return seconds since 1970 as date and time in UTC, ISO 8601 with seconds.

    Example:
        >>> utc(0.0)
        '1970-01-01T00:00:00Z'
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
