"""What the door counts; telemetry reads it from any thread."""

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class DoorCounters:
    """Numbers that only grow. Written by the door's thread alone.

    Attributes:
        connections: TLS connections that were begun; 0 without TLS.
        authenticated: Of them, those that an enrolled client has made.
        enrolment_connections: TLS connections to the enrolment port that were begun.
        sessions: Sessions that were opened.
        sessions_replaced: Ended because their client opened another.
        sessions_dropped: Ended because their client did not read.
        sent_away: Clients that were told to come back later.
        messages: Messages of sessions received.
        throttled: Of them, those that came faster than they may.
        bytes_in: Bytes of sessions and uploads.
        bytes_out: Bytes of sessions and downloads.
        downloads: Downloads begun.
        uploads: Uploads begun.
        uploads_resumed: Of them, those that went on with what was here.
        stalled: Downloads and uploads that were ended because nothing moved.
        disk_full: Replies and uploads that could not be written, and attempts to open an exchange.
        replies_logged: Replies that are durable.
        replies_accepted: Replies that count.
        replies_late: Replies that came too late.
        enrolled: Enrolments.
        refused: Peers, messages and replies turned down, by cause.
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
