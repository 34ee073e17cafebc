"""The client's end of the gateway, against a small test gateway, in plaintext and mutual TLS."""

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from blake3 import blake3
from google.protobuf.message import Message

from fedlearn.errors import (
    ConnectionRefused,
    DeploymentError,
    EnrolmentRefused,
    ProtocolError,
)
from fedlearn.gateway.authority import Authority
from fedlearn.identity.identity import Identity, Invitation, certificate_fingerprint
from fedlearn.secagg.keys import verify
from fedlearn.transport import grpc_client, wire
from fedlearn.transport.content import compute_digest, encode_enrolment
from fedlearn.transport.grpc_client import (
    NAME_METADATA,
    Credentials,
    GatewayConnection,
    GatewaySession,
    enrol,
)
from fedlearn.transport.wire_pb2 import (
    Beat,
    Cancel,
    Chunk,
    ComeBack,
    DownloadRequest,
    EnrolReply,
    EnrolRequest,
    Envelope,
    FromClient,
    FromCoordinator,
    Hello,
    Progress,
    Receipt,
    TaskKey,
    UploadPart,
    UploadStatus,
    Welcome,
)

TIMEOUT_S = 120.0  # of a whole test: only a hang takes so long
HELLO = Hello(protocol=wire.PROTOCOL, software="test")
WELCOME = FromCoordinator(welcome=Welcome(protocol=wire.PROTOCOL, client_id=7, run_id="run"))
KEY = TaskKey(run_id="run", kind="TrainRequest", round_num=1)
ACCEPTED = UploadStatus(receipt=Receipt(key=KEY, verdict=Receipt.ACCEPTED))
CONTENT = bytes(range(256)) * 10_000  # 2.4 chunks
DIGEST = compute_digest(CONTENT)
ENVELOPE = Envelope(key=KEY, digest=DIGEST, num_bytes=len(CONTENT), signature=bytes(64))

Context = grpc.aio.ServicerContext[bytes, bytes]
Handler = Callable[["Gateway", Context], Awaitable[None]]


@dataclass
class Gateway:
    """A gateway that runs one handler of the test for each method."""

    session: Handler | None = None
    download: Handler | None = None
    upload: Handler | None = None
    enrol: Handler | None = None
    num_calls: int = 0
    received: list[object] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def for_ever(self) -> None:
        """Wait until the client disconnects."""
        self.waiting.set()
        await asyncio.Event().wait()

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        gateway = {"Session": self.session, "Download": self.download, "Upload": self.upload}
        return (
            grpc.method_handlers_generic_handler(wire.GATEWAY, self._methods(gateway)),
            grpc.method_handlers_generic_handler(
                wire.ENROLMENT, self._methods({"Enrol": self.enrol})
            ),
        )

    def _methods(
        self, handlers: dict[str, Handler | None]
    ) -> dict[str, "grpc.RpcMethodHandler[bytes, bytes]"]:
        return {
            name: grpc.stream_stream_rpc_method_handler(self._counted(handler))
            for name, handler in handlers.items()
            if handler is not None
        }

    def _counted(self, handler: Handler) -> Callable[[object, Context], Awaitable[None]]:
        async def handle(requests: object, context: Context) -> None:
            self.num_calls += 1
            try:
                await handler(self, context)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

        return handle


async def tell(context: Context, *messages: Message) -> None:
    for message in messages:
        await context.write(message.SerializeToString())


async def parts(context: Context) -> AsyncIterator[bytes]:
    """Yield the client's remaining messages."""
    part: object = await context.read()
    while isinstance(part, bytes):
        yield part
        part = await context.read()


