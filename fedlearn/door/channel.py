"""The run loop's side of the door: a channel whose clients are across the network."""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import structlog

from fedlearn.core.clock import Clock, WallClock
from fedlearn.core.codec import encode
from fedlearn.core.files import disk_errors
from fedlearn.core.messages import (
    ClientId,
    EvaluateRequest,
    Failure,
    Request,
    TrainRequest,
    apart,
)
from fedlearn.core.randomness import SecretBytes
from fedlearn.door.connections import Hall
from fedlearn.door.exchange import ExchangeState, Key
from fedlearn.door.loop import LoopThread
from fedlearn.door.spool import LoggedReply, Opened, ReplyLog, forget_exchanges
from fedlearn.door.tasks import Desk, LiveExchange, Offer
from fedlearn.errors import ConfigError, FedlearnError, NoSpace, StoreError
from fedlearn.transport import wire
from fedlearn.transport.base import Arrival, as_reply
from fedlearn.transport.content import digest_of

#: Seconds between two looks at whether waiting shall end.
_LOOK_S = 0.2

#: Of the name of a folder that is this process' alone.
_NAME_BYTES = 8

_log = structlog.get_logger(__name__)

#: Raises what shall end waiting: :class:`~fedlearn.errors.Parked`, for one.
Check = Callable[[], None]


class DoorClock(Clock, WallClock, Protocol):
    """Monotonic time, and the time of day."""


