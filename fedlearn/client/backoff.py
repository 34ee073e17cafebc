"""How long to wait before trying again: exponentially longer, and never all at once."""

from collections.abc import Callable
from dataclasses import dataclass

from fedlearn.core.secret_bytes import jitter

#: Upper bounds of the first wait and of all.
_FIRST_S, _LAST_S = 1.0, 300.0


@dataclass
class Backoff:
    """Waits of up to 1 s, 2 s, 4 s, … 5 min, each uniformly distributed from zero.

    Attributes:
        jitter: A number in [0, 1).

    References:
        M. Brooker, 2015, "Exponential Backoff And Jitter" (full jitter).

    Example:
        >>> waits = Backoff(jitter=lambda: 0.5)
        >>> [waits.next_s() for _ in range(4)]
        [0.5, 1.0, 2.0, 4.0]
    """

    jitter: Callable[[], float] = jitter
    _bound_s: float = 0.0

    def next_s(self) -> float:
        """Return the seconds to wait now."""
        self._bound_s = min(_LAST_S, 2.0 * self._bound_s or _FIRST_S)
        return self._bound_s * self.jitter()

    def reset(self) -> None:
        """Begin again with short waits: something has worked."""
        self._bound_s = 0.0