@asynccontextmanager
async def serving(
    gateway: Gateway, *, authority: Authority | None = None, client_certificates: bool = True
) -> AsyncIterator[str]:
    server = grpc.aio.server(handlers=gateway.handlers())
    if authority is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        tls = grpc.ssl_server_credentials(
            [authority.server_certificate()],
            root_certificates=authority.ca_pem if client_certificates else None,
            require_client_auth=client_certificates,
        )
        port = server.add_secure_port("127.0.0.1:0", tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def run_bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await test()

    asyncio.run(run_bounded())


def connecting(address: str, *, stall_timeout_s: float = 60.0) -> GatewayConnection:
    return GatewayConnection(address, None, name="hospital-a", stall_timeout_s=stall_timeout_s)


def joined(authority: Authority, identity: Identity) -> Credentials:
    request = identity.csr_pem("hospital-a")
    return Credentials(
        ca_pem=authority.ca_pem,
        certificate_pem=authority.sign(request, name="hospital-a", client_id=7, valid_days=1),
        tls_key_pem=identity.tls_key_pem,
    )


# --- the session


async def _welcomes(gateway: Gateway, context: Context) -> None:
    gateway.received.append(dict(context.invocation_metadata() or ()).get(NAME_METADATA))
    gateway.received.append(FromClient.FromString(await context.read()))
    await tell(context, WELCOME)


async def _echoes_phases(gateway: Gateway, context: Context) -> None:
    await _welcomes(gateway, context)
    for phase in (Progress.DOWNLOADING, Progress.TRAINING):
        gateway.received.append(FromClient.FromString(await context.read()))
        reason = Progress.Phase.Name(phase)
        await tell(context, FromCoordinator(cancel=Cancel(reason=reason)))


def test_a_session_says_hello_and_then_messages_go_both_ways() -> None:
    async def test() -> None:
        gateway = Gateway(session=_echoes_phases)
        async with (
            serving(gateway) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            assert (session.welcome.client_id, session.welcome.run_id) == (7, "run")
            for phase in (Progress.DOWNLOADING, Progress.TRAINING):
                await session.send(FromClient(progress=Progress(phase=phase)))
                message = await session.receive()
                assert message is not None
                assert message.cancel.reason == Progress.Phase.Name(phase)
            assert await session.receive() is None
            assert await session.receive() is None
        assert gateway.received[:2] == ["hospital-a", FromClient(hello=HELLO)]
        assert len(gateway.received) == 4

    run(test)


def test_several_tasks_may_send_at_once() -> None:
    async def takes_100(gateway: Gateway, context: Context) -> None:
        await _welcomes(gateway, context)
        for _ in range(100):
            gateway.received.append(FromClient.FromString(await context.read()))

    async def test() -> None:
        gateway = Gateway(session=takes_100)
        async with (
            serving(gateway) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            messages = [FromClient(progress=Progress(key=TaskKey(round_num=n))) for n in range(100)]
            await asyncio.gather(*(session.send(message) for message in messages))
            assert await session.receive() is None
        assert gateway.received[2:] == messages

    run(test)


def test_what_was_sent_before_the_end_is_received_after_it() -> None:
    last = [FromCoordinator(cancel=Cancel(reason=str(n))) for n in range(20)]
    last.append(FromCoordinator(come_back=ComeBack(after_s=3.0)))

    async def ends(gateway: Gateway, context: Context) -> None:
        await _welcomes(gateway, context)
        await tell(context, *last)
        gateway.waiting.set()

    async def test() -> None:
        gateway = Gateway(session=ends)
        async with (
            serving(gateway) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            await gateway.waiting.wait()  # all messages are sent before the first is read
            assert [await session.receive() for _ in last] == last
            assert await session.receive() is None
            with pytest.raises(ConnectionError, match="has ended the call"):
                await session.send(FromClient())

    run(test)


HOSTILE = "\x1b[2J" + "x" * 100_000
LEGIBLE = "\ufffd[2J" + "x" * 496


def test_a_reason_is_short_and_steers_no_terminal(tmp_path: Path) -> None:
    """It ends up in logs, in an application's dialog and on the screen of `fedlearn join`."""

    async def explains(gateway: Gateway, context: Context) -> None:
        await _welcomes(gateway, context)
        await tell(
            context,
            FromCoordinator(cancel=Cancel(reason=HOSTILE)),
            FromCoordinator(receipt=Receipt(reason=HOSTILE)),
            FromCoordinator(come_back=ComeBack(reason=HOSTILE)),
        )

    async def refuses(gateway: Gateway, context: Context) -> None:
        await context.read()  # otherwise the call might end during a write
        await tell(context, UploadStatus(receipt=Receipt(reason=HOSTILE)))

    async def test() -> None:
        (tmp_path / "reply").write_bytes(CONTENT)
        gateway = Gateway(session=explains, upload=refuses)
        async with (
            serving(gateway) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            assert await session.receive() == FromCoordinator(cancel=Cancel(reason=LEGIBLE))
            assert await session.receive() == FromCoordinator(receipt=Receipt(reason=LEGIBLE))
            assert await session.receive() == FromCoordinator(come_back=ComeBack(reason=LEGIBLE))
            receipt = await connection.upload(ENVELOPE, tmp_path / "reply")
            assert receipt == Receipt(reason=LEGIBLE)

    run(test)


REFUSALS = [
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
]
FAILURES = [
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.NOT_FOUND,
]


def _aborting(code: grpc.StatusCode) -> Handler:
    async def abort(gateway: Gateway, context: Context) -> None:
        await context.abort(code, "hospital-a is revoked " + "x" * 2000)

    return abort


@pytest.mark.parametrize("code", REFUSALS + FAILURES)
def test_a_status_becomes_a_refusal_or_a_failure_with_the_coordinators_words(
    tmp_path: Path, code: grpc.StatusCode
) -> None:
    expected = ConnectionRefused if code in REFUSALS else ConnectionError
    (tmp_path / "reply").write_bytes(CONTENT)

    async def test() -> None:
        abort = _aborting(code)
        gateway = Gateway(session=abort, download=abort, upload=abort)
        async with serving(gateway) as address, connecting(address) as connection:
            with pytest.raises(expected, match="hospital-a is revoked") as caught:
                async with connection.session(HELLO):
                    pass
            assert len(str(caught.value)) < 600
            with pytest.raises(expected, match="hospital-a is revoked"):
                await connection.download(DIGEST, num_bytes=9, path=tmp_path / "request")
            with pytest.raises(expected, match="hospital-a is revoked"):
                await connection.upload(ENVELOPE, tmp_path / "reply")

    run(test)


@pytest.mark.parametrize(
    ("told", "after_s"),
    [
        ("2.5", 2.5),
        ("0", 0.0),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        (None, None),
    ],
)
def test_when_to_come_back_is_heard_if_it_is_a_time(
    told: str | None, after_s: float | None
) -> None:
    async def aborts(gateway: Gateway, context: Context) -> None:
        metadata = () if told is None else ((wire.COME_BACK_METADATA, told),)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not now", metadata)

    async def test() -> None:
        async with serving(Gateway(session=aborts)) as address, connecting(address) as connection:
            with pytest.raises(ConnectionError, match="not now") as caught:
                async with connection.session(HELLO):
                    pass
        assert getattr(caught.value, "after_s", None) == after_s

    run(test)


def test_a_refusal_is_heard_even_where_it_races_with_what_the_client_sends() -> None:
    async def test() -> None:
        gateway = Gateway(session=_aborting(grpc.StatusCode.PERMISSION_DENIED))
        async with serving(gateway) as address, connecting(address) as connection:
            for _ in range(100):
                with pytest.raises(ConnectionRefused, match="hospital-a is revoked"):
                    async with connection.session(HELLO) as session:
                        await session.send(FromClient())

    run(test)


def test_a_refusal_is_heard_where_a_write_fails_before_it_comes() -> None:
    """A failed write is reported as INTERNAL by gRPC until the coordinator's status arrives."""
    address: Future[str] = Future()
    ends = threading.Event()

    async def refuses_at_the_second_message(gateway: Gateway, context: Context) -> None:
        await _welcomes(gateway, context)
        await context.read()
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "hospital-a is revoked")

    async def serve() -> None:
        async with serving(Gateway(session=refuses_at_the_second_message)) as here:
            address.set_result(here)
            await asyncio.to_thread(ends.wait, TIMEOUT_S)

    async def talk(connection: GatewayConnection) -> None:
        async with connection.session(HELLO) as session:
            while True:
                await session.send(FromClient())

    async def hear(connection: GatewayConnection) -> None:
        with pytest.raises(ConnectionRefused, match="hospital-a is revoked"):
            await talk(connection)

    async def test() -> None:
        async with connecting(await asyncio.wrap_future(address)) as connection:
            for _ in range(10):
                await asyncio.gather(*[hear(connection) for _ in range(50)])

    coordinator = threading.Thread(target=asyncio.run, args=(serve(),))
    coordinator.start()
    try:
        run(test)
    finally:
        ends.set()
        coordinator.join()


def test_a_method_that_the_coordinator_does_not_have_is_a_refusal() -> None:
    async def test() -> None:
        async with serving(Gateway()) as address, connecting(address) as connection:
            with pytest.raises(ConnectionRefused):
                async with connection.session(HELLO):
                    pass

    run(test)


def test_a_coordinator_that_is_not_there_is_a_connection_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(Gateway()) as address:
            pass
        async with connecting(address) as connection:
            with pytest.raises(ConnectionError, match=address):
                async with connection.session(HELLO):
                    pass
            with pytest.raises(ConnectionError, match=address):
                await connection.download(DIGEST, num_bytes=9, path=tmp_path / "request")

    run(test)


def test_a_coordinator_that_stops_cuts_the_session() -> None:
    async def stays(gateway: Gateway, context: Context) -> None:
        await _welcomes(gateway, context)
        await gateway.for_ever()

    async def test() -> None:
        server = serving(Gateway(session=stays))
        address = await server.__aenter__()
        async with connecting(address) as connection, connection.session(HELLO) as session:
            await server.__aexit__(None, None, None)
            with pytest.raises(ConnectionError):
                await session.receive()
            with pytest.raises(ConnectionError):
                await session.send(FromClient())

    run(test)


async def _silent(gateway: Gateway, context: Context) -> None:
    await gateway.for_ever()


def test_a_coordinator_that_is_silent_is_a_connection_error(tmp_path: Path) -> None:
    (tmp_path / "reply").write_bytes(CONTENT)

    async def test() -> None:
        gateway = Gateway(session=_silent, download=_silent, upload=_silent)
        async with (
            serving(gateway) as address,
            connecting(address, stall_timeout_s=0.2) as connection,
        ):
            with pytest.raises(ConnectionError, match=r"silent for 0\.2 s"):
                async with connection.session(HELLO):
                    pass
            with pytest.raises(ConnectionError, match="silent"):
                await connection.download(DIGEST, num_bytes=9, path=tmp_path / "request")
            with pytest.raises(ConnectionError, match="silent"):
                await connection.upload(ENVELOPE, tmp_path / "reply")

    run(test)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (FromCoordinator(welcome=Welcome(protocol=wire.PROTOCOL + 1)), ConnectionRefused),
        (FromCoordinator(cancel=Cancel(reason="no")), ProtocolError),
        (FromCoordinator(), ProtocolError),
        (b"\xff\xff\xff", ProtocolError),
        (None, ConnectionError),
    ],
)
def test_another_answer_than_a_welcome_opens_no_session(
    answer: FromCoordinator | bytes | None, error: type[Exception]
) -> None:
    async def answers(gateway: Gateway, context: Context) -> None:
        await context.read()
        if answer is not None:
            data = answer if isinstance(answer, bytes) else answer.SerializeToString()
            await context.write(data)

    async def test() -> None:
        async with serving(Gateway(session=answers)) as address, connecting(address) as connection:
            with pytest.raises(error):
                async with connection.session(HELLO):
                    pass

    run(test)


def test_a_message_above_the_bound_is_not_taken() -> None:
    async def floods(gateway: Gateway, context: Context) -> None:
        await _welcomes(gateway, context)
        reason = "x" * (wire.MAX_MESSAGE_BYTES + 1)
        await tell(context, FromCoordinator(cancel=Cancel(reason=reason)))

    async def test() -> None:
        async with (
            serving(Gateway(session=floods)) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            with pytest.raises(ConnectionError, match="RESOURCE_EXHAUSTED"):
                await session.receive()

    run(test)


async def _stays(gateway: Gateway, context: Context) -> None:
    await _welcomes(gateway, context)
    await gateway.for_ever()


def test_leaving_the_session_ends_it_at_the_coordinator() -> None:
    async def test() -> None:
        gateway = Gateway(session=_stays)
        async with serving(gateway) as address, connecting(address) as connection:
            async with connection.session(HELLO):
                assert not gateway.cancelled.is_set()
            await gateway.cancelled.wait()

    run(test)


def test_cancelling_a_task_closes_its_call_and_is_not_swallowed() -> None:
    async def test() -> None:
        gateway = Gateway(session=_stays)
        async with serving(gateway) as address, connecting(address) as connection:

            async def listen() -> None:
                async with connection.session(HELLO) as session:
                    await session.receive()

            task = asyncio.create_task(listen())
            await gateway.waiting.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gateway.cancelled.wait()

    run(test)


def test_who_waits_when_another_task_closes_the_session_hears_a_connection_error() -> None:
    async def test() -> None:
        async with serving(Gateway(session=_stays)) as address, connecting(address) as connection:
            async with connection.session(HELLO) as session:
                waiting = asyncio.create_task(_receive(session))
                await asyncio.sleep(0)
            with pytest.raises(ConnectionError, match="was closed"):
                await waiting

    run(test)


async def _receive(session: GatewaySession) -> FromCoordinator | None:
    return await session.receive()


# --- downloads


def _sends(content: bytes, *, until: int | None = None) -> Handler:
    """Serve ``content`` in chunks; with ``until``, cut the call there."""

    async def send(gateway: Gateway, context: Context) -> None:
        request = DownloadRequest.FromString(await context.read())
        gateway.received.append((request.digest, request.offset))
        for start in range(request.offset, until or len(content), 100_000):
            await tell(context, Chunk(data=content[start : start + 100_000]))
        if until is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    return send


def test_a_download_is_whole_or_resumed_or_already_there(tmp_path: Path) -> None:
    path = tmp_path / "request"

    async def test() -> None:
        gateway = Gateway(download=_sends(CONTENT))
        async with serving(gateway) as address, connecting(address) as connection:
            for there in (None, b"", CONTENT[:1], CONTENT[:1_234_567], CONTENT[:-1], CONTENT):
                if there is not None:
                    path.write_bytes(there)
                await connection.download(DIGEST, num_bytes=len(CONTENT), path=path)
                assert path.read_bytes() == CONTENT
        assert gateway.received == [(DIGEST, n) for n in (0, 0, 1, 1_234_567, len(CONTENT) - 1)]

    run(test)


def test_a_download_that_was_cut_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "request"

    async def test() -> None:
        gateway = Gateway(download=_sends(CONTENT, until=1_000_000))
        async with serving(gateway) as address, connecting(address) as connection:
            with pytest.raises(ConnectionError, match="cut"):
                await connection.download(DIGEST, num_bytes=len(CONTENT), path=path)
        there = path.stat().st_size
        assert 0 < there <= 1_000_000
        gateway = Gateway(download=_sends(CONTENT))
        async with serving(gateway) as address, connecting(address) as connection:
            await connection.download(DIGEST, num_bytes=len(CONTENT), path=path)
        assert gateway.received == [(DIGEST, there)]
        assert path.read_bytes() == CONTENT

    run(test)


def test_a_file_that_is_too_long_is_of_something_else_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "request"
    path.write_bytes(CONTENT + b"x")

    async def test() -> None:
        async with (
            serving(Gateway(download=_sends(CONTENT))) as address,
            connecting(address) as connection,
        ):
            await connection.download(DIGEST, num_bytes=len(CONTENT), path=path)

    run(test)
    assert path.read_bytes() == CONTENT


def test_an_empty_download_makes_an_empty_file(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            serving(Gateway(download=_sends(b""))) as address,
            connecting(address) as connection,
        ):
            nothing = compute_digest(b"")
            await connection.download(nothing, num_bytes=0, path=tmp_path / "request")

    run(test)
    assert (tmp_path / "request").read_bytes() == b""


async def _empty_chunk(gateway: Gateway, context: Context) -> None:
    await context.read()
    await tell(context, Chunk())


async def _no_chunk(gateway: Gateway, context: Context) -> None:
    await context.read()
    await context.write(b"\xff\xff\xff")


@pytest.mark.parametrize(
    "send",
    [
        _sends(CONTENT[:-1] + b"x"),
        _sends(CONTENT[:-1]),
        _sends(CONTENT + b"x"),
        _sends(b""),
        _empty_chunk,
        _no_chunk,
    ],
)
@pytest.mark.parametrize("there", [b"", CONTENT[:1000]])
def test_other_bytes_than_asked_for_are_refused_and_removed(
    tmp_path: Path, send: Handler, there: bytes
) -> None:
    path = tmp_path / "request"
    path.write_bytes(there)

    async def test() -> None:
        async with serving(Gateway(download=send)) as address, connecting(address) as connection:
            with pytest.raises(ProtocolError):
                await connection.download(DIGEST, num_bytes=len(CONTENT), path=path)

    run(test)
    assert not path.exists()


@pytest.mark.parametrize("num_bytes", [1000, len(CONTENT)])
def test_a_damaged_beginning_is_found_at_the_end_and_all_is_got_anew(
    tmp_path: Path, num_bytes: int
) -> None:
    """A power loss may keep the length and lose the bytes; control: the test above."""
    path = tmp_path / "request"
    path.write_bytes(b"damaged" + CONTENT[7:num_bytes])

    async def test() -> None:
        async with (
            serving(Gateway(download=_sends(CONTENT))) as address,
            connecting(address) as connection,
        ):
            await connection.download(DIGEST, num_bytes=len(CONTENT), path=path)

    run(test)
    assert path.read_bytes() == CONTENT


def test_a_download_that_cannot_be_written_is_not_the_networks_fault(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            serving(Gateway(download=_sends(CONTENT))) as address,
            connecting(address) as connection,
        ):
            path = tmp_path / "missing" / "request"
            with pytest.raises(DeploymentError, match="missing/request"):
                await connection.download(DIGEST, num_bytes=len(CONTENT), path=path)

    run(test)


def _has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def test_a_cancelled_download_closes_the_call_and_keeps_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "request"

    async def begins(gateway: Gateway, context: Context) -> None:
        await tell(context, Chunk(data=CONTENT[:1000]))
        await gateway.for_ever()

    async def test() -> None:
        gateway = Gateway(download=begins)
        async with serving(gateway) as address, connecting(address) as connection:
            download = connection.download(DIGEST, num_bytes=len(CONTENT), path=path)
            task = asyncio.create_task(download)
            await gateway.waiting.wait()
            while not _has_bytes(path):
                await asyncio.wait([task], timeout=0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gateway.cancelled.wait()

    run(test)
    assert path.read_bytes() == CONTENT[:1000]


def test_memory_does_not_grow_with_what_is_moved(tmp_path: Path) -> None:
    num_chunks, chunk = 32, bytes(wire.CHUNK_BYTES)
    digest = blake3()
    for _ in range(num_chunks):
        digest.update(chunk)
    num_bytes = num_chunks * len(chunk)

    async def sends(gateway: Gateway, context: Context) -> None:
        for _ in range(num_chunks):
            await tell(context, Chunk(data=chunk))

    async def takes(gateway: Gateway, context: Context) -> None:
        await context.read()
        await tell(context, UploadStatus(offset=0))
        async for _ in parts(context):
            pass
        await tell(context, ACCEPTED)

    async def test() -> None:
        path = tmp_path / "content"
        envelope = Envelope(digest=digest.digest(), num_bytes=num_bytes)
        async with (
            serving(Gateway(download=sends, upload=takes)) as address,
            connecting(address) as connection,
        ):
            await connection.download(digest.digest(), num_bytes=num_bytes, path=path)
            await connection.upload(envelope, path)

    tracemalloc.start()
    try:
        run(test)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < num_bytes / 2


# --- uploads


def _takes_from(offset: int) -> Handler:
    async def take(gateway: Gateway, context: Context) -> None:
        gateway.received.append(UploadPart.FromString(await context.read()).envelope)
        await tell(context, UploadStatus(offset=offset))
        data = bytearray()
        async for part in parts(context):
            data += UploadPart.FromString(part).data
        gateway.received.append(bytes(data))
        await tell(context, ACCEPTED)

    return take


@pytest.mark.parametrize("offset", [0, 1, 1_234_567, len(CONTENT)])
def test_an_upload_sends_what_the_coordinator_does_not_have(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "reply"
    path.write_bytes(CONTENT)

    async def test() -> None:
        gateway = Gateway(upload=_takes_from(offset))
        async with serving(gateway) as address, connecting(address) as connection:
            assert await connection.upload(ENVELOPE, path) == ACCEPTED.receipt
        assert gateway.received == [ENVELOPE, CONTENT[offset:]]

    run(test)


def test_a_reply_that_was_settled_before_is_not_sent_again(tmp_path: Path) -> None:
    async def wait_until_settled(gateway: Gateway, context: Context) -> None:
        await context.read()
        await tell(context, ACCEPTED)

    async def test() -> None:
        async with (
            serving(Gateway(upload=wait_until_settled)) as address,
            connecting(address) as connection,
        ):
            receipt = await connection.upload(ENVELOPE, tmp_path / "need not even be there")
            assert receipt == ACCEPTED.receipt

    run(test)


def test_a_round_that_closes_meanwhile_ends_the_upload_with_its_receipt(tmp_path: Path) -> None:
    path = tmp_path / "reply"
    with path.open("wb") as stream:
        stream.truncate(64 << 20)  # more than is in flight
    late = UploadStatus(receipt=Receipt(key=KEY, verdict=Receipt.LATE))

    async def closes(gateway: Gateway, context: Context) -> None:
        await context.read()
        await tell(context, UploadStatus(offset=0))
        await context.read()
        await tell(context, late)

    async def test() -> None:
        async with serving(Gateway(upload=closes)) as address, connecting(address) as connection:
            envelope = Envelope(key=KEY, num_bytes=64 << 20)
            assert await connection.upload(envelope, path) == late.receipt

    run(test)


def test_a_refusal_in_the_middle_of_an_upload_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "reply"
    with path.open("wb") as stream:
        stream.truncate(64 << 20)

    async def refuses(gateway: Gateway, context: Context) -> None:
        await context.read()
        await tell(context, UploadStatus(offset=0))
        await context.read()
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "revoked just now")

    async def test() -> None:
        async with serving(Gateway(upload=refuses)) as address, connecting(address) as connection:
            with pytest.raises(ConnectionRefused, match="revoked just now"):
                await connection.upload(Envelope(key=KEY, num_bytes=64 << 20), path)

    run(test)


def test_a_coordinator_that_stops_reading_is_a_connection_error(tmp_path: Path) -> None:
    path = tmp_path / "reply"
    with path.open("wb") as stream:
        stream.truncate(64 << 20)

    async def stalls(gateway: Gateway, context: Context) -> None:
        await context.read()
        await tell(context, UploadStatus(offset=0))
        await gateway.for_ever()

    async def test() -> None:
        async with (
            serving(Gateway(upload=stalls)) as address,
            connecting(address, stall_timeout_s=0.3) as connection,
        ):
            with pytest.raises(ConnectionError):
                await connection.upload(Envelope(key=KEY, num_bytes=64 << 20), path)

    run(test)


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ([], ConnectionError),
        ([UploadStatus(offset=0)], ConnectionError),
        ([UploadStatus(offset=len(CONTENT) + 1)], ProtocolError),
        ([UploadStatus(offset=0), UploadStatus(offset=0)], ProtocolError),
        ([UploadStatus()], ProtocolError),
    ],
)
def test_an_upload_without_a_receipt_has_failed(
    tmp_path: Path, statuses: list[UploadStatus], error: type[Exception]
) -> None:
    path = tmp_path / "reply"
    path.write_bytes(CONTENT)

    async def answers(gateway: Gateway, context: Context) -> None:
        await context.read()
        await tell(context, *statuses)

    async def test() -> None:
        async with serving(Gateway(upload=answers)) as address, connecting(address) as connection:
            with pytest.raises(error):
                await connection.upload(ENVELOPE, path)

    run(test)


def test_a_reply_that_cannot_be_read_is_not_the_networks_fault(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            serving(Gateway(upload=_takes_from(0))) as address,
            connecting(address) as connection,
        ):
            with pytest.raises(DeploymentError, match="missing"):
                await connection.upload(ENVELOPE, tmp_path / "missing")

    run(test)


def test_a_cancelled_upload_closes_the_call(tmp_path: Path) -> None:
    path = tmp_path / "reply"
    path.write_bytes(CONTENT)

    async def waits(gateway: Gateway, context: Context) -> None:
        await context.read()
        await tell(context, UploadStatus(offset=0))
        async for _ in parts(context):
            pass
        await gateway.for_ever()  # the receipt only comes at the end of the round

    async def test() -> None:
        gateway = Gateway(upload=waits)
        async with serving(gateway) as address, connecting(address) as connection:
            task = asyncio.create_task(connection.upload(ENVELOPE, path))
            await gateway.waiting.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gateway.cancelled.wait()

    run(test)


# --- authentication


@pytest.mark.parametrize("address", ["10.0.0.1:7000", "fl.example.org:7000", "[2001:db8::1]:7000"])
def test_plaintext_does_not_leave_the_machine(address: str) -> None:
    async def test() -> None:
        with pytest.raises(DeploymentError, match="without TLS"):
            connecting(address)

    run(test)


def test_credentials_print_no_key() -> None:
    credentials = Credentials(ca_pem=b"ca", certificate_pem=b"cert", tls_key_pem=b"secret")
    assert repr(credentials) == "Credentials()"


async def _shows_certificate(gateway: Gateway, context: Context) -> None:
    await context.read()
    (certificate,) = context.auth_context()["x509_pem_cert"]
    await tell(
        context,
        FromCoordinator(
            welcome=Welcome(protocol=wire.PROTOCOL, run_id=certificate_fingerprint(certificate))
        ),
    )


def test_mutual_tls_shows_the_coordinator_which_certificate_calls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, host_names=())
    credentials = joined(authority, Identity.create())

    async def test() -> None:
        async with serving(Gateway(session=_shows_certificate), authority=authority) as address:
            port = address.rpartition(":")[2]
            for host in ("127.0.0.1", "localhost"):
                async with (
                    GatewayConnection(f"{host}:{port}", credentials) as connection,
                    connection.session(HELLO) as session,
                ):
                    assert session.welcome.run_id == certificate_fingerprint(
                        credentials.certificate_pem
                    )

    run(test)


def test_without_a_certificate_of_the_authority_there_is_no_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours", host_names=())
    foreign = Authority(tmp_path / "theirs", host_names=())
    identity = Identity.create()
    good = joined(authority, identity)
    bad = [
        replace(good, certificate_pem=b"", tls_key_pem=b""),  # no certificate
        replace(joined(foreign, identity), ca_pem=authority.ca_pem),  # another authority's
        replace(good, ca_pem=foreign.ca_pem),  # expects a coordinator of another authority
    ]

    async def test() -> None:
        gateway = Gateway(session=_shows_certificate)
        async with serving(gateway, authority=authority) as address:
            for credentials in bad:
                await _is_refused(address, credentials)
            assert gateway.num_calls == 0
            async with GatewayConnection(address, good) as connection, connection.session(HELLO):
                assert gateway.num_calls == 1

    run(test)


def test_a_coordinator_of_another_name_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, host_names=())
    good = joined(authority, Identity.create())

    async def test() -> None:
        gateway = Gateway(session=_shows_certificate)
        async with serving(gateway, authority=authority) as address:
            monkeypatch.setattr(grpc_client, "SERVER_NAME", "fl.example.org")
            await _is_refused(address, good)
            assert gateway.num_calls == 0
            monkeypatch.undo()
            async with GatewayConnection(address, good) as connection, connection.session(HELLO):
                assert gateway.num_calls == 1

    run(test)


