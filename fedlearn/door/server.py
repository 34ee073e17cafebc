"""The door: clients come in over gRPC, from behind mutual TLS, and are bounded in all they do.

::

    main thread              thread "door" (asyncio, grpc.aio)            thread "reply-log"
    ───────────              ─────────────────────────────────            ──────────────────
    DoorChannel.exchange ──► Desk: tasks ──► Hall: sessions ──► clients
         ▲                   Desk: checks ◄── sessions, Transfers ◄──┘
         │                     └──────────────────────────────────────► log, one fsync a group
         └───────────────────── a reply that is durable ◄──────────────────────┘

Nothing that a client does or leaves undone holds up another one, or the main thread.
"""

import asyncio
import resource
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, TypeAlias, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from fedlearn.core.clock import utc
from fedlearn.core.messages import ClientId
from fedlearn.door.authority import Authority
from fedlearn.door.channel import Check, DoorChannel, DoorClock
from fedlearn.door.connections import Context, Ending, Hall, Session, read
from fedlearn.door.counters import DoorCounters
from fedlearn.door.enrolled import Roster
from fedlearn.door.enrolment import MAX_ENROLMENT_BYTES, Enrolments
from fedlearn.door.exchange import Docket, Key, TokenBucket
from fedlearn.door.loop import LoopThread
from fedlearn.door.settings import DoorSettings
from fedlearn.door.spool import GroupWriter, ended_exchanges
from fedlearn.door.tasks import Desk
from fedlearn.door.transfers import Transfers
from fedlearn.errors import DeploymentError, ProtocolError, StoreError
from fedlearn.identity.registry import EnrolledClient, Registry
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.addresses import is_loopback
from fedlearn.transport.grpc_client import NAME_METADATA
from fedlearn.transport.identity import fingerprint

__all__ = ["Door", "DoorChannel", "DoorSettings"]

#: Seconds between two looks at the registry and at who leads.
_POLL_S = 1.0

#: Seconds past the grace in which calls that were cancelled have to end.
_STOP_S = 0.5

#: Connections whose client has been recognised, of those that are remembered.
_MAX_PEERS = 1 << 16

#: Calls of one connection at once: a session, transfers, and one of each that is ending.
_MAX_STREAMS = 8

#: Calls of one client that have not ended, over all its connections.
_MAX_CALLS = 16

#: Bytes of a message other than a reply.
_MAX_SMALL_BYTES = 16 << 10

#: Connections to the enrolment port at once. Whoever reaches it may hold one, for a while only.
_MAX_ENROLMENT_CONNECTIONS = 1000

#: Seconds that a client has to read the last message of its session.
_LAST_WORD_S = 1.0

#: Seconds between two lines of the log about strangers and about calls that were refused: both
#: come as fast as they like.
_REPORT_S = 10.0

_EXPIRED = "this client's certificate has expired; enrol again with a new invitation"

_SOFTWARE = f"fedlearn {version('fedlearn')}"

_log = structlog.get_logger(__name__)

T = TypeVar("T")
_Handlers: TypeAlias = "dict[str, grpc.RpcMethodHandler[bytes, bytes]]"


