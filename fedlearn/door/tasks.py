"""The exchange that is open: tasks out, replies in, receipts back. All on the door's event loop."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

import grpc
import structlog

from fedlearn.core.clock import Clock
from fedlearn.core.messages import ClientId
from fedlearn.door.connections import Ending, Hall, Session
from fedlearn.door.counters import DoorCounters
from fedlearn.door.exchange import (
    ACCEPTED,
    LATE,
    Docket,
    ExchangeState,
    Judgement,
    Key,
    Phase,
    Ruling,
    Standing,
    Verdict,
)
from fedlearn.door.spool import (
    Closed,
    Draft,
    GroupWriter,
    LoggedReply,
    Outcome,
    PartialUpload,
    ReplyLog,
)
from fedlearn.identity.registry import EnrolledClient
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import DIGEST_BYTES, digest_of
from fedlearn.transport.identity import signed_bytes, verify

#: Small replies of one cohort that may be under way at once, in bytes.
_INLINE_TOTAL_BYTES = 256 << 20
_MIN_INLINE_BYTES = 16 << 10

#: Of a disk that is full, or broken: the client keeps its reply.
NOT_STORED = Ending(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "the coordinator cannot store this reply now (its disk is full or broken); try again",
)

#: Of an exchange that will be opened again, in most cases by another process.
PUT_ASIDE = Ending(
    grpc.StatusCode.UNAVAILABLE, "no such exchange is open (any more, or yet); try again later"
)

#: Of an upload whose client has begun another.
SUPERSEDED = Ending(grpc.StatusCode.ABORTED, "this client has begun another upload")

#: What is said of bytes that do not have the digest that was signed.
WRONG_DIGEST = Ruling(Verdict.REFUSED, "the bytes do not have the digest that was signed", "digest")

_VERDICTS = {
    Verdict.ACCEPTED: wire_pb2.Receipt.ACCEPTED,
    Verdict.LATE: wire_pb2.Receipt.LATE,
    Verdict.REFUSED: wire_pb2.Receipt.REFUSED,
}

_PHASES = {
    wire_pb2.Progress.DOWNLOADING: Phase.DOWNLOADING,
    wire_pb2.Progress.TRAINING: Phase.TRAINING,
    wire_pb2.Progress.UPLOADING: Phase.UPLOADING,
}

_log = structlog.get_logger(__name__)


#: What becomes of an upload that is here: its verdict, or why there is none yet.
Waiter: TypeAlias = "asyncio.Future[Ruling | Ending]"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One request, encoded once for all that are sent it.

    Attributes:
        digest: Of its bytes.
        num_bytes: How many.
        data: The bytes where they are few, else empty.
        path: Where they are otherwise.
    """

    digest: bytes
    num_bytes: int
    data: bytes
    path: Path | None

    @property
    def max_reply_bytes(self) -> int:
        """Bytes of the largest reply that makes sense."""
        return 2 * self.num_bytes + (1 << 20)


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveExchange:
    """An exchange with what it needs to run.

    Attributes:
        state: Who is where.
        offers: What is asked.
        personal: By client what it alone is sent beside its offer; whoever is absent, nothing.
        log: Where replies are made durable.
        arrivals: What has been logged, for the thread that collects.
        started_s: When it was opened, on the door's clock; before now if it goes on.
        deadline_s: When it closes, on the door's clock; infinite: not before all answered.
    """

    state: ExchangeState
    offers: Sequence[Offer]
    personal: Mapping[ClientId, bytes]
    log: ReplyLog
    arrivals: SimpleQueue[LoggedReply]
    started_s: float
    deadline_s: float

    @property
    def max_inline_bytes(self) -> int:
        """Bytes of the largest reply that comes whole, so that a cohort of them is bounded."""
        share = _INLINE_TOTAL_BYTES // max(1, len(self.state.participants))
        return max(_MIN_INLINE_BYTES, min(wire.MAX_INLINE_BYTES, share))


