"""A liar behind a real door: mutual TLS, gRPC, and clients with homes on disk."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedlearn.client.conditions import Conditions
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.policy import Policy
from fedlearn.client.runtime import Runtime
from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.door.authority import Authority
from fedlearn.door.eligibility import Requirements, Told
from fedlearn.door.server import Door, DoorSettings
from fedlearn.identity.registry import EnrolledClient, MemoryRegistry
from fedlearn.training.trainer import LocalTrainer
from fedlearn.transport.identity import Invitation
from tests.security.liars.harness import Fixed, Stand, plan_for

NUM_CLIENTS = 5
#: Four of five may be corrupted: t = q = 5, and nobody may be lost.
PLAN = plan_for(NUM_CLIENTS, corruption=0.9, dropout=0.0)
RUN_ID = "lies"
LONG_S = 60.0
FIXED, POLICY = Fixed(), Policy()
_VALID_S = 600.0
#: Whether a client may be asked, by what it says of itself.
Eligible = Callable[[EnrolledClient, Told], bool]
ANY: Eligible = Requirements().admits


@dataclass
class DoorSite:
    """A door with its authority, in this process.

    Attributes:
        folder: Of keys, invitations and homes.
    """

    folder: Path
    door: Door
    registry: MemoryRegistry
    authority: Authority

    def invitation(self, number: int) -> Path:
        """Return the file with which a client may join."""
        path = self.folder / f"client-{number}.invitation"
        Invitation(
            name=f"client-{number}",
            addresses=(self.door.address,),
            enrolment_addresses=(self.door.enrolment_address,),
            ca_pem=self.authority.ca_pem,
            token=self.registry.invite(f"client-{number}", tags=(), valid_s=_VALID_S),
            expires_utc=utc(SystemClock().unix_s() + _VALID_S),
            coordinator_key=self.authority.coordinator_key,
        ).save(path)
        return path

    def home(self, number: int) -> Path:
        return self.folder / f"home-{number}"

    def stand(self, *, victim: int) -> Stand:
        """Return the coordinator of sessions among the clients that are enrolled."""
        directory: Mapping[ClientId, bytes] = {
            client.client_id: client.identity_key for client in self.registry.clients()
        }
        return Stand.over(
            self.door.channel(),
            plan=PLAN,
            signer=self.authority.signer,
            directory=directory,
            victim=ClientId(victim),
            sends_directory=True,
            deadline_s=LONG_S,
        )

    def wait_for_all(self) -> None:
        """Return when all clients may be asked."""
        clock = SystemClock()
        ends_s = clock.now_s() + LONG_S

        def check() -> None:
            assert clock.now_s() < ends_s, "the clients do not come"

        self.door.channel().wait_for(NUM_CLIENTS, check)


@contextmanager
def door_in(folder: Path, *, eligible: Eligible = ANY) -> Iterator[DoorSite]:
    """Open a door, and close it."""
    clock = SystemClock()
    registry = MemoryRegistry(clock)
    authority = Authority.open(folder / "authority", host_names=())
    door = Door(
        DoorSettings(
            address="127.0.0.1:0",
            enrolment_address="127.0.0.1:0",
            max_messages_per_s=1000.0,  # a liar asks more often than a round does
        ),
        registry=registry,
        run_id=RUN_ID,
        spool_dir=folder / "spool",
        authority=authority,
        eligible=eligible,
        is_leader=lambda: True,
        clock=clock,
    )
    door.start()
    try:
        yield DoorSite(folder, door, registry, authority)
    finally:
        door.stop(grace_s=0.5)


class ThreadedClient:
    """A client's runtime on a thread with a loop of its own; it may be started again.

    Args:
        home: Its folder.
        invitation: The file to enrol with.
        trainer: What it trains with.
        policy: What it refuses.
    """

    def __init__(
        self,
        home: Path,
        invitation: Path,
        *,
        trainer: LocalTrainer = FIXED,
        policy: Policy = POLICY,
    ) -> None:
        self._home, self._invitation = Home(home), invitation
        self._trainer, self._policy = trainer, policy
        self._home.set_consent(granted=True)
        self.start()

    def start(self) -> None:
        """Run until :meth:`stop`; returns once it is connected."""
        connected, self._loop = threading.Event(), asyncio.new_event_loop()

        def on_event(event: AgentEvent) -> None:
            if event.kind is EventKind.CONNECTED:
                connected.set()

        self._runtime = Runtime(
            self._home,
            self._trainer,
            invitation=self._invitation,
            conditions=Conditions(),
            policy=self._policy,
            on_event=on_event,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert connected.wait(LONG_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._runtime.stop)
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._runtime.run())