class Door:
    """The gRPC server of a coordinator, on a thread of its own.

    Args:
        settings: Its bounds.
        registry: Who is enrolled.
        run_id: Of the run.
        spool_dir: For requests and replies on their way; this run's alone.
        authority: Signs and shows certificates; ``None``: plaintext on the loopback, where
            clients say themselves who they are, for tests and demonstrations.
        eligible: Whether a client may be asked, by what it says of itself.
        is_leader: Whether this coordinator may accept replies now; cheap.
        clock: Real time.

    Attributes:
        counters: What has happened so far.
        address: Where clients connect, once started.
        enrolment_address: Where they enrol; empty if nowhere.
    """

    def __init__(
        self,
        settings: DoorSettings,
        *,
        registry: Registry,
        run_id: str,
        spool_dir: Path,
        authority: Authority | None,
        eligible: Callable[[EnrolledClient, wire_pb2.Eligibility], bool],
        is_leader: Callable[[], bool],
        clock: DoorClock,
    ) -> None:
        self.counters = DoorCounters()
        self.address = ""
        self.enrolment_address = ""
        self._settings = settings
        self._registry = registry
        self._run_id = run_id
        self._spool_dir = spool_dir
        self._authority = authority
        self._is_leader = is_leader
        self._clock = clock
        self._changed = threading.Event()
        self._calls: Counter[ClientId] = Counter()
        self._peers: dict[str, None] = {}
        self._strangers = 0
        self._refusals: dict[str, tuple[int, str]] = {}  # how many by cause, and whose was the last
        self._reported_s = clock.now_s()
        self._roster = Roster(registry, self._roster_changed, clock)
        self._hall = Hall(
            max_connected=settings.max_connected,
            come_back_s=settings.come_back_s,
            eligible=eligible,
            changed=self._changed.set,
            counters=self.counters,
            clock=clock,
        )

    def start(self) -> None:
        """Open the ports and return.

        Raises:
            DeploymentError: A port cannot be listened on, or is not the loopback's without TLS.
            StoreError: What is in the spool cannot be read.
        """
        self._require_loopback()
        docket, is_recovering = Docket(self._run_id), False
        for ended in ended_exchanges(self._spool_dir / "replies", run_id=self._run_id):
            if ended.closed is None:
                is_recovering = True
            else:
                accepted = [each.client_id for each in ended.replies[: ended.closed.num_consumed]]
                docket.remember(Key.of_folder(self._run_id, ended.name), accepted)
        if self._is_leader():  # a successor has its own there
            shutil.rmtree(self._spool_dir / "passing", ignore_errors=True)
        self._loop = LoopThread("door")
        self._writer = GroupWriter(self._loop.post)
        self._files = ThreadPoolExecutor(4, thread_name_prefix="door-files")
        self._desk = Desk(
            docket=docket,
            hall=self._hall,
            writer=self._writer,
            is_leader=self._is_leader,
            counters=self.counters,
            clock=self._clock,
            is_recovering=is_recovering,
        )
        self._hall.is_needed = self._desk.is_needed
        self._transfers = Transfers(
            desk=self._desk,
            files=self._files,
            stall_timeout_s=self._settings.stall_timeout_s,
            counters=self.counters,
        )
        try:
            self._loop.call(self._serve()).result()
        except DeploymentError:
            self._end()
            raise

    def stop(self, *, grace_s: float, reason: str = "the coordinator is stopping") -> None:
        """Tell clients to come back and why, give calls ``grace_s`` to end, close the ports."""
        self._loop.call(self._close(grace_s, reason)).result()
        self._end()

    def channel(self, *, check: Check = lambda: None) -> DoorChannel:
        """Return the run loop's side.

        Args:
            check: Called several times a second while the channel waits; what it raises, a
                :class:`~fedlearn.errors.FedlearnError`, ends the waiting.
        """
        return DoorChannel(
            loop=self._loop,
            desk=self._desk,
            hall=self._hall,
            run_id=self._run_id,
            folder=self._spool_dir,
            recovery_grace_s=self._settings.recovery_grace_s,
            changed=self._changed,
            check=check,
            clock=self._clock,
        )

    def call(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Run ``coroutine`` on the door's event loop."""
        return self._loop.call(coroutine)

    def when_blind(self, tell: Callable[[StoreError], None]) -> None:
        """Have ``tell`` told if the door, open, does not look at the registry any more.

        Revoked clients would be heard on. A registry that is only away is looked at again.
        """

        def ended(poll: asyncio.Task[None]) -> None:
            error = None if poll.cancelled() else poll.exception()
            if error is not None:
                _log.error("poll_died", error=repr(error))
                tell(
                    StoreError(
                        f"the door does not see any more who is revoked ({type(error).__name__}, "
                        "see the log); start the coordinator again"
                    )
                )

        self._loop.post(lambda: self._poll.add_done_callback(ended))

    def status(self) -> dict[str, object]:
        """Return who is connected and where the open exchange stands, as JSON values."""
        return self._loop.ask(self._status)

    def _status(self) -> dict[str, object]:
        def name(client_id: ClientId) -> str:
            client = self._roster.by_id(client_id)
            return "" if client is None else client.name

        status = self._desk.status(name)
        return status | {"connected": len(self._hall), "eligible": len(self._hall.eligible())}

    def _end(self) -> None:
        self._writer.stop()
        self._loop.stop()
        self._files.shutdown()

    def _require_loopback(self) -> None:
        for address in (self._settings.address, self._settings.enrolment_address):
            if self._authority is None and address is not None and not is_loopback(address):
                raise DeploymentError(
                    f"without TLS the door opens on the loopback only, not on {address!r}; take "
                    "127.0.0.1, or run with certificates (without --insecure)"
                )

    # The servers.

    async def _serve(self) -> None:
        await self._roster.renew()
        # On the wire all calls are streams; read as such, a client that says nothing times out.
        handlers: _Handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Download": grpc.stream_stream_rpc_method_handler(self._download),
            "Upload": grpc.stream_stream_rpc_method_handler(self._upload),
        }
        settings = self._settings
        is_enrolling = settings.enrolment_address is not None
        num_connections, num_enrolling = _affordable(
            settings.max_connected + settings.max_handshakes,
            _MAX_ENROLMENT_CONNECTIONS if is_enrolling else 0,
        )
        self._server = self._new_server(
            wire.DOOR,
            handlers,
            max_bytes=wire.MAX_MESSAGE_BYTES,
            max_connections=num_connections,
            idle_s=2 * wire.KEEPALIVE_S,  # a client that is there has a session
        )
        self.address = self._bind(self._server, self._settings.address, mutual=True)
        self._enrolment_server: grpc.aio.Server | None = None
        if self._settings.enrolment_address is not None:
            enrolments = Enrolments(
                registry=self._registry,
                roster=self._roster,
                authority=self._authority,
                timeout_s=self._settings.handshake_timeout_s,
                certificate_days=self._settings.certificate_days,
                counters=self.counters,
                clock=self._clock,
            )
            enrol: _Handlers = {"Enrol": grpc.stream_stream_rpc_method_handler(enrolments.enrol)}
            server = self._new_server(
                wire.ENROLMENT,
                enrol,
                max_bytes=MAX_ENROLMENT_BYTES,
                max_connections=num_enrolling,
                idle_s=settings.handshake_timeout_s,
            )
            address = self._settings.enrolment_address
            self.enrolment_address = self._bind(server, address, mutual=False)
            await server.start()
            self._enrolment_server = server
        await self._server.start()
        self._poll = asyncio.create_task(self._keep_polling())
        _log.info("door_open", address=self.address, enrolment_address=self.enrolment_address)

    def _new_server(
        self,
        service: str,
        handlers: _Handlers,
        *,
        max_bytes: int,
        max_connections: int,
        idle_s: float,
    ) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # two coordinators on one port would share its clients
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
                ("grpc.max_metadata_size", 16 << 10),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.max_connection_idle_ms", _ms(idle_s)),
                ("grpc.server_handshake_timeout_ms", _ms(self._settings.handshake_timeout_s)),
                ("grpc.keepalive_time_ms", _ms(2 * wire.KEEPALIVE_S)),
                ("grpc.keepalive_timeout_ms", _ms(wire.KEEPALIVE_S)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", _ms(wire.KEEPALIVE_S / 2)),
            ]
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        return server

    def _bind(self, server: grpc.aio.Server, address: str, *, mutual: bool) -> str:
        """Listen on ``address`` and return it with the port that it came to."""
        try:
            if self._authority is None:
                port = server.add_insecure_port(address)
            else:
                credentials = self._server_credentials(self._authority, mutual=mutual)
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise DeploymentError(
                f"cannot listen on {address}: another program has the port, or the host is not "
                "this machine; choose another address"
            ) from error
        return f"{address.rpartition(':')[0]}:{port}"

    def _server_credentials(self, authority: Authority, *, mutual: bool) -> grpc.ServerCredentials:
        """Return credentials that are looked up for every connection: certificates renew."""
        served = authority.server_certificate()

        def current() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            if mutual:
                self.counters.connections += 1
            else:
                self.counters.enrolment_connections += 1
            try:
                latest = authority.server_certificate()
            except DeploymentError as error:
                _log.error("server_certificate_not_renewed", reason=str(error))
                return None
            if latest == served:
                return None
            served = latest
            return _configuration(authority, latest, mutual=mutual)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(authority, served, mutual=mutual),
            # None, "as before", is documented and missing in the types.
            cast("Callable[[], grpc.ServerCertificateConfiguration]", current),
            require_client_authentication=mutual,
        )

    async def _close(self, grace_s: float, reason: str) -> None:
        self._poll.cancel()
        self._report_refusals()
        self._desk.abandon()
        for session in self._hall.sessions():
            self._hall.send_away(session, reason, after_s=1.0)
        servers = [each for each in (self._server, self._enrolment_server) if each is not None]
        stopping = [asyncio.create_task(each.stop(grace_s)) for each in servers]
        # gRPC waits on for calls whose client is gone without a word: until its keepalive ends.
        _, late = await asyncio.wait(stopping, timeout=grace_s + _STOP_S)
        if late:
            _log.warning("door_closed_late", servers=len(late), waited_s=grace_s + _STOP_S)

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self._roster.renew()
            self._desk.tell_untold()
            self._cut_expired()
            self._report()

    def _cut_expired(self) -> None:
        """End the sessions whose certificate has expired since they were opened."""
        for session in self._hall.sessions():
            if self._has_expired(session.client):
                self._cut(session, _EXPIRED)

    def _has_expired(self, client: EnrolledClient) -> bool:
        return client.certificate_expires_utc <= utc(self._clock.unix_s())

    def _report(self) -> None:
        """Log now and then who came and was not let in: nobody else tells of them."""
        now_s = self._clock.now_s()
        if now_s - self._reported_s < _REPORT_S:
            return
        self._reported_s = now_s
        self._report_strangers()
        self._report_refusals()

    def _report_refusals(self) -> None:
        for cause, (num_calls, last_peer) in self._refusals.items():
            _log.warning("refused", cause=cause, num_calls=num_calls, last_peer=last_peer)
        self._refusals.clear()

    def _report_strangers(self) -> None:
        """Log how many connections came to nothing."""
        strangers = self.counters.connections - self.counters.authenticated
        if strangers > self._strangers:
            num_new = strangers - self._strangers
            _log.warning("strangers", num_connections=num_new, num_so_far=strangers)
        self._strangers = strangers

    def _roster_changed(self) -> None:
        """End the sessions of clients that are revoked or have another certificate now."""
        for session in self._hall.sessions():
            client = self._roster.by_id(session.client.client_id)
            if client is None or client.status != "active":
                self._cut(session, "this client was revoked")
            elif client.fingerprint != session.client.fingerprint:
                self._cut(session, "this client has enrolled again with other keys")
            else:
                session.client = client
                self._hall.reconsider(session, session.eligibility)
        self._transfers.cut_strangers(self._roster.by_id)

    def _cut(self, session: Session, reason: str) -> None:
        client_id = session.client.client_id
        _log.warning("session_ended", client_id=client_id, reason=reason)
        session.cut(Ending(grpc.StatusCode.UNAUTHENTICATED, reason))
        self._hall.leave(session)
        self._desk.gone(client_id)
        self._transfers.cut(client_id)

    # The calls.

    async def _session(self, _: object, context: Context) -> None:
        async with self._caller(context) as client:
            await self._serve_session(client, context)

    async def _download(self, _: object, context: Context) -> None:
        async with self._caller(context) as client:
            await self._transfers.download(client, context)

    async def _upload(self, _: object, context: Context) -> None:
        async with self._caller(context) as client:
            await self._transfers.upload(client, context)

    @asynccontextmanager
    async def _caller(self, context: Context) -> AsyncIterator[EnrolledClient]:
        """Yield the client that calls, unless it has too many calls: some may never end.

        Even the end of a call has to be read by the client; one that does not read keeps
        its calls until its connection breaks.
        """
        client = await self._authenticated(context)
        if self._calls[client.client_id] >= _MAX_CALLS:
            words = "too many calls of this client have not ended; close its connections"
            await self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, words, "calls")
        self._calls[client.client_id] += 1
        try:
            yield client
        except grpc.aio.InternalError as error:
            # A message is still being sent to a client that does not read: its call cannot be
            # ended in words. A call that is let go of is reset.
            _log.info("call_dropped", client_id=client.client_id)
            raise asyncio.CancelledError from error
        finally:
            self._calls[client.client_id] -= 1
            if not self._calls[client.client_id]:
                del self._calls[client.client_id]

    async def _serve_session(self, client: EnrolledClient, context: Context) -> None:
        if not self._is_leader():
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "this coordinator stands by; try another address"
            )
        hello = await self._hello(context)
        session = Session(client, hello, since_s=self._clock.now_s())
        welcome = wire_pb2.Welcome(
            protocol=wire.PROTOCOL,
            software=_SOFTWARE,
            client_id=client.client_id,
            run_id=self._run_id,
            unix_s=self._clock.unix_s(),
        )
        session.push(wire_pb2.FromCoordinator(welcome=welcome).SerializeToString())
        self._desk.answer_held(session)  # also if there is no room
        if self._hall.enter(session):
            self._desk.greet(session)
        await self._converse(session, context)
        ending = session.ending
        if ending is not None and ending.code is not grpc.StatusCode.OK:
            await context.abort(ending.code, ending.reason)

    async def _converse(self, session: Session, context: Context) -> None:
        """Listen and speak until one side ends the session."""
        timeout_s = self._settings.stall_timeout_s
        writing = asyncio.create_task(
            session.write(context, timeout_s=timeout_s, counters=self.counters)
        )
        tasks = {
            asyncio.create_task(self._listen(session, context)),
            writing,
            asyncio.create_task(session.wait_cut()),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._leave(session)
            session.finish(Ending(grpc.StatusCode.OK, "the client has left"))
            # gRPC takes no end of a call while a message is being sent.
            await asyncio.wait({writing}, timeout=_LAST_WORD_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._leave(session)
        if writing.cancelled():
            raise asyncio.CancelledError

    def _leave(self, session: Session) -> None:
        self._hall.leave(session)
        if self._hall.find(session.client.client_id) is None:
            self._desk.gone(session.client.client_id)

    async def _listen(self, session: Session, context: Context) -> None:
        bucket = TokenBucket(self._settings.max_messages_per_s, self._clock.now_s())
        while (data := await read(context)) is not None:
            self.counters.messages += 1
            self.counters.bytes_in += len(data)
            wait_s = bucket.take(now_s=self._clock.now_s())
            if wait_s > 0.0:
                self.counters.throttled += 1
                await asyncio.sleep(wait_s)
            try:
                message = _parsed(data)
            except ProtocolError as error:
                self._count_refusal("malformed", context)
                session.cut(Ending(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
                return
            self._hear(session, message)

    def _hear(self, session: Session, message: wire_pb2.FromClient) -> None:
        match message.WhichOneof("what"):
            case "result":
                self._desk.result(session, message.result)
            case "progress":
                self._desk.progressed(session, message.progress)
            case "eligibility":
                self._hall.reconsider(session, message.eligibility)
            case _:  # a second hello, or what a later version says
                self.counters.refused["unexpected"] += 1

    async def _hello(self, context: Context) -> wire_pb2.Hello:
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                data = await read(context)
            message = _parsed(data or b"")
        except TimeoutError:
            await self._refuse(
                context, grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came in time", "handshake"
            )
        except ProtocolError as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error), "malformed")
        if message.WhichOneof("what") != "hello":
            await self._refuse(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "a session begins with hello",
                "handshake",
            )
        if message.hello.protocol != wire.PROTOCOL:
            words = (
                f"the client speaks protocol {message.hello.protocol}, this coordinator "
                f"{wire.PROTOCOL}; install {_SOFTWARE} on the client"
            )
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, words, "protocol")
        return message.hello

    async def _authenticated(self, context: Context) -> EnrolledClient:
        """Return the client that calls, by its certificate."""
        client = await self._recognised(context)
        if client is None and self._roster.is_away:
            words = "the coordinator cannot look up new clients now; try again"
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, words, "registry")
        if client is None:
            await self._refuse(
                context, grpc.StatusCode.UNAUTHENTICATED, "this client is not enrolled", "unknown"
            )
        if client.status != "active":
            await self._refuse(
                context, grpc.StatusCode.UNAUTHENTICATED, "this client was revoked", "revoked"
            )
        if self._has_expired(client):  # since the connection was made
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, _EXPIRED, "expired")
        return client

    async def _recognised(self, context: Context) -> EnrolledClient | None:
        if self._authority is None:
            name = dict(context.invocation_metadata() or ()).get(NAME_METADATA, "")
            return await self._roster.by_name(str(name))
        for certificate in context.auth_context().get("x509_pem_cert", ()):
            try:
                client = await self._roster.by_fingerprint(fingerprint(certificate))
            except ProtocolError:
                return None
            if client is not None:
                self._count_peer(context.peer())
            return client
        return None

    def _count_peer(self, peer: str) -> None:
        """Count a connection whose client is known, once."""
        if peer not in self._peers:
            self.counters.authenticated += 1
            self._peers[peer] = None
            if len(self._peers) > _MAX_PEERS:
                del self._peers[next(iter(self._peers))]

    async def _refuse(
        self, context: Context, code: grpc.StatusCode, words: str, cause: str
    ) -> NoReturn:
        self._count_refusal(cause, context)
        await context.abort(code, words)
        raise AssertionError("abort raises")

    def _count_refusal(self, cause: str, context: Context) -> None:
        self.counters.refused[cause] += 1
        num_calls, _ = self._refusals.get(cause, (0, ""))
        self._refusals[cause] = num_calls + 1, context.peer()


