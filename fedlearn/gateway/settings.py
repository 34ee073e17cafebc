"""The limits of the server: numbers of clients and connections, rates, and time limits."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import doc

from fedlearn.core.ranges import Count, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The server settings that an operator may choose."""

    address: Annotated[
        str, doc("``host:port`` for clients, who enrol there, too; port 0 takes any free one.")
    ]
    enrolment_address: Annotated[
        str | None,
        doc(
            "``host:port`` where clients of an earlier version enrol, who show no certificate for"
            " that; not set: they cannot."
        ),
    ] = None
    max_connected: Annotated[
        Count,
        doc(
            "Clients connected at a time, >= 1; others are told when to come back, unless their "
            "reply is awaited."
        ),
    ] = 10_000
    max_handshakes: Annotated[
        int,
        doc(
            "Connections more than that at once, of whoever: under way, or of clients that are "
            "being sent away. Each takes some 25 kB. Never more in all than half of the files "
            "that the process may open."
        ),
    ] = 10_000
    handshake_timeout_s: Annotated[float, doc("For TLS, and again for the first message.")] = 10.0
    stall_timeout_s: Annotated[
        Positive,
        doc(
            "Seconds without progress that end a client's upload or download, > 0, and the "
            "session of one that does not read; it may resume."
        ),
    ] = 30.0
    come_back_s: Annotated[
        Positive,
        doc(
            "Seconds after which a client that is not needed shall come back at the earliest, > "
            "0; each is told a time of its own, as many as can be taken."
        ),
    ] = 60.0
    max_messages_per_s: Annotated[float, doc("Of one client, on average.")] = 20.0
    recovery_grace_s: Annotated[
        NotNegative,
        doc(
            "Seconds that a round which a restart interrupted waits for its clients at least, >= 0."
        ),
    ] = 30.0
    certificate_days: Annotated[Count, doc("Days that a client's certificate is valid, >= 1.")] = (
        365
    )
