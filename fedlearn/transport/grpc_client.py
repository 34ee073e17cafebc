"""The client's end of the gRPC service: one connection, its session, and its transfers.

This module makes no decisions: when to connect, what to train and what to keep is up to the client
runtime. Every failed call raises one of these errors:

* :class:`ConnectionError` (the built-in): unreachable, cut, or silent for too long. Retry later; if
  the coordinator says when, it is a :class:`ComeBackLater`.
* :class:`~fedlearn.errors.ConnectionRefused`: the coordinator does not admit this client.
* :class:`~fedlearn.errors.ProtocolError`: the coordinator sent something unexpected.

Cancelling a coroutine closes its call.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from fedlearn.core.files import explain_disk_errors
from fedlearn.core.words import replace_unprintable
from fedlearn.errors import (
    ConnectionRefused,
    DeploymentError,
    EnrolmentRefused,
    OtherProtocol,
    ProtocolError,
)
from fedlearn.identity.identity import SERVER_NAME, Identity, Invitation
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.addresses import is_loopback
from fedlearn.transport.content import encode_enrolment, hash_stream

#: Metadata key for the name of a client without a certificate; only a server without TLS reads it.
NAME_METADATA = "fedlearn-client"

#: Seconds within which a connection must be established.
CONNECT_S = 8

_STALL_TIMEOUT_S = 60.0
#: Seconds within which the coordinator must answer a hello.
_WELCOME_S = 15.0
#: Seconds within which a command of an operator must be answered.
_ANSWER_S = 600.0
#: Most bytes of an answer to an operator.
MAX_ANSWER_BYTES = 64 << 20
#: Seconds between two checks of whether the coordinator is silent.
_TICK_S = 1.0
#: gRPC's own status of a failed write, which may hide the status that the coordinator gave.
_WRITE_FAILED = (grpc.StatusCode.INTERNAL, "Internal error from Core")
_LOOK_S, _NUM_LOOKS = 0.01, 100
_MAX_CHARACTERS = 500  # of a coordinator's explanation: it ends up in logs and dialogs
_WITH_A_REASON = {"cancel", "come_back", "receipt"}

_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", wire.KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", wire.KEEPALIVE_ANSWER_S * 1000),
    # This also limits how long connecting may take, TLS included: a frozen coordinator would
    # otherwise hold up the attempt for ever.
    ("grpc.min_reconnect_backoff_ms", CONNECT_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),  # a session is silent while its client trains
    ("grpc.enable_retries", 0),  # they would buffer uploads; the runtime retries
    ("grpc.use_local_subchannel_pool", 1),  # or a new connection inherits an old one's back-off
]

_REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}

M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a client shows in mutual TLS, and the authority that it trusts.

    The coordinator's certificate carries the name :data:`fedlearn.identity.identity.SERVER_NAME`.

    Attributes:
        ca_pem: The deployment's certificate authority; no other is trusted.
        certificate_pem: The client's, from :func:`enrol`, or before that its invitation's; empty:
            none, for the port of clients of an earlier version.
        tls_key_pem: The private key of the certificate. Never printed.
    """

    ca_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    tls_key_pem: bytes = field(repr=False)

    @classmethod
    def of(cls, invitation: Invitation) -> "Credentials | None":
        """Return the credentials of an invitation; ``None`` if it is for a server without TLS."""
        if not invitation.ca_pem:
            return None
        return cls(
            ca_pem=invitation.ca_pem,
            certificate_pem=invitation.certificate_pem,
            tls_key_pem=invitation.tls_key_pem,
        )


class ComeBackLater(ConnectionError):
    """The coordinator does not serve this client now, and says when to come back.

    Attributes:
        after_s: Seconds from now, >= 0; a client decides itself how long it stays away.
    """

    def __init__(self, words: str, *, after_s: float) -> None:
        super().__init__(words)
        self.after_s = after_s


class OperatorReply(NamedTuple):
    """A coordinator's answer to an operator's command.

    Attributes:
        lines: JSON objects, one a line.
        file: The file that comes with them; empty: none.
        ending: Whether the command was carried out, or what went wrong.
    """

    lines: bytes
    file: bytes
    ending: wire_pb2.CommandEnding


