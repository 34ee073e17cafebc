"""A server behind mutual TLS, honest clients, and peers that may send anything."""

import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import grpc
import torch

from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    TrainReply,
    TrainRequest,
)
from fedlearn.gateway.loop import LoopThread
from fedlearn.identity.identity import SERVER_NAME, Identity
from fedlearn.identity.registry import Registry
from fedlearn.testing.local_gateway import ANYWHERE, LocalGateway
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.base import ask_once
from fedlearn.transport.content import compute_digest, encode_signed_reply
from fedlearn.transport.grpc_client import Credentials, GatewayConnection, GatewaySession, enrol

RUN_ID = "0123456789abcdef0123456789abcdef"
#: Longest wait for steps that are normally immediate, even on a slow machine.
WAIT_S = 60.0
#: Slow peers may take longer than an honest round may, so a round that waits for them is noticed.
SETTINGS = replace(
    ANYWHERE,
    enrolment_address=ANYWHERE.address,  # as for clients of an earlier version
    handshake_timeout_s=30.0,
    stall_timeout_s=30.0,
)
#: For tests that wait for a handshake to time out; an honest one takes 0.05 s.
HANDSHAKE_S = 2.0
IMPATIENT = replace(SETTINGS, handshake_timeout_s=HANDSHAKE_S)
HELLO = wire_pb2.Hello(protocol=wire.PROTOCOL)
LANES = {"delta": torch.ones(4)}

#: Longest time of an honest round while others misbehave. Undisturbed, it takes 0.05 s. A pause of
#: the machine stays within this; waiting for a peer's handshake or for a stalled one does not.
ROUND_S = 10.0

T = TypeVar("T")


@dataclass
class SetClock(SystemClock):
    """A real clock whose time of day and elapsed time can be shifted."""

    ahead_s: float = 0.0
    jump_s: float = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.jump_s

    def unix_s(self) -> float:
        return super().unix_s() + self.ahead_s


@dataclass
class Peer:
    """A peer with keys, and perhaps a certificate."""

    name: str
    identity: Identity
    client_id: int
    credentials: Credentials


class Site(LocalGateway):
    """A server, and peers that run on their own thread.

    Attributes:
        loop: Event loop of the peers.
        clock: The server's clock, which tests may shift.
        num_rounds: Number of rounds that honest clients were asked to join.
    """

    clock: SetClock

    def __init__(self, folder: Path, *, registry: Registry | None = None) -> None:
        super().__init__(
            folder, settings=SETTINGS, run_id=RUN_ID, registry=registry, clock=SetClock()
        )
        self.loop = LoopThread("peers")
        self.num_rounds = 0

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.loop.stop()

    def enrolled(self, name: str) -> Peer:
        identity, invitation = Identity.create(), self.create_invitation(name)
        certificate, client_id = self.run(
            enrol(self.gateway.enrolment_address, invitation, identity)
        )
        return self.peer(name, identity, certificate, client_id=client_id)

    def peer(self, name: str, identity: Identity, certificate: bytes, *, client_id: int) -> Peer:
        credentials = Credentials(
            ca_pem=self.authority.ca_pem,
            certificate_pem=certificate,
            tls_key_pem=identity.tls_key_pem if certificate else b"",
        )
        return Peer(name, identity, client_id, credentials)

    def run(self, coroutine: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await coroutine

        return self.loop.call(awaited()).result(WAIT_S)

    def in_session(self, peer: Peer, call: Callable[[GatewaySession], Awaitable[T]]) -> T:
        async def call_server() -> T:
            async with (
                GatewayConnection(self.gateway.address, peer.credentials) as connection,
                connection.session(HELLO) as session,
            ):
                return await call(session)

        return self.run(call_server())

    def raw(
        self,
        method: str,
        peer: Peer,
        *messages: bytes,
        half_close: bool = False,
        first: Callable[[], object] = lambda: None,
    ) -> tuple[list[bytes], grpc.StatusCode]:
        """Send any bytes as messages of a call; return the answers, and how the call ended.

        Without ``half_close`` the server has to end it. ``first`` runs between the start of the
        call and its first message. The call is a blocking one: a write that fails hides the
        server's status in ``grpc.aio`` (grpc issue 36066).
        """
        tls = grpc.ssl_channel_credentials(
            peer.credentials.ca_pem,
            peer.credentials.tls_key_pem or None,
            peer.credentials.certificate_pem or None,
        )
        ended = threading.Event()

        def say() -> Iterator[bytes]:
            first()
            yield from messages
            if not half_close:
                ended.wait()

        options = [("grpc.ssl_target_name_override", SERVER_NAME)]
        with grpc.secure_channel(self.gateway.address, tls, options) as channel:
            start: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                f"/{wire.GATEWAY}/{method}"
            )
            call = start(say())
            call.add_callback(ended.set)
            timer = threading.Timer(WAIT_S, call.cancel)
            timer.start()
            answers = list[bytes]()
            with suppress(grpc.RpcError):
                answers.extend(call)
            timer.cancel()
            return answers, call.code()

    def refused(self, cause: str) -> int:
        return self.gateway.counters.refused[cause]

    def train(self, *peers: Peer, seconds: float = ROUND_S) -> None:
        """Let honest clients finish a round in time, while all other activity continues."""
        began_s = self.clock.now_s()
        request = request_of(self.num_rounds)
        self.num_rounds += 1
        honest = [self.loop.call(answer(self.gateway.address, peer)) for peer in peers]
        cohort = [ClientId(peer.client_id) for peer in peers]
        channel = self.gateway.channel()
        arrivals = ask_once(channel, dict.fromkeys(cohort, request), deadline_s=WAIT_S)
        assert {arrival.client_id for arrival in arrivals} == set(cohort)
        for each in honest:
            assert each.result(WAIT_S) == wire_pb2.Receipt.ACCEPTED
        assert self.clock.now_s() - began_s < seconds

    def wait_until(self, holds: Callable[[], bool]) -> None:
        ends_s = self.clock.now_s() + WAIT_S
        while not holds():
            assert self.clock.now_s() < ends_s
            self.clock.sleep(0.02)