@dataclass(kw_only=True, eq=False)
class Desk:
    """Runs exchanges, one after the other.

    Attributes:
        docket: What was and is asked.
        hall: Who is connected.
        writer: Makes replies durable.
        is_leader: Whether a reply may be called accepted here and now.
        counters: Of the door.
        clock: Monotonic.
        is_recovering: Whether a crash has left an exchange that was not opened again yet: it
            may wait for anyone.
    """

    docket: Docket
    hall: Hall
    writer: GroupWriter
    is_leader: Callable[[], bool]
    counters: DoorCounters
    clock: Clock
    is_recovering: bool
    _live: LiveExchange | None = None
    _waiters: dict[tuple[Key, ClientId], Waiter] = field(default_factory=dict)
    _untold: dict[tuple[Key, ClientId], Ruling] = field(default_factory=dict)
    _called_off: dict[ClientId, Key] = field(default_factory=dict)  # while away
    _closing: set[Key] = field(default_factory=set)  # until how they ended is durable

    # The exchange, from the thread that collects.

    def open(self, live: LiveExchange) -> None:
        """Ask everyone; replies of an earlier process count already."""
        now_s = self.clock.now_s()
        self._live = live
        self.is_recovering = False
        self.docket.open(live.state)
        for reply in live.log.replies:
            if live.state.is_awaited(reply.client_id):
                live.state.log(reply.client_id, now_s=now_s)
        if live.log.closed is not None:
            return  # it has only to be read again
        alike = [self._task(live, offer, b"", now_s=now_s) for offer in live.offers]
        for client_id, participant in live.state.participants.items():
            self._called_off.pop(client_id, None)
            if participant.is_taken:
                continue
            message, personal = alike[participant.offer], live.personal.get(client_id, b"")
            if personal:
                offer = live.offers[participant.offer]
                message = self._task(live, offer, personal, now_s=now_s)
            if self.hall.push(client_id, message):
                live.state.move(client_id, Phase.CONNECTED, now_s=now_s)
        for session in self.hall.sessions():
            self.answer_held(session)

    def found_no_space(self) -> None:
        """Count an attempt to open an exchange, which the disk was too full for."""
        self.counters.disk_full += 1

    def consumed(self, live: LiveExchange, num_consumed: int, *, failed: bool) -> None:
        """Accept the first ``num_consumed`` replies."""
        for client_id in live.state.consume(num_consumed, failed=failed):
            self.counters.replies_accepted += 1
            self._settle(live.state.key, client_id, ACCEPTED)

    def close(self, live: LiveExchange, *, by_itself: bool) -> None:
        """Take no more replies; clients are told so once that is durable."""
        if self._live is not live:
            return  # the door has closed, and the exchange will be opened again
        key, state = live.state.key, live.state
        late, silent = state.close()
        self._live = None
        self.docket.remember(key, state.logged[: state.num_consumed])
        self._closing.add(key)
        closed = Closed(num_consumed=state.num_consumed, by_itself=by_itself)
        reason = "the round has closed" if by_itself else "the round has enough replies"
        tell = partial(self._closed, key, late=late, silent=silent, reason=reason)
        self.writer.close(live.log, closed, tell)

    def committed(self, before_round: int) -> None:
        """Tell what was kept back of rounds before ``before_round``: now it stands."""
        self._closing = {key for key in self._closing if key.round_num >= before_round}
        self.tell_untold()

    def suspend(self, live: LiveExchange) -> None:
        """Put the exchange aside as a crash would: it goes on when it is opened again."""
        if self._live is not live:
            return
        live.state.is_open = False
        self._live = None
        self.docket.leave()
        for (key, _), waiter in self._waiters.items():
            if key == live.state.key and not waiter.done():
                waiter.set_result(PUT_ASIDE)
        self.writer.close(live.log, None, partial(_log_closed, live.state.key))

    def abandon(self) -> None:
        """Put the open exchange aside if there is one: the door closes."""
        if self._live is not None:
            self.suspend(self._live)

    # Clients.

    def answer_held(self, session: Session) -> None:
        """Tell a client of the replies that it holds; keep those that nothing is known of."""
        unknown = []
        for key in session.held:
            judgement = self.docket.judge(key_of(key), session.client.client_id)
            if isinstance(judgement, Ruling):
                self._tell(key_of(key), session, judgement)
            elif judgement is Standing.UNKNOWN:
                unknown.append(key)
        session.held = tuple(unknown)

    def greet(self, session: Session) -> None:
        """Tell a client that has just connected what it has missed."""
        client_id, live, now_s = session.client.client_id, self._live, self.clock.now_s()
        called_off = self._called_off.pop(client_id, None)
        if called_off is not None:
            cancel = wire_pb2.Cancel(key=key_message(called_off), reason="the round has closed")
            session.push(wire_pb2.FromCoordinator(cancel=cancel).SerializeToString())
        if live is not None and live.state.is_awaited(client_id):
            offer = live.offers[live.state.participants[client_id].offer]
            personal = live.personal.get(client_id, b"")
            session.push(self._task(live, offer, personal, now_s=now_s))
            live.state.move(client_id, Phase.CONNECTED, now_s=now_s)

    def gone(self, client_id: ClientId) -> None:
        """Note that the session of a client has ended."""
        self.moved(client_id, Phase.GONE)

    def is_needed(self, client_id: ClientId) -> bool:
        """Whether the open exchange waits for this client."""
        live = self._live
        return self.is_recovering or (live is not None and live.state.is_awaited(client_id))

    def progressed(self, session: Session, progress: wire_pb2.Progress) -> None:
        """Note how far a client says it is."""
        live, phase = self._live, _PHASES.get(progress.phase)
        if live is not None and phase is not None and key_of(progress.key) == live.state.key:
            self.moved(session.client.client_id, phase)

    def moved(self, client_id: ClientId, phase: Phase) -> None:
        """Note how far a client is."""
        if self._live is not None:
            self._live.state.move(client_id, phase, now_s=self.clock.now_s())

    def offer_to(self, client_id: ClientId, digest: bytes) -> Offer | None:
        """Return the request with this hash if this client is asked it."""
        if self._live is None:
            return None
        participant = self._live.state.participants.get(client_id)
        if participant is None:
            return None
        offer = self._live.offers[participant.offer]
        return offer if offer.digest == digest else None

    def admit(self, client: EnrolledClient, envelope: wire_pb2.Envelope) -> Judgement:
        """Return whether a reply may come, by its envelope alone; a refusal is counted."""
        judgement = self.docket.judge(key_of(envelope.key), client.client_id)
        if judgement is Standing.OPEN:
            judgement = self._check(client, envelope)
        if judgement is LATE:
            self.counters.replies_late += 1
        elif isinstance(judgement, Ruling) and judgement.verdict is Verdict.REFUSED:
            self.refused(client, judgement)
        return judgement

    def refused(self, client: EnrolledClient, ruling: Ruling) -> None:
        """Count and log that a reply was refused."""
        self.counters.refused[ruling.cause] += 1
        _log.warning("reply_refused", client_id=client.client_id, reason=ruling.reason)

    def result(self, session: Session, result: wire_pb2.Result) -> None:
        """Take a small reply."""
        client, envelope = session.client, result.envelope
        judgement = self.admit(client, envelope)
        if judgement is Standing.OPEN:
            judgement = _mismatch(envelope, result.data) or Standing.OPEN
            if isinstance(judgement, Ruling):
                self.refused(client, judgement)
        if isinstance(judgement, Ruling):
            self._tell(key_of(envelope.key), session, judgement)
        elif judgement is Standing.OPEN:
            self.take(client.client_id, envelope, result.data)

    def take(
        self, client_id: ClientId, envelope: wire_pb2.Envelope, data: bytes | PartialUpload
    ) -> None:
        """Log the verified reply of an awaited client; what becomes of it is told later."""
        live = self._live
        assert live is not None
        live.state.take(client_id)
        draft = Draft(
            client_id=client_id,
            elapsed_s=self.clock.now_s() - live.started_s,
            digest=envelope.digest,
            num_bytes=envelope.num_bytes,
            data=data,
        )
        self.writer.append(live.log, draft, partial(self._logged, live, client_id))

    def may_tell(self, key: Key, ruling: Ruling) -> bool:
        """Whether a verdict stands: a crash cannot undo it, and no other coordinator."""
        if ruling.verdict is Verdict.LATE and key in self._closing:
            return False
        return ruling.verdict is Verdict.REFUSED or self.is_leader()

    def settled(self, key: Key, client_id: ClientId) -> Waiter:
        """Return what will be told of a reply that is here, in place of a message."""
        old = self._waiters.pop((key, client_id), None)
        if old is not None and not old.done():
            old.set_result(SUPERSEDED)
        future: Waiter = asyncio.get_running_loop().create_future()
        self._waiters[key, client_id] = future
        return future

    def unsettled(self, key: Key, client_id: ClientId, future: Waiter) -> None:
        """Stop waiting: the client is gone, and will ask when it is back."""
        if self._waiters.get((key, client_id)) is future:
            del self._waiters[key, client_id]

    def folder(self) -> Path:
        """Return the folder of the exchange that is open."""
        assert self._live is not None
        return self._live.log.folder

    def tell_untold(self) -> None:
        """Tell what could not be told before: it was not durable, or not this coordinator's."""
        if self._untold and self.is_leader():
            untold, self._untold = self._untold, {}
            for (key, client_id), ruling in untold.items():
                self._settle(key, client_id, ruling)

    def status(self, name: Callable[[ClientId], str]) -> dict[str, object]:
        """Return where each client of the open exchange is, and since when; JSON values."""
        live, now_s = self._live, self.clock.now_s()
        if live is None:
            return {"exchange": None, "clients": {}}
        clients = {
            str(client_id): {
                "name": name(client_id),
                "phase": str(each.phase),
                "since_s": round(now_s - each.since_s, 1),
            }
            for client_id, each in live.state.participants.items()
        }
        exchange = live.state.key._asdict() | {
            "elapsed_s": round(now_s - live.started_s, 1),
            "remaining_s": round(live.deadline_s - now_s, 1) if isfinite(live.deadline_s) else None,
            "phases": Counter(str(each.phase) for each in live.state.participants.values()),
        }
        return {"exchange": exchange, "clients": clients}

    def _check(self, client: EnrolledClient, envelope: wire_pb2.Envelope) -> Judgement:
        live = self._live
        assert live is not None
        offer = live.offers[live.state.participants[client.client_id].offer]
        if len(envelope.digest) != DIGEST_BYTES:
            return _refusal(f"{len(envelope.digest)} bytes are no digest", "digest")
        if envelope.num_bytes > offer.max_reply_bytes:
            return _refusal(
                f"{envelope.num_bytes} bytes, at most {offer.max_reply_bytes} make sense", "size"
            )
        signed = signed_bytes(envelope.key, client_id=client.client_id, digest=envelope.digest)
        if not verify(client.identity_key, envelope.signature, signed):
            return _refusal("the signature is not of this client's identity key", "signature")
        return Standing.OPEN

    def _logged(self, live: LiveExchange, client_id: ClientId, outcome: Outcome) -> None:
        key = live.state.key
        if isinstance(outcome, LoggedReply):
            self.counters.replies_logged += 1
            live.state.log(client_id, now_s=self.clock.now_s())
            if self._live is live:
                live.arrivals.put(outcome)
            elif self.docket.is_past(key):
                self._late(key, client_id)
            return
        live.state.put_back(client_id)
        self.counters.disk_full += 1
        _log.error("reply_not_stored", client_id=client_id, reason=str(outcome))
        self._unstored(key, client_id)

    def _unstored(self, key: Key, client_id: ClientId) -> None:
        """Have a client keep its reply and try again."""
        waiter = self._waiters.pop((key, client_id), None)
        if waiter is not None and not waiter.done():
            waiter.set_result(NOT_STORED)
        elif (session := self.hall.find(client_id)) is not None:
            session.cut(NOT_STORED)

    def _late(self, key: Key, client_id: ClientId) -> None:
        self.counters.replies_late += 1
        self._settle(key, client_id, LATE)

    def _settle(self, key: Key, client_id: ClientId, ruling: Ruling) -> None:
        """Tell a client what becomes of its reply; one that is away asks when it is back."""
        if not self.may_tell(key, ruling):
            self._untold[key, client_id] = ruling
            return
        waiter = self._waiters.pop((key, client_id), None)
        if waiter is not None and not waiter.done():
            waiter.set_result(ruling)
            return
        message = wire_pb2.FromCoordinator(receipt=receipt(key_message(key), ruling))
        self.hall.push(client_id, message.SerializeToString())

    def _tell(self, key: Key, session: Session, ruling: Ruling) -> None:
        if not self.may_tell(key, ruling):
            if self.docket.is_past(key):  # a client makes up as many others as it likes
                self._untold[key, session.client.client_id] = ruling
            return
        message = wire_pb2.FromCoordinator(receipt=receipt(key_message(key), ruling))
        session.push(message.SerializeToString())

    def _closed(
        self,
        key: Key,
        outcome: Outcome,
        *,
        late: Sequence[ClientId],
        silent: Sequence[ClientId],
        reason: str,
    ) -> None:
        """Tell the late ones, and call off whoever still works: no crash undoes it any more."""
        _log_closed(key, outcome)
        if not isinstance(outcome, OSError):
            self._closing.discard(key)
            self.tell_untold()
        for client_id in late:
            self._late(key, client_id)
        if silent and self.may_tell(key, LATE):  # otherwise another process may wait for them
            cancel = wire_pb2.Cancel(key=key_message(key), reason=reason)
            message = wire_pb2.FromCoordinator(cancel=cancel).SerializeToString()
            for client_id in silent:
                if not self.hall.push(client_id, message):
                    self._called_off[client_id] = key
        self.hall.send_surplus_away()

    def _task(self, live: LiveExchange, offer: Offer, personal: bytes, *, now_s: float) -> bytes:
        remaining_s = live.deadline_s - now_s
        task = wire_pb2.Task(
            key=key_message(live.state.key),
            digest=offer.digest,
            num_bytes=offer.num_bytes,
            data=offer.data,
            remaining_s=max(1e-3, remaining_s) if isfinite(remaining_s) else 0.0,
            max_reply_bytes=offer.max_reply_bytes,
            max_inline_bytes=live.max_inline_bytes,
            personal=personal,
        )
        return wire_pb2.FromCoordinator(task=task).SerializeToString()