class GatewaySession:
    """The stream of one connected client, after the coordinator's welcome.

    Several tasks may send, and one may receive at a time.
    """

    def __init__(self, call: "_Call", *, welcome: wire_pb2.Welcome, life: "_Life") -> None:
        self.welcome = welcome
        self._call, self._life = call, life

    async def send(self, message: wire_pb2.FromClient) -> None:
        """Send one message; returns once the transport has accepted it."""
        await self._call.write(message)

    async def receive(self) -> wire_pb2.FromCoordinator | None:
        """Wait for the next message, without a limit; ``None``: the coordinator ended the stream.

        Reasons in it are cut and made printable. Cancelling this call ends the session: to wait
        for something else as well, keep the task.
        """
        message = await self._call.read(wire_pb2.FromCoordinator)
        while message is not None and message.WhichOneof("what") == "beat":
            message = await self._call.read(wire_pb2.FromCoordinator)
        if message is not None and (what := message.WhichOneof("what")) in _WITH_A_REASON:
            part = getattr(message, what)
            part.reason = _clean_text(part.reason)
        return message

    async def watch(self) -> NoReturn:
        """Raise once the coordinator has missed its beats.

        The connections of a frozen coordinator stay open, so only missing beats reveal it. Silence
        is counted in ticks of this process: while it does not run itself, as when training holds
        the interpreter, no time passes.

        Raises:
            ConnectionError: The coordinator is silent.
        """
        beat_s, life = self.welcome.beat_s, self._life
        if not 0.0 < beat_s < math.inf:
            await asyncio.Event().wait()
        tick_s, limit_s = min(_TICK_S, beat_s), wire.MISSED_BEATS * beat_s
        while life.num_ticks * tick_s < limit_s:
            await asyncio.sleep(tick_s)
            life.num_ticks += 1
        raise ConnectionError(f"the coordinator has been silent for {limit_s:.3g} s")


@dataclass
class _Life:
    """Signs of life from the other end of a connection.

    Attributes:
        num_ticks: Ticks since the last message of any call: beats wait behind the chunks of a
            download, so chunks count, too.
    """

    num_ticks: int = 0


