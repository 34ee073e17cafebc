"""A real door on the loopback, in the process of a test: real gRPC, real TLS, no database."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.door.authority import Authority
from fedlearn.door.eligibility import Requirements
from fedlearn.door.server import Door, DoorSettings
from fedlearn.errors import DeploymentError
from fedlearn.identity.identity import Invitation
from fedlearn.identity.registry import EnrolledClient, Registry
from fedlearn.testing.registry import FreshRegistry
from fedlearn.transport.wire_pb2 import Eligibility

_LOOPBACK = "127.0.0.1:0"
_RUN_ID_BYTES = 16
_EVERYBODY = Requirements().admits

#: On a port that is free.
ANYWHERE = DoorSettings(address=_LOOPBACK)


class LocalDoor:
    """A door with its authority and its registry; all that are opened close with the context.

    Args:
        folder: Of keys, and of updates on their way.
        settings: Of a door that is opened with no others.
        run_id: Names the run to clients; ``None`` draws one.
        eligible: Whether a client may be asked, by what it says of itself.
        registry: Of clients; ``None``: one in memory.
        clock: By which invitations and certificates end.

    Attributes:
        authority: What certifies the clients.
        doors: All that were opened, in that order.

    Example:
        A coordinator of sums of one's own, and clients that join it with files::

            with LocalDoor(folder) as local:
                local.invitation("clinic-a").save(folder / "clinic-a.invitation")
                local.wait_for(1)
                collector = SecureCollector(channel=local.door.channel(), ...)
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: DoorSettings = ANYWHERE,
        run_id: str | None = None,
        eligible: Callable[[EnrolledClient, Eligibility], bool] = _EVERYBODY,
        registry: Registry | None = None,
        clock: SystemClock | None = None,
    ) -> None:
        self.folder = folder
        self.run_id = run_id or SecretBytes.generate(_RUN_ID_BYTES).reveal().hex()
        self.clock = clock or SystemClock()
        self.registry = registry or FreshRegistry(self.clock)
        self.authority = Authority(folder / "authority", host_names=())
        self.doors: list[Door] = []
        self._settings, self._eligible = settings, eligible

    def __enter__(self) -> Self:
        """Open the first door."""
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Close all doors."""
        for door in self.doors:
            door.stop(grace_s=0.0)

    @property
    def door(self) -> Door:
        """The door that was opened last."""
        return self.doors[-1]

    def open(self, settings: DoorSettings | None = None, *, run_id: str | None = None) -> Door:
        """Open another door to the same clients.

        Args:
            settings: ``None``: those of the first.
            run_id: ``None``: that of the first.
        """
        door = Door(
            settings or self._settings,
            registry=self.registry,
            run_id=run_id or self.run_id,
            spool_dir=self.folder / "spool" / (run_id or self.run_id),
            authority=self.authority,
            eligible=self._eligible,
            is_leader=lambda: True,
            clock=self.clock,
        )
        door.start()
        self.doors.append(door)
        return door

    def invitation(
        self, name: str, *, tags: Sequence[str] = (), valid_s: float = 3600.0
    ) -> Invitation:
        """Return an invitation to the door that was opened last.

        Raises:
            DeploymentError: ``name`` cannot name a client.
        """
        certificate_pem, tls_key_pem = self.authority.certify_invitation(name, valid_s=valid_s)
        return Invitation(
            name=name,
            addresses=(self.door.address,),
            enrolment_addresses=(),
            ca_pem=self.authority.ca_pem,
            token=self.registry.invite(name, tags=tags, valid_s=valid_s),
            expires_utc=utc(self.clock.unix_s() + valid_s),
            coordinator_key=self.authority.coordinator_key,
            certificate_pem=certificate_pem,
            tls_key_pem=tls_key_pem,
        )

    def wait_for(self, num: int, *, timeout_s: float = 60.0) -> None:
        """Return when ``num`` clients may be asked.

        Raises:
            DeploymentError: They did not come in time.
        """
        channel, ends_s = self.door.channel(), self.clock.now_s() + timeout_s

        def check() -> None:
            if self.clock.now_s() > ends_s:
                raise DeploymentError(
                    f"{len(channel.available())} of {num} clients came within {timeout_s:g} s; "
                    "look into their logs, or raise timeout_s"
                )

        channel.wait_for(num, check)