async def _is_refused(address: str, credentials: Credentials) -> None:
    async with GatewayConnection(address, credentials) as connection:
        with pytest.raises(ConnectionError):
            async with connection.session(HELLO):
                pass


def _enrols(authority: Authority, subject: Identity | None = None) -> Handler:
    async def handle(gateway: Gateway, context: Context) -> None:
        request = EnrolRequest.FromString(await context.read())
        signed = encode_enrolment(request.token, request.csr_pem)
        if not verify(request.identity_key, request.identity_signature, signed):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the key is not held")
        if request.token != b"token":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the invitation was used")
        csr = subject.csr_pem(request.name) if subject else request.csr_pem
        certificate = authority.sign(csr, name=request.name, client_id=7, valid_days=1)
        await tell(context, EnrolReply(certificate_pem=certificate, client_id=7))

    return handle


def invite(address: str, authority: Authority) -> Invitation:
    return Invitation(
        name="hospital-a",
        addresses=(address,),
        enrolment_addresses=(address,),
        ca_pem=authority.ca_pem,
        token=b"token",
        expires_utc="2030-01-01T00:00:00Z",
    )


def test_an_invitation_is_redeemed_for_a_certificate_that_opens_the_gateway(tmp_path: Path) -> None:
    authority, identity = Authority(tmp_path, host_names=()), Identity.create()

    async def test() -> None:
        gateway = Gateway(enrol=_enrols(authority))
        async with serving(gateway, authority=authority, client_certificates=False) as address:
            certificate_pem, client_id = await enrol(address, invite(address, authority), identity)
        assert client_id == 7
        credentials = Credentials(
            ca_pem=authority.ca_pem,
            certificate_pem=certificate_pem,
            tls_key_pem=identity.tls_key_pem,
        )
        async with (
            serving(Gateway(session=_shows_certificate), authority=authority) as address,
            GatewayConnection(address, credentials) as connection,
            connection.session(HELLO) as session,
        ):
            assert session.welcome.run_id == certificate_fingerprint(certificate_pem)

    run(test)


