"""The sessions of connected clients, and which clients are asked to come back later.

A client that does not read only harms its own session: each session has a queue of at most a few
messages, and a session whose queue overflows is dropped.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.errors import ProtocolError
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.pace import Pace
from fedlearn.gateway.settings import GatewaySettings
from fedlearn.gateway.versions import MAX_SOFTWARE, Versions
from fedlearn.identity.identity import certificate_fingerprint
from fedlearn.identity.profiles import Profile, read_subject
from fedlearn.identity.registry import EnrolledClient
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import TaskKey

_MAX_WAITING = 32  # messages that a client has not read
_MAX_STUDIES = 64  # studies that a client may consent to; others are ignored
_MAX_HELD = 64  # unsettled replies that a client may ask about when it connects

_ENOUGH = "the coordinator has enough clients for now"

_log = structlog.get_logger(__name__)

_BEAT = wire_pb2.FromCoordinator(beat=wire_pb2.Beat()).SerializeToString()

Context = grpc.aio.ServicerContext[bytes, bytes]

MessageT = TypeVar("MessageT", bound=Message)


class CallStatus(NamedTuple):
    """The status with which a call ends.

    Attributes:
        code: OK for a regular end.
        reason: For the client to log.
        cause: One word to count it by if the call, or a message in it, is refused.
    """

    code: grpc.StatusCode
    reason: str
    cause: str = ""


class CallEnded(Exception):
    """A call ends early; its peer, a client if it is known, receives the reason."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        cause: str = "",
        *,
        client: EnrolledClient | None = None,
    ) -> None:
        super().__init__(reason)
        self.ending = CallStatus(code, reason, cause)
        self.client = client


class Peer(NamedTuple):
    """What the certificate of a peer says, which gRPC has verified against the authority.

    Attributes:
        profile: Whom it was issued to; ``OTHER`` without a certificate.
        name: A client's number or an operator's name; empty for other profiles.
        fingerprint: SHA-256 of its DER, hexadecimal.
    """

    profile: Profile
    name: str
    fingerprint: str


def read_peer(context: Context) -> Peer:
    """Return what a peer's certificate says."""
    for certificate in context.auth_context().get("x509_pem_cert", ()):
        with suppress(ProtocolError):
            return Peer(*read_subject(certificate), certificate_fingerprint(certificate))
    return Peer(Profile.OTHER, "", "")


async def read(context: Context) -> bytes | None:
    """Return the next message of a call; ``None`` at its end."""
    data: object = await context.read()
    return data if isinstance(data, bytes) else None


async def read_first(context: Context, *, timeout_s: float) -> bytes:
    """Return the first message of a call, empty at its end.

    Raises:
        CallEnded: It did not come within ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await read(context) or b""
    except TimeoutError as error:
        reason = f"no message within {timeout_s:g} s"
        raise CallEnded(grpc.StatusCode.DEADLINE_EXCEEDED, reason, "handshake") from error


def parse_message(kind: type[MessageT], data: bytes) -> MessageT:
    """Parse ``data`` as a message of this kind; raise :class:`CallEnded` if it is malformed."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        reason = f"{len(data)} bytes are not a {kind.__name__}"
        raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, reason, "malformed") from error


@contextmanager
def count_call(
    running: Counter[ClientId], client_id: ClientId, *, at_most: int, what: str
) -> Iterator[None]:
    """Count a call while it runs; raise :class:`CallEnded` if the client has too many."""
    if running[client_id] >= at_most:
        reason = f"this client has {at_most} open {what}; wait, or close its connections"
        raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, what)
    running[client_id] += 1
    try:
        yield
    finally:
        running[client_id] -= 1
        if not running[client_id]:
            del running[client_id]


@dataclass(kw_only=True, eq=False)
class Audience:
    """The clients that one run may ask.

    Attributes:
        admits: Whether a client may be sent the run's tasks, judged by what it reports.
        needs_newest: Why the run needs the newest protocol; empty if it does not.
        changed: Called when a client connects, disconnects, or changes its eligibility.
        num_wanted: Number of clients that a round would ask. Clients check in at any pace until so
            many are eligible.
    """

    run_id: str
    admits: Callable[[EnrolledClient, wire_pb2.Eligibility], bool]
    needs_newest: str
    changed: Callable[[], None]
    num_wanted: int = 0

    def may_ask(self, session: "ServerSession") -> bool:
        """Whether the client of a session may be sent the run's tasks."""
        if session.only_looks or self.run_id in session.set_aside_by:
            return False
        if session.only_run not in (None, self.run_id):
            return False
        if self.needs_newest and session.protocol != wire.PROTOCOL:
            return False
        return self.admits(session.client, session.eligibility)


