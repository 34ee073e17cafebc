"""Exponential back-off with jitter, so that clients do not reconnect all at the same time."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from annotated_types import doc

from fedlearn.core.ranges import Positive, describe_out_of_range
from fedlearn.core.secret_bytes import draw_jitter
from fedlearn.errors import ConfigError

#: Upper bound of the first wait.
_FIRST_S = 1.0
#: Shortest absence, so that a coordinator that asks for none does not cause a busy loop.
_LEAST_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Reconnection:
    """How soon a client tries to reconnect to its coordinator.

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> Reconnection(max_backoff_s=10.0).clamp_absence_s(1e9)
        3600.0
    """

    max_backoff_s: Annotated[
        Positive,
        doc(
            "Longest wait after a failed attempt to connect, in seconds, > 0: the waits are up to "
            "1 s, 2 s, 4 s and so on, but never longer than this."
        ),
    ] = 20.0
    max_absence_s: Annotated[
        Positive,
        doc(
            "Longest absence that a coordinator may ask for, in seconds, > 0. A coordinator that "
            "has enough clients, or is stopping, asks clients to come back later."
        ),
    ] = 3600.0

    def __post_init__(self) -> None:
        if wrong := describe_out_of_range(self):
            raise ConfigError(f"reconnection.{wrong}")

    def clamp_absence_s(self, requested_s: float) -> float:
        """Clamp the absence that a coordinator asks for, ``requested_s``, which may even be NaN."""
        # The order of the arguments matters: max(_LEAST_S, nan) is _LEAST_S.
        return min(max(_LEAST_S, requested_s), self.max_absence_s)


@dataclass
class Backoff:
    """Generates waits of up to 1 s, 2 s, 4 s and so on, each drawn uniformly from zero up.

    Attributes:
        max_s: Upper bound of every wait, in seconds.
        jitter: Returns a random number in [0, 1).

    References:
        M. Brooker, 2015, "Exponential Backoff And Jitter" (full jitter).

    Example:
        >>> waits = Backoff(max_s=5.0, jitter=lambda: 0.5)
        >>> [waits.next_s() for _ in range(4)]
        [0.5, 1.0, 2.0, 2.5]
    """

    max_s: float
    _: KW_ONLY
    jitter: Callable[[], float] = draw_jitter
    _bound_s: float = 0.0

    def next_s(self) -> float:
        """Draw the next wait, in seconds."""
        # The bound is 0 before the first wait.
        self._bound_s = min(self.max_s, 2.0 * self._bound_s or _FIRST_S)
        return self._bound_s * self.jitter()

    def reset(self) -> None:
        """Start again with short waits, after a success."""
        self._bound_s = 0.0
