"""A real coordinator server on loopback, inside the test process: real gRPC and real TLS."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import DeploymentError
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.eligibility import Requirements
from fedlearn.gateway.operations import OperatorAccess
from fedlearn.gateway.server import Gateway, GatewaySettings, RunTerms
from fedlearn.identity.identity import Invitation
from fedlearn.identity.registry import EnrolledClient, Registry
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport.wire_pb2 import Eligibility

_LOOPBACK = "127.0.0.1:0"
_RUN_ID_BYTES = 16
_ADMIT_ALL = Requirements().admits

#: Listen on a free port.
ANYWHERE = GatewaySettings(address=_LOOPBACK)


#: Seconds between two looks at who is connected.
_LOOK_S = 0.05


class LocalGateway:
    """Serves clients over gRPC, with a certificate authority and a client registry.

    Every server that :meth:`open` starts stops when the context exits.

    Args:
        folder: Where keys and uploads in progress are stored.
        settings: Settings of a server that is opened without any.
        run_id: The run's id; ``None`` draws a random one.
        eligible: Decides whether a client may be asked, from what it reports about itself.
        registry: The client registry; ``None`` creates an empty, temporary one.
        clock: The clock that invitations expire by.
        operators: Who may give commands; ``None``: nobody.

    Attributes:
        authority: The certificate authority that certifies clients.
        gateways: All servers that were opened, oldest first.

    Example:
        A custom secure-sum collector, whose clients join with invitation files::

            with LocalGateway(folder) as local:
                local.create_invitation("clinic-a").save(folder / "clinic-a.invitation")
                local.wait_for(1)
                collector = SecureCollector(channel=local.gateway.channel(), ...)

        Invite a client:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from structlog.testing import capture_logs
        >>> with capture_logs(), TemporaryDirectory() as home, LocalGateway(Path(home)) as local:
        ...     invitation = local.create_invitation("clinic-a")
        >>> invitation.name
        'clinic-a'
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: GatewaySettings = ANYWHERE,
        run_id: str | None = None,
        eligible: Callable[[EnrolledClient, Eligibility], bool] = _ADMIT_ALL,
        registry: Registry | None = None,
        clock: SystemClock | None = None,
        operators: OperatorAccess | None = None,
    ) -> None:
        self.folder = folder
        self.run_id = run_id or SecretBytes.generate(_RUN_ID_BYTES).reveal().hex()
        self.clock = clock or SystemClock()
        self.registry = registry or FreshRegistry(self.clock)
        self.authority = Authority(folder / "authority", host_names=())
        self.gateways: list[Gateway] = []
        self._settings, self._eligible, self._operators = settings, eligible, operators

    def __enter__(self) -> Self:
        """Start the first server."""
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all servers."""
        for gateway in self.gateways:
            gateway.stop(grace_s=0.0)

    @property
    def gateway(self) -> Gateway:
        """The server that was opened last."""
        return self.gateways[-1]

    def open(
        self, settings: GatewaySettings | None = None, *, run_id: str | None = None
    ) -> Gateway:
        """Start another server for the same clients.

        Args:
            settings: Its settings; ``None`` uses those of the first server.
            run_id: Its run id; ``None`` uses that of the first server.
        """
        terms = self.terms(run_id or self.run_id)
        gateway = Gateway(
            settings or self._settings,
            registry=self.registry,
            runs=[terms],
            authority=self.authority,
            operators=self._operators,
            is_leader=terms.is_leader,
            clock=self.clock,
        )
        gateway.start()
        self.gateways.append(gateway)
        return gateway

    def terms(self, run_id: str) -> RunTerms:
        """Return the terms of a run, to serve it besides others: see :meth:`Gateway.open_run`."""
        return RunTerms(
            run_id=run_id,
            uploads_dir=self.folder / "spool" / run_id,
            eligible=self._eligible,
            # No other coordinator takes over in a test.
            is_leader=lambda: True,
        )

    def create_invitation(
        self, name: str, *, tags: Sequence[str] = (), valid_s: float = 3600.0
    ) -> Invitation:
        """Create an invitation to the server that was opened last.

        Args:
            name: The client's name.
            tags: Stored with the client in the registry.
            valid_s: Seconds until the invitation expires.

        Raises:
            DeploymentError: ``name`` cannot name a client.
        """
        certificate_pem, tls_key_pem = self.authority.certify_invitation(name, valid_s=valid_s)
        return Invitation(
            name=name,
            addresses=(self.gateway.address,),
            enrolment_addresses=(),
            ca_pem=self.authority.ca_pem,
            token=self.registry.invite(name, tags=tags, valid_s=valid_s),
            expires_utc=utc(self.clock.unix_s() + valid_s),
            coordinator_key=self.authority.coordinator_key,
            certificate_pem=certificate_pem,
            tls_key_pem=tls_key_pem,
        )

    def wait_for(self, num: int, *, timeout_s: float = 60.0) -> None:
        """Wait until ``num`` clients are connected and eligible.

        Raises:
            DeploymentError: Fewer clients connected within ``timeout_s``.
        """
        ends_s = self.clock.now_s() + timeout_s
        # Not the channel's available clients: those may work for another run.
        while (found := self.gateway.num_eligible()) < num:
            if self.clock.now_s() > ends_s:
                raise DeploymentError(
                    f"only {found} of {num} clients connected within {timeout_s:g} s; check their "
                    "logs, or raise timeout_s"
                )
            self.clock.sleep(_LOOK_S)