def test_an_enrolment_that_is_refused_or_wrong_or_unheard_is_told_apart(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours", host_names=())
    foreign = Authority(tmp_path / "theirs", host_names=())
    identity = Identity.create()

    async def test() -> None:
        gateway = Gateway(enrol=_enrols(authority))
        async with serving(gateway, authority=authority, client_certificates=False) as address:
            invitation = invite(address, authority)
            with pytest.raises(EnrolmentRefused, match="the invitation was used"):
                await enrol(address, replace(invitation, token=b"other"), identity)
            with pytest.raises(ConnectionError):  # an impostor never sees the token
                await enrol(address, replace(invitation, ca_pem=foreign.ca_pem), identity)
            assert gateway.num_calls == 1
        with pytest.raises(ConnectionError):
            await enrol(address, invitation, identity)
        gateway = Gateway(enrol=_enrols(authority, subject=Identity.create()))
        async with serving(gateway, authority=authority, client_certificates=False) as address:
            with pytest.raises(ProtocolError, match="not for this client's key"):
                await enrol(address, invitation, identity)
        with pytest.raises(DeploymentError, match="without TLS"):
            await enrol("10.0.0.1:7001", replace(invitation, ca_pem=b""), identity)

    run(test)


def test_an_enrolment_without_an_answer_is_a_connection_error() -> None:
    async def nothing(gateway: Gateway, context: Context) -> None:
        await context.read()

    async def test() -> None:
        async with serving(Gateway(enrol=nothing)) as address:
            invitation = Invitation(
                name="a",
                addresses=(address,),
                enrolment_addresses=(address,),
                ca_pem=b"",
                token=b"t",
                expires_utc="",
            )
            with pytest.raises(ConnectionError, match="without an answer"):
                await enrol(address, invitation, Identity.create())

    run(test)


# --- a coordinator that stops responding

#: Long enough for gRPC's own thread to deliver a message on a busy machine.
_BEAT_S = 0.1


def test_a_coordinator_that_misses_its_beats_is_given_up() -> None:
    """One that sends heartbeats is kept, even if silent otherwise; heartbeats are not passed on."""
    welcome = FromCoordinator(welcome=Welcome(protocol=wire.PROTOCOL, beat_s=_BEAT_S))
    num_beats = 2 * wire.MISSED_BEATS

    async def beats(gateway: Gateway, context: Context) -> None:
        await context.read()
        await context.write(welcome.SerializeToString())
        for _ in range(num_beats):
            await context.write(FromCoordinator(beat=Beat()).SerializeToString())
            await asyncio.sleep(_BEAT_S)
        await context.write(FromCoordinator(cancel=Cancel(reason="now")).SerializeToString())
        await gateway.for_ever()

    async def test() -> None:
        async with (
            serving(Gateway(session=beats)) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            watching = asyncio.create_task(session.watch())
            assert await session.receive() == FromCoordinator(cancel=Cancel(reason="now"))
            assert not watching.done()
            with pytest.raises(ConnectionError, match="silent"):
                await watching

    run(test)


async def _promises_beats(gateway: Gateway, context: Context) -> None:
    """Welcome a client, then send nothing."""
    await context.read()
    welcome = Welcome(protocol=wire.PROTOCOL, beat_s=_BEAT_S)
    await tell(context, FromCoordinator(welcome=welcome))
    await asyncio.Event().wait()


def test_a_coordinator_that_promises_no_beats_may_be_silent() -> None:
    async def test() -> None:
        async with (
            serving(Gateway(session=_welcomes)) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.watch(), 0.2)

    run(test)


async def _stops_sending(gateway: Gateway, context: Context) -> None:
    await tell(context, Chunk(data=CONTENT[:1000]))
    await gateway.for_ever()


async def _stops_reading(gateway: Gateway, context: Context) -> None:
    await context.read()
    await tell(context, UploadStatus(offset=0))
    await gateway.for_ever()


@pytest.mark.parametrize("way", ["download", "upload"])
def test_a_coordinator_that_falls_silent_in_a_transfer_is_given_up_as_soon(
    tmp_path: Path, way: str
) -> None:
    """However much is missing: on any connection the next chunk would have arrived by then."""
    path, num_bytes = tmp_path / "content", 100 * wire.CHUNK_BYTES
    if way == "upload":
        with path.open("wb") as stream:
            stream.truncate(num_bytes)

    async def test() -> None:
        gateway = Gateway(session=_promises_beats, download=_stops_sending, upload=_stops_reading)
        async with (
            serving(gateway) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            transfer: asyncio.Future[object] = asyncio.ensure_future(
                connection.download(DIGEST, num_bytes=num_bytes, path=path)
                if way == "download"
                else connection.upload(Envelope(digest=DIGEST, num_bytes=num_bytes), path)
            )
            await gateway.waiting.wait()
            with pytest.raises(ConnectionError, match=r"silent for 0\.3 s"):
                await asyncio.wait_for(session.watch(), 5.0)
            assert not transfer.done()
            transfer.cancel()
            await asyncio.gather(transfer, return_exceptions=True)

    run(test)


def test_chunks_that_come_in_place_of_beats_show_that_a_coordinator_lives(tmp_path: Path) -> None:
    """On a slow connection heartbeats would queue behind the chunks."""
    num_chunks, chunk = 2 * wire.MISSED_BEATS, CONTENT[:1000]
    content = num_chunks * chunk

    async def sends_slowly(gateway: Gateway, context: Context) -> None:
        for _ in range(num_chunks):
            await asyncio.sleep(_BEAT_S)
            await tell(context, Chunk(data=chunk))

    async def test() -> None:
        path = tmp_path / "content"
        async with (
            serving(Gateway(session=_promises_beats, download=sends_slowly)) as address,
            connecting(address) as connection,
            connection.session(HELLO) as session,
        ):
            watching = asyncio.create_task(session.watch())
            await connection.download(blake3(content).digest(), num_bytes=len(content), path=path)
            assert not watching.done()
            with pytest.raises(ConnectionError, match="silent"):
                await watching
        assert path.read_bytes() == content

    run(test)
