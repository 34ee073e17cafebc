"""How long to wait before trying again: exponentially longer, and never all at once."""

from collections.abc import Callable
from dataclasses import dataclass

from fedlearn.core.randomness import jitter


@dataclass
class Backoff:
    """Waits of up to 1 s, 2 s, 4 s, … 5 min, each uniformly distributed from zero.

    Attributes:
        first_s: Upper bound of the first wait.
        last_s: Upper bound of all waits.
        jitter: A number in [0, 1).

    References:
        M. Brooker, 2015, "Exponential Backoff And Jitter" (full jitter).

    Example:
        >>> waits = Backoff(jitter=lambda: 0.5)
        >>> [waits.next_s() for _ in range(4)]
        [0.5, 1.0, 2.0, 4.0]
    """

    first_s: float = 1.0
    last_s: float = 300.0
    jitter: Callable[[], float] = jitter
    _bound_s: float = 0.0

    def next_s(self) -> float:
        """Return the seconds to wait now."""
        self._bound_s = min(self.last_s, 2.0 * self._bound_s or self.first_s)
        return self._bound_s * self.jitter()

    def reset(self) -> None:
        """Begin again with short waits: something has worked."""
        self._bound_s = 0.0