class GatewayConnection:
    """One connection to one address of the server; created and used inside one event loop.

    Several calls may run over it at once. Leaving the context closes them all.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None,
        *,
        name: str = "",
        stall_timeout_s: float = _STALL_TIMEOUT_S,
    ) -> None:
        """Prepare the connection; nothing is sent before the first call.

        Args:
            address: ``host:port``.
            credentials: ``None``: plaintext, which is only allowed to a loopback address.
            name: The client's name if it has no certificate to show.
            stall_timeout_s: Seconds after which a message has failed, unless waiting is normal.

        Raises:
            DeploymentError: Plaintext to another machine was requested.
        """
        self._address = address
        self._channel = _open_channel(address, credentials)
        self._metadata = ((NAME_METADATA, name),) if name and not credentials else ()
        self._stall_timeout_s = stall_timeout_s
        self._life = _Life()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    @asynccontextmanager
    async def session(self, hello: wire_pb2.Hello) -> AsyncIterator[GatewaySession]:
        """Say hello, and yield the session once the coordinator has answered with a welcome.

        The hello names the newest protocol first. If the coordinator refuses it because it was not
        upgraded yet, the previous protocol is tried. Leaving the context ends the session.

        Args:
            hello: The client's hello; its protocol is set here.

        Raises:
            OtherProtocol: The coordinator speaks none of this client's protocols, or its run needs
                a newer one.
        """
        refusal: OtherProtocol | None = None
        for protocol in sorted(wire.MESSAGE_VERSIONS, reverse=True):
            with self._call("Session") as call:
                try:
                    welcome = await self._greet(call, hello, protocol)
                except OtherProtocol as error:
                    refusal = refusal or error
                    continue
                yield GatewaySession(call, welcome=welcome, life=self._life)
                return
        assert refusal is not None  # there is a protocol
        raise refusal

    async def _greet(self, call: "_Call", hello: wire_pb2.Hello, protocol: int) -> wire_pb2.Welcome:
        own = wire_pb2.Hello()
        own.CopyFrom(hello)
        own.protocol = protocol
        await call.write(wire_pb2.FromClient(hello=own))
        first = await call.read(wire_pb2.FromCoordinator, patiently=False, within_s=_WELCOME_S)
        welcome = self._require_welcome(first)
        if welcome.protocol != protocol:
            raise OtherProtocol(
                f"{self._address} answers in protocol {welcome.protocol}, but this client asked "
                f"for {protocol}; install the coordinator's version of fedlearn "
                f"({_clean_text(welcome.software)!r})"
            )
        return welcome

    async def enrol(self, request: wire_pb2.EnrolRequest) -> wire_pb2.EnrolReply:
        """Request a certificate; use :func:`enrol`, which also checks the reply."""
        with self._call("Enrol", service=wire.ENROLMENT) as call:
            await call.write(request)
            await call.end_writing()
            reply = await call.read(wire_pb2.EnrolReply, patiently=False)
        if reply is None:
            raise ConnectionError(f"{self._address} ended the enrolment without an answer")
        return reply

    async def look(self, request: wire_pb2.LookRequest) -> None:
        """Ask whether an invitation is open, as :func:`look` does."""
        with self._call("Announce", service=wire.ENROLMENT) as call:
            await call.write(request)
            await call.end_writing()
            await call.read(wire_pb2.LookReply, patiently=False)

    async def wait_until_connected(self) -> None:
        """Connect, so that a command that is then lost was sent at most once.

        Raises:
            ConnectionError: There is no connection within :data:`CONNECT_S`.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._channel.channel_ready()
        except TimeoutError as error:
            raise ConnectionError(f"{self._address} cannot be reached") from error

    async def give(
        self, command: wire_pb2.OperatorCommand, *, content: bytes = b""
    ) -> OperatorReply:
        """Give an operator's command, with the content of its file if it has one.

        Raises:
            ProtocolError: The answer has more than :data:`MAX_ANSWER_BYTES`, or its file more than
                :data:`~fedlearn.transport.wire.MAX_FILE_BYTES`.
        """
        lines, file = bytearray(), bytearray()
        # Patiently: building a model, or waiting for a coordinator to react, takes a while.
        within_s = _ANSWER_S + len(content) / wire.SLOWEST_BYTES_PER_S
        with self._call("Give", service=wire.OPERATIONS) as call:
            await call.write(command)
            # Beside reading: a coordinator that refuses the command does not read the file.
            sending = asyncio.create_task(_send_content(call, content))
            try:
                while part := await call.read(wire_pb2.OperatorAnswer, within_s=within_s):
                    if part.WhichOneof("what") == "ending":
                        return OperatorReply(bytes(lines), bytes(file), part.ending)
                    lines += part.data
                    file += part.file
                    if len(lines) > MAX_ANSWER_BYTES or len(file) > wire.MAX_FILE_BYTES:
                        raise ProtocolError(f"{self._address} sends an answer without end")
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        raise ConnectionError(f"{self._address} ended an answer half-way")

    async def join_operators(
        self, request: wire_pb2.OperatorJoinRequest
    ) -> wire_pb2.OperatorJoinReply:
        """Redeem an operator's invitation, or renew the certificate that is shown."""
        with self._call("Join", service=wire.OPERATIONS) as call:
            await call.write(request)
            await call.end_writing()
            reply = await call.read(wire_pb2.OperatorJoinReply, patiently=False)
        if reply is None:
            raise ConnectionError(f"{self._address} ended the call without an answer")
        return reply

    async def download(self, digest: bytes, *, num_bytes: int, path: Path) -> None:
        """Download a request into ``path``, resuming after the bytes that are already there.

        A complete file costs no call. A partial file is kept when the connection breaks, and
        removed if its content is wrong. Bytes of an earlier attempt may have been damaged since,
        for example by a power failure: the whole file is then downloaded again, once.

        Args:
            digest: Digest of the whole file.
            num_bytes: Size of the whole file.
            path: The partial file, or where to create it; its folder exists.

        Raises:
            ProtocolError: The bytes do not match the digest; the file is removed.
            DeploymentError: The file cannot be written.
        """
        offset = _measure_partial_file(path, at_most=num_bytes)
        try:
            await self._fill_file(digest, num_bytes=num_bytes, offset=offset, path=path)
        except ProtocolError:
            if offset == 0:
                raise
            await self._fill_file(digest, num_bytes=num_bytes, offset=0, path=path)

    async def upload(self, envelope: wire_pb2.Envelope, path: Path) -> wire_pb2.Receipt:
        """Send a reply, starting at the offset that the coordinator names; return its receipt.

        The receipt comes when the reply is settled, which may be at the end of the round.

        Args:
            envelope: The signed description of the reply.
            path: A file of ``envelope.num_bytes`` bytes.

        Raises:
            DeploymentError: The file cannot be read.
        """
        with self._call("Upload") as call:
            await call.write(wire_pb2.UploadPart(envelope=envelope))
            status = await call.read(wire_pb2.UploadStatus, patiently=False)
            if status is None or status.WhichOneof("what") != "offset":
                return self._require_receipt(status)  # settled before
            if status.offset > envelope.num_bytes:
                raise ProtocolError(
                    f"{self._address} reports {status.offset} bytes of a reply of "
                    f"{envelope.num_bytes}"
                )
            # Read while sending: the coordinator may settle the reply before all of it has been
            # sent.
            answer = asyncio.create_task(call.read(wire_pb2.UploadStatus))
            try:
                await _send_file(call, path, offset=status.offset, until=answer)
                return self._require_receipt(await answer)
            finally:
                call.cancel()
                await asyncio.gather(answer, return_exceptions=True)

    async def _fill_file(self, digest: bytes, *, num_bytes: int, offset: int, path: Path) -> None:
        """Download the missing bytes from ``offset`` on; remove the file if it is wrong."""
        try:
            # An empty file needs a call, too, which creates it.
            if offset < num_bytes or num_bytes == 0:
                await self._append(digest, num_bytes=num_bytes, offset=offset, path=path)
            await asyncio.to_thread(_check_digest, path, digest=digest)
        except ProtocolError:
            _remove(path)
            raise

    async def _append(self, digest: bytes, *, num_bytes: int, offset: int, path: Path) -> None:
        with _report_disk_errors(path):
            stream = path.open("ab")
        with stream, self._call("Download") as call:
            await call.write(wire_pb2.DownloadRequest(digest=digest, offset=offset))
            await call.end_writing()
            while chunk := await call.read(wire_pb2.Chunk, patiently=False):
                offset += len(chunk.data)
                # Empty chunks could keep the call open without end.
                if offset > num_bytes or not chunk.data:
                    raise ProtocolError(
                        f"{self._address} sent a chunk of {len(chunk.data)} bytes that ends at "
                        f"{offset} of {num_bytes}"
                    )
                with _report_disk_errors(path):
                    stream.write(chunk.data)
                    stream.flush()  # here, so that a full disk is reported as such

    @contextmanager
    def _call(self, method: str, *, service: str = wire.GATEWAY) -> Iterator["_Call"]:
        call = _Call(
            self._channel,
            f"/{service}/{method}",
            address=self._address,
            metadata=self._metadata,
            stall_timeout_s=self._stall_timeout_s,
            life=self._life,
        )
        try:
            yield call
        finally:
            call.cancel()

    def _require_welcome(self, first: wire_pb2.FromCoordinator | None) -> wire_pb2.Welcome:
        if first is None:
            raise ConnectionError(f"{self._address} ended the session before a welcome")
        if first.WhichOneof("what") != "welcome":
            raise ProtocolError(f"{self._address} answered a hello with {first.WhichOneof('what')}")
        return first.welcome

    def _require_receipt(self, status: wire_pb2.UploadStatus | None) -> wire_pb2.Receipt:
        if status is None:
            raise ConnectionError(f"{self._address} ended an upload without a receipt")
        if status.WhichOneof("what") != "receipt":
            raise ProtocolError(f"{self._address} sent {status.WhichOneof('what')}, not a receipt")
        status.receipt.reason = _clean_text(status.receipt.reason)
        return status.receipt


