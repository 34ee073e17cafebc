"""The channel through which the round loop reaches clients across the network."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite, nan
from pathlib import Path
from queue import Empty, SimpleQueue

import structlog
from torch import Tensor

from fedlearn.core.clock import RealClock
from fedlearn.core.codec import encode, encode_constants, split
from fedlearn.core.files import explain_disk_errors
from fedlearn.core.messages import ClientId, EvaluateRequest, Failure, Request, TrainRequest
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.core.tracing import traceparent
from fedlearn.errors import (
    ConfigError,
    FedlearnError,
    NoSpace,
    OtherVersion,
    ProtocolError,
    StoreError,
)
from fedlearn.gateway.connections import Sessions
from fedlearn.gateway.exchanges import Exchanges, LiveQuestion, Offer
from fedlearn.gateway.loop import LoopThread
from fedlearn.gateway.questions import ACCEPTED, QuestionState, Ruling, refuse_unusable
from fedlearn.gateway.served_runs import ServedRun, ServedRuns
from fedlearn.gateway.upload_store import LoggedReply, OpeningRecord, ReplyLog, remove_exchanges
from fedlearn.transport import wire
from fedlearn.transport.base import Arrival, CohortRequests, are_same, decode_reply, require_free
from fedlearn.transport.content import NO_QUESTION, TaskKey, compute_digest

#: Seconds between two checks of whether to stop waiting.
_POLL_S = 0.2
_GIVEN_UP = "this client took too long; the round no longer waits for it"

_log = structlog.get_logger(__name__)

#: Raises an error to end a wait, such as :class:`~fedlearn.errors.Parked`.
Check = Callable[[], None]
#: Creates the context manager that surrounds each wait for replies.
Waiting = Callable[[], AbstractContextManager[None]]


@dataclass(kw_only=True, eq=False)
class GatewayChannel:
    """A :class:`fedlearn.transport.base.Channel` to clients connected over gRPC; for one thread.

    A crash or an interruption during an exchange loses no logged reply to a training request: the
    same exchange, opened again, returns those replies first, in the same order, and waits for the
    rest. If the exchange asks several questions, each is durable separately, identified by its
    kind, round, attempt and position among such questions; the order of replies across questions
    is not recorded.

    Attributes:
        loop: The server's event loop; ``runs``, ``run`` and ``sessions`` are only used on it.
        run_id: Id of the run in its tasks.
        folder: For outgoing requests and incoming replies.
        recovery_grace_s: Minimum time that clients have to reconnect to a resumed exchange.
        changed: Set by the server when a client connects, disconnects, or changes its eligibility.
        check: Called often while the channel waits.
        waiting: Surrounds each wait for replies.
    """

    loop: LoopThread
    runs: ServedRuns
    run: ServedRun
    sessions: Sessions
    run_id: str
    folder: Path
    recovery_grace_s: float
    changed: threading.Event
    check: Check
    waiting: Waiting
    clock: RealClock
    _last: dict[str, TaskKey] = field(default_factory=dict)  # by kind
    _open: list[LiveQuestion] = field(default_factory=list)
    _encoded: tuple[Request, Offer] | None = None  # the last request
    _prefetched: Offer | None = None  # the last model that clients may prefetch
    #: The constants of the model that was sent last, and their offer.
    _constants: tuple[Mapping[str, Tensor], Offer] | None = None
    _trainers: dict[tuple[int, ClientId], str] = field(default_factory=dict)
    _training: "GatewayExchange | None" = None  # the last exchange that asked clients to train

    def __post_init__(self) -> None:
        # A coordinator that has been taken over may still run without knowing it, so each process
        # writes to its own folder. The server removes all of them when it starts.
        self._passing = self.folder / "passing" / SecretBytes.generate(8).reveal().hex()

    @property
    def exchanges(self) -> Exchanges:
        """The run's exchanges."""
        return self.run.exchanges

    def available(self) -> Sequence[ClientId]:
        """Return the clients that the run may ask now, by number.

        They are connected and eligible, and neither work for another run nor are kept for one.
        """
        return self.loop.ask(partial(self.runs.find_available, self.run.run_id))

    def set_aside(self, client_id: ClientId) -> None:
        """Make a client unavailable until it reconnects."""
        self.loop.post(partial(self.sessions.set_aside, client_id, run_id=self.run.run_id))

    def num_set_aside(self) -> int:
        """Return the number of connected clients that are set aside."""
        return len(self.loop.ask(partial(self.sessions.find_set_aside, self.run.run_id)))

    def num_elsewhere(self) -> int:
        """Return how many clients the run could ask but for other runs, which come first."""
        return len(self.loop.ask(partial(self.runs.find_elsewhere, self.run.run_id)))

    def wait_for(self, num: int, check: Check) -> None:
        """Wait until ``num`` clients are available, or ``check`` raises."""
        check()
        while len(self.available()) < num:
            self.changed.wait(_POLL_S)
            self.changed.clear()
            check()

    def open(self, *, deadline_s: float) -> "GatewayExchange":
        """Open an exchange; if it resumes after a restart, clients get time to reconnect."""
        return GatewayExchange(self, deadline_s)

    def forget(self, before_round: int) -> None:
        """Remove the replies of rounds before ``before_round``, which are part of a commit.

        Replies to open questions are kept, and those of the last round: its clients may still ask
        for receipts.
        """
        in_use = {question.state.key.folder for question in self._open}

        def is_old(name: str) -> bool:
            # Folders are named kind-round-attempt-number; a name without a round is older than any.
            _, _, rest = name.partition("-")
            round_num, _, _ = rest.partition("-")
            is_round = round_num.isdecimal()
            return name not in in_use and (not is_round or int(round_num) < before_round - 1)

        remove_exchanges(self.folder / "replies", is_unneeded=is_old)
        self.loop.post(partial(self.exchanges.release_verdicts, before_round))

    def num_waiting(self) -> int:
        """Return the number of unread replies to training requests, durable or not.

        Those that an earlier process has logged count as well.
        """
        logged = 0 if self._training is None else self._training.num_waiting()
        return logged + self.exchanges.num_unlogged

    def send_prefetch(
        self, client_ids: Sequence[ClientId], request: TrainRequest, *, last_round_num: int
    ) -> None:
        """Announce a model that clients may be asked to train next, so that they can prefetch it.

        Clients may download it and begin to train; those that are asked in a round up to
        ``last_round_num`` may answer with that result. If the disk is full, nothing is sent.
        """
        key = TaskKey(self.run_id, request.kind, request.round_num, request.attempt, NO_QUESTION)
        encoded = self._encoded  # more clients may be sent the present request: keep it encoded
        try:
            (self._prefetched,) = self._encode_requests([request], client_ids)
        except NoSpace:
            return
        finally:
            self._encoded = encoded
        send = self.exchanges.send_prefetch
        self.loop.post(partial(send, key, self._prefetched, client_ids, last_round_num))

    def note_trainer(self, key: TaskKey, reply: LoggedReply) -> None:
        """Note what a client ran in a round, if it says so."""
        if reply.trainer:
            self._trainers[key.round_num, reply.client_id] = reply.trainer

    def take_trainers(self) -> dict[tuple[int, ClientId], str]:
        """Return what clients ran since the last call, by round and client."""
        taken, self._trainers = self._trainers, {}
        return taken

    def cancel_prefetches(self) -> None:
        """Cancel the announced models: clients will not be asked to train them."""
        self._prefetched = None
        self.loop.post(self.exchanges.cancel_prefetches)

    # Used by exchanges.

    def next_key(self, request: Request, *, number: int | None) -> TaskKey:
        """Return the key of a question, given the first of its requests."""
        key = TaskKey(self.run_id, request.kind, request.round_num, self._attempt(request), 0)
        if number is not None:
            return key._replace(exchange=number)
        # Questions of one kind are numbered within a round and attempt. A restarted run asks in
        # the same order, so it finds the same keys, and with them its logs.
        last = self._last.get(key.kind)
        if last is not None and last.order[:2] == key.order[:2]:
            key = key._replace(exchange=last.exchange + 1)
        self._last[key.kind] = key
        return key

    def put_back(self, key: TaskKey) -> None:
        """Let the next question of this kind reuse this key, so that it resumes this question."""
        self._last.pop(key.kind, None)
        if key.exchange > 0:
            self._last[key.kind] = key._replace(exchange=key.exchange - 1)

    def put(
        self, key: TaskKey, requests: Mapping[ClientId, Request], exchange: "GatewayExchange"
    ) -> LiveQuestion:
        """Send a question to at least one client, as :meth:`GatewayExchange.ask` does."""
        question, is_logged = None, False
        while question is None:
            try:
                question = self._open_question(key, requests, exchange)
            except NoSpace as error:
                if not is_logged:
                    reason = str(error)
                    _log.error("exchange_waits_for_space", folder=key.folder, reason=reason)
                is_logged = True
                self.loop.post(self.exchanges.count_disk_full)
                self.check()
                self.clock.sleep(_POLL_S)
        self._open.append(question)
        if key.kind == TrainRequest.kind:
            self._training = exchange
        self.loop.post(partial(self.exchanges.open, question))
        return question

    def leave(self, question: LiveQuestion, how: Callable[[LiveQuestion], None]) -> None:
        """Close or suspend a question on the server."""
        self._open.remove(question)
        self.loop.post(partial(how, question))

    def _open_question(
        self, key: TaskKey, requests: Mapping[ClientId, Request], exchange: "GatewayExchange"
    ) -> LiveQuestion:
        cohort = CohortRequests.of(requests)
        _require_fit(cohort.personal)
        # Before the log, whose existence means that clients were asked.
        offers = self._encode_requests(cohort.shared, cohort.places)
        now_s, now_unix_s = self.clock.now_s(), self.clock.unix_s()
        durable = key.kind == TrainRequest.kind
        log = ReplyLog(
            (self.folder / "replies" if durable else self._passing) / key.folder,
            opened=OpeningRecord(run_id=self.run_id, opened_unix_s=now_unix_s),
            durable=durable,
        )
        remaining_s = self._remaining_s(log, exchange.deadline_s, now_unix_s=now_unix_s)
        return LiveQuestion(
            state=QuestionState.of(key, cohort.places, now_s=now_s),
            offers=offers,
            personal=cohort.personal,
            log=log,
            arrivals=exchange.arrivals,
            # Only the wall clock survives a restart. It may have been set back meanwhile, hence
            # `max`.
            started_s=now_s - max(0.0, now_unix_s - log.opened_unix_s),
            deadline_s=now_s + remaining_s if exchange.ends_s is None else exchange.ends_s,
            traceparent=traceparent(),
        )

    def _remaining_s(self, log: ReplyLog, deadline_s: float, *, now_unix_s: float) -> float:
        """Return the seconds until an exchange ends, which an earlier process may have opened."""
        if not log.is_resumed or not isfinite(deadline_s):
            return deadline_s
        # Downtime counts against the deadline, but clients need some time to find the new process.
        # `min`: a wall clock that was set back must not extend the round.
        left_s = log.opened_unix_s + deadline_s - now_unix_s
        return min(deadline_s, max(left_s, self.recovery_grace_s))

    def _attempt(self, request: Request) -> int:
        """Return the attempt of a request; for an evaluation, the one that made its model."""
        if not isinstance(request, EvaluateRequest):
            return request.attempt
        trained = [last for kind, last in self._last.items() if kind != EvaluateRequest.kind]
        made_in = (last for last in trained if last.round_num == request.round_num - 1)
        return max((last.attempt for last in made_in), default=0)

    def _encode_request(self, request: Request, folder: Path, *, has_older: bool) -> Offer:
        """Return an encoded request, with a version for older clients if some are connected.

        A request is encoded once even if it is sent again later, as other clients reply.
        """
        if self._encoded is None or self._encoded[0] is not request:
            bare, constants = split(request)
            apart = self._offer_constants(constants, folder) if constants else None
            self._encoded = request, _build_offer(encode(bare), constants=apart, folder=folder)
        offer = self._encoded[1]
        if has_older and offer.older is None:
            older = _encode_older(request, folder=folder)
            if older is not None and older.digest != offer.digest:
                self._encoded = request, replace(offer, older=older)
        return self._encoded[1]

    def _offer_constants(self, constants: Mapping[str, Tensor], folder: Path) -> Offer:
        """Return the offer of a model's constants; the same tensors are encoded once in a run."""
        known = self._constants
        if known is None or not are_same(known[0], constants):
            encoded = encode_constants(constants)
            self._constants = known = constants, _write_offer(encoded, folder=folder)
        return known[1]

    def _encode_requests(
        self, requests: Iterable[Request], client_ids: Collection[ClientId]
    ) -> list[Offer]:
        """Encode each request once; large ones go to files instead of staying in memory."""
        folder = self._passing / "requests"
        all_speak_newest = partial(self.sessions.all_speak_newest, run_id=self.run.run_id)
        has_older = not self.loop.ask(partial(all_speak_newest, client_ids))
        with explain_disk_errors(
            folder, raises=StoreError, doing="write the requests of a round to"
        ):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            offers = [self._encode_request(each, folder, has_older=has_older) for each in requests]
            # Clients of open questions may still download these files.
            in_use = [offer for question in self._open for offer in question.offers]
            in_use += [] if self._prefetched is None else [self._prefetched]
            needed = {each.path for offer in [*offers, *in_use] for each in offer.files}
            needed |= {None if self._constants is None else self._constants[1].path}
            for path in folder.iterdir():
                if path not in needed:
                    path.unlink(missing_ok=True)  # a running download keeps its open file
        return offers


