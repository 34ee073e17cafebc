"""Collects plaintext updates over a channel, in rounds of all three kinds.

A round is synchronous, semi-synchronous (:class:`LateUpdates`) or asynchronous
(:class:`Asynchrony`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple, Protocol

from torch import Tensor

from fedlearn.algorithms.aggregations import weights
from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.collector import CollectedRound, RoundRequest
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.pending_tasks import Draw, PendingTask, PendingTasks
from fedlearn.algorithms.round_state import RoundState, round_state_for
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.messages import ClientId, TrainReply, TrainRequest
from fedlearn.core.participations import Status
from fedlearn.core.tracing import span
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.updates import Fold, build_participation, validate_or_refuse
from fedlearn.transport.base import Arrival, Channel, Exchange

#: How often a deployed round looks for newly connected clients, in seconds.
_LOOK_S = 1.0
#: Smallest staleness limit with which models are prefetched. A client that has one is asked to
#: train it one round later, and may reply another round later.
_LEAST_STALENESS = 2


class PrefetchSender(Protocol):
    """Sends models to clients before they are asked to train them."""

    def send_prefetch(
        self, client_ids: Sequence[ClientId], request: TrainRequest, *, last_round_num: int
    ) -> None:
        """Send a request early; clients may answer later ones up to ``last_round_num`` with it."""

    def cancel_prefetches(self) -> None:
        """Cancel all prefetches: the clients will not be asked for them."""


class _ArrivedUpdate(NamedTuple):
    task: PendingTask
    update: TrainReply
    duration_s: float


@dataclass(kw_only=True, eq=False)
class PlainCollector:
    """Collects the updates of clients that a channel reaches.

    Each reply is checked on arrival and then queued without a copy. Queued replies are aggregated
    as one block, in a single pass over the sum: whenever as many as fit into ``slab_bytes`` are
    queued, and at the close of the round. If no two fit, replies are aggregated one by one, with
    bit-identical results to a simulation engine at block size 1. An aggregation that needs all
    updates at once gets them at the close; until then, replies that came over the network stay on
    disk.

    If updates of earlier rounds count, the exchange stays open from round to round for as long as
    a client is in flight. A process that resumes a run asks the clients in flight again.

    Memory: the aggregate, one reply, and the queued replies.

    Attributes:
        channel: The connection to the clients.
        policy: When a round closes, and how long a client may take.
        slab_bytes: Bound of the queued replies, in bytes; if no two fit, none is queued.
        round_mode: Settings of semi-synchronous or asynchronous rounds; ``None``: rounds are
            synchronous.
        wait: Waits a moment for clients to connect, if an asynchronous round has no client in
            flight and none to ask; ``None``: no client will connect.
        prefetcher: Sends the newest model to clients that still work on an older one; ``None``: no
            model is sent before it is asked for.
        congestion: Limit of the clients in flight; ``None``: only the concurrency limits them.
        sent_statistics: By round, the statistics of the model that was broadcast in it.
    """

    channel: Channel
    policy: StragglerPolicy
    slab_bytes: int
    round_mode: LateUpdates | Asynchrony | None = None
    wait: Callable[[], None] | None = None
    prefetcher: PrefetchSender | None = None
    congestion: InFlightLimit | None = None
    sent_statistics: dict[int, Tensor | None] = field(default_factory=dict, init=False)
    _exchange: Exchange | None = None
    _closed_s: float = 0.0  # when the last round closed, in the exchange's seconds
    _in_flight: frozenset[ClientId] = frozenset()
    #: Updates of an attempt that got too few: they count at the start of the next attempt.
    _held: dict[ClientId, _ArrivedUpdate] = field(default_factory=dict)

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.channel.available()

    def busy(self) -> frozenset[ClientId]:
        """Return the clients that are in flight between two rounds."""
        return self._in_flight

    def close(self) -> None:
        """Cancel all tasks and notify the clients in flight."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
            if self.prefetcher is not None:
                self.prefetcher.cancel_prefetches()

    def collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        """Ask clients and take replies until the round closes; see :class:`Collector`."""
        try:
            collected = self._collect(pending, requests, requests[round_num], draw)
        finally:
            # The tasks of a synchronous round end with it, even if it raised.
            if self.round_mode is None:
                self.close()
        self._in_flight = frozenset(each.client_id for each in collected.pending)
        return collected

    def _collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        request: RoundRequest,
        draw: Draw,
    ) -> CollectedRound:
        # Nothing is in flight, so nothing ties this round to the last exchange: begin a new one.
        if not pending:
            self.close()
        is_resumed = self._exchange is None
        if self._exchange is None:
            # Clients receive the exchange's deadline and may give up then. If late updates count,
            # they must not: the exchange outlives the round.
            deadline_s = self.policy.deadline_s if self.round_mode is None else math.inf
            self._exchange, self._closed_s = self.channel.open(deadline_s=deadline_s), 0.0
        self._remember_statistics(requests, request.round_num)
        round_state = round_state_for(self.policy, self.round_mode, pending, request)
        if self.congestion is not None:
            round_state.limit(self.congestion.limit)
        attempt = _RoundAttempt(self, self._exchange, round_state, requests, draw, self._closed_s)
        attempt.open(is_resumed=is_resumed, held=self._held)
        attempt.run(self._held)
        self._closed_s = attempt.opened_s + attempt.now_s
        collected, self._held = attempt.close(), attempt.held
        return collected

    def _remember_statistics(self, requests: Mapping[int, RoundRequest], round_num: int) -> None:
        """Remember the statistics broadcast in recent rounds, for updates that are based on them.

        A client that began early on a prefetched model may answer with an older round than it was
        asked for, so the last ``max_staleness`` rounds are kept as well as the pending ones.
        """
        most = 0 if self.round_mode is None else self.round_mode.max_staleness
        self.sent_statistics |= {
            number: each.params.round_statistics() for number, each in requests.items()
        }
        for number in [each for each in self.sent_statistics if each < round_num - most]:
            if number not in requests:
                del self.sent_statistics[number]


