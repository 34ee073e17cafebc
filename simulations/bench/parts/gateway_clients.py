"""Many clients in one process, which enrol in bulk, connect at once and answer at once."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from parts.gateway_coordinator import AUTHORITY, CLIENTS, model

from fedlearn.core.clock import Clock
from fedlearn.core.codec import encode
from fedlearn.core.messages import TrainReply
from fedlearn.gateway.authority import Authority
from fedlearn.identity.identity import Identity, certificate_fingerprint
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import compute_digest, encode_signed_reply
from fedlearn.transport.grpc_client import (
    ComeBackLater,
    Credentials,
    GatewayConnection,
    GatewaySession,
)

#: Clients that connect at the same time.
_CONNECTING = 64


@dataclass(frozen=True, kw_only=True)
class Client:
    """One enrolled client.

    Attributes:
        client_id: Its id.
        name: Its name.
        identity: Its keys.
        credentials: Its credentials for mutual TLS.
    """

    client_id: int
    name: str
    identity: Identity
    credentials: Credentials

    def envelope(
        self, key: wire_pb2.TaskKey, *, digest: bytes, num_bytes: int
    ) -> wire_pb2.Envelope:
        """Sign and return the description of a reply."""
        signed = encode_signed_reply(key, client_id=self.client_id, digest=digest)
        return wire_pb2.Envelope(
            key=key, digest=digest, num_bytes=num_bytes, signature=self.identity.sign(signed)
        )


def enrol(num: int, folder: Path) -> list[Client]:
    """Create an authority and ``num`` clients, as an operator would one by one.

    Both are written to ``folder`` for the coordinator.
    """
    authority = Authority(folder / AUTHORITY, host_names=())
    clients, listed = list[Client](), list[dict[str, str]]()
    for client_id in range(num):
        name, identity = f"client-{client_id}", Identity.create()
        certificate_pem = authority.sign(
            identity.csr_pem(name), name=name, client_id=client_id, valid_days=7
        )
        credentials = Credentials(
            ca_pem=authority.ca_pem,
            certificate_pem=certificate_pem,
            tls_key_pem=identity.tls_key_pem,
        )
        client = Client(client_id=client_id, name=name, identity=identity, credentials=credentials)
        clients.append(client)
        listed.append(
            {
                "name": name,
                "identity_key": identity.public_key.hex(),
                "fingerprint": certificate_fingerprint(certificate_pem),
            }
        )
    (folder / CLIENTS).write_text(json.dumps(listed))
    return clients


@dataclass(frozen=True)
class Call:
    """A client with a task.

    Attributes:
        client: The client.
        connection: Its connection to the gateway.
        session: Its stream on that connection.
        task: The task.
    """

    client: Client
    connection: GatewayConnection
    session: GatewaySession
    task: wire_pb2.Task


#: How clients answer a task.
Answer = Callable[[Call], Awaitable[None]]


@dataclass
class Inline:
    """Answers with an update that fits into the session's stream.

    Attributes:
        size: Elements of the model.
        tensors: Its tensors.
    """

    size: int
    tensors: int
    _replies: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    async def __call__(self, call: Call) -> None:
        """Sign and send."""
        task = call.task
        data, digest = self._reply(task.key.round_num)
        envelope = call.client.envelope(task.key, digest=digest, num_bytes=len(data))
        result = wire_pb2.Result(envelope=envelope, data=data)
        await call.session.send(wire_pb2.FromClient(result=result))

    def _reply(self, round_num: int) -> tuple[bytes, bytes]:
        """Return the update of a round and its digest; all clients send the same."""
        if round_num not in self._replies:
            data = encoded_update(self.size, tensors=self.tensors, round_num=round_num)
            self._replies[round_num] = data, compute_digest(data)
        return self._replies[round_num]


@dataclass
class Bulky:
    """Downloads the model and uploads an update of its size, a few clients at a time.

    Attributes:
        path: File of the update.
        digest: Digest of its bytes.
        at_once: Limits the clients that transfer at the same time.
        downloads: Whether the model is downloaded first, as a client that trains would.
        clock: Real time.
        upload_s: Seconds of each upload until its receipt.
    """

    path: Path
    digest: bytes
    at_once: asyncio.Semaphore
    downloads: bool
    clock: Clock
    upload_s: asyncio.Queue[float] = field(default_factory=asyncio.Queue)

    async def __call__(self, call: Call) -> None:
        """Download the model if asked to, and upload the update.

        Raises:
            SystemExit: The update was not accepted, so the figures are meaningless.
        """
        task, num_bytes = call.task, self.path.stat().st_size
        envelope = call.client.envelope(task.key, digest=self.digest, num_bytes=num_bytes)
        async with self.at_once:
            if self.downloads:
                copy = self.path.with_name(f"download-{call.client.client_id}")
                await call.connection.download(task.digest, num_bytes=task.num_bytes, path=copy)
                copy.unlink()
            started_s = self.clock.now_s()
            receipt = await call.connection.upload(envelope, self.path)
            self.upload_s.put_nowait(self.clock.now_s() - started_s)
        if receipt.verdict != wire_pb2.Receipt.ACCEPTED:
            raise SystemExit(f"an upload was not accepted: {receipt}")


@asynccontextmanager
async def connected(clients: Sequence[Client], address: str, answer: Answer) -> AsyncIterator[None]:
    """Connect all clients and let them answer until the context is left.

    Raises:
        BaseExceptionGroup: A client has failed.
    """
    connecting, welcomed = asyncio.Semaphore(_CONNECTING), asyncio.Semaphore(0)

    async def run(client: Client) -> None:
        async with (
            GatewayConnection(address, client.credentials, name=client.name) as connection,
            AsyncExitStack() as stack,
        ):
            opened = await _check_in(connection, stack, connecting)
            welcomed.release()
            while (told := await opened.receive()) is not None:
                if told.WhichOneof("what") == "task":
                    await answer(Call(client, connection, opened, told.task))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(client)) for client in clients]
        for _ in clients:
            await welcomed.acquire()
        yield
        for task in tasks:
            task.cancel()


async def _check_in(
    connection: GatewayConnection, stack: AsyncExitStack, connecting: asyncio.Semaphore
) -> GatewaySession:
    """Open a session that ends with ``stack``; come back whenever the coordinator says so.

    On a busy machine it lets fewer clients check in each second, and sends the others away.
    """
    hello = wire_pb2.Hello(protocol=wire.PROTOCOL, software="bench")
    while True:
        async with connecting:
            try:
                return await stack.enter_async_context(connection.session(hello))
            except ComeBackLater as told:
                after_s = told.after_s
        await asyncio.sleep(after_s)


def encoded_update(size: int, *, tensors: int, round_num: int) -> bytes:
    """Encode an update of constant numbers as a client does."""
    delta = torch.full((model(size, tensors=tensors).layout.size,), 1e-3)
    return encode(
        TrainReply(round_num=round_num, lanes={"delta": delta}, num_examples=10, metrics={})
    )