class ServerSession:
    """One connected client.

    Attributes:
        protocol: The protocol version that it speaks.
        software: The software that it runs, as it reports.
        eligible_for: Ids of the runs whose tasks it may be sent.
        only_looks: Whether it disconnects after the welcome, so it must not be sent tasks.
        takes_bundles: Whether it understands notices of bundles.
        told_bundles: Ids of the runs whose bundles were announced to it.
        only_run: Id of the only run in which an earlier client takes part; ``None``: it may take
            part in any.
        set_aside_by: Ids of runs that send it no tasks while it is connected, because it keeps
            failing in them.
        sent_tasks: By run, the task that it was sent last while it is connected.
        since_s: When it connected, on the server's clock.
        held: Replies for which the client still waits for a receipt.
        ending: Why the session has ended; ``None`` while it is open.
        is_cut: Set once the session has ended without sending its queued messages.
    """

    def __init__(self, client: EnrolledClient, hello: wire_pb2.Hello, *, since_s: float) -> None:
        self.client = client
        self.protocol = hello.protocol
        self.software = hello.software[:MAX_SOFTWARE]
        self.eligibility = hello.eligibility
        self.eligible_for: frozenset[str] = frozenset()
        self.only_looks = hello.only_looks
        self.takes_bundles = hello.takes_bundles
        self.told_bundles = set[str]()
        self.only_run: str | None = None
        self.set_aside_by = set[str]()
        self.sent_tasks = dict[str, TaskKey]()
        self.since_s = since_s
        self.held = tuple(hello.held[:_MAX_HELD])
        self.ending: CallStatus | None = None
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.is_cut = asyncio.Event()

    @property
    def max_concurrent_runs(self) -> int:
        """Number of runs for which the client works at a time, within the protocol's limit."""
        return min(max(1, self.eligibility.max_concurrent_runs), wire.MAX_CONCURRENT_RUNS)

    def push(self, message: bytes) -> bool:
        """Queue a message to the client; return False if its queue is full."""
        if self.ending is not None:
            return True
        if len(self._waiting) >= _MAX_WAITING:
            self.cut(CallStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, "this client does not read"))
            return False
        self._waiting.append(message)
        self._wake.set()
        return True

    def finish(self, ending: CallStatus) -> None:
        """End the session once its queue has been sent."""
        self.ending = self.ending or ending
        self._wake.set()

    def cut(self, ending: CallStatus) -> None:
        """End the session at once."""
        self.ending = self.ending or ending
        self._waiting.clear()
        self._wake.set()
        self.is_cut.set()

    async def write(
        self, context: Context, *, timeout_s: float, beat_s: float, counters: GatewayCounters
    ) -> None:
        """Send queued messages until the session finishes or its client stops reading.

        While the queue is empty, a beat is sent every ``beat_s`` seconds to show that this
        coordinator is alive; 0 disables beats.
        """
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                try:
                    async with asyncio.timeout(timeout_s):
                        await context.write(message)
                except TimeoutError:
                    reason = f"this client has not read for {timeout_s:g} s"
                    self.cut(CallStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))
                    counters.sessions_dropped += 1
                    return
                counters.bytes_out += len(message)
            if self.ending is not None:
                return
            try:
                async with asyncio.timeout(beat_s or None):
                    await self._wake.wait()
            except TimeoutError:
                self._waiting.append(_BEAT)
            # Nothing awaits between this and the next look at the queue, so no message is missed.
            self._wake.clear()