@dataclass
class _ReadReply:
    """A reply that was read, and its verdict."""

    question: LiveQuestion
    ruling: Ruling = ACCEPTED
    failed: bool = False

    def refuse(self, reason: str) -> None:
        """Reject the reply, with the reason."""
        self.ruling = refuse_unusable(reason)


class GatewayExchange:
    """A :class:`fedlearn.transport.base.Exchange` with clients connected over gRPC.

    A reply is read and decoded when it is requested; its client receives the verdict with the next
    call of the exchange. Any error from its methods, except a :class:`ValueError`, suspends the
    exchange as a crash would: it can be opened again, and resumes.

    Attributes:
        deadline_s: In seconds after the first question.
        ends_s: The same on the channel's clock; ``None`` before the first question.
        arrivals: Logged replies.
    """

    def __init__(self, channel: GatewayChannel, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.ends_s: float | None = None
        self.arrivals: SimpleQueue[tuple[LiveQuestion, LoggedReply]] = SimpleQueue()
        self._channel = channel
        self._started_s = nan  # on the channel's clock, from the first question
        self._grace_until_s = 0.0  # in seconds since then
        self._firsts: dict[str, TaskKey] = {}  # by kind
        self._questions: list[LiveQuestion] = []
        self._found: deque[tuple[LiveQuestion, LoggedReply]] = deque()  # by an earlier process
        self._awaited: dict[ClientId, TaskKey] = {}
        self._last: _ReadReply | None = None
        self._is_open = True
        self._is_over = False

    def ask(self, requests: Mapping[ClientId, Request], *, number: int | None = None) -> None:
        """Send requests to clients, also to those that connect later; wait while the disk is full.

        Raises:
            ConfigError: The part for one client alone is too large for its task; no client is
                asked.
            StoreError: The disk is broken.
            ValueError: See the protocol.
            FedlearnError: Raised by the channel's ``check``.
        """
        require_free(self._awaited, requests, is_open=self._is_open)
        self._accept()
        if not requests:
            return
        self._close_answered()
        key = self._channel.next_key(next(iter(requests.values())), number=number)
        if number is None:
            self._firsts.setdefault(key.kind, key)
        with self._suspend_on_error():
            question = self._channel.put(key, requests, self)
        if self.ends_s is None:
            # A numbered question may have been asked at another time, by an earlier process. The
            # exchange's clock still starts now, in this process.
            own_s = question.started_s if number is None else self._channel.clock.now_s()
            self._started_s, self.ends_s = own_s, question.deadline_s
        log = question.log
        if log.is_resumed and log.closed is None:
            grace_until_s = self.elapsed_s() + self._channel.recovery_grace_s
            self._grace_until_s = max(self._grace_until_s, grace_until_s)
        self._questions.append(question)
        found = [reply for reply in log.replies if reply.client_id in question.state.participants]
        awaited: Iterable[ClientId] = question.state.participants
        if log.closed is not None:  # closed by an earlier process: its replies are read again
            found = found[: log.closed.num_consumed]
            awaited = [reply.client_id for reply in found]
        self._found.extend((question, reply) for reply in found)
        self._awaited |= dict.fromkeys(awaited, key)
        self._is_over = False

    def next(self, *, until_s: float) -> Arrival | None:
        """Return the next reply; replies to one question come in the order of its log.

        Raises:
            StoreError: The disk is broken.
            FedlearnError: Raised by the channel's ``check``.
        """
        self._accept()
        is_found = bool(self._found)
        with self._suspend_on_error():
            logged = self._wait_for_logged(until_s)
            if logged is None:
                return None
            question, reply = logged
            data = question.log.read(reply)
        # The verdict is sent with the next call: until then, the caller may still refuse the
        # reply.
        read = self._last = _ReadReply(question)
        try:
            answer = decode_reply(data)
        except ProtocolError as error:
            answer = Failure(str(error))
            read.refuse(answer.reason)
            if isinstance(error, OtherVersion):
                refuse = self._channel.sessions.refuse_version
                self._channel.loop.post(partial(refuse, reply.client_id, answer.reason))
        expected = self._channel.run.terms.bundle
        has_result = not isinstance(answer, Failure)
        if expected is not None and has_result and reply.trainer != expected.trainer:
            ran = reply.trainer or "what it does not say"
            answer = Failure(f"the client ran {ran}, not {expected.trainer}")
            read.refuse(answer.reason)
        self._channel.note_trainer(question.state.key, reply)
        read.failed = isinstance(answer, Failure)
        del self._awaited[reply.client_id]
        # Logs count from their own question, arrivals from the first question of the exchange.
        elapsed_s = question.started_s - self._started_s + reply.elapsed_s
        logged_s = reply.elapsed_s if is_found else None
        return Arrival(reply.client_id, answer, elapsed_s, read.refuse, logged_s)

    def num_waiting(self) -> int:
        """Return the number of logged replies that have not been read yet."""
        return len(self._found) + self.arrivals.qsize()

    def elapsed_s(self) -> float:
        """Return the seconds since the first question; 0 before it."""
        return 0.0 if self.ends_s is None else self._channel.clock.now_s() - self._started_s

    def grace_until_s(self) -> float:
        """Return the end of the time for clients to reconnect, in seconds since the first question.

        0 if no earlier process has asked one of its questions.
        """
        return self._grace_until_s

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        """Stop waiting for some clients, and cancel their tasks.

        Raises:
            ValueError: Another client that was asked in the same question is still awaited.
        """
        self._accept()
        gone = {self._awaited[each] for each in client_ids if each in self._awaited}
        for each in client_ids:
            self._awaited.pop(each, None)
        if awaited := gone & set(self._awaited.values()):
            raise ValueError(
                f"other clients of {awaited.pop().folder} are still awaited; ask clients that may "
                "be given up in questions of their own"
            )
        for question in [each for each in self._questions if each.state.key in gone]:
            self._close(question, by_itself=False, reason=_GIVEN_UP)
            self._questions.remove(question)
        self._found = deque(each for each in self._found if each[0].state.key not in gone)

    def close(self) -> None:
        """Take no more replies; clients learn this once it is stored durably."""
        self._accept()  # the caller has the last reply, even if it stops there
        for question in self._take_open_questions():
            self._close(question, by_itself=self._is_over)

    @contextmanager
    def _suspend_on_error(self) -> Iterator[None]:
        try:
            yield
        except FedlearnError:
            # Back to the first question of each kind: reopened, the exchange asks all of them
            # again, and must find each one's log.
            for key in self._firsts.values():
                self._channel.put_back(key)
            for question in self._take_open_questions():
                self._channel.leave(question, self._channel.exchanges.suspend)
            raise

    def _close(self, question: LiveQuestion, *, by_itself: bool, reason: str = "") -> None:
        close = partial(self._channel.exchanges.close, by_itself=by_itself, reason=reason)
        self._channel.leave(question, close)

    def _take_open_questions(self) -> Sequence[LiveQuestion]:
        """Stop waiting for any client; return the questions that were open."""
        questions, self._questions = self._questions, []
        self._is_open = False
        self._awaited.clear()
        self._found.clear()
        return questions

    def _accept(self) -> None:
        if (read := self._last) is not None:
            deliver = self._channel.exchanges.deliver_verdict
            settle = partial(deliver, read.question, read.ruling, failed=read.failed)
            self._channel.loop.post(settle)
            self._last = None

    def _close_answered(self) -> None:
        """Close questions that every client has answered: an exchange may stay open for hours."""
        open_keys = set(self._awaited.values())
        for question in self._questions:
            if question.state.key not in open_keys:
                self._close(question, by_itself=True)
        self._questions = [each for each in self._questions if each.state.key in open_keys]

    def _wait_for_logged(self, until_s: float) -> tuple[LiveQuestion, LoggedReply] | None:
        # Replies of an earlier process first, even after the deadline: they counted then.
        if self._found:
            self._channel.check()
            return self._found.popleft()
        ends_s = inf if self.ends_s is None else self.ends_s
        while self._awaited:
            self._channel.check()
            now_s = self._channel.clock.now_s()
            if now_s >= ends_s:
                break
            left_s = min(self._started_s + until_s, ends_s) - now_s
            try:
                with self._channel.waiting():
                    # A short timeout, so that `check` runs often enough to notice a stop or a lost
                    # lease.
                    logged = self.arrivals.get(timeout=max(0.0, min(left_s, _POLL_S)))
            except Empty:
                if left_s <= 0.0:
                    return None
                continue
            if logged[0] in self._questions:  # else its client was given up meanwhile
                return logged
        self._is_over = True
        return None


def _require_fit(personal: Mapping[ClientId, bytes]) -> None:
    for client_id, own in personal.items():
        if len(own) > wire.MAX_PERSONAL_BYTES:
            raise ConfigError(
                f"the secure-aggregation packets for client {client_id} have {len(own)} bytes, "
                f"at most {wire.MAX_PERSONAL_BYTES} fit into its task; ask fewer clients a round, "
                'or set secure_aggregation.mode to "sparse"'
            )


def _build_offer(content: bytes, *, constants: Offer | None, folder: Path) -> Offer:
    if len(content) > wire.MAX_INLINE_BYTES:
        return replace(_write_offer(content, folder=folder), constants=constants)
    digest = compute_digest(content)
    return Offer(
        digest=digest, num_bytes=len(content), data=content, path=None, constants=constants
    )


def _encode_older(request: Request, *, folder: Path) -> Offer | None:
    """Return a request encoded for the previous protocol; ``None`` if it has no such form."""
    try:
        content = encode(request, newest=wire.MESSAGE_VERSIONS[min(wire.MESSAGE_VERSIONS)])
    except ValueError:
        return None
    return _build_offer(content, constants=None, folder=folder)


def _write_offer(content: bytes, *, folder: Path) -> Offer:
    digest = compute_digest(content)
    path, written = folder / digest.hex(), folder / f"{digest.hex()}.new"
    written.write_bytes(content)
    written.replace(path)  # a running download of the old file keeps its open copy
    return Offer(digest=digest, num_bytes=len(content), data=b"", path=path)
