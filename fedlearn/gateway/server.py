"""The gRPC server of a coordinator: clients connect with mutual TLS, and all they do is bounded.

It is an asyncio loop on its own thread; another thread logs replies, and four more read and write
files. The round loop of each run talks to it through a :class:`GatewayChannel`, as
``docs/explanation/deployment.md`` shows. No client, active or silent, can delay another one, or a
run.
"""

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import partial
from typing import TypeAlias, cast

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray

from fedlearn.core.clock import RealClock, utc
from fedlearn.core.messages import ClientId
from fedlearn.core.software import SOFTWARE
from fedlearn.errors import DeploymentError, StoreError
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.channel import Check, GatewayChannel, Waiting
from fedlearn.gateway.connections import (
    Audience,
    CallEnded,
    CallStatus,
    Context,
    ServerSession,
    Sessions,
    count_call,
    parse_message,
    read,
    read_first,
    read_peer,
)
from fedlearn.gateway.contacts import Contacts
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.enrolled import EnrolledClients
from fedlearn.gateway.enrolment import MAX_ENROLMENT_BYTES, Enrolments
from fedlearn.gateway.exchanges import Exchanges, OfferedBundle
from fedlearn.gateway.loop import LoopThread
from fedlearn.gateway.open_files import max_open_files
from fedlearn.gateway.operations import OperatorAccess, OperatorCalls
from fedlearn.gateway.pace import Pace
from fedlearn.gateway.processor_time import ProcessorTime
from fedlearn.gateway.questions import (
    ACCEPTED,
    VerdictHistory,
    refuse_unusable,
)
from fedlearn.gateway.served_runs import RunTerms, ServedRun, ServedRuns
from fedlearn.gateway.settings import GatewaySettings
from fedlearn.gateway.token_bucket import TokenBucket
from fedlearn.gateway.transfers import Transfers
from fedlearn.gateway.upload_store import GroupWriter, read_exchange_logs
from fedlearn.gateway.versions import Versions
from fedlearn.identity.profiles import Profile
from fedlearn.identity.registry import EnrolledClient, Registry
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.addresses import is_loopback
from fedlearn.transport.content import TaskKey
from fedlearn.transport.grpc_client import NAME_METADATA

__all__ = ["Gateway", "GatewayChannel", "GatewaySettings", "RunTerms"]

_POLL_S = 1.0  # between two reads of the registry and of the leadership
_STOP_S = 0.5  # after the grace period, for cancelled calls to end
_LAST_WORD_S = 1.0  # for a client to read the last message of its session
_REPORT_S = 10.0  # between two log lines about strangers and refused calls, however many come

#: Earliest time at which a client that is not served now may come back.
_SOON_S = 0.5
#: Share of one core that check-ins may take.
_SHARE = 0.5
#: So many check-ins trigger a measurement of their cost before the next poll: until the rate is
#: corrected, every client that is sent away gets a wrong time.
_MANY = 10
_NOT_NOW = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)

_MAX_PEERS = 1 << 16  # remembered connections of known clients
_MAX_STREAMS = 24  # of one connection at once: a session, transfers, and those that are ending
_MAX_CALLS = 32  # unfinished calls of one client, over all its connections
_MAX_SMALL_BYTES = 16 << 10  # of a message other than a reply
_MAX_LISTED = 100  # clients that the status lists as set aside
_REVOKED = "this client was revoked"
_MAX_ENROLMENT_CONNECTIONS = 1000  # at once; any peer that reaches the port may hold one

