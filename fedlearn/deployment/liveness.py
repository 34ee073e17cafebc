"""Detect stuck threads, so that a supervisor can restart the process."""

from dataclasses import dataclass, field

from fedlearn.core.clock import Clock


@dataclass(kw_only=True)
class SignsOfLife:
    """Tracks when each watched thread last showed a sign of life; safe to call from any thread.

    Attributes:
        stuck_after_s: Seconds without a sign of life after which a thread counts as stuck.
        clock: Real time.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> clock = VirtualClock()
        >>> signs = SignsOfLife(stuck_after_s=10.0, clock=clock)
        >>> signs.show("rounds")
        >>> clock.sleep(11.0)
        >>> signs.describe_stuck()
        'the thread of the rounds has shown no sign of life for 11 s'
    """

    stuck_after_s: float
    clock: Clock
    _shown_s: dict[str, float] = field(default_factory=dict)

    def show(self, thread: str, *, sleeps_s: float = 0.0) -> None:
        """Record a sign of life of a thread, which may now sleep for ``sleeps_s``."""
        self._shown_s[thread] = self.clock.now_s() + sleeps_s

    def forget(self, thread: str) -> None:
        """Stop tracking a thread, which has ended."""
        self._shown_s.pop(thread, None)

    def describe_stuck(self) -> str:
        """Describe which threads are stuck, and for how long; empty if none is."""
        now_s = self.clock.now_s()
        # A copy: other threads write to it.
        silent = {thread: now_s - shown_s for thread, shown_s in self._shown_s.copy().items()}
        return "; ".join(
            f"the thread of the {thread} has shown no sign of life for {silent_s:.0f} s"
            for thread, silent_s in silent.items()
            if silent_s > self.stuck_after_s
        )
