"""The limits of the server: numbers of clients and connections, rates, and time limits."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import doc

from fedlearn.core.ranges import Count, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The server settings that an operator may choose."""

    address: Annotated[
        str, doc("``host:port`` where clients connect and enrol; port 0: any free port.")
    ]
    enrolment_address: Annotated[
        str | None,
        doc(
            "``host:port`` where clients of an earlier version enrol, without a certificate; not "
            "set: they cannot enrol."
        ),
    ] = None
    max_connected: Annotated[
        Count,
        doc(
            "Most clients that are connected at a time, >= 1; others get a time to come back, "
            "unless their reply is awaited."
        ),
    ] = 10_000
    max_handshakes: Annotated[
        int,
        doc(
            "Most connections in addition to those: handshakes of any peer, and clients that are "
            "being sent away. Each takes some 25 kB. Together, connections take at most half of "
            "the files that the process may open."
        ),
    ] = 10_000
    handshake_timeout_s: Annotated[
        float, doc("Time limit for the TLS handshake, and again for the first message, in seconds.")
    ] = 10.0
    stall_timeout_s: Annotated[
        Positive,
        doc(
            "Seconds without progress after which an upload or download is ended, > 0, and the "
            "session of a client that does not read. The client may resume it."
        ),
    ] = 30.0
    come_back_s: Annotated[
        Positive,
        doc(
            "Least number of seconds after which a client that is not needed comes back, > 0. Each "
            "gets its own time, at the rate that the coordinator can take."
        ),
    ] = 60.0
    max_messages_per_s: Annotated[
        float, doc("Messages a second that one client may send, on average.")
    ] = 20.0
    recovery_grace_s: Annotated[
        NotNegative,
        doc(
            "Least number of seconds that clients have to reconnect to a round that a restart "
            "interrupted, >= 0."
        ),
    ] = 30.0
    certificate_days: Annotated[
        Count, doc("Days for which a client's certificate is valid, >= 1.")
    ] = 365
