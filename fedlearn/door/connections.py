"""The sessions of the clients that are connected, and who is asked to come back later.

A client that does not read costs its own session and nobody else's time: what it is to be
told waits in a queue of a few messages, and whoever lets that run over is dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.door.counters import DoorCounters
from fedlearn.identity.registry import EnrolledClient
from fedlearn.transport import wire_pb2

#: Messages that may wait for a client to read.
_MAX_WAITING = 32

#: Unsettled replies that a client may ask about when it connects.
MAX_HELD = 64

_log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]


async def read(context: Context) -> bytes | None:
    """Return the next message of a call; ``None`` at its end."""
    data: object = await context.read()
    return data if isinstance(data, bytes) else None


@dataclass(frozen=True)
class Ending:
    """Why a session ends.

    Attributes:
        code: OK ends it in order.
        reason: For the client to log.
    """

    code: grpc.StatusCode
    reason: str


class Session:
    """One connected client.

    Attributes:
        client: Who.
        eligibility: What it says of itself.
        is_eligible: Whether it may be asked.
        only_looks: Whether it leaves after the welcome, and must not be.
        since_s: When it connected, on the door's clock.
        held: Replies that it holds and waits for a receipt of.
        ending: Why the session has ended; ``None`` while it lives.
    """

    def __init__(self, client: EnrolledClient, hello: wire_pb2.Hello, *, since_s: float) -> None:
        self.client = client
        self.eligibility = hello.eligibility
        self.is_eligible = False
        self.only_looks = hello.only_looks
        self.since_s = since_s
        self.held = tuple(hello.held[:MAX_HELD])
        self.ending: Ending | None = None
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._cut = asyncio.Event()

    def push(self, message: bytes) -> bool:
        """Send a message when the client can take it; False: too many wait already."""
        if self.ending is not None:
            return True
        if len(self._waiting) >= _MAX_WAITING:
            self.cut(Ending(grpc.StatusCode.RESOURCE_EXHAUSTED, "this client does not read"))
            return False
        self._waiting.append(message)
        self._wake.set()
        return True

    def finish(self, ending: Ending) -> None:
        """End the session once what waits has been sent."""
        self.ending = self.ending or ending
        self._wake.set()

    def cut(self, ending: Ending) -> None:
        """End the session at once."""
        self.ending = self.ending or ending
        self._waiting.clear()
        self._wake.set()
        self._cut.set()

    async def wait_cut(self) -> None:
        """Wait until the session is cut."""
        await self._cut.wait()

    async def write(self, context: Context, *, timeout_s: float, counters: DoorCounters) -> None:
        """Send what is pushed until the session finishes or its client stops reading."""
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                try:
                    async with asyncio.timeout(timeout_s):
                        await context.write(message)
                except TimeoutError:
                    reason = f"this client has not read for {timeout_s:g} s"
                    self.cut(Ending(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))
                    counters.sessions_dropped += 1
                    return
                counters.bytes_out += len(message)
            if self.ending is not None:
                return
            await self._wake.wait()
            self._wake.clear()


class Hall:
    """All sessions, one a client at the most.

    Attributes:
        is_needed: Whether a client's reply is awaited: it is never sent away.

    Args:
        max_connected: More clients than so many are sent away unless they are needed.
        come_back_s: For about how long.
        changed: Told when a client comes, goes, or becomes eligible or not.
    """

    def __init__(
        self,
        *,
        max_connected: int,
        come_back_s: float,
        eligible: Callable[[EnrolledClient, wire_pb2.Eligibility], bool],
        changed: Callable[[], None],
        counters: DoorCounters,
        clock: Clock,
    ) -> None:
        self.is_needed: Callable[[ClientId], bool] = lambda _: False
        self._max_connected = max_connected
        self._come_back_s = come_back_s
        self._eligible = eligible
        self._changed = changed
        self._counters = counters
        self._clock = clock
        self._jitter = Seed(0).derive("come back").numpy()
        self._sessions: dict[ClientId, Session] = {}  # the longest connected first

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, client_id: ClientId) -> Session | None:
        """Return the session of a client; ``None`` if it is not connected."""
        return self._sessions.get(client_id)

    def sessions(self) -> list[Session]:
        """Return all sessions."""
        return list(self._sessions.values())

    def eligible(self) -> list[ClientId]:
        """Return the clients that may be asked, by number."""
        return sorted(each for each, session in self._sessions.items() if session.is_eligible)

    def enter(self, session: Session) -> bool:
        """Take a session in, in place of its client's last; False: it is sent away."""
        client_id = session.client.client_id
        old = self._sessions.pop(client_id, None)
        if old is not None:
            self._counters.sessions_replaced += 1
            old.cut(Ending(grpc.StatusCode.ABORTED, "this client has opened another session"))
        self._counters.sessions += 1
        self._sessions[client_id] = session
        self.reconsider(session, session.eligibility)
        if len(self._sessions) > self._max_connected:
            self._make_room(session)
        return session.ending is None

    def leave(self, session: Session) -> None:
        """Forget a session that has ended, unless another took its place before."""
        if self._sessions.get(session.client.client_id) is session:
            del self._sessions[session.client.client_id]
            self._changed()

    def reconsider(self, session: Session, eligibility: wire_pb2.Eligibility) -> None:
        """Note what a client says of itself now."""
        session.eligibility = eligibility
        session.is_eligible = not session.only_looks and self._eligible(session.client, eligibility)
        self._changed()

    def push(self, client_id: ClientId, message: bytes) -> bool:
        """Tell a client something if it is connected; return whether it is."""
        session = self._sessions.get(client_id)
        if session is None:
            return False
        if not session.push(message):
            self._counters.sessions_dropped += 1
            _log.warning("session_dropped", client_id=client_id, reason="does not read")
            self.leave(session)
            return False
        return True

    def send_surplus_away(self) -> None:
        """Make the hall as full as it may be: those not needed go, the longest there first."""
        surplus = len(self._sessions) - self._max_connected
        for session in self.sessions() if surplus > 0 else ():
            if self.is_needed(session.client.client_id):
                continue
            self.send_away(session, "the coordinator has enough clients for now")
            surplus -= 1
            if surplus <= 0:
                break

    def send_away(self, session: Session, reason: str, *, after_s: float | None = None) -> None:
        """Ask a client to come back in about ``after_s``; half to one and a half times."""
        after_s = (self._come_back_s if after_s is None else after_s) * (
            0.5 + self._jitter.random()
        )
        come_back = wire_pb2.ComeBack(after_s=after_s, reason=reason)
        session.push(wire_pb2.FromCoordinator(come_back=come_back).SerializeToString())
        session.finish(Ending(grpc.StatusCode.OK, reason))
        self._counters.sent_away += 1
        self.leave(session)

    def _make_room(self, newcomer: Session) -> None:
        """Send away whoever was here for long and is not needed, else the newcomer."""
        now_s = self._clock.now_s()
        for client_id, session in self._sessions.items():
            if session is newcomer or now_s - session.since_s < self._come_back_s:
                break  # and those behind it are here for less long
            if not self.is_needed(client_id):
                self.send_away(session, "other clients have their turn")
                return
        if not self.is_needed(newcomer.client.client_id):
            self.send_away(newcomer, "the coordinator has enough clients for now")