def key_of(key: wire_pb2.TaskKey) -> Key:
    """Return a key as a value."""
    return Key(key.run_id, key.kind, key.round_num, key.attempt, key.exchange)


def key_message(key: Key) -> wire_pb2.TaskKey:
    """Return a key as a message."""
    return wire_pb2.TaskKey(**key._asdict())


def receipt(key: wire_pb2.TaskKey, ruling: Ruling) -> wire_pb2.Receipt:
    """Return a ruling as a message."""
    return wire_pb2.Receipt(key=key, verdict=_VERDICTS[ruling.verdict], reason=ruling.reason)


def _refusal(reason: str, cause: str) -> Ruling:
    return Ruling(Verdict.REFUSED, reason, cause)


def _mismatch(envelope: wire_pb2.Envelope, data: bytes) -> Ruling | None:
    """Return why ``data`` is not what its envelope says."""
    if len(data) != envelope.num_bytes:
        return _refusal(f"{len(data)} bytes came, {envelope.num_bytes} were announced", "size")
    if digest_of(data) != envelope.digest:
        return WRONG_DIGEST
    return None


def _log_closed(key: Key, outcome: Outcome) -> None:
    if isinstance(outcome, OSError):
        # Harmless: no verdict is told before the next commit; a restart before it opens the
        # exchange again.
        _log.error("reply_log_not_closed", folder=key.folder, reason=str(outcome))
