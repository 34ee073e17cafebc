"""The bounds of the door: how many, how fast, how long."""

from dataclasses import dataclass

from fedlearn.core.ranges import Count, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class DoorSettings:
    """What an operator may choose of the door.

    Attributes:
        address: ``host:port`` for clients, who enrol there, too; port 0 takes any free one.
        enrolment_address: ``host:port`` where clients of an earlier version enrol, who show no
            certificate for that; ``None``: they cannot.
        max_connected: Clients connected at a time, >= 1; others are told when to come back, unless
            their reply is awaited.
        max_handshakes: Connections more than that at once, of whoever: under way, or of clients
            that are being sent away. Each takes some 25 kB. Never more in all than half of the
            files that the process may open.
        handshake_timeout_s: For TLS, and again for the first message.
        stall_timeout_s: Seconds without progress that end a client's upload or download, > 0, and
            the session of one that does not read; it may resume.
        come_back_s: Seconds after which a client that is not needed shall come back at the
            earliest, > 0; each is told a time of its own, as many as can be taken.
        max_messages_per_s: Of one client, on average.
        recovery_grace_s: Seconds that a round which a restart interrupted waits for its clients at
            least, >= 0.
        certificate_days: Days that a client's certificate is valid, >= 1.
    """

    address: str
    enrolment_address: str | None = None
    max_connected: Count = 10_000
    max_handshakes: int = 10_000
    handshake_timeout_s: float = 10.0
    stall_timeout_s: Positive = 30.0
    come_back_s: Positive = 60.0
    max_messages_per_s: float = 20.0
    recovery_grace_s: NotNegative = 30.0
    certificate_days: Count = 365
