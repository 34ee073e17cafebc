"""Remembers a costly answer for a while, however often pages ask for it."""

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from fedlearn.core.clock import Clock

T = TypeVar("T")


class Remembered(Generic[T]):
    """Calls a function at most once in ``for_s`` seconds; other threads wait for its result.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> clock, asked = VirtualClock(), iter([1, 2])
        >>> answer = Remembered(lambda: next(asked), clock=clock, for_s=5.0)
        >>> first = [answer(), answer()]
        >>> clock.sleep(5.0)
        >>> [*first, answer()]
        [1, 1, 2]
    """

    def __init__(self, compute: Callable[[], T], *, clock: Clock, for_s: float) -> None:
        self._compute, self._clock, self._for_s = compute, clock, for_s
        self._last: tuple[float, T] | None = None
        self._lock = Lock()

    def __call__(self) -> T:
        """Return the remembered result, or a new one; errors are raised and not remembered."""
        with self._lock:
            now_s = self._clock.now_s()
            if self._last is None or now_s - self._last[0] >= self._for_s:
                self._last = now_s, self._compute()
            return self._last[1]
