"""The bounds of the door: how many, how fast, how long."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DoorSettings:
    """What an operator may choose of the door.

    Attributes:
        address: ``host:port`` for clients; port 0 takes any free one.
        enrolment_address: ``host:port`` for enrolment; ``None``: nobody can enrol here.
        max_connected: Clients connected at once; others are asked to come back, unless their
            reply is awaited.
        max_handshakes: Connections more than that at once, of whoever: under way, or of clients
            that are being sent away. Each takes some 25 kB. Never more in all than half of the
            files that the process may open.
        handshake_timeout_s: For TLS, and again for the first message.
        stall_timeout_s: A transfer in which nothing moves for so long is ended, and so is the
            session of a client that does not read.
        come_back_s: For about how long clients that are not needed are sent away.
        max_messages_per_s: Of one client, on average.
        recovery_grace_s: After a restart inside an exchange, clients have at least so long to
            come back.
        certificate_days: How long an enrolled client's certificate is good for.
    """

    address: str
    enrolment_address: str | None = None
    max_connected: int = 10_000
    max_handshakes: int = 10_000
    handshake_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    come_back_s: float = 60.0
    max_messages_per_s: float = 20.0
    recovery_grace_s: float = 30.0
    certificate_days: int = 365
