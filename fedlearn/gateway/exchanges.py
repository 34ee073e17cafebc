"""The open exchange: sends tasks, receives replies and sends receipts, on the server's event loop.

Each time an exchange asks clients, that is one question, with its own key and log.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import isfinite
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

import grpc
import structlog

from fedlearn.core.clock import Clock
from fedlearn.core.codec import encode
from fedlearn.core.kinds import SECURE_KIND
from fedlearn.core.messages import ClientId, Failure
from fedlearn.gateway.connections import CallEnded, CallStatus, ServerSession, Sessions
from fedlearn.gateway.counters import GatewayCounters
from fedlearn.gateway.questions import (
    LATE,
    ClientPhase,
    Judgment,
    QuestionState,
    ReplyState,
    Ruling,
    Verdict,
    VerdictHistory,
    refuse,
)
from fedlearn.gateway.upload_store import (
    ClosingRecord,
    Draft,
    GroupWriter,
    LoggedReply,
    PartialUpload,
    ReplyLog,
    WriteResult,
)
from fedlearn.identity.registry import EnrolledClient
from fedlearn.secagg.keys import verify
from fedlearn.transport import wire, wire_pb2
from fedlearn.transport.content import DIGEST_BYTES, TaskKey, compute_digest, encode_signed_reply

#: Bytes of small replies of one cohort that may be in flight at once.
_INLINE_TOTAL_BYTES = 256 << 20
_MIN_INLINE_BYTES = 16 << 10
_MAX_TRAINER = 100  # characters
_MAX_REASON = 300  # characters of a client's reason not to run a bundle

NOT_STORED = CallStatus(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "the coordinator cannot store this reply now (its disk is full or broken); try again",
)
#: Ends uploads to an exchange that will be opened again, in most cases by another process.
NOT_OPEN = CallStatus(
    grpc.StatusCode.UNAVAILABLE, "no such exchange is open (any more, or yet); try again later"
)
SUPERSEDED = CallStatus(grpc.StatusCode.ABORTED, "this client has started another upload")
_NO_VERDICT = CallStatus(grpc.StatusCode.UNAVAILABLE, "no verdict can be given now; try again")
WRONG_DIGEST = refuse("the bytes do not have the digest that was signed", "digest")

_PHASES = {
    wire_pb2.Progress.DOWNLOADING: ClientPhase.DOWNLOADING,
    wire_pb2.Progress.TRAINING: ClientPhase.TRAINING,
    wire_pb2.Progress.UPLOADING: ClientPhase.UPLOADING,
}

_log = structlog.get_logger(__name__)

#: The future outcome of a received upload: its verdict, or why there is none yet.
Waiter: TypeAlias = asyncio.Future[Ruling | CallStatus]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A request, encoded once for all of its clients: in ``data``, or in a file if it is large.

    Attributes:
        constants: The model's tensors that stay the same in a run, which a client downloads
            once; ``None``: they are in the request.
        older: The same request for clients of an older protocol; ``None``: they can read this
            one, or none is connected.
    """

    digest: bytes
    num_bytes: int
    data: bytes
    path: Path | None
    constants: "Offer | None" = None
    older: "Offer | None" = None

    def for_protocol(self, protocol: int) -> "Offer":
        """Return the version of the request for clients that speak ``protocol``."""
        return self if self.older is None or protocol == wire.PROTOCOL else self.older

    @property
    def files(self) -> "list[Offer]":
        """All downloads that clients may need for this request."""
        others = [each for each in (self.constants, self.older) if each is not None]
        return [self, *others]

    @property
    def max_reply_bytes(self) -> int:
        """Size limit of a reply."""
        return 2 * self.num_bytes + (1 << 20)


