"""Whether the threads that must go on do: a supervisor restarts a process where one is stuck."""

from dataclasses import dataclass, field

from fedlearn.core.clock import Clock


@dataclass(kw_only=True)
class SignsOfLife:
    """When threads that must not stand still have last shown that they go on; any thread may ask.

    Attributes:
        stuck_after_s: Without a sign for so long a thread is stuck.
        clock: Real time.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> clock = VirtualClock()
        >>> signs = SignsOfLife(stuck_after_s=10.0, clock=clock)
        >>> signs.show("rounds")
        >>> clock.sleep(11.0)
        >>> signs.stuck()
        'the thread of the rounds has shown no sign of life for 11 s'
    """

    stuck_after_s: float
    clock: Clock
    _shown_s: dict[str, float] = field(default_factory=dict)

    def show(self, thread: str, *, sleeps_s: float = 0.0) -> None:
        """Note that a thread goes on; what it does next may sleep for so long."""
        self._shown_s[thread] = self.clock.now_s() + sleeps_s

    def stuck(self) -> str:
        """Return which threads stand still, and for how long, in words; empty: none does."""
        now_s = self.clock.now_s()
        silent = {thread: now_s - shown_s for thread, shown_s in self._shown_s.copy().items()}
        return "; ".join(
            f"the thread of the {thread} has shown no sign of life for {silent_s:.0f} s"
            for thread, silent_s in silent.items()
            if silent_s > self.stuck_after_s
        )