class DoorChannel:
    """A :class:`fedlearn.transport.base.Channel` to the clients at a door; for one thread.

    A crash or an interruption inside an exchange loses no reply that was logged: the same
    exchange, opened again, yields those first, in the same order, and waits for the rest.
    Only replies to training requests are that durable.

    Args:
        loop: Where the door runs.
        desk: Runs exchanges; only ever touched on the loop.
        hall: Who is connected; likewise.
        run_id: Of the run.
        folder: For requests on their way out and replies on their way in.
        recovery_grace_s: How long clients have at least to come back to an exchange that
            goes on.
        changed: Set by the door when a client comes, goes, or becomes eligible or not.
        check: Called often while the channel waits.
        clock: Of the deployment.
    """

    def __init__(
        self,
        *,
        loop: LoopThread,
        desk: Desk,
        hall: Hall,
        run_id: str,
        folder: Path,
        recovery_grace_s: float,
        changed: threading.Event,
        check: Check,
        clock: DoorClock,
    ) -> None:
        self._loop = loop
        self._desk = desk
        self._hall = hall
        self._run_id = run_id
        self._replies = folder / "replies"
        # Another coordinator may have been taken over and not know it yet: it has its own. The
        # door removes all when it starts.
        own = SecretBytes.generate(_NAME_BYTES).reveal().hex()
        self._passing = folder / "passing" / own
        self._recovery_grace_s = recovery_grace_s
        self._changed = changed
        self._check = check
        self._clock = clock
        self._last: dict[str, Key] = {}  # by kind

    def available(self) -> Sequence[ClientId]:
        """Return the clients that are connected and eligible, by number."""
        return tuple(self._loop.ask(self._hall.eligible))

    def wait_for(self, num: int, check: Check) -> None:
        """Wait until ``num`` clients are available, or ``check`` raises."""
        check()
        while len(self.available()) < num:
            self._changed.wait(_LOOK_S)
            self._changed.clear()
            check()

    def exchange(
        self, requests: Mapping[ClientId, Request], *, deadline_s: float
    ) -> Iterator[Arrival]:
        """Ask clients, those too that connect later, and yield what they answer.

        Each reply is read and decoded when it is asked for. A reply is accepted, and its
        client told so, when the next one is asked for or the exchange is left. A disk that
        is full is waited for before anyone is asked.

        Raises:
            ConfigError: A part of a request that is for one client alone is too large for its
                task; nobody has been asked.
            StoreError: The disk is broken.
            FedlearnError: What ``check`` raises; the exchange can be opened again.
        """
        if not requests:
            return
        live = self._opened_with_space(requests, deadline_s=deadline_s)
        self._loop.post(partial(self._desk.open, live))
        try:
            yield from self._arrivals(live)
        except GeneratorExit:
            self._loop.post(partial(self._desk.close, live, by_itself=False))
            raise
        except FedlearnError:
            self._unmake_key(live.state.key)
            self._loop.post(partial(self._desk.suspend, live))
            raise
        self._loop.post(partial(self._desk.close, live, by_itself=True))

    def forget(self, before_round: int) -> None:
        """Remove the replies of rounds before ``before_round``: they are part of a commit.

        Those of the round just before it stay: its clients may still ask for receipts.
        """

        def is_old(name: str) -> bool:
            round_num = name.split("-")[1:2]
            return round_num[:1] < [f"{before_round - 1:06d}"]

        forget_exchanges(self._replies, unneeded=is_old)
        self._loop.post(partial(self._desk.committed, before_round))

    def _opened_with_space(
        self, requests: Mapping[ClientId, Request], *, deadline_s: float
    ) -> LiveExchange:
        key, is_told = self._next_key(next(iter(requests.values()))), False
        while True:
            try:
                return self._opened(key, requests, deadline_s=deadline_s)
            except NoSpace as error:
                if not is_told:
                    _log.error("exchange_waits_for_space", folder=key.folder, reason=str(error))
                is_told = True
                self._loop.post(self._desk.found_no_space)
            try:
                self._check()
            except FedlearnError:
                self._unmake_key(key)
                raise
            self._clock.sleep(_LOOK_S)

    def _opened(
        self, key: Key, requests: Mapping[ClientId, Request], *, deadline_s: float
    ) -> LiveExchange:
        asked = _Asked.of(requests)
        offers = self._offers(asked.shared)  # before the log: it says that clients were asked
        now_s, now_unix_s = self._clock.now_s(), self._clock.unix_s()
        durable = key.kind == TrainRequest.__name__
        log = ReplyLog(
            (self._replies if durable else self._passing) / key.folder,
            opened=Opened(run_id=self._run_id, opened_unix_s=now_unix_s),
            durable=durable,
        )
        return LiveExchange(
            state=ExchangeState.of(key, asked.places.items(), now_s=now_s),
            offers=offers,
            personal=asked.personal,
            log=log,
            arrivals=SimpleQueue(),
            started_s=now_s - max(0.0, now_unix_s - log.opened_unix_s),
            deadline_s=now_s + self._remaining_s(log, deadline_s, now_unix_s=now_unix_s),
        )

    def _remaining_s(self, log: ReplyLog, deadline_s: float, *, now_unix_s: float) -> float:
        """Return the seconds until an exchange closes that may have been opened before."""
        if not log.is_resumed or not isfinite(deadline_s):
            return deadline_s
        left_s = log.opened_unix_s + deadline_s - now_unix_s
        return min(deadline_s, max(left_s, self._recovery_grace_s))

    def _next_key(self, request: Request) -> Key:
        kind = type(request).__name__
        key = Key(self._run_id, kind, request.round_num, self._attempt(request), 0)
        last = self._last.get(kind)
        if last is not None and last.order[:2] == key.order[:2]:
            key = key._replace(exchange=last.exchange + 1)
        self._last[kind] = key
        return key

    def _attempt(self, request: Request) -> int:
        """Return the attempt of a request; a model is measured in the one that has made it.

        A session of secure aggregation that is repeated makes another model, in another attempt.
        """
        if not isinstance(request, EvaluateRequest):
            return request.attempt
        trained = [last for kind, last in self._last.items() if kind != EvaluateRequest.__name__]
        made_in = (last for last in trained if last.round_num == request.round_num - 1)
        return max((last.attempt for last in made_in), default=0)

    def _unmake_key(self, key: Key) -> None:
        """Have the next exchange take the key of this one, which goes on in it."""
        del self._last[key.kind]
        if key.exchange > 0:
            self._last[key.kind] = key._replace(exchange=key.exchange - 1)

    def _offers(self, requests: Iterable[Request]) -> list[Offer]:
        """Encode each request once; a large one goes to a file, so that it is not held twice."""
        folder = self._passing / "requests"
        with disk_errors(folder, raises=StoreError, doing="write the requests of a round to"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            offers = [_offer(request, folder=folder) for request in requests]
            needed = {offer.path for offer in offers}
            for path in folder.iterdir():
                if path not in needed:
                    path.unlink(missing_ok=True)  # a download that reads it has it open
        return offers

    def _arrivals(self, live: LiveExchange) -> Iterator[Arrival]:
        """Yield replies in the order of the log until all have answered or it is too late."""
        for num, reply in enumerate(self._logged(live)):
            arrival = Arrival(reply.client_id, as_reply(live.log.read(reply)), reply.elapsed_s)
            failed = isinstance(arrival.reply, Failure)
            consumed = partial(self._desk.consumed, live, num + 1, failed=failed)
            try:
                yield arrival
            finally:
                # Also if the collector leaves with this reply, which it has had.
                self._loop.post(consumed)
                del arrival  # before the next one is read: it may be as large as the model

    def _logged(self, live: LiveExchange) -> Iterator[LoggedReply]:
        log, participants = live.log, live.state.participants
        found = [reply for reply in log.replies if reply.client_id in participants]
        if log.closed is not None:
            yield from found[: log.closed.num_consumed]
            return
        for reply in found:
            self._check()
            yield reply
        for _ in range(len(participants) - len(found)):
            arrived = self._next(live)
            if arrived is None:
                return
            yield arrived

    def _next(self, live: LiveExchange) -> LoggedReply | None:
        """Wait for the next reply; ``None`` at the deadline."""
        while True:
            self._check()
            left_s = live.deadline_s - self._clock.now_s()
            if left_s <= 0.0:
                return None
            try:
                return live.arrivals.get(timeout=min(left_s, _LOOK_S))
            except Empty:
                continue


@dataclass(frozen=True)
class _Asked:
    """What a cohort is asked, taken apart.

    Attributes:
        shared: What is encoded once for all that are sent it.
        places: By client its place in ``shared``.
        personal: By client what is for it alone.
    """

    shared: Sequence[Request]
    places: Mapping[ClientId, int]
    personal: Mapping[ClientId, bytes]

    @classmethod
    def of(cls, requests: Mapping[ClientId, Request]) -> "_Asked":
        """Take requests apart; those whose shared parts hold the same objects have one.

        Raises:
            ConfigError: A personal part is too large.
        """
        shared: dict[Hashable, tuple[int, Request]] = {}
        places, personal = dict[ClientId, int](), dict[ClientId, bytes]()
        for client_id, request in requests.items():
            common, own = apart(request)
            if len(own) > wire.MAX_PERSONAL_BYTES:
                raise ConfigError(
                    f"client {client_id} is to be sent {len(own)} bytes of secure aggregation's "
                    f"packets with the model, {wire.MAX_PERSONAL_BYTES} fit; ask fewer clients a "
                    'round, or set secure_aggregation.mode to "sparse"'
                )
            if own:
                personal[client_id] = own
            key = _objects(common) if own else id(request)
            places[client_id], _ = shared.setdefault(key, (len(shared), common))
        return cls([request for _, request in shared.values()], places, personal)


def _objects(request: Request) -> tuple[int, ...]:
    """Return which objects a request holds: two that hold the same have the same bytes."""
    return tuple(id(value) for value in vars(request).values())


def _offer(request: Request, *, folder: Path) -> Offer:
    content = encode(request)
    digest = digest_of(content)
    if len(content) <= wire.MAX_INLINE_BYTES:
        return Offer(digest=digest, num_bytes=len(content), data=content, path=None)
    path = folder / digest.hex()
    path.write_bytes(content)
    return Offer(digest=digest, num_bytes=len(content), data=b"", path=path)