@dataclass(eq=False)
class _RoundAttempt:
    """Drives one attempt at a round: reports the channel's events to its state machine."""

    collector: PlainCollector
    exchange: Exchange
    round_state: RoundState
    requests: Mapping[int, RoundRequest]
    draw: Draw
    opened_s: float  # on the exchange's clock; initially when the previous round closed
    now_s: float = 0.0  # seconds since the round opened
    #: The updates so far, as long as they are too few for a step of the server.
    held: dict[ClientId, _ArrivedUpdate] = field(default_factory=dict)
    _messages: dict[ClientId, TrainRequest] = field(default_factory=dict)
    _last_reply_s: float = 0.0  # when a client last replied or was given up
    _is_prefetched: bool = False

    def __post_init__(self) -> None:
        self.request = self.requests[self.round_state.round_num]
        # The answer to a query has no delta.
        num_bytes = self.request.params.vector.nbytes or self.request.upload_bytes
        num_together = max(1, self.collector.slab_bytes // num_bytes)
        self.fold = Fold(self.request, num_together=num_together)

    def open(self, *, is_resumed: bool, held: Mapping[ClientId, _ArrivedUpdate]) -> None:
        """Open the round: give up tasks that are too stale, and on a resume send the others again.

        The channel may return replies that an earlier process received.
        """
        self._begin()
        self._give_up(self.round_state.give_up_stale())
        if is_resumed:
            again = [each for each in self.round_state.pending if each.client_id not in held]
            again.sort(key=lambda each: (each.based_on, each.attempt))
            self._prepare(again)
            self._ask(again)

    def _begin(self) -> None:
        """Set the opening time of the round to now.

        Time has passed since the previous round closed: for its evaluation, until clients
        connected, or while the run was paused.
        """
        since_s = max(0.0, self.exchange.elapsed_s() - self.opened_s)
        self.opened_s += since_s
        self.round_state.pass_time(since_s)

    def run(self, held: Mapping[ClientId, _ArrivedUpdate]) -> None:
        """Ask clients and take replies until the round closes or no client can answer any more."""
        # A held update may have grown too stale meanwhile, so that its task was given up. Look
        # before asking: its client may be drawn again, with a new task.
        still_held = [
            each for each in held.values() if self.round_state.awaits(each.task.client_id)
        ]
        self._refill()
        for each in still_held:
            self._count(each._replace(task=self.round_state.land(each.task.client_id)))
        while not self.round_state.is_closed:
            self._refill()
            self._prefetch()
            if not self.round_state.pending:
                if self._should_give_up():
                    self.now_s = self.round_state.run_out(self.now_s)
                    return
                if self.collector.wait is None:
                    return
                self.collector.wait()
                continue
            if self.collector.congestion is not None:
                self.collector.congestion.measure_queue()
            self.round_state.grant(self.exchange.grace_until_s() - self.opened_s)
            until_s = min(self.round_state.wakes_s(), self._next_look_s())
            # The exchange of a synchronous round enforces the deadline itself, and extends it
            # after a restart, so wait for it without a limit.
            ends_s = math.inf if self.collector.round_mode is None else self.opened_s + until_s
            arrival = self.exchange.next(until_s=ends_s)
            if arrival is not None:
                # A reply may have arrived before it was read: time must not run backwards.
                self.now_s = max(self.now_s, arrival.elapsed_s - self.opened_s)
                self._take(arrival)
                del arrival  # free it before the next one is read: both may be as large as a model
            elif math.isinf(ends_s):
                self.now_s = self.round_state.run_out(self.now_s)
                return
            else:
                self.now_s = max(self.now_s, until_s)
                self._give_up(self.round_state.expire(self.now_s))

    def _should_give_up(self) -> bool:
        """Return whether to stop waiting for further clients to fill the round.

        A client that was late, sent an unusable update or kept failing is not asked again on this
        model. If there is such a client and no other connected client is left to ask, the round
        gives up once ``deadline_s`` has passed since the last client replied. It gives up at once
        if all clients have failed or no other client will connect. If there is no such client,
        the round waits for clients to connect.
        """
        others = self.round_state.could_ask_others(self.collector.available())
        if others or not self.round_state.has_missed_any:
            return False
        have_all_failed = all(row.status is Status.FAILED for row in self.round_state.rows)
        if have_all_failed or self.collector.wait is None:
            return True
        waited_s = self.exchange.elapsed_s() - self.opened_s - self._last_reply_s
        return waited_s >= self.collector.policy.deadline_s

    def _next_look_s(self) -> float:
        is_looking = self.collector.wait is not None and self.round_state.may_ask
        return self.now_s + _LOOK_S if is_looking else math.inf

    # ---- Asking ---------------------------------------------------------------------------

    def _refill(self) -> None:
        while self.round_state.may_ask:
            # A draw can take long, if it waits for clients to connect or the run is paused.
            if self.round_state.opens_when_drawn:
                self._begin()
            else:
                self.now_s = max(self.now_s, self.exchange.elapsed_s() - self.opened_s)
            self._ask(self.round_state.ask(self.now_s))
            drawn = self.round_state.draw(self.draw)
            # A cohort is asked even if it is empty, since that opens the round.
            if not drawn and not self.round_state.opens_when_drawn:
                return
            self._prepare(drawn)
            self.round_state.put(drawn)

    def _prepare(self, tasks: Sequence[PendingTask]) -> None:
        """Build each client's message; clients with equal messages share one object."""
        # `groupby` joins neighbors only: pending tasks of a resumed run are sorted by this key.
        for (based_on, attempt), group in groupby(tasks, key=lambda e: (e.based_on, e.attempt)):
            request = replace(self.requests[based_on], attempt=attempt)
            self._messages |= request.messages([each.client_id for each in group])

    def _ask(self, tasks: Sequence[PendingTask]) -> None:
        """Send each task to its client.

        A synchronous round asks its whole cohort in one question, which keeps its deadline across
        a restart. Otherwise each task is a separate question.
        """
        messages = {each.client_id: self._messages.pop(each.client_id) for each in tasks}
        if self.collector.round_mode is None and messages:
            self.exchange.ask(messages)
            return
        for each in tasks:
            self.exchange.ask({each.client_id: messages[each.client_id]}, number=each.place)

    def _prefetch(self) -> None:
        """Prefetch this round's model on clients that still work on an older one.

        They can then start on it as soon as they are done. That pays off only if no other client
        could be asked in their place, so that they are asked next. Once that is no longer so,
        because other clients have connected or the limit of clients in flight was lowered, it is
        called off: such a client might be asked much later, and answer with an update that is
        stale by then. The request itself comes in a later round and its reply may take one round
        more, hence the smallest staleness limit and the last round in which the model may be used.
        """
        prefetcher, round_mode = self.collector.prefetcher, self.collector.round_mode
        if prefetcher is None or round_mode is None or self._is_prefetched:
            return
        most, round_num = round_mode.max_staleness, self.round_state.round_num
        if most < _LEAST_STALENESS:
            return
        if self.request.counted is not None:
            return  # a client's state depends on whether its pending update counts: not known yet
        self._is_prefetched = True
        pending, available = self.round_state.pending, self.collector.available()
        if self.round_state.is_over_limit or self.round_state.could_ask_others(available):
            prefetcher.cancel_prefetches()
            return
        if all(each.based_on == round_num for each in pending):
            return
        messages = self.request.messages([each.client_id for each in pending])
        # Clients with equal messages share one object, so identity groups them.
        for message in {id(each): each for each in messages.values()}.values():
            alike = [client_id for client_id, each in messages.items() if each is message]
            prefetcher.send_prefetch(alike, message, last_round_num=round_num + most - 1)

    # ---- Replies --------------------------------------------------------------------------

    def _take(self, arrival: Arrival) -> None:
        num_in_flight = len(self.round_state.pending)
        task, self._last_reply_s = self.round_state.land(arrival.client_id), self.now_s
        if (congestion := self.collector.congestion) is not None:
            self.round_state.limit(congestion.update_limit(num_in_flight=num_in_flight))
        # sent_s is relative to this round's opening, and negative for an earlier round.
        duration_s = arrival.duration_s(self.opened_s + task.sent_s)
        oldest = None
        round_mode = self.collector.round_mode
        if round_mode is not None and self.round_state.allows_early_work:
            oldest = max(0, task.based_on - round_mode.max_staleness)
        # Against the request that the client was sent, which may be of an earlier round.
        with span("round.validate", client_id=arrival.client_id):
            update = validate_or_refuse(arrival, self.requests[task.based_on], oldest=oldest)
        if not isinstance(update, TrainReply):
            row = build_participation(arrival.client_id, update, duration_s)
            is_own = update is arrival.reply  # the client itself reported a failure: no update sent
            self.round_state.fail(task, row, sent_nothing=is_own)
            return
        # The client may have begun early, on a prefetched model of an older round.
        task = task._replace(based_on=update.round_num)
        if round_mode is not None and self.round_state.age(task) > round_mode.max_staleness:
            arrival.refuse(f"it is based on round {task.based_on + 1}, which is too old")
            self.round_state.settle(task, Status.STALE)
            self.round_state.excuse(arrival.client_id)  # no update of it is in the buffer
            return
        self._count(_ArrivedUpdate(task, update, duration_s))

    def _count(self, arrived: _ArrivedUpdate) -> None:
        task, update, duration_s = arrived
        self.round_state.take(task, build_participation(task.client_id, update, duration_s))
        self.round_state.metrics.add(update.metrics, num_examples=update.num_examples)
        factors = self.round_state.factors([task])
        self.fold.add(
            task.client_id,
            update,
            factor=1.0 if factors is None else float(factors[0]),
            sent_S=self.collector.sent_statistics.get(task.based_on),
        )
        if self.round_state.is_carried_over:
            self.held[task.client_id] = arrived
        else:
            self.held.clear()  # no later attempt will count these updates

    def _give_up(self, tasks: Iterable[PendingTask]) -> None:
        gone = [each.client_id for each in tasks]
        if gone:
            self._last_reply_s = self.now_s
            self.exchange.give_up(gone)

    # ---- The close ------------------------------------------------------------------------

    def close(self) -> CollectedRound:
        self.round_state.finish()
        return self.round_state.close(
            self._aggregate() if self.round_state.is_enough else None,
            closed_s=self.now_s,
            counted={each.client_id: each.based_on for each in self.round_state.counted},
        )

    def _aggregate(self) -> Aggregate:
        strategy = self.request.strategy
        return self.round_state.damp(
            self.fold.close(),
            strategy,
            weigh=lambda num_examples_B: weights(strategy.aggregation, num_examples_B),
        )
