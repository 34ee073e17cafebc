"""A lying coordinator behind a real server: mutual TLS, gRPC, and clients with homes on disk."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.policy import Policy
from fedlearn.client.runtime import Runtime
from fedlearn.core.messages import ClientId
from fedlearn.gateway.eligibility import Requirements
from fedlearn.identity.registry import EnrolledClient
from fedlearn.testing.local_gateway import ANYWHERE, LocalGateway
from fedlearn.training.trainer import LocalTrainer
from fedlearn.transport.wire_pb2 import Eligibility
from tests.security.liars.harness import Fixed, Stand, plan_for

NUM_CLIENTS = 5
#: Four of five clients may be corrupted: t = q = 5, so no client may drop out.
PLAN = plan_for(NUM_CLIENTS, corruption=0.8, dropout=0.0)
RUN_ID = "lies"
LONG_S = 60.0
FIXED, POLICY = Fixed(), Policy()
#: Lets clients send more messages than an honest round takes, since a liar asks more often.
SETTINGS = replace(ANYWHERE, max_messages_per_s=1000.0)
#: Decides whether a client may be sampled, from what it reports about itself.
Eligible = Callable[[EnrolledClient, Eligibility], bool]
ANY: Eligible = Requirements().admits


class LyingGateway(LocalGateway):
    """A server with a liar behind it, and the homes of its clients."""

    def __init__(self, folder: Path, *, eligible: Eligible = ANY) -> None:
        super().__init__(folder, settings=SETTINGS, run_id=RUN_ID, eligible=eligible)

    def invite(self, number: int) -> Path:
        """Save the invitation file with which a client may join, and return its path."""
        path = self.folder / f"client-{number}.invitation"
        self.create_invitation(f"client-{number}").save(path)
        return path

    def home(self, number: int) -> Path:
        return self.folder / f"home-{number}"

    def stand(self, *, victim: int) -> Stand:
        """Return the coordinator of sessions among the enrolled clients."""
        directory: Mapping[ClientId, bytes] = {
            client.client_id: client.identity_key for client in self.registry.clients()
        }
        return Stand.over(
            self.gateway.channel(),
            plan=PLAN,
            signer=self.authority.signer,
            directory=directory,
            victim=ClientId(victim),
            sends_directory=True,
            deadline_s=LONG_S,
        )


class ThreadedClient:
    """A client's runtime on its own thread and event loop; it can be stopped and started again.

    Args:
        home: Its home folder.
        invitation: The file to enrol with.
        trainer: The trainer that it runs.
        policy: Its policy.
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
        """Run until :meth:`stop`; return once the client is connected."""
        connected, self._loop = threading.Event(), asyncio.new_event_loop()

        def on_event(event: AgentEvent) -> None:
            if event.kind is EventKind.CONNECTED:
                connected.set()

        self._runtime = Runtime(
            RuntimeOptions(
                home=self._home.folder, trainer="", invitation=self._invitation, policy=self._policy
            ),
            self._trainer,
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