def _clean_text(text: str) -> str:
    return replace_unprintable(text[:_MAX_CHARACTERS])


async def enrol(
    address: str,
    invitation: Invitation,
    identity: Identity,
    *,
    lineage: bytes = b"",
    credentials: Credentials | None = None,
) -> tuple[bytes, int]:
    """Redeem an invitation at one of its ``token_addresses``, or replace a client's keys.

    Args:
        address: ``host:port``.
        invitation: With its token; without a token, ``lineage`` authorizes the client. Without a
            certificate authority, only a loopback address is allowed.
        identity: The keys that the client will use.
        lineage: The chain that links its identity key to earlier ones; empty: there is none.
        credentials: Those of an enrolled client; ``None``: those of the invitation.

    Returns:
        The client's certificate, PEM, and its client id.

    Raises:
        EnrolmentRefused: The coordinator does not accept the invitation, or the keys.
        DeploymentError: There is no certificate authority, and the address is another machine's.
    """
    csr_pem = identity.csr_pem(invitation.name)
    request = wire_pb2.EnrolRequest(
        name=invitation.name,
        token=invitation.token,
        csr_pem=csr_pem,
        identity_key=identity.public_key,
        identity_signature=identity.sign(encode_enrolment(invitation.token, csr_pem)),
        lineage=lineage,
    )
    credentials = credentials or Credentials.of(invitation)
    try:
        async with GatewayConnection(address, credentials) as connection:
            reply = await connection.enrol(request)
    except ConnectionRefused as error:
        raise EnrolmentRefused(str(error)) from error
    # A certificate for another key would be useless, and would replace a good one.
    if credentials and not identity.is_subject_of(reply.certificate_pem):
        raise ProtocolError(f"the certificate from {address} is not for this client's key")
    return reply.certificate_pem, reply.client_id


