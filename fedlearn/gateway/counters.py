"""Counters of the coordinator's network side, which telemetry reads from any thread."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields


@dataclass
class Histogram:
    """Counts of values by bucket, written by one thread.

    Attributes:
        bounds: Upper ends of all buckets but the last, which has none; ascending.

    Example:
        >>> seconds = Histogram((0.1, 1.0))
        >>> for each in (0.05, 0.1, 0.5, 7.0):
        ...     seconds.observe(each)
        >>> seconds.cumulate(), round(seconds.total, 2)
        ([2, 3, 4], 7.65)
    """

    bounds: Sequence[float]
    total: float = 0.0
    _counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulate(self) -> list[int]:
        """Return the number of values up to each bound, and last the number of all values."""
        counts = self._counts.copy()
        return [sum(counts[: place + 1]) for place in range(len(counts))]


#: From a local network to a phone far away, and from a table's model to a language model's.
_UPLOAD_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_UPLOAD_BYTES = tuple(10.0**power for power in range(3, 12))


@dataclass
class GatewayCounters:
    """Counters that only increase, written by the server's event loop alone.

    :mod:`fedlearn.gateway.meanings` says what each one counts.
    """

    connections: int = 0
    authenticated: int = 0
    enrolment_connections: int = 0
    looks: int = 0
    check_ins: int = 0
    paced: int = 0
    sessions: int = 0
    sessions_replaced: int = 0
    sessions_dropped: int = 0
    sent_away: int = 0
    messages: int = 0
    throttled: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    downloads: int = 0
    sent_ahead: int = 0
    uploads: int = 0
    uploads_resumed: int = 0
    stalled: int = 0
    disk_full: int = 0
    replies_logged: int = 0
    replies_accepted: int = 0
    replies_late: int = 0
    enrolled: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    upload_seconds: Histogram = field(default_factory=lambda: Histogram(_UPLOAD_S))
    upload_bytes: Histogram = field(default_factory=lambda: Histogram(_UPLOAD_BYTES))

    def values(self) -> dict[str, float]:
        """Return the counters by name; refusals by cause: ``refused{reason=revoked}``."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        named = {name: float(value) for name, value in values.items() if isinstance(value, int)}
        refused = dict(self.refused)
        return named | {f"refused{{reason={cause}}}": n for cause, n in refused.items()}

    def histograms(self) -> dict[str, Histogram]:
        """Return the histograms by name."""
        return {"upload_seconds": self.upload_seconds, "upload_bytes": self.upload_bytes}