@dataclass(frozen=True, kw_only=True)
class OfferedBundle:
    """The bundle of a run.

    Attributes:
        sha256: The digest by which people know it.
        offer: Its file.
    """

    sha256: bytes
    offer: Offer

    @classmethod
    def of(cls, path: Path) -> "OfferedBundle":
        """Offer the bundle in a file; raises OSError if it cannot be read."""
        content = path.read_bytes()
        offer = Offer(digest=compute_digest(content), num_bytes=len(content), data=b"", path=path)
        return cls(sha256=sha256(content).digest(), offer=offer)

    @property
    def trainer(self) -> str:
        """What clients that ran it say in their envelopes."""
        return f"bundle:{self.sha256.hex()}"

    def encode_notice(self, run_id: str) -> bytes:
        """Return the message that announces it to clients."""
        notice = wire_pb2.BundleNotice(
            run_id=run_id,
            sha256=self.sha256,
            digest=self.offer.digest,
            num_bytes=self.offer.num_bytes,
        )
        return wire_pb2.FromCoordinator(bundle=notice).SerializeToString()

    def is_run_by(self, report: wire_pb2.Eligibility) -> bool:
        """Whether a client reports that it runs the bundle."""
        return any(each.sha256 == self.sha256 and each.runs for each in report.bundles)

    def explain_refusal(self, report: wire_pb2.Eligibility) -> str:
        """Return why a client does not run the bundle, in its words; empty: it does not say."""
        found = (each.reason for each in report.bundles if each.sha256 == self.sha256)
        return next(found, "")[:_MAX_REASON]


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveQuestion:
    """An open question, with all that it needs.

    Attributes:
        personal: By client the bytes for it alone, in addition to its offer; others get none.
        log: Makes replies durable.
        arrivals: Logged replies of the exchange, for the thread that collects them.
        started_s: When it was first asked, on the server's clock; in the past if it was resumed.
        deadline_s: When its exchange ends, on the server's clock; infinite: not before it closes.
        traceparent: The span that asks; empty: the coordinator records none.
    """

    state: QuestionState
    offers: Sequence[Offer]
    personal: Mapping[ClientId, bytes]
    log: ReplyLog
    arrivals: "SimpleQueue[tuple[LiveQuestion, LoggedReply]]"
    started_s: float
    deadline_s: float
    traceparent: str

    def find_offer(self, client_id: ClientId) -> Offer:
        """Return the request for a participating client."""
        return self.offers[self.state.participants[client_id].offer]