@dataclass(kw_only=True, eq=False)
class Sessions:
    """All sessions, at most one for each client.

    Attributes:
        pace: Decides when clients that are not needed come back.
        versions: Which protocol versions may connect.
        audiences: By id of a run, whom it may ask.
        is_needed: Whether a client's reply is awaited; such a client is never sent away.
    """

    settings: GatewaySettings
    counters: GatewayCounters
    clock: Clock
    pace: Pace
    versions: Versions = field(default_factory=Versions)
    audiences: dict[str, Audience] = field(default_factory=dict)
    is_needed: Callable[[ClientId], bool] = lambda _: False
    _sessions: dict[ClientId, ServerSession] = field(default_factory=dict)  # the oldest first
    _touched: dict[ClientId, ServerSession] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, client_id: ClientId) -> ServerSession | None:
        """Return the session of a client; ``None`` if it is not connected."""
        return self._sessions.get(client_id)

    def all(self) -> list[ServerSession]:
        """Return all sessions."""
        return list(self._sessions.values())

    def find_eligible(self, run_id: str) -> list[ClientId]:
        """Return the ids of clients that may be sent tasks of a run, in ascending order."""
        return sorted(
            each for each, session in self._sessions.items() if run_id in session.eligible_for
        )

    def may_check_in(self, client_id: ClientId) -> bool:
        """Return whether a client may check in now: the pace allows it, or the client is needed."""
        if self.pace.admits() or self.is_needed(client_id):
            return True
        # A run that wants no clients must not cost a look at all of them.
        return any(
            self._num_eligible(each.run_id) < each.num_wanted
            for each in self.audiences.values()
            if each.num_wanted
        )

    def _num_eligible(self, run_id: str) -> int:
        return sum(run_id in each.eligible_for for each in self._sessions.values())

    def take_touched(self) -> list[ServerSession]:
        """Return the last session of each client that changed since the last call.

        A session changes when its client connects, disconnects, or reports its eligibility.
        """
        touched, self._touched = self._touched, {}
        return list(touched.values())

    def enter(self, session: ServerSession) -> bool:
        """Add a session, replacing the client's previous one; return False if it is sent away."""
        client_id = session.client.client_id
        # Popped and inserted again, not replaced: the dict stays ordered by age.
        old = self._sessions.pop(client_id, None)
        if old is not None:
            self.counters.sessions_replaced += 1
            old.cut(CallStatus(grpc.StatusCode.ABORTED, "this client has opened another session"))
        self.counters.sessions += 1
        self._sessions[client_id] = session
        self.reconsider(session, session.eligibility)
        if len(self._sessions) > self.settings.max_connected:
            self._make_room(session)
        return session.ending is None

    def leave(self, session: ServerSession) -> None:
        """Remove a session that has ended, unless a newer one has replaced it."""
        # The call of a replaced session ends later than its successor enters.
        if self._sessions.get(session.client.client_id) is session:
            del self._sessions[session.client.client_id]
            self._touch(session)

    def reconsider(self, session: ServerSession, eligibility: wire_pb2.Eligibility) -> None:
        """Update a client's eligibility with its latest report."""
        del eligibility.studies[_MAX_STUDIES:]
        session.eligibility = eligibility
        session.eligible_for = frozenset(
            run_id for run_id, each in self.audiences.items() if each.may_ask(session)
        )
        self._touch(session)

    def _touch(self, session: ServerSession) -> None:
        self._touched[session.client.client_id] = session
        for audience in self.audiences.values():
            audience.changed()

    def set_aside(self, client_id: ClientId, *, run_id: str) -> None:
        """Send a client no more tasks of a run until it reconnects."""
        session = self._sessions.get(client_id)
        if session is not None and run_id not in session.set_aside_by:
            session.set_aside_by.add(run_id)
            self.reconsider(session, session.eligibility)
            _log.warning("client_set_aside", client_id=client_id, name=session.client.name)

    def all_speak_newest(self, client_ids: Iterable[ClientId], *, run_id: str) -> bool:
        """Return whether all these clients of a run are known to speak the newest protocol."""
        if self.audiences[run_id].needs_newest:
            return True
        found = (self._sessions.get(each) for each in client_ids)
        return all(each is not None and each.protocol == wire.PROTOCOL for each in found)

    def refuse_version(self, client_id: ClientId, reason: str) -> None:
        """End the session of a client whose reply has another version; refuse it until upgraded."""
        session = self._sessions.get(client_id)
        if session is None:
            return
        versions, protocol = self.versions, session.protocol
        reason = versions.refuse_unreadable(client_id, protocol, session.software, reason)
        name = session.client.name
        _log.warning("client_of_other_version", client_id=client_id, name=name, reason=reason)
        session.cut(CallStatus(grpc.StatusCode.FAILED_PRECONDITION, reason, "protocol"))
        self.leave(session)

    def find_set_aside(self, run_id: str) -> list[ClientId]:
        """Return the ids of clients that a run has set aside, in ascending order."""
        return sorted(
            each for each, session in self._sessions.items() if run_id in session.set_aside_by
        )

    def push(self, client_id: ClientId, message: bytes) -> bool:
        """Send a message to a client; return whether it is connected."""
        session = self._sessions.get(client_id)
        if session is None:
            return False
        if not session.push(message):
            self.counters.sessions_dropped += 1
            name = session.client.name
            _log.warning("session_dropped", client_id=client_id, name=name, reason="does not read")
            self.leave(session)
            return False
        return True

    def send_surplus_away(self) -> None:
        """Send away clients above the limit: those that are not needed, oldest session first."""
        for session in self.all():
            if len(self._sessions) <= self.settings.max_connected:
                break
            if not self.is_needed(session.client.client_id):
                self.send_away(session, _ENOUGH)

    def send_away(
        self, session: ServerSession, reason: str, *, after_s: float | None = None
    ) -> None:
        """Ask a client to come back after at least ``after_s``, at a time that the pace chooses."""
        least_s = self.settings.come_back_s if after_s is None else after_s
        after_s = self.pace.book_return_s(least_s, client_id=session.client.client_id)
        come_back = wire_pb2.ComeBack(after_s=after_s, reason=reason)
        session.push(wire_pb2.FromCoordinator(come_back=come_back).SerializeToString())
        session.finish(CallStatus(grpc.StatusCode.OK, reason))
        self.counters.sent_away += 1
        self.leave(session)

    def _make_room(self, newcomer: ServerSession) -> None:
        """Send away the longest-connected client that is not needed, or else the newcomer."""
        now_s = self.clock.now_s()
        for client_id, session in self._sessions.items():
            if session is newcomer or now_s - session.since_s < self.settings.come_back_s:
                break  # sessions are in order of age: all others are younger
            if not self.is_needed(client_id):
                self.send_away(session, "it is other clients' turn")
                return
        if not self.is_needed(newcomer.client.client_id):
            self.send_away(newcomer, _ENOUGH)