#: Serves a call: gRPC passes the messages, which are read from the context instead.
_Serve: TypeAlias = Callable[[object, Context], Awaitable[None]]

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class Gateway:
    """The gRPC server of a coordinator, on its own thread.

    Attributes:
        runs: The runs that are served from the start; :meth:`open_run` adds others.
        authority: Issues and serves certificates; ``None``: plaintext on the loopback, where
            clients are trusted to give their own names, for tests and demonstrations.
        is_leader: Whether this coordinator may serve clients now; must be cheap.
        operators: Who may give commands from other machines; ``None``: nobody, as without TLS.
        beat_s: Longest silence towards a client, in seconds, so that it knows that this
            coordinator is alive; 0: unlimited, since no other coordinator can take over.
        public_addresses: Where clients reach the coordinator from now on; empty: where they do
            now.
        pace: Limits the rate of check-ins; ``None``: the rate is measured.
        counters: Counters of all events so far.
        address: Where clients enrol and connect, once started.
        enrolment_address: Where clients of an earlier version enrol; empty if they cannot.
    """

    settings: GatewaySettings
    _: KW_ONLY
    registry: Registry
    runs: Sequence[RunTerms]
    authority: Authority | None
    is_leader: Callable[[], bool]
    clock: RealClock
    operators: OperatorAccess | None = None
    beat_s: float = 0.0
    public_addresses: Sequence[str] = ()
    pace: Pace | None = None

    def __post_init__(self) -> None:
        self.counters = GatewayCounters()
        self.address = ""
        self.enrolment_address = ""
        self._calls: Counter[ClientId] = Counter()
        self._peers: dict[str, None] = {}
        self._operations: OperatorCalls | None = None
        self._strangers = self._num_paced = self._num_connections = 0
        self._refusals: dict[str, tuple[int, str]] = {}  # by cause: number of calls, last peer
        self._reported_s = self.clock.now_s()
        self._pace = self.pace or Pace(self.clock, share=_SHARE)
        self._num_measured = 0  # check-ins
        self._enrolled = EnrolledClients(self.registry, self._apply_enrolments, self.clock)
        self._sessions = Sessions(
            settings=self.settings,
            counters=self.counters,
            clock=self.clock,
            pace=self._pace,
            versions=Versions(needs_newest=self._explain_newest_protocol),
        )

    def start(self) -> None:
        """Open the ports and return.

        Raises:
            DeploymentError: A port cannot be opened, or is not on the loopback without TLS.
            StoreError: The upload store cannot be read.
        """
        # They all belong to the loop's thread from here on.
        self._loop = LoopThread("gateway")
        self._writer = GroupWriter(self._loop.post)
        self._files = ThreadPoolExecutor(4, thread_name_prefix="gateway-files")
        unserved = self._build_exchanges(
            VerdictHistory(None), is_leader=self.is_leader, is_recovering=False
        )
        self._served = ServedRuns(sessions=self._sessions, unserved=unserved, clock=self.clock)
        self._sessions.is_needed = self._served.is_needed
        for terms in self.runs:
            self.open_run(terms)
        self._contacts = Contacts(
            registry=self.registry,
            sessions=self._sessions,
            is_leader=self.is_leader,
            clock=self.clock,
        )
        self._transfers = Transfers(
            runs=self._served,
            files=self._files,
            find_objection=self._find_objection,
            stall_timeout_s=self.settings.stall_timeout_s,
            chunk_bytes=wire.download_chunk_bytes(self.beat_s),
            counters=self.counters,
            clock=self.clock,
        )
        try:
            self._loop.call(self._serve()).result()
        except DeploymentError:
            self._end()
            raise

    def stop(self, *, grace_s: float, reason: str = "the coordinator is stopping") -> None:
        """Ask clients to come back later, with a reason, and close the ports.

        Running calls have ``grace_s`` seconds to end.
        """
        self._loop.call(self._close(grace_s, reason)).result()
        self._end()

    def open_run(self, terms: RunTerms) -> None:
        """Serve a run from now on, besides those that are served already, perhaps again.

        Raises:
            StoreError: Its upload store cannot be read.
        """
        # The logs of earlier processes say which replies counted, so that clients that missed their
        # receipt still get one.
        history, is_recovering = VerdictHistory(terms.run_id), False
        for name, log in read_exchange_logs(terms.uploads_dir / "replies", run_id=terms.run_id):
            if log.closed is None:
                is_recovering = terms.is_leader()
            else:
                taken = log.replies[: log.closed.num_consumed]
                rulings = {each.client_id: ACCEPTED for each in taken}
                for number, reason in log.closed.refused.items():
                    rulings[ClientId(int(number))] = refuse_unusable(reason)
                history.remember(TaskKey.of_folder(terms.run_id, name), rulings)
        # A coordinator that no longer leads would delete the files of its successor.
        if terms.is_leader():
            shutil.rmtree(terms.uploads_dir / "passing", ignore_errors=True)
        changed = threading.Event()
        run = ServedRun(
            terms=terms,
            exchanges=self._build_exchanges(
                history,
                is_leader=terms.is_leader,
                is_recovering=is_recovering,
                study=terms.study,
                bundle=terms.bundle,
            ),
            audience=Audience(
                run_id=terms.run_id,
                admits=terms.admits,
                needs_newest=terms.needs_newest,
                changed=changed.set,
            ),
            changed=changed,
        )
        self._loop.ask(partial(self._served.add, run))

    def retire_run(self, run_id: str, *, is_over: bool) -> None:
        """Ask no more clients for a run; its open questions are suspended, as by a crash.

        Clients still learn the verdicts on their replies. They keep what belongs to the run, unless
        it is over: :meth:`open_run` may serve it again.
        """
        self._loop.ask(partial(self._served.retire, run_id, is_over=is_over))

    def channel(
        self, run_id: str = "", *, check: Check = lambda: None, waiting: Waiting = nullcontext
    ) -> GatewayChannel:
        """Create the channel for the round loop of a run.

        Args:
            run_id: Id of the run; empty: the first one.
            check: Called often while the channel waits; any error that it raises ends the wait.
            waiting: Surrounds each wait for replies.
        """
        run = self._find_run(run_id)
        return GatewayChannel(
            loop=self._loop,
            runs=self._served,
            run=run,
            sessions=self._sessions,
            run_id=run.run_id,
            folder=run.terms.uploads_dir,
            recovery_grace_s=self.settings.recovery_grace_s,
            changed=run.changed,
            check=check,
            waiting=waiting,
            clock=self.clock,
        )

    def reconsider_clients(self) -> None:
        """Decide again which clients may be asked for which run, by the runs' terms."""
        self._loop.ask(self._served.reconsider_all)

    def list_consents(self) -> dict[str, frozenset[str]]:
        """Return the studies to which each connected client consents, by its name."""
        return self._loop.ask(self._served.list_consents)

    def _find_run(self, run_id: str) -> ServedRun:
        found = self._loop.ask(partial(self._served.find, run_id))
        assert found is not None, f"the run {run_id!r} is not served"
        return found

    def _build_exchanges(
        self,
        history: VerdictHistory,
        *,
        is_leader: Callable[[], bool],
        is_recovering: bool,
        study: str = "",
        bundle: OfferedBundle | None = None,
    ) -> Exchanges:
        return Exchanges(
            history=history,
            sessions=self._sessions,
            writer=self._writer,
            is_leader=is_leader,
            counters=self.counters,
            clock=self.clock,
            is_recovering=is_recovering,
            study=study,
            bundle=bundle,
        )

    def _explain_newest_protocol(self) -> str:
        """Say why every run needs clients of the newest protocol; empty if one does not."""
        reasons = [each.needs_newest for each in self._sessions.audiences.values()]
        return reasons[0] if reasons and all(reasons) else ""

    def on_polling_failure(self, report: Callable[[StoreError], None]) -> None:
        """Call ``report`` if the task that polls the registry dies while the server is open."""

        def report_death(poll: asyncio.Task[None]) -> None:
            error = None if poll.cancelled() else poll.exception()
            if error is not None:
                _log.error("poll_died", error=repr(error))
                report(
                    StoreError(
                        "the gateway can no longer read which clients are revoked "
                        f"({type(error).__name__}, see the log); restart the coordinator"
                    )
                )

        self._loop.post(lambda: self._poll.add_done_callback(report_death))

    def set_num_wanted(self, num_clients: int, *, run_id: str = "") -> None:
        """Let clients check in at any pace until ``num_clients`` are eligible for a round."""
        audience = self._find_run(run_id).audience
        self._loop.post(partial(setattr, audience, "num_wanted", num_clients))

    def status(self, run_id: str = "") -> dict[str, object]:
        """Return a run's clients and the state of its open exchange, as JSON values.

        Empty if the run is not served: whoever asks cannot know when it retires.

        Args:
            run_id: Id of the run; empty: the first one.
        """

        def look_up() -> dict[str, object]:
            run = self._served.find(run_id)
            return {} if run is None else self._status(run)

        return self._loop.ask(look_up)

    def num_connected(self) -> int:
        """Return how many clients are connected, whichever runs they work for."""
        return self._loop.ask(lambda: len(self._sessions))

    def num_eligible(self, run_id: str = "") -> int:
        """Return how many connected clients may be sent tasks of a run, whatever they do now."""
        run = self._find_run(run_id)
        return len(self._loop.ask(partial(self._sessions.find_eligible, run.run_id)))

    def find_names(self, client_ids: Collection[ClientId]) -> dict[ClientId, str]:
        """Return the names of clients; the name of a client that is not enrolled is empty."""
        return self._loop.ask(lambda: {each: self._find_name(each) for each in client_ids})

    def _find_name(self, client_id: ClientId) -> str:
        client = self._enrolled.find_by_id(client_id)
        return "" if client is None else client.name

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each client reports; 0 if it is not connected or reports none.

        See :class:`~fedlearn.algorithms.informed_sampling.ClientProperties`.
        """

        def look_up() -> list[int]:
            found = [self._sessions.find(ClientId(each)) for each in client_ids.tolist()]
            return [0 if each is None else each.eligibility.num_examples for each in found]

        # A client may report any number. The limit is far above real ones, and sums below it fit.
        return np.asarray(np.minimum(self._loop.ask(look_up), 1 << 40), np.int64)

    def groups(self, client_ids: NDArray[np.int64], *, by: str) -> Sequence[str]:
        """Return the value of each client's tag ``by=value``; empty if it has none."""

        def look_up() -> list[str]:
            found = [self._enrolled.find_by_id(ClientId(each)) for each in client_ids.tolist()]
            tags = [dict(tag.split("=", 1) for tag in each.tags) if each else {} for each in found]
            return [each.get(by, "") for each in tags]

        return self._loop.ask(look_up)

    def _status(self, run: ServedRun) -> dict[str, object]:
        set_aside = self._sessions.find_set_aside(run.run_id)
        eligible = self._sessions.find_eligible(run.run_id)
        elsewhere = [each for each in eligible if self._served.works_elsewhere(each, run.run_id)]
        return run.exchanges.status(self._find_name) | {
            "connected": len(self._sessions),
            "eligible": len(eligible),
            "elsewhere": len(elsewhere),
            "set_aside": len(set_aside),
            "other_version": self._sessions.versions.status(
                self._find_name, concerns=run.terms.concerns
            ),
            **self._pace.values(),
            "clients_set_aside": set_aside[:_MAX_LISTED],
            "without_bundle": self._list_without_code(run),
        }

    def _list_without_code(self, run: ServedRun) -> dict[str, str]:
        """Return why clients do not run the run's bundle, or have no trainer for it, by name."""
        lacking = (
            session
            for session in self._sessions.all()
            if run.terms.concerns(session.client.name)
            and not run.terms.has_code(session.eligibility)
        )
        found = {s.client.name: run.terms.explain_lack(s.eligibility) for s in lacking}
        return dict(sorted(found.items())[:_MAX_LISTED])

    def find_first_expiry(self) -> datetime | None:
        """Return the earliest expiry of an active client's certificate; ``None``: there is none."""
        return self._loop.ask(self._enrolled.find_first_expiry)

    def _end(self) -> None:
        self._writer.stop()
        self._loop.stop()
        self._files.shutdown()
        if self._operations is not None:
            self._operations.close()

    # The servers.

    async def _serve(self) -> None:
        await self._enrolled.renew()
        settings = self.settings
        num_connections, num_enrolling = _limit_connections(
            settings.max_connected + settings.max_handshakes,
            0 if settings.enrolment_address is None else _MAX_ENROLMENT_CONNECTIONS,
        )
        enrolments = Enrolments(
            registry=self.registry,
            enrolled=self._enrolled,
            authority=self.authority,
            settings=settings,
            counters=self.counters,
            clock=self.clock,
        )
        self._servers: list[grpc.aio.Server] = []
        self.address = self._listen_on(
            settings.address,
            self._build_operations()
            | {
                wire.GATEWAY: {
                    "Session": partial(self._serve_client, self._serve_session),
                    "Download": partial(self._serve_client, self._transfers.download),
                    "Upload": partial(self._serve_client, self._transfers.upload),
                },
                wire.ENROLMENT: {
                    "Enrol": partial(self._serve_invited, enrolments.enrol),
                    "Announce": partial(self._serve_invited, enrolments.announce),
                },
            },
            mutual=True,
            max_bytes=wire.MAX_MESSAGE_BYTES,
            max_connections=num_connections,
            idle_s=2 * wire.KEEPALIVE_S,  # a connected client has a session, which is not idle
        )
        if settings.enrolment_address is not None:
            self.enrolment_address = self._listen_on(
                settings.enrolment_address,
                {
                    wire.ENROLMENT: {
                        "Enrol": partial(self._serve_anyone, enrolments.enrol),
                        "Announce": partial(self._serve_anyone, enrolments.announce),
                    }
                },
                mutual=False,
                max_bytes=MAX_ENROLMENT_BYTES,
                max_connections=num_enrolling,
                idle_s=settings.handshake_timeout_s,
            )
        for server in reversed(self._servers):
            await server.start()
        self._processor_time = ProcessorTime()
        self._poll = asyncio.create_task(self._keep_polling())
        _log.info("gateway_open", address=self.address, enrolment_address=self.enrolment_address)

    def _build_operations(self) -> dict[str, dict[str, _Serve]]:
        """Return the service for operators; none where nobody may give commands."""
        if self.operators is None or self.authority is None:
            return {}
        self._operations = OperatorCalls(
            access=self.operators,
            authority=self.authority,
            settings=self.settings,
            is_leader=self.is_leader,
            clock=self.clock,
        )
        calls = {"Give": self._operations.give, "Join": self._operations.join}
        return {
            wire.OPERATIONS: {
                name: partial(self._serve_operator, call) for name, call in calls.items()
            }
        }

    def _listen_on(
        self,
        address: str,
        services: Mapping[str, Mapping[str, _Serve]],
        *,
        mutual: bool,
        max_bytes: int,
        max_connections: int,
        idle_s: float,
    ) -> str:
        """Create a server for ``address``; return the address with the port that was opened."""
        if self.authority is None and not is_loopback(address):
            raise DeploymentError(
                f"without TLS the gateway listens on the loopback only, not on {address!r}; use "
                "127.0.0.1, or run with certificates (without --insecure)"
            )
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # or two coordinators on one port would split its clients
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
                ("grpc.max_metadata_size", 16 << 10),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                # Otherwise gRPC drops calls in a rush, without telling clients when to come back.
                ("grpc.server.max_pending_requests", max_connections),
                ("grpc.server.max_pending_requests_hard_limit", max_connections),
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.max_connection_idle_ms", _to_ms(idle_s)),
                ("grpc.server_handshake_timeout_ms", _to_ms(self.settings.handshake_timeout_s)),
                ("grpc.keepalive_time_ms", _to_ms(2 * wire.KEEPALIVE_S)),
                ("grpc.keepalive_timeout_ms", _to_ms(wire.KEEPALIVE_S)),
                # Without these, the server would answer pings of its clients on silent connections
                # with GOAWAY (too_many_pings), and soon stop its own.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", _to_ms(wire.KEEPALIVE_S / 2)),
            ]
        )
        # On the wire all calls are streams. Handling them as streams lets this code read the first
        # message with a timeout, so a silent client does not hold its call.
        for service, calls in services.items():
            handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
                name: grpc.stream_stream_rpc_method_handler(call) for name, call in calls.items()
            }
            handler = grpc.method_handlers_generic_handler(service, handlers)
            server.add_generic_rpc_handlers((handler,))
        self._servers.append(server)
        try:
            if self.authority is None:
                port = server.add_insecure_port(address)
            else:
                credentials = self._build_credentials(self.authority, mutual=mutual)
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise DeploymentError(
                f"cannot listen on {address}: another program uses the port, or the host is not "
                "this machine; choose another address"
            ) from error
        return f"{address.rpartition(':')[0]}:{port}"

    def _build_credentials(self, authority: Authority, *, mutual: bool) -> grpc.ServerCredentials:
        served = authority.server_certificate()

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [served], root_certificates=authority.ca_pem if mutual else None
            )

        def current() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            self.counters.connections += mutual
            self.counters.enrolment_connections += not mutual
            try:
                latest = authority.server_certificate()
            except DeploymentError as error:
                _log.error("server_certificate_not_renewed", reason=str(error))
                return None
            if latest == served:
                return None
            served = latest
            return configuration()

        # gRPC asks `current` for every connection, since certificates renew.
        return grpc.dynamic_ssl_server_credentials(
            configuration(),
            # None means "no change": documented, but missing in gRPC's types.
            cast("Callable[[], grpc.ServerCertificateConfiguration]", current),
            require_client_authentication=mutual,
        )

    async def _close(self, grace_s: float, reason: str) -> None:
        self._poll.cancel()
        self._report_refusals()
        # Exchanges first: they answer uploads with a reason, before `stop` cancels their calls.
        for run in self._served.all():
            run.exchanges.abandon()
        for session in self._sessions.all():
            self._sessions.send_away(session, reason, after_s=_SOON_S)
        if not self._enrolled.is_unreachable:  # otherwise this would wait for a database
            await self._contacts.keep()
        stopping = [asyncio.create_task(each.stop(grace_s)) for each in self._servers]
        # For calls of a client that vanished, gRPC waits longer than the grace period: until the
        # keepalive fails.
        _, late = await asyncio.wait(stopping, timeout=grace_s + _STOP_S)
        if late:
            _log.warning("gateway_closed_late", servers=len(late), waited_s=grace_s + _STOP_S)

    async def _keep_polling(self) -> None:
        while True:
            await self._update_pace()
            await self._enrolled.renew()
            for run in self._served.all():
                run.exchanges.send_pending_verdicts()
                run.exchanges.fail(self._enrolled.revoked, _REVOKED)
            self._end_revoked_sessions()
            self._report()
            await self._contacts.keep()

    async def _update_pace(self) -> None:
        """Wait until the next poll; measure the cost of check-ins and how late the loop is."""
        began_s = self.clock.now_s()
        await asyncio.sleep(_POLL_S)
        late_s = max(0.0, self.clock.now_s() - began_s - _POLL_S)
        self._processor_time.find_threads()
        self._measure()
        self._pace.record_lateness(late_s=late_s)

    def _measure(self) -> None:
        before, self._num_measured = self._num_measured, self.counters.check_ins
        cpu_s = self._processor_time.measure_s()
        self._pace.record_cost(cpu_s=cpu_s, num_check_ins=self._num_measured - before)

    def _report(self) -> None:
        """Log every 10 s which peers were not let in: nothing else reports them."""
        now_s = self.clock.now_s()
        if now_s - self._reported_s < _REPORT_S:
            return
        self._reported_s = now_s
        counters = self.counters
        # Counted from the connections at the last report: newer ones may still authenticate.
        strangers = self._num_connections - counters.authenticated - counters.looks
        self._num_connections = counters.connections
        if strangers > self._strangers:
            num_new = strangers - self._strangers
            _log.warning("strangers", num_connections=num_new, num_so_far=strangers)
        if (num_paced := counters.paced) > self._num_paced:
            _log.info("paced", num_sent_away=num_paced - self._num_paced, **self._pace.values())
            self._num_paced = num_paced
        self._strangers = max(strangers, self._strangers)  # an announced look may not come
        self._report_refusals()

    def _report_refusals(self) -> None:
        for cause, (num_calls, last_peer) in self._refusals.items():
            _log.warning("refused", cause=cause, num_calls=num_calls, last_peer=last_peer)
        self._refusals.clear()

    def _apply_enrolments(self) -> None:
        self._end_revoked_sessions()
        for session in self._sessions.all():
            session.client = self._enrolled.find_by_id(session.client.client_id) or session.client
            self._sessions.reconsider(session, session.eligibility)

    def _end_revoked_sessions(self) -> None:
        for session in self._sessions.all():
            if (objection := self._find_objection(session.client)) is None:
                continue
            reason, _ = objection
            client = session.client
            _log.warning(
                "session_ended", client_id=client.client_id, name=client.name, reason=reason
            )
            session.cut(CallStatus(grpc.StatusCode.UNAUTHENTICATED, reason))
            self._leave(session)

    def _find_objection(self, client: EnrolledClient) -> tuple[str, str] | None:
        """Return why a known client is no longer admitted, with one word to count it by."""
        now = self._enrolled.find_by_id(client.client_id)
        if now is None or now.status != "active":
            return _REVOKED, "revoked"
        if now.fingerprint != client.fingerprint:
            return "this client has enrolled again with other keys", "replaced"
        if now.certificate_expires_utc <= utc(self.clock.unix_s()):
            return (
                "this client's certificate has expired; enrol again with a new invitation",
                "expired",
            )
        return None

    # The calls.

    async def _serve_client(
        self,
        serve: Callable[[EnrolledClient, Context], Awaitable[None]],
        _: object,
        context: Context,
    ) -> None:
        """Serve an enrolled client, unless it has too many unfinished calls.

        A call lasts until the client has read its end: one that does not read keeps its calls
        open, and counted, as long as it is connected.
        """
        async with self._report_ending(context):
            client = await self._authenticate(context)
            with count_call(self._calls, client.client_id, at_most=_MAX_CALLS, what="calls"):
                # This inner block reports under the client's name. `abort` raises another error
                # type than CallEnded, so the outer block, for unknown peers, does not report it
                # again.
                async with self._report_ending(context, client=client):
                    await serve(client, context)

    async def _serve_anyone(
        self, serve: Callable[[Context], Awaitable[None]], _: object, context: Context
    ) -> None:
        async with self._report_ending(context):
            await serve(context)

    async def _serve_invited(
        self, serve: Callable[[Context], Awaitable[None]], _: object, context: Context
    ) -> None:
        """Serve a client that need not be enrolled; count its connection as known afterwards."""
        async with self._report_ending(context):
            if read_peer(context).profile in (Profile.OPERATOR, Profile.OPERATOR_INVITATION):
                reason = "this is an operator's certificate, with which no client enrols"
                raise CallEnded(grpc.StatusCode.PERMISSION_DENIED, reason, "profile")
            await serve(context)
            self._count_peer(context.peer())

    async def _serve_operator(
        self, serve: Callable[[Context], Awaitable[None]], _: object, context: Context
    ) -> None:
        async with self._report_ending(context):
            self._count_peer(context.peer())
            await serve(context)

    @asynccontextmanager
    async def _report_ending(
        self, context: Context, *, client: EnrolledClient | None = None
    ) -> AsyncIterator[None]:
        """Send the peer the reason if its call ends early, and count refusals."""
        try:
            yield
        except CallEnded as ended:
            code, reason, cause = ended.ending
            who = ended.client if client is None else client
            if cause:
                self.counters.refused[cause] += 1
                num_calls, _ = self._refusals.get(cause, (0, ""))
                self._refusals[cause] = num_calls + 1, context.peer() if who is None else who.name
            try:
                # Trailing metadata must be set before `abort` sends the trailers.
                if code in _NOT_NOW:
                    client_id = None if who is None else who.client_id
                    after_s = self._pace.book_return_s(_SOON_S, client_id=client_id)
                    context.set_trailing_metadata(((wire.COME_BACK_METADATA, f"{after_s:.3f}"),))
                await context.abort(code, reason)
            except grpc.aio.InternalError as error:
                # A message is still being sent to a client that does not read, so gRPC takes no
                # status for its call. Cancelling the task resets the call.
                _log.info("call_dropped", client_id=None if client is None else client.client_id)
                raise asyncio.CancelledError from error

    async def _serve_session(self, client: EnrolledClient, context: Context) -> None:
        if not self.is_leader():
            reason = "this coordinator is on standby; try another address"
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, reason)
        self.counters.check_ins += 1
        # Before `may_check_in`, which uses the rate that this measures.
        if self.counters.check_ins - self._num_measured >= _MANY:
            self._measure()
        if not self._sessions.may_check_in(client.client_id):
            self.counters.paced += 1
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, "too many clients are connecting")
        hello = await self._read_hello(client, context)
        session = ServerSession(client, hello, since_s=self.clock.now_s())
        run_id = self._served.choose_run(session)
        if not hello.takes_many_runs:
            session.only_run = run_id
        welcome = wire_pb2.Welcome(
            protocol=hello.protocol,
            software=SOFTWARE,
            client_id=client.client_id,
            run_id=run_id,
            run_ids=self._served.list_going_on(),
            unix_s=self.clock.unix_s(),
            beat_s=self._beat_s(hello.protocol),
            addresses=self.public_addresses,
            records_trainers=True,
        )
        session.push(wire_pb2.FromCoordinator(welcome=welcome).SerializeToString())
        self._served.send_missed_verdicts(session)  # even if there is no room for the session
        if self._sessions.enter(session):
            self._served.greet(session)
        await self._converse(session, context)
        if session.ending is not None and session.ending.code is not grpc.StatusCode.OK:
            raise CallEnded(*session.ending)

    def _beat_s(self, protocol: int) -> float:
        """Return the seconds between beats; clients of protocol 2 do not understand them."""
        return self.beat_s if protocol == wire.PROTOCOL else 0.0

    async def _converse(self, session: ServerSession, context: Context) -> None:
        timeout_s = self.settings.stall_timeout_s
        writing = asyncio.create_task(
            session.write(
                context,
                timeout_s=timeout_s,
                beat_s=self._beat_s(session.protocol),
                counters=self.counters,
            )
        )
        tasks = {
            asyncio.create_task(self._listen(session, context)),
            writing,
            asyncio.create_task(session.is_cut.wait()),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._leave(session)
            # Does not replace an earlier ending; it only lets `write` send its queue and return.
            session.finish(CallStatus(grpc.StatusCode.OK, "the client has left"))
            # gRPC cannot end a call while a message is being sent.
            await asyncio.wait({writing}, timeout=_LAST_WORD_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._leave(session)
        # A message was still being sent, and gRPC takes no status then: cancelling resets the
        # call.
        if writing.cancelled():
            raise asyncio.CancelledError

    def _leave(self, session: ServerSession) -> None:
        self._sessions.leave(session)
        if self._sessions.find(session.client.client_id) is None:
            self._served.set_gone(session.client.client_id)

    async def _listen(self, session: ServerSession, context: Context) -> None:
        bucket = TokenBucket(self.settings.max_messages_per_s, self.clock.now_s())
        while (data := await read(context)) is not None:
            self.counters.messages += 1
            self.counters.bytes_in += len(data)
            # A fast client waits here, which fills its flow-control window, and is not
            # disconnected.
            wait_s = bucket.take(now_s=self.clock.now_s())
            if wait_s > 0.0:
                self.counters.throttled += 1
                await asyncio.sleep(wait_s)
            try:
                self._handle_message(session, _parse_from_client(data))
            except CallEnded as ended:
                session.cut(ended.ending)
                return

    def _handle_message(self, session: ServerSession, message: wire_pb2.FromClient) -> None:
        match message.WhichOneof("what"):
            case "result":
                key = message.result.envelope.key
                self._served.exchanges_of(key.run_id).receive_result(session, message.result)
            case "progress":
                key = message.progress.key
                self._served.exchanges_of(key.run_id).record_progress(session, message.progress)
            case "eligibility":
                self._sessions.reconsider(session, message.eligibility)
            case _:  # a second hello, or a message of a later version
                self.counters.refused["unexpected"] += 1

    async def _read_hello(self, client: EnrolledClient, context: Context) -> wire_pb2.Hello:
        message = _parse_from_client(
            await read_first(context, timeout_s=self.settings.handshake_timeout_s)
        )
        if message.WhichOneof("what") != "hello":
            reason = "a session must start with hello"
            raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, reason, "handshake")
        if reason := self._sessions.versions.find_objection(client.client_id, message.hello):
            raise CallEnded(grpc.StatusCode.FAILED_PRECONDITION, reason, "protocol")
        return message.hello

    async def _authenticate(self, context: Context) -> EnrolledClient:
        """Identify the client that calls by its certificate.

        Raises:
            CallEnded: It is unknown, or is no longer admitted.
        """
        client = await self._find_client(context)
        if client is None and self._enrolled.is_unreachable:
            reason = "the coordinator cannot look up new clients now; try again"
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, reason, "registry")
        if client is None:
            reason = "this client is not enrolled"
            raise CallEnded(grpc.StatusCode.UNAUTHENTICATED, reason, "unknown")
        objection = self._find_objection(client)
        if objection is not None:  # its certificate may have expired since it connected
            raise CallEnded(grpc.StatusCode.UNAUTHENTICATED, *objection, client=client)
        return client

    async def _find_client(self, context: Context) -> EnrolledClient | None:
        if self.authority is None:
            name = dict(context.invocation_metadata() or ()).get(NAME_METADATA, "")
            return await self._enrolled.find_by_name(str(name))
        # gRPC has verified this certificate against the authority; the registry decides who it is,
        # and whether it is still admitted.
        peer = read_peer(context)
        if peer.profile is not Profile.CLIENT:
            return None
        client = await self._enrolled.find_by_fingerprint(peer.fingerprint)
        if client is not None:
            self._count_peer(context.peer())
        return client

    def _count_peer(self, peer: str) -> None:
        if peer not in self._peers:
            self.counters.authenticated += 1
            self._peers[peer] = None
            if len(self._peers) > _MAX_PEERS:
                # A dict keeps its order, so this is the oldest. An evicted peer that calls again
                # is counted twice, which is harmless: the count only serves to tell strangers from
                # clients.
                del self._peers[next(iter(self._peers))]


def _parse_from_client(data: bytes) -> wire_pb2.FromClient:
    message = parse_message(wire_pb2.FromClient, data)
    kind = message.WhichOneof("what")
    # Only a reply may be large: each open session could otherwise make the server hold much
    # memory.
    if kind != "result" and len(data) > _MAX_SMALL_BYTES:
        reason = f"{len(data)} bytes of {kind}, at most {_MAX_SMALL_BYTES} are allowed"
        raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, reason, "malformed")
    return message


def _limit_connections(num_connections: int, num_enrolling: int) -> tuple[int, int]:
    """Return the limits on open connections: of clients, and to the enrolment port.

    Together they take at most half of the files that the process may open, and enrolment at most
    an eighth. Without a limit, a peer that opens enough connections could keep the run from its own
    database.
    """
    max_files = max_open_files()
    if max_files is None:
        return num_connections, num_enrolling
    enrolling = min(num_enrolling, max_files // 8)
    return min(num_connections, max_files // 2 - enrolling), enrolling


def _to_ms(seconds: float) -> int:
    return max(1, round(1000.0 * seconds))