@dataclass(kw_only=True, eq=False)
class Exchanges:
    """Runs the exchanges of one run, one after the other; each asks clients once or several times.

    Attributes:
        is_leader: Whether this coordinator may accept replies now.
        study: Name of the run's study, which clients are told with each task; empty: none.
        is_recovering: Whether a crash has left an unfinished exchange. Until it is opened again,
            every client may be one that it needs.
        bundle: The trainer that the run ships; any client may download it.
        num_unlogged: Verified replies that are not durable yet.
        next_turn: Returns the number of a question, in the order in which all runs ask.
        is_turn: Whether a client that is asked works for this run now, not first for another.
        released: Called with clients that no longer work for this run.
    """

    history: VerdictHistory
    sessions: Sessions
    writer: GroupWriter
    is_leader: Callable[[], bool]
    counters: GatewayCounters
    clock: Clock
    is_recovering: bool
    study: str = ""
    bundle: OfferedBundle | None = None
    num_unlogged: int = 0
    next_turn: Callable[[], int] = lambda: 0
    is_turn: Callable[[ClientId], bool] = lambda _: True
    released: Callable[[Collection[ClientId]], None] = lambda _: None
    _turns: dict[TaskKey, int] = field(default_factory=dict)  # of open questions
    _held: dict[ClientId, int] = field(default_factory=dict)  # turns between two stages
    _live: dict[TaskKey, LiveQuestion] = field(default_factory=dict)
    _questions: dict[ClientId, LiveQuestion] = field(default_factory=dict)  # the last question
    _waiters: dict[tuple[TaskKey, ClientId], Waiter] = field(default_factory=dict)
    _pending_verdicts: dict[tuple[TaskKey, ClientId], Ruling] = field(default_factory=dict)
    _cancelled: dict[ClientId, TaskKey] = field(default_factory=dict)  # for their return
    _prefetches: dict[ClientId, tuple[TaskKey, Offer]] = field(
        default_factory=dict
    )  # last sent ahead
    _closing: set[TaskKey] = field(default_factory=set)  # until their end is durable
    _late_to: dict[ClientId, TaskKey] = field(default_factory=dict)  # the last late reply counted

    # Called on behalf of the thread that collects replies.

    def open(self, live: LiveQuestion) -> None:
        """Send tasks to all participants; replies that an earlier process logged count already."""
        now_s = self.clock.now_s()
        self._live[live.state.key] = live
        self._turns[live.state.key] = self._take_turn(live)
        self._questions |= dict.fromkeys(live.state.participants, live)
        self.is_recovering = False
        self.history.open(live.state.key)
        # Mark logged replies before any task is sent: their clients must not train a second time.
        for reply in live.log.replies:
            if live.state.is_awaited(reply.client_id):
                live.state.log(reply.client_id, now_s=now_s)
        if live.log.closed is not None:
            return  # its replies only have to be read again
        alike = dict[bytes, bytes]()  # by the request's digest: encoded once for all
        for client_id, participant in live.state.participants.items():
            self._cancelled.pop(client_id, None)
            session = self.sessions.find(client_id)
            if participant.is_taken or session is None or not self.is_turn(client_id):
                continue
            offer = live.find_offer(client_id).for_protocol(session.protocol)
            if personal := live.personal.get(client_id, b""):
                message = self._encode_task(live, offer, personal)
            else:
                if offer.digest not in alike:
                    alike[offer.digest] = self._encode_task(live, offer, b"")
                message = alike[offer.digest]
            if self.sessions.push(client_id, message):
                session.sent_tasks[live.state.key.run_id] = live.state.key
                live.state.move(client_id, ClientPhase.CONNECTED, now_s=now_s)
        for session in self.sessions.all():
            self.send_missed_verdicts(session, run_id=live.state.key.run_id)

    def send_prefetch(
        self, key: TaskKey, offer: Offer, client_ids: Sequence[ClientId], last_round_num: int
    ) -> None:
        """Announce a request to clients that have no task yet, if they support prefetching."""
        alike = dict[bytes, bytes]()
        for client_id in client_ids:
            session = self.sessions.find(client_id)
            if session is None or not session.eligibility.takes_ahead:
                continue
            own = offer.for_protocol(session.protocol)
            if own.digest not in alike:
                alike[own.digest] = self._encode_prefetch(key, own, last_round_num)
            self._prefetches[client_id] = key, own
            self.counters.sent_ahead += self.sessions.push(client_id, alike[own.digest])

    def _encode_prefetch(self, key: TaskKey, offer: Offer, last_round_num: int) -> bytes:
        task = wire_pb2.Task(
            key=key.message(),
            digest=offer.digest,
            num_bytes=offer.num_bytes,
            max_reply_bytes=offer.max_reply_bytes,
            max_inline_bytes=self._max_inline_bytes(),
            last_round_num=last_round_num,
            study=self.study,
        )
        _add_constants(task, offer)
        self._add_bundle(task)
        return wire_pb2.FromCoordinator(ahead=task).SerializeToString()

    def cancel_prefetches(self) -> None:
        """Cancel all announced requests."""
        for client_id, (key, _) in self._prefetches.items():
            self.sessions.push(client_id, _encode_cancel(key, "no more rounds are open"))
        self._prefetches.clear()

    def count_disk_full(self) -> None:
        """Count an attempt to open an exchange that failed because the disk was full."""
        self.counters.disk_full += 1

    def deliver_verdict(self, live: LiveQuestion, ruling: Ruling, *, failed: bool) -> None:
        """Send the verdict on the next reply; ``failed``: it reports that its client failed."""
        client_id = live.state.consume(ruling=ruling, failed=failed)
        if ruling.verdict is Verdict.ACCEPTED:
            self.counters.replies_accepted += 1
        else:
            self.counters.refused[ruling.cause] += 1
        self._settle(live.state.key, client_id, ruling)
        self.released((client_id,))

    def close(self, live: LiveQuestion, *, by_itself: bool, reason: str = "") -> None:
        """Take no more replies; clients receive the reason once the close is durable."""
        if not self._leave(live):
            return  # the server has stopped, and the exchange will be opened again
        key, state = live.state.key, live.state
        # The verdicts are taken now, but announced only once the close is durable: until then, a
        # crash could reopen the exchange, and count a reply whose client has been told "late".
        late, silent = state.split_unsettled()
        rulings = state.collect_rulings()
        self.history.remember(key, rulings)
        self._closing.add(key)
        refused = {str(each): ruling.reason for each, ruling in rulings.items() if ruling.reason}
        closed = ClosingRecord(
            num_consumed=state.num_consumed, by_itself=by_itself, refused=refused
        )
        reason = reason or ("the round has closed" if by_itself else "the round has enough replies")
        report = partial(self._on_closed, key, late=late, silent=silent, reason=reason)
        self.writer.put(live.log, closed, report)

    def release_verdicts(self, before_round: int) -> None:
        """Send the verdicts that waited for the commit of rounds before ``before_round``."""
        self.end_session()
        self._closing = {key for key in self._closing if key.round_num >= before_round}
        self.send_pending_verdicts()

    def suspend(self, live: LiveQuestion) -> None:
        """Stop the exchange as a crash would: it resumes when it is opened again."""
        if not self._leave(live):
            return
        for key, client_id in list(self._waiters):
            if key == live.state.key:
                self._answer(key, client_id, NOT_OPEN)
        self.writer.put(live.log, None, partial(_log_close_error, live.state.key))

    def abandon(self) -> None:
        """Suspend all open questions because the server stops."""
        for live in list(self._live.values()):
            self.suspend(live)
        self.end_session()

    # Clients.

    def send_missed_verdicts(self, session: ServerSession, *, run_id: str) -> None:
        """Send the verdicts on the replies to a run that a client holds; keep the unknown ones."""
        unknown = []
        for key in session.held:
            if key.run_id != run_id:
                unknown.append(key)
                continue
            judgment = self._judge(TaskKey.of(key), session.client.client_id)
            if isinstance(judgment, Ruling):
                self._send_verdict(TaskKey.of(key), session, judgment)
            elif judgment is ReplyState.UNKNOWN:
                unknown.append(key)
        session.held = tuple(unknown)

    def send_missed_cancel(self, session: ServerSession) -> None:
        """Tell a client that has just connected if its task was cancelled meanwhile."""
        client_id = session.client.client_id
        if client_id in self._cancelled:
            session.push(_encode_cancel(self._cancelled.pop(client_id), "the round has closed"))

    def send_task(self, session: ServerSession) -> None:
        """Send a client its task, if its reply is awaited and it was not sent in this session."""
        client_id = session.client.client_id
        live = self._questions.get(client_id)
        if live is not None and live.state.is_awaited(client_id):
            key = live.state.key
            if session.sent_tasks.get(key.run_id) == key:
                return
            session.sent_tasks[key.run_id] = key
            personal = live.personal.get(client_id, b"")
            offer = live.find_offer(client_id).for_protocol(session.protocol)
            session.push(self._encode_task(live, offer, personal))
            self.set_phase(client_id, ClientPhase.CONNECTED)

    def find_turn(self, client_id: ClientId) -> int | None:
        """Return the number of the question on which a client works; ``None``: on none.

        In a session of secure aggregation a client has one turn for all stages: while it worked for
        another run, the next stage would wait for it, or take place without it.
        """
        live = self._questions.get(client_id)
        if live is None:
            return self._held.get(client_id)
        is_session = live.state.key.kind == SECURE_KIND
        if live.state.participants[client_id].ruling is not None and not is_session:
            return None
        return self._turns[live.state.key]

    def end_session(self) -> None:
        """Note that no further stage comes: its clients may work for other runs."""
        held, self._held = self._held, {}
        self.released(held)

    def _take_turn(self, live: LiveQuestion) -> int:
        """Return the turn of a question: that of the stage before, if there was one."""
        turns = [self._held[each] for each in live.state.participants if each in self._held]
        if live.state.key.kind != SECURE_KIND or live.state.key.exchange == 0:
            turns = []
            self.end_session()
        return min(turns, default=None) or self.next_turn()

    def is_needed(self, client_id: ClientId) -> bool:
        """Whether the open exchange waits for this client."""
        live = self._questions.get(client_id)
        return self.is_recovering or (live is not None and live.state.is_awaited(client_id))

    def record_progress(self, session: ServerSession, progress: wire_pb2.Progress) -> None:
        """Record the progress that a client reports."""
        live, phase = self._live.get(TaskKey.of(progress.key)), _PHASES.get(progress.phase)
        if live is not None and phase is not None:
            live.state.move(session.client.client_id, phase, now_s=self.clock.now_s())

    def set_phase(self, client_id: ClientId, phase: ClientPhase) -> None:
        """Set the phase of a client."""
        live = self._questions.get(client_id)
        if live is not None:
            live.state.move(client_id, phase, now_s=self.clock.now_s())

    def find_offer(self, client_id: ClientId, digest: bytes) -> Offer | None:
        """Return the offer with this digest if it was sent or announced to this client."""
        live = self._questions.get(client_id)
        _, prefetch = self._prefetches.get(client_id, (None, None))
        current = None if live is None else live.find_offer(client_id)
        if self.bundle is not None and self.bundle.offer.digest == digest:
            return self.bundle.offer
        offers = [
            each for offer in (current, prefetch) if offer is not None for each in offer.files
        ]
        return next((each for each in offers if each.digest == digest), None)

    def is_pending_task(self, client_id: ClientId, offer: Offer) -> bool:
        """Return whether a client is being asked this request now."""
        live = self._questions.get(client_id)
        if live is None:
            return False
        current = live.find_offer(client_id)
        return offer.digest in {
            each.digest for each in (current, current.older) if each is not None
        }

    def admit(self, client: EnrolledClient, envelope: wire_pb2.Envelope) -> Judgment:
        """Judge a reply by its envelope alone, before its bytes come; a refusal is counted."""
        key = TaskKey.of(envelope.key)
        judgment = self._judge(key, client.client_id)
        if judgment is ReplyState.OPEN:
            judgment = self._check(client, envelope)
        if judgment is LATE:
            self._count_late(key, client.client_id)
        elif isinstance(judgment, Ruling) and judgment.verdict is Verdict.REFUSED:
            self.count_refusal(client, judgment)
        return judgment

    def count_refusal(self, client: EnrolledClient, ruling: Ruling) -> None:
        """Count and log a refused reply."""
        self.counters.refused[ruling.cause] += 1
        _log.warning(
            "reply_refused", client_id=client.client_id, name=client.name, reason=ruling.reason
        )

    def receive_result(self, session: ServerSession, result: wire_pb2.Result) -> None:
        """Receive a small reply."""
        client, envelope = session.client, result.envelope
        judgment = self.admit(client, envelope)
        if judgment is ReplyState.OPEN and (mismatch := _find_mismatch(envelope, result.data)):
            self.count_refusal(client, mismatch)
            judgment = mismatch
        if isinstance(judgment, Ruling):
            self._send_verdict(TaskKey.of(envelope.key), session, judgment)
        elif judgment is ReplyState.OPEN:
            self.log_reply(client.client_id, envelope, result.data)

    def log_reply(
        self, client_id: ClientId, envelope: wire_pb2.Envelope, data: bytes | PartialUpload
    ) -> None:
        """Log the verified reply of an awaited client; its verdict follows later."""
        live = self._live[TaskKey.of(envelope.key)]
        # Taken before it is durable: a second copy that arrives during the fsync is not logged
        # again.
        live.state.take(client_id)
        self.num_unlogged += 1
        # Timed on arrival, not after the fsync: a busy disk must not make a client look slow.
        elapsed_s = self.clock.now_s() - live.started_s
        reply = LoggedReply(
            client_id,
            elapsed_s,
            envelope.digest,
            envelope.num_bytes,
            trainer=envelope.trainer,
        )
        self.writer.put(live.log, Draft(reply, data), partial(self._on_logged, live, client_id))

    def fail(self, client_ids: Iterable[ClientId], reason: str) -> None:
        """Let the open tasks of some clients fail, since these clients can no longer answer.

        The failure is logged like a reply, so a restart does not wait for them either.
        """
        for client_id in client_ids:
            live = self._questions.get(client_id)
            if live is None or live.log.closed is not None or not live.state.is_awaited(client_id):
                continue
            data = encode(Failure(reason))
            envelope = wire_pb2.Envelope(
                key=live.state.key.message(), digest=compute_digest(data), num_bytes=len(data)
            )
            self.log_reply(client_id, envelope, data)

    async def wait_for_verdict(
        self,
        client_id: ClientId,
        envelope: wire_pb2.Envelope,
        judgment: Judgment,
        *,
        wait_s: float,
    ) -> Ruling:
        """Wait for the final verdict on an upload that was received, or is not needed.

        A verdict that is known already but not final yet is waited for at most ``wait_s``.

        Raises:
            CallEnded: There is no verdict, or not in time, or the client asks in another call.
        """
        key, timeout_s = TaskKey.of(envelope.key), None
        if judgment is ReplyState.UNKNOWN:
            raise CallEnded(*NOT_OPEN)
        if isinstance(judgment, Ruling):
            if self._is_final(key, judgment):
                return judgment
            if not self.is_leader():
                raise CallEnded(*_NO_VERDICT)
            self._pending_verdicts[key, client_id], timeout_s = judgment, wait_s
        # One waiter a client: the older call belongs to a connection that the client has given up.
        self._answer(key, client_id, SUPERSEDED)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiters[key, client_id] = waiter
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await waiter
        except TimeoutError as error:
            raise CallEnded(*_NO_VERDICT) from error
        finally:
            # A newer call may have put its own waiter here.
            if self._waiters.get((key, client_id)) is waiter:
                del self._waiters[key, client_id]
        if isinstance(outcome, CallStatus):
            raise CallEnded(*outcome)
        return outcome

    def find_folder(self, key: TaskKey) -> Path:
        """Return the folder of a question that is open."""
        return self._live[key].log.folder

    def send_pending_verdicts(self) -> None:
        """Send the verdicts that were not final before: not durable, or not the leader's."""
        if self._pending_verdicts and self.is_leader():
            pending, self._pending_verdicts = self._pending_verdicts, {}
            for (key, client_id), ruling in pending.items():
                self._settle(key, client_id, ruling)

    def status(self, name: Callable[[ClientId], str]) -> dict[str, object]:
        """Return the phase of each client of the open exchange, and since when; JSON values."""
        if not self._live:
            return {"exchange": None, "clients": {}}
        # Several questions may be open at once; report the one asked last.
        live, now_s = next(reversed(self._live.values())), self.clock.now_s()
        participants = {
            client_id: each.state.participants[client_id]
            for client_id, each in self._questions.items()
        }
        clients = {
            str(client_id): {
                "name": name(client_id),
                "phase": str(each.phase),
                "since_s": round(now_s - each.since_s, 1),
            }
            for client_id, each in participants.items()
        }
        exchange = live.state.key._asdict() | {
            "elapsed_s": round(now_s - live.started_s, 1),
            "remaining_s": round(live.deadline_s - now_s, 1) if isfinite(live.deadline_s) else None,
            "phases": Counter(str(each.phase) for each in participants.values()),
        }
        return {"exchange": exchange, "clients": clients}

    def _judge(self, key: TaskKey, client_id: ClientId) -> Judgment:
        live = self._live.get(key)
        if live is None:
            return self.history.judge(key, client_id)
        return live.state.judge(client_id)

    def _check(self, client: EnrolledClient, envelope: wire_pb2.Envelope) -> Judgment:
        most = self._live[TaskKey.of(envelope.key)].find_offer(client.client_id).max_reply_bytes
        if len(envelope.digest) != DIGEST_BYTES:
            return refuse(f"{len(envelope.digest)} bytes are not a digest", "digest")
        if envelope.num_bytes > most:
            return refuse(f"{envelope.num_bytes} bytes, at most {most} are allowed", "size")
        if len(envelope.trainer) > _MAX_TRAINER:
            return refuse("the name of the trainer is too long", "trainer")
        signed = encode_signed_reply(
            envelope.key,
            client_id=client.client_id,
            digest=envelope.digest,
            trainer=envelope.trainer,
        )
        if not verify(client.identity_key, envelope.signature, signed):
            return refuse("the signature is not by this client's identity key", "signature")
        return ReplyState.OPEN

    def _on_logged(self, live: LiveQuestion, client_id: ClientId, outcome: WriteResult) -> None:
        key = live.state.key
        self.num_unlogged -= 1
        if isinstance(outcome, LoggedReply):
            self.counters.replies_logged += 1
            live.state.log(client_id, now_s=self.clock.now_s())
            if self._live.get(key) is live:
                live.arrivals.put((live, outcome))
            # The question closed during the fsync. If it was only suspended, the reply counts when
            # the question opens again, so it gets no verdict now.
            elif self.history.is_past(key):
                self._settle_late(key, client_id)
            return
        live.state.put_back(client_id)
        self.counters.disk_full += 1
        _log.error("reply_not_stored", client_id=client_id, reason=str(outcome))
        is_answered = self._answer(key, client_id, NOT_STORED)
        if not is_answered and (session := self.sessions.find(client_id)) is not None:
            session.cut(NOT_STORED)

    def _settle_late(self, key: TaskKey, client_id: ClientId) -> None:
        self._count_late(key, client_id)
        self._settle(key, client_id, LATE)

    def _count_late(self, key: TaskKey, client_id: ClientId) -> None:
        # A client that missed the receipt sends its reply again.
        if self._late_to.get(client_id) != key:
            self._late_to[client_id] = key
            self.counters.replies_late += 1

    def _settle(self, key: TaskKey, client_id: ClientId, ruling: Ruling) -> None:
        if not self._is_final(key, ruling):
            self._pending_verdicts[key, client_id] = ruling
        # A disconnected client gets no message; it names the replies that it holds when it
        # returns.
        elif not self._answer(key, client_id, ruling):
            self.sessions.push(client_id, _encode_receipt(key, ruling))

    def _is_final(self, key: TaskKey, ruling: Ruling) -> bool:
        """Whether a verdict is final: neither a crash nor another coordinator can change it."""
        # Before the close is durable, a restart would open the exchange again and accept this
        # reply.
        if ruling.verdict is Verdict.LATE and key in self._closing:
            return False
        # A refusal depends on the reply alone, so every coordinator would refuse it.
        return ruling.verdict is Verdict.REFUSED or self.is_leader()

    def _answer(self, key: TaskKey, client_id: ClientId, outcome: Ruling | CallStatus) -> bool:
        """Give an outcome to a client's waiting upload; return whether there was one."""
        waiter = self._waiters.pop((key, client_id), None)
        if waiter is None or waiter.done():
            return False
        waiter.set_result(outcome)
        return True

    def _send_verdict(self, key: TaskKey, session: ServerSession, ruling: Ruling) -> None:
        if self._is_final(key, ruling):
            session.push(_encode_receipt(key, ruling))
        elif self.history.is_past(key):  # a client could invent any number of other keys
            self._pending_verdicts[key, session.client.client_id] = ruling

    def _on_closed(
        self,
        key: TaskKey,
        outcome: WriteResult,
        *,
        late: Sequence[ClientId],
        silent: Sequence[ClientId],
        reason: str,
    ) -> None:
        """Answer late clients and cancel silent ones, once no crash can undo the close."""
        _log_close_error(key, outcome)
        if not isinstance(outcome, OSError):
            self._closing.discard(key)
            self.send_pending_verdicts()
        for client_id in late:
            self._settle_late(key, client_id)
        # Unless the verdict is final, another process may still wait for the silent clients.
        if silent and self._is_final(key, LATE):
            message = _encode_cancel(key, reason)
            for client_id in silent:
                if not self.sessions.push(client_id, message):
                    self._cancelled[client_id] = key
        self.sessions.send_surplus_away()

    def _leave(self, live: LiveQuestion) -> bool:
        """Remove a question from the open ones; return whether it was there."""
        if self._live.get(live.state.key) is not live:
            return False
        del self._live[live.state.key]
        turn = self._turns.pop(live.state.key)
        for client_id, participant in live.state.participants.items():
            if self._questions.get(client_id) is live:
                del self._questions[client_id]
            if live.state.key.kind == SECURE_KIND and participant.ruling is not None:
                self._held[client_id] = turn
        # The others were released with their verdict.
        self.released([each for each, it in live.state.participants.items() if it.ruling is None])
        return True

    def _max_inline_bytes(self) -> int:
        """Return the size limit of a reply sent whole, which bounds the total over all clients."""
        share = _INLINE_TOTAL_BYTES // max(1, len(self._questions))
        return max(_MIN_INLINE_BYTES, min(wire.MAX_INLINE_BYTES, share))

    def _encode_task(self, live: LiveQuestion, offer: Offer, personal: bytes) -> bytes:
        remaining_s = live.deadline_s - self.clock.now_s()
        task = wire_pb2.Task(
            key=live.state.key.message(),
            digest=offer.digest,
            num_bytes=offer.num_bytes,
            data=offer.data,
            # 0 means "no deadline" on the wire, so a deadline that has passed must not round to
            # it.
            remaining_s=max(1e-3, remaining_s) if isfinite(remaining_s) else 0.0,
            max_reply_bytes=offer.max_reply_bytes,
            max_inline_bytes=self._max_inline_bytes(),
            personal=personal,
            study=self.study,
            traceparent=live.traceparent,
        )
        _add_constants(task, offer)
        self._add_bundle(task)
        return wire_pb2.FromCoordinator(task=task).SerializeToString()

    def _add_bundle(self, task: wire_pb2.Task) -> None:
        if self.bundle is not None:
            task.bundle = self.bundle.sha256


