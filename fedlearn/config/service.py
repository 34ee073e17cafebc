"""Configuration of a deployed coordinator's service: addresses, eligible clients and timeouts."""

from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

from pydantic import Field, StringConstraints

from fedlearn.config.components import with_keys_of
from fedlearn.config.dashboard import DashboardSection
from fedlearn.config.section import PathText, Problem, Section, describe_as
from fedlearn.config.toml import quote
from fedlearn.core.ranges import NotNegative, Positive, Whole
from fedlearn.gateway.eligibility import Requirements
from fedlearn.gateway.settings import GatewaySettings
from fedlearn.transport.addresses import ADDRESS_PATTERN, MAX_PORT

Address: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=ADDRESS_PATTERN),
    describe_as('"host:port"'),
]
AddressList: TypeAlias = Annotated[tuple[Address, ...], Field(strict=False)]
#: A tag is a key and a value.
TAG_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*=[A-Za-z0-9._:/-]+$"
Tag: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=TAG_PATTERN, max_length=100),
    describe_as('"key=value"'),
]
Tags: TypeAlias = Annotated[tuple[Tag, ...], Field(strict=False)]
Names: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=100)], ...], Field(strict=False)
]


@with_keys_of(Requirements)
class EligibilitySection(Section):
    """The tags and reported properties that a client needs to be sent tasks."""

    tags: Tags = Field(
        (),
        description="Tags that a client's invitation must have, all of them; empty: any client.",
    )
    devices: Names = Field(
        (), description='Devices that a client may train on, such as "cpu", "cuda"; empty: any.'
    )


@with_keys_of(
    GatewaySettings,
    given=("max_handshakes", "handshake_timeout_s", "max_messages_per_s"),
    max_connected=2000,
)
class ServiceSection(Section):
    """The deployed coordinator, except for its own training."""

    address: Address = Field(
        "127.0.0.1:9440",
        description="Address where clients join and are served, by mutual TLS; host 0.0.0.0 is "
        "every interface, port 0 any free one.",
    )
    enrolment_address: Address | None = Field(
        None,
        description="A second address, where clients of an earlier version join, by TLS; not set: "
        "they cannot join.",
    )
    http_address: Address = Field(
        "127.0.0.1:9442",
        description="Address of /livez, /readyz and /metrics, without TLS: keep it off the "
        "clients' network.",
    )
    public_addresses: AddressList = Field(
        (),
        description="Addresses in invitations, preferably DNS names. The coordinator also sends "
        "them to connected clients, which store them and try them in turn; empty: "
        "invitations have coordinator.address.",
    )
    public_enrolment_addresses: AddressList = Field(
        (),
        description="Enrolment addresses in invitations for clients of an earlier version; empty: "
        "coordinator.enrolment_address.",
    )
    folder: PathText | None = Field(
        None,
        description="Folder of the certificate authority's keys and of the upload store, shared "
        'by coordinators that may take over; without it, "coordinator" next to the '
        "runs directory.",
    )
    patience_s: NotNegative = Field(
        60.0,
        description="Seconds that a round waits until all the clients that it would ask are "
        "connected, >= 0; then it asks those that are, if they are at least "
        "stragglers.min_reports.",
    )
    send_ahead: bool = Field(
        True,
        description="Whether clients in flight in an asynchronous run prefetch newer models if no "
        "other client could be asked in their place: they start on the newest one as "
        "soon as they are done. Not with evaluation.clients, whose evaluations would "
        "interrupt that.",
    )
    set_aside_after: Whole = Field(
        5,
        description="Consecutive attempts that a client may fail while others report, >= 0; it is "
        "then not asked until it reconnects. 0: no limit.",
    )
    lease_ttl_s: Positive = Field(
        5.0,
        description="Seconds of silence after which another coordinator on the same database "
        "takes over, > 0.",
    )
    stuck_after_s: Positive = Field(
        600.0,
        description="Seconds without a heartbeat from the thread that runs the rounds, or from "
        "the one that uses the database, after which /livez reports the coordinator "
        "as stuck, so that its supervisor restarts it, > 0; longer than your longest "
        "evaluation or server step.",
    )
    shutdown_grace_s: NotNegative = Field(
        5.0,
        description="Seconds that a shutdown waits for uploads in progress, >= 0; then the round "
        "is parked.",
    )
    invitation_valid_h: Positive = Field(
        72.0, description="Hours within which an invitation must be used, > 0."
    )
    eligibility: EligibilitySection = Field(
        EligibilitySection(),
        description="The tags and reported properties that a client needs to be sent tasks.",
    )
    dashboard: DashboardSection = Field(
        DashboardSection(), description="The page that shows the deployment, and who may open it."
    )
    training: Any = None  # Any: CoordinatorSection validates it, which needs torch

    def problems(self) -> Iterator[Problem]:
        """Refuse ports out of range, two services on one address, and addresses without effect."""
        for name in ("address", "enrolment_address", "http_address"):
            yield from self._check_port(name, getattr(self, name) or self.address)
        for name in ("public_addresses", "public_enrolment_addresses"):
            for address in getattr(self, name):
                yield from self._check_port(name, address)
        page = self.dashboard.address
        served = [self.address, self.enrolment_address, self.http_address, page]
        names = ("enrolment_address", "http_address", "dashboard.address")
        for place, name in enumerate(names, start=1):
            here = served[place]
            # Port 0 is any free one, so two services may both have it.
            if here is not None and here in served[:place] and _parse_port(here):
                text = f"is {quote(here)}, where another service listens; take other ports"
                yield Problem((name, "address"), text)
        if self.public_enrolment_addresses and self.enrolment_address is None:
            text = (
                "is set, but nothing listens there: enrolment_address is not set, and clients join "
                "at coordinator.address; leave it out, or set both for clients of earlier versions"
            )
            yield Problem(("public_enrolment_addresses",), text)

    def _check_port(self, name: str, address: str) -> Iterator[Problem]:
        if _parse_port(address) > MAX_PORT:
            text = f"is {quote(address)}, but ports end at {MAX_PORT}; take a smaller one"
            yield Problem((name,), text)


def _parse_port(address: str) -> int:
    return int(address.rpartition(":")[2])
