"""What the door counts; telemetry reads it from any thread."""

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class DoorCounters:
    """Numbers that only grow, written by the door's thread alone.

    What each counts stands in the operator's reference, ``docs/reference/metrics.md``.
    """

    connections: int = 0
    authenticated: int = 0
    enrolment_connections: int = 0
    sessions: int = 0
    sessions_replaced: int = 0
    sessions_dropped: int = 0
    sent_away: int = 0
    messages: int = 0
    throttled: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    downloads: int = 0
    uploads: int = 0
    uploads_resumed: int = 0
    stalled: int = 0
    disk_full: int = 0
    replies_logged: int = 0
    replies_accepted: int = 0
    replies_late: int = 0
    enrolled: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def values(self) -> dict[str, float]:
        """Return all by name; ``refused`` once for each cause: ``refused{reason=revoked}``."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        refused = named.pop("refused")
        return named | {f"refused{{reason={cause}}}": n for cause, n in dict(refused).items()}
