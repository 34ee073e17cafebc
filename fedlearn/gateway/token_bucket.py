"""A rate limit: so many events a second on average, with a small burst."""

from dataclasses import dataclass, field


@dataclass
class TokenBucket:
    """Bounds how often something happens: ``rate_per_s`` on average, two seconds' worth at once.

    Example:
        >>> bucket = TokenBucket(rate_per_s=10.0, now_s=0.0)
        >>> [bucket.take(now_s=0.0) for _ in range(20)][-1], bucket.take(now_s=0.0)
        (0.0, 0.1)
    """

    rate_per_s: float
    now_s: float
    _tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = 2.0 * self.rate_per_s

    def has(self, *, now_s: float) -> bool:
        """Take a token if there is one; return whether there was."""
        if self.take(now_s=now_s) == 0.0:
            return True
        self._tokens += 1.0  # the caller does not wait for its token, so it goes back
        return False

    def take(self, *, now_s: float) -> float:
        """Take a token and return the seconds to wait before proceeding; 0 within the bound."""
        # Tokens may go below zero: each caller that waits owes one, so the next waits longer.
        grown = self._tokens + (now_s - self.now_s) * self.rate_per_s
        self._tokens = min(grown, 2.0 * self.rate_per_s) - 1.0
        self.now_s = now_s
        return max(0.0, -self._tokens / self.rate_per_s)
