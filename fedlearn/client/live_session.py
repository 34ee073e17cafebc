"""A session with the coordinator, and the messages that a client sends in it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fedlearn.client.keyring import Enrolment
from fedlearn.errors import ConnectionRefused
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import TaskKey, compute_digest, encode_signed_reply
from fedlearn.transport.grpc_client import Credentials, GatewayConnection, GatewaySession


@dataclass(eq=False)
class LiveSession:
    """An open session, and the jobs that are cancelled when it ends.

    Attributes:
        max_concurrent_runs: Runs for which the client works at a time, as it has told.
        leave: Set this to end the session.
        jobs: The jobs that run.
        sent_replies: Keys of the replies that were sent in this session.
    """

    connection: GatewayConnection
    session: GatewaySession
    enrolment: Enrolment
    max_concurrent_runs: int
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    jobs: set["asyncio.Task[None]"] = field(default_factory=set)
    sent_replies: set[TaskKey] = field(default_factory=set)

    def spawn(self, job: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run ``job`` until it is done or the session ends."""
        task = asyncio.create_task(job)
        self.jobs.add(task)
        task.add_done_callback(self.jobs.discard)
        return task

    def send(self, message: wire_pb2.FromClient) -> None:
        """Send a message without waiting; it may get lost."""
        self.spawn(self._send(message))

    def report_phase(self, key: TaskKey, phase: "wire_pb2.Progress.Phase") -> None:
        """Report the phase of the work on a task to the coordinator."""
        progress = wire_pb2.Progress(key=key.message(), phase=phase)
        self.send(wire_pb2.FromClient(progress=progress))

    def build_result(self, key: TaskKey, reply: bytes, *, trainer: str = "") -> wire_pb2.FromClient:
        """Build the signed message that carries a reply inline."""
        digest = compute_digest(reply)
        envelope = self.build_envelope(key, digest=digest, num_bytes=len(reply), trainer=trainer)
        return wire_pb2.FromClient(result=wire_pb2.Result(envelope=envelope, data=reply))

    def build_envelope(
        self, key: TaskKey, *, digest: bytes, num_bytes: int, trainer: str
    ) -> wire_pb2.Envelope:
        """Build the signed envelope that announces a reply of ``trainer``."""
        client_id, message = self.enrolment.client_id, key.message()
        if not self.session.welcome.records_trainers:  # an earlier version would not verify it
            trainer = ""
        signed = encode_signed_reply(message, client_id=client_id, digest=digest, trainer=trainer)
        return wire_pb2.Envelope(
            key=message,
            digest=digest,
            num_bytes=num_bytes,
            signature=self.enrolment.identity.sign(signed),
            trainer=trainer,
        )

    async def _send(self, message: wire_pb2.FromClient) -> None:
        try:
            await self.session.send(message)
        except (ConnectionError, ConnectionRefused):
            self.leave.set()


async def cancel(jobs: list[asyncio.Task[Any]]) -> None:
    """Cancel jobs and wait until they have ended."""
    for job in jobs:
        job.cancel()
    # Wait even for those that fail: their cleanup may use the session.
    await asyncio.gather(*jobs, return_exceptions=True)


def credentials_of(enrolment: Enrolment) -> Credentials | None:
    """Return the TLS credentials of an enrolled client; ``None`` without TLS."""
    if not enrolment.invitation.ca_pem:
        return None
    return Credentials(
        ca_pem=enrolment.invitation.ca_pem,
        certificate_pem=enrolment.certificate_pem,
        tls_key_pem=enrolment.identity.tls_key_pem,
    )


@asynccontextmanager
async def session_at(
    address: str, enrolment: Enrolment, hello: wire_pb2.Hello
) -> AsyncIterator[LiveSession]:
    """Hold a session with the coordinator at ``address`` while the block runs.

    Without a certificate authority, this works on loopback only, without TLS. Raises as
    :class:`~fedlearn.transport.grpc_client.GatewayConnection` and its session do.
    """
    credentials, name = credentials_of(enrolment), enrolment.invitation.name
    async with (
        GatewayConnection(address, credentials, name=name) as connection,
        connection.session(hello) as session,
    ):
        told = max(1, hello.eligibility.max_concurrent_runs)
        yield LiveSession(connection, session, enrolment, told)