def request_of(round_num: int) -> TrainRequest:
    return TrainRequest(
        round_num=round_num,
        attempt=0,
        tensors={"weight": torch.zeros(4)},
        order=("weight",),
        settings={},
        seed=0,
    )


def reply(round_num: int = 0) -> bytes:
    return encode(TrainReply(round_num=round_num, lanes=LANES, num_examples=1, metrics={}))


async def answer(address: str, peer: Peer) -> int:
    """Take one task, train, and return the verdict of the receipt."""
    async with (
        GatewayConnection(address, peer.credentials) as connection,
        connection.session(HELLO) as session,
    ):
        task = await told(session, "task")
        await session.send(trained(task.task, peer))
        return (await told(session, "receipt")).receipt.verdict


async def told(session: GatewaySession, kind: str) -> wire_pb2.FromCoordinator:
    """Return the next message of a kind, skipping others."""
    while (message := await session.receive()) is not None:
        if message.WhichOneof("what") == kind:
            return message
    raise AssertionError(f"the session ended without a {kind}")


def trained(task: wire_pb2.Task, peer: Peer) -> wire_pb2.FromClient:
    """Return an honest reply with no change, for any model."""
    asked = decode(task.data)
    if isinstance(asked, TrainRequest):
        lanes = {"delta": torch.zeros(sum(asked.tensors[name].numel() for name in asked.order))}
        data = encode(
            TrainReply(
                round_num=asked.round_num, lanes=lanes, num_examples=5, metrics={"loss": 1.0}
            )
        )
    else:
        metrics = {"loss": 1.0, "accuracy": 0.5}
        data = encode(EvaluateReply(round_num=task.key.round_num, num_examples=5, metrics=metrics))
    return result(task.key, data, peer)


def envelope(
    key: wire_pb2.TaskKey, data: bytes, peer: Peer, *, client_id: int | None = None
) -> wire_pb2.Envelope:
    digest = compute_digest(data)
    claimed = peer.client_id if client_id is None else client_id
    signed = encode_signed_reply(key, client_id=claimed, digest=digest)
    return wire_pb2.Envelope(
        key=key, digest=digest, num_bytes=len(data), signature=peer.identity.sign(signed)
    )


def result(
    key: wire_pb2.TaskKey, data: bytes, peer: Peer, *, client_id: int | None = None
) -> wire_pb2.FromClient:
    signed = envelope(key, data, peer, client_id=client_id)
    return wire_pb2.FromClient(result=wire_pb2.Result(envelope=signed, data=data))


# Peers that speak TLS and HTTP/2 without gRPC.


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def tls_context(peer: Peer | None, folder: Path) -> ssl.SSLContext:
    """Return a TLS context with the peer's certificate, if any, that trusts every server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if peer is not None:
        path = folder / f"{peer.name}.pem"
        path.write_bytes(peer.credentials.certificate_pem + peer.credentials.tls_key_pem)
        context.load_cert_chain(path)
    return context


def client_hello(context: ssl.SSLContext) -> bytes:
    """Return the first message of a TLS handshake."""
    outgoing = ssl.MemoryBIO()
    talk = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=SERVER_NAME)
    with suppress(ssl.SSLWantReadError):
        talk.do_handshake()
    return outgoing.read()


def is_ended(stream: socket.socket, *, timeout_s: float = WAIT_S) -> bool:
    """Read everything, and return whether the other side ends the connection in time.

    Data that is already there is read even if ``timeout_s`` is tiny.
    """
    clock = SystemClock()
    ends_s = clock.now_s() + timeout_s
    while True:
        left_s = ends_s - clock.now_s()
        stream.settimeout(max(left_s, 0.001))
        try:
            if not stream.recv(1 << 16):
                return True
        except TimeoutError:
            return False
        except OSError:  # reset
            return True
        if left_s <= 0.0:
            return False


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS_FRAME, GOAWAY = 0, 1, 3, 4, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind: int, *, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Build an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_headers(method: str, *, stream: int) -> bytes:
    """Build the frame that begins a call; each header is a literal without index."""
    pairs = {
        ":method": "POST",
        ":scheme": "https",
        ":path": f"/{wire.GATEWAY}/{method}",
        ":authority": SERVER_NAME,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\0" + b"".join(bytes([len(each)]) + each.encode() for each in pair)
        for pair in pairs.items()
    )
    return frame(HEADERS, flags=END_HEADERS, stream=stream, payload=block)


@contextmanager
def http2(address: str, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    """Connect, and send the preface of HTTP/2."""
    with (
        socket.create_connection(address_of(address), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname=SERVER_NAME) as stream,
    ):
        stream.sendall(PREFACE + frame(SETTINGS_FRAME))
        yield stream


def frames_until_refused(stream: ssl.SSLSocket) -> Counter[int]:
    """Count frames by kind until a stream or the connection is reset, or the connection ends."""
    counts, content = Counter[int](), b""
    stream.settimeout(WAIT_S)
    while not counts[RST_STREAM] + counts[GOAWAY]:
        try:
            came = stream.recv(1 << 16)
        except OSError:
            return counts
        if not came:
            return counts
        content += came
        while len(content) >= 9 + (size := int.from_bytes(content[:3], "big")):
            counts[content[3]] += 1
            content = content[9 + size :]
    return counts