def _parsed(data: bytes) -> wire_pb2.FromClient:
    """Return a message of a session.

    Raises:
        ProtocolError: It is none, or larger than any but a reply may be.
    """
    try:
        message = wire_pb2.FromClient.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes are no FromClient") from error
    kind = message.WhichOneof("what")
    if kind != "result" and len(data) > _MAX_SMALL_BYTES:
        raise ProtocolError(f"{len(data)} bytes of {kind}, at most {_MAX_SMALL_BYTES} make sense")
    return message


def _configuration(
    authority: Authority, key_and_chain: tuple[bytes, bytes], *, mutual: bool
) -> grpc.ServerCertificateConfiguration:
    roots = authority.ca_pem if mutual else None
    return grpc.ssl_server_certificate_configuration([key_and_chain], root_certificates=roots)


def _affordable(num_connections: int, num_enrolling: int) -> tuple[int, int]:
    """Return how many of these connections may be open, for clients and to enrol.

    Both together are at most half of the files that the process may open, those to enrol an
    eighth: without a bound, whoever connects often enough keeps the run from its own database.
    """
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return num_connections, num_enrolling
    enrolling = min(num_enrolling, max_files // 8)
    return min(num_connections, max_files // 2 - enrolling), enrolling


def _ms(seconds: float) -> int:
    return max(1, round(1000.0 * seconds))