async def look(address: str, invitation: Invitation) -> None:
    """Check that a coordinator answers and that an invitation is open, without using its token.

    Args:
        address: ``host:port``, one of the invitation's ``token_addresses``.
        invitation: With its token.

    Raises:
        ConnectionRefused: The invitation is unknown, or was used.
        DeploymentError: There is no certificate authority, and the address is another machine's.
    """
    request = wire_pb2.LookRequest(name=invitation.name, token=invitation.token)
    async with GatewayConnection(address, Credentials.of(invitation)) as connection:
        await connection.look(request)


class _CallEnd(ConnectionError):
    """The coordinator has ended a call regularly."""


class _Call:
    """One call, which parses messages and translates gRPC's errors into ours.

    On the wire, gRPC's four kinds of calls are the same: streams of messages in both directions.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        method: str,
        *,
        address: str,
        metadata: tuple[tuple[str, str], ...],
        stall_timeout_s: float,
        life: _Life,
    ) -> None:
        start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        self._call = start(metadata=metadata)
        self._address = address
        self._stall_timeout_s, self._life = stall_timeout_s, life
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._come_back_s: float | None = None
        self._call.add_done_callback(self._remember)

    async def write(self, message: Message) -> None:
        """Send one message."""
        await self.write_bytes(message.SerializeToString())

    async def write_bytes(self, data: bytes) -> None:
        """Send one serialized message."""
        async with self._translate_errors(), self._writing, asyncio.timeout(self._stall_timeout_s):
            await self._call.write(data)

    async def end_writing(self) -> None:
        """Tell the coordinator that no more messages follow."""
        async with self._translate_errors():
            await self._call.done_writing()

    async def read(
        self, kind: type[M], *, patiently: bool = True, within_s: float = math.inf
    ) -> M | None:
        """Return the next message; ``None`` at the end.

        Args:
            kind: The class of the message.
            patiently: Whether to wait up to ``within_s``; otherwise the stall timeout also holds.
            within_s: Seconds after which the wait has failed.
        """
        most_s = within_s if patiently else min(within_s, self._stall_timeout_s)
        try:
            async with self._translate_errors(waits_s=most_s):
                async with asyncio.timeout(most_s if math.isfinite(most_s) else None):
                    data = await self._call.read()
            # Any message is a sign of life.
            self._life.num_ticks = 0
        except _CallEnd:
            return None
        if not isinstance(data, bytes):
            return None
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise ProtocolError(f"{self._address} sent {len(data)} bytes, not a {kind}") from error

    def cancel(self) -> None:
        """End the call; has no effect if it has ended."""
        self._call.cancel()

    def _remember(self, call: grpc.aio.Call) -> None:
        """Save the coordinator's status while it is visible.

        A write that fails because the call has ended replaces the status by :data:`_WRITE_FAILED`,
        which would hide from a client that it is refused
        (https://github.com/grpc/grpc/issues/36066).
        """
        if self._status in (None, _WRITE_FAILED):
            self._status = (
                _run_without_waiting(call.code()),
                _run_without_waiting(call.details()) or "",
            )
            self._come_back_s = _parse_seconds(_run_without_waiting(call.trailing_metadata()))

    async def _wait_for_status(self) -> None:
        """Wait for the coordinator's status if a write failed before it came.

        gRPC does not notify anyone when it replaces one status by the other, so this polls. It does
        not replace it while a message is unread; the call then counts as a broken connection, and
        the next call receives the status.
        """
        for _ in range(_NUM_LOOKS):
            if self._status != _WRITE_FAILED:
                return
            await asyncio.sleep(_LOOK_S)
            self._remember(self._call)

    def _build_error(self) -> Exception:
        code, words = self._status or (grpc.StatusCode.UNKNOWN, "")
        if code is grpc.StatusCode.OK:
            return _CallEnd(f"{self._address} has ended the call")
        if code in _REFUSALS:
            is_version = code is grpc.StatusCode.FAILED_PRECONDITION
            return (OtherProtocol if is_version else ConnectionRefused)(
                f"{self._address} refuses: {_clean_text(words)}"
            )
        text = f"{self._address}: {code.name}: {_clean_text(words)}"
        if self._come_back_s is not None:
            return ComeBackLater(text, after_s=self._come_back_s)
        return ConnectionError(text)

    @asynccontextmanager
    async def _translate_errors(self, *, waits_s: float | None = None) -> AsyncIterator[None]:
        waits_s = self._stall_timeout_s if waits_s is None else waits_s
        try:
            yield
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:  # the call has ended
            await self._wait_for_status()
            raise self._build_error() from error
        except TimeoutError as error:
            raise ConnectionError(f"{self._address} has been silent for {waits_s:g} s") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # This task was not cancelled: gRPC raises the same error in every task that waits for
            # a call which another task has closed.
            raise ConnectionError(f"the call to {self._address} was closed") from None


def _parse_seconds(metadata: grpc.aio.Metadata | None) -> float | None:
    """Return the seconds after which to come back; ``None`` if there is no valid number."""
    text = dict(metadata or ()).get(wire.COME_BACK_METADATA)
    try:
        seconds = float(str(text))
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < math.inf else None


def _run_without_waiting(answer: Coroutine[None, None, T]) -> T:
    """Return the result of a coroutine that never has to wait."""
    try:
        answer.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("the call has ended, and still its status must be waited for")


async def _send_content(call: _Call, content: bytes) -> None:
    """Send the content of a command's file in parts, and end writing."""
    for begin in range(0, len(content), wire.CHUNK_BYTES):
        data = content[begin : begin + wire.CHUNK_BYTES]
        await call.write(wire_pb2.OperatorCommand(data=data))
    await call.end_writing()


async def _send_file(
    call: _Call, path: Path, *, offset: int, until: "asyncio.Task[wire_pb2.UploadStatus | None]"
) -> None:
    """Send ``path`` from ``offset`` on; stop early once the coordinator has answered ``until``."""
    with _report_disk_errors(path), path.open("rb") as stream:
        stream.seek(offset)
        while not until.done():
            data = stream.read(wire.CHUNK_BYTES)
            try:
                if not data:
                    await call.end_writing()
                    return
                number = wire_pb2.UploadPart.DATA_FIELD_NUMBER
                await call.write_bytes(wire.encode_bytes_field(number, data))
            except (ConnectionError, ConnectionRefused):
                return  # the coordinator may answer early: its answer says what went wrong


def _measure_partial_file(path: Path, *, at_most: int) -> int:
    """Return the size of a partial download; remove a file that is too long to be one."""
    with _report_disk_errors(path):
        num_bytes = path.stat().st_size if path.exists() else 0
        if num_bytes <= at_most:
            return num_bytes
        path.unlink()
        return 0


def _remove(path: Path) -> None:
    with _report_disk_errors(path):
        path.unlink(missing_ok=True)


def _check_digest(path: Path, *, digest: bytes) -> None:
    with _report_disk_errors(path), path.open("rb", buffering=0) as stream:
        found = hash_stream(stream).digest()
    if found != digest:
        raise ProtocolError(
            f"{path} was downloaded with digest {found.hex()}, expected {digest.hex()}: it was "
            "removed and must be downloaded again"
        )


def _report_disk_errors(path: Path) -> AbstractContextManager[None]:
    # Around each disk access alone: errors of the network are OSErrors, too.
    return explain_disk_errors(path, raises=DeploymentError, doing="read or write")


def _open_channel(address: str, credentials: Credentials | None) -> grpc.aio.Channel:
    """Create a channel to ``address``; raise DeploymentError for plaintext to another machine."""
    is_local = is_loopback(address)
    # The site's proxy would look for "localhost" on its own machine.
    options = [*_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_local else [*_OPTIONS]
    if credentials is None:
        if not is_local:
            raise DeploymentError(
                f"{address} is another machine, and without TLS every machine on the way could "
                "read and change messages; join with an invitation (`fedlearn invite NAME`)"
            )
        return grpc.aio.insecure_channel(address, options)
    tls = grpc.ssl_channel_credentials(
        root_certificates=credentials.ca_pem,
        private_key=credentials.tls_key_pem or None,
        certificate_chain=credentials.certificate_pem or None,
    )
    # The server's certificate always has this name, under whichever address it is reached.
    options.append(("grpc.ssl_target_name_override", SERVER_NAME))
    return grpc.aio.secure_channel(address, tls, options)