def _add_constants(task: wire_pb2.Task, offer: Offer) -> None:
    if offer.constants is not None:
        task.constants_digest = offer.constants.digest
        task.constants_bytes = offer.constants.num_bytes


def receipt(key: wire_pb2.TaskKey, ruling: Ruling) -> wire_pb2.Receipt:
    """Return a ruling as a wire message; both sides use the same verdict names."""
    return wire_pb2.Receipt(key=key, verdict=ruling.verdict.name, reason=ruling.reason)


def _encode_receipt(key: TaskKey, ruling: Ruling) -> bytes:
    message = wire_pb2.FromCoordinator(receipt=receipt(key.message(), ruling))
    return message.SerializeToString()


def _encode_cancel(key: TaskKey, reason: str) -> bytes:
    cancel = wire_pb2.Cancel(key=key.message(), reason=reason)
    return wire_pb2.FromCoordinator(cancel=cancel).SerializeToString()


def _find_mismatch(envelope: wire_pb2.Envelope, data: bytes) -> Ruling | None:
    if len(data) != envelope.num_bytes:
        return refuse(f"{len(data)} bytes, but {envelope.num_bytes} were announced", "size")
    if compute_digest(data) != envelope.digest:
        return WRONG_DIGEST
    return None


def _log_close_error(key: TaskKey, outcome: WriteResult) -> None:
    if isinstance(outcome, OSError):
        # Harmless: no verdict is sent before the next commit, and a restart before that opens the
        # exchange again.
        _log.error("reply_log_not_closed", folder=key.folder, reason=str(outcome))
