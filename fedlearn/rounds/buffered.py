"""Fill the buffer of an asynchronous round over a channel: one exchange, asked again and again."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

from torch import Tensor

from fedlearn.algorithms.aggregations import weights
from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.collecting import Collected, RoundRequest
from fedlearn.algorithms.flight import Asked, Buffer, Draw, Flight
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.tally import Tally
from fedlearn.core.collecting import Participations, Status
from fedlearn.core.messages import ClientId, TrainReply, TrainRequest
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.updates import Fold, judged, participation
from fedlearn.transport.base import Arrival, Channel, Exchange

#: Seconds after which a deployed round looks who has come since.
_LOOK_S = 1.0
#: Below it nothing is sent ahead: who has it is asked a round later, and may land yet one later.
_LEAST_STALENESS = 2


class Ahead(Protocol):
    """Tells clients of models before they are asked about them."""

    def send_ahead(
        self, client_ids: Sequence[ClientId], request: TrainRequest, *, last_round_num: int
    ) -> None:
        """Tell clients of a request; a question up to that round may be answered with it."""

    def call_ahead_off(self) -> None:
        """Tell them that they will not be asked about it."""


@dataclass(kw_only=True, eq=False)
class OpenCollector:
    """Fills buffers with the updates of clients that a channel reaches.

    Its exchange stays open from round to round, as long as anybody is in flight. Where a process
    goes on with a run, it asks those who are in flight anew.

    Attributes:
        channel: How clients are reached.
        policy: How long a client may take.
        asynchrony: When a buffer is full, and what staleness does.
        slab_bytes: Bound of the replies that wait; each is folded in at once if no two fit.
        wait: Waits a moment for clients to come, where nobody is in flight and nobody can be asked;
            ``None``: nobody will come.
        congestion: How many clients may be in flight at the moment; ``None``: the concurrency.
        ahead: Where the newest model is sent to clients that still work on an older one; ``None``:
            nowhere.
    """

    channel: Channel
    policy: StragglerPolicy
    asynchrony: Asynchrony
    slab_bytes: int
    wait: Callable[[], None] | None
    ahead: Ahead | None = None
    congestion: InFlightLimit | None = None
    #: By round the statistics of the model that clients were sent in it.
    sent_statistics: dict[int, Tensor] = field(default_factory=dict, init=False)
    _exchange: Exchange | None = None
    _closed_s: float = 0.0  # when the last round closed, in the exchange's seconds
    _in_flight: frozenset[ClientId] = frozenset()

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.channel.available()

    def close(self) -> None:
        """Wait for nobody any more: the run is done, and who is in flight is told so."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
            if self.ahead is not None:
                self.ahead.call_ahead_off()

    def busy(self) -> frozenset[ClientId]:
        """Return who is in flight between two rounds: they have a task already."""
        return self._in_flight

    def _remember_statistics(self, requests: Mapping[int, RoundRequest], round_num: int) -> None:
        """Keep what clients were sent: one may have begun on a model before it was asked to."""
        sent = {number: each.params.sent_statistics() for number, each in requests.items()}
        oldest = round_num - self.asynchrony.max_staleness
        kept = {number: each for number, each in self.sent_statistics.items() if number >= oldest}
        self.sent_statistics = kept | sent

    def collect(
        self, flight: Flight, requests: Mapping[int, RoundRequest], *, round_num: int, draw: Draw
    ) -> Collected:
        """Ask and fold replies in until the buffer is full; see :class:`Collector`."""
        if not flight:
            self.close()
        goes_on = self._exchange is None
        if self._exchange is None:
            self._exchange, self._closed_s = self.channel.open(deadline_s=math.inf), 0.0
        # Since the last round closed, its model was evaluated, or the run was paused.
        opened_s = max(self._closed_s, self._exchange.elapsed_s())
        since_s = opened_s - self._closed_s
        aged = [each._replace(asked_s=each.asked_s - since_s) for each in flight]
        most = None if self.congestion is None else self.congestion.limit
        buffer = Buffer(self.asynchrony, aged, round_num=round_num, most=most)
        num_together = max(1, self.slab_bytes // requests[round_num].params.vector.nbytes)
        fold = Fold(requests[round_num], num_together=num_together)
        self._remember_statistics(requests, round_num)
        played = _Round(self, self._exchange, opened_s, buffer, requests, fold)
        played.give_up(buffer.give_up(), Status.STALE)
        if goes_on:
            played.go_on()
        played.play(draw)
        self._closed_s = opened_s + played.now_s
        collected = played.close()
        self._in_flight = frozenset(each.client_id for each in collected.flight)
        return collected


@dataclass(eq=False)
class _Round:
    """One round on its way to a full buffer."""

    collector: OpenCollector
    exchange: Exchange
    opened_s: float
    buffer: Buffer
    requests: Mapping[int, RoundRequest]
    fold: Fold
    now_s: float = 0.0
    messages: dict[ClientId, TrainRequest] = field(default_factory=dict)
    num_failed: int = 0
    is_sent_ahead: bool = False
    landed_s: float = 0.0  # when the last one in flight landed
    is_short: bool = False  # whether it closes with what there is

    def __post_init__(self) -> None:
        self.tally = Tally(self.buffer.round_num, self.collector.asynchrony)

    def play(self, draw: Draw) -> None:
        """Ask, and take replies, until the buffer is full or nobody is left to fill it."""
        policy, asynchrony = self.collector.policy, self.collector.asynchrony
        most_failed = (policy.max_retries + 1) * max(policy.num_wanted, asynchrony.concurrency)
        while not self.buffer.is_full and self.num_failed <= most_failed:
            self._refill(draw)
            self._send_ahead()
            if not self.buffer.flight:
                self.is_short = self._is_given_up()
                if self.is_short or self.collector.wait is None:
                    return
                self.collector.wait()
                continue
            until_s = min(self._ends_s(), self._look_s())
            if self.collector.congestion is not None:
                self.collector.congestion.look()
            arrival = self.exchange.next(until_s=self.opened_s + until_s)
            if arrival is not None:
                self.now_s = max(self.now_s, arrival.elapsed_s - self.opened_s)
                self._take(arrival)
            elif math.isinf(until_s):
                return
            else:
                self.now_s = max(self.now_s, until_s)
                self._pass_deadline()

    def _is_given_up(self) -> bool:
        """Return whether a deadline has passed since everybody there has had a turn.

        Who was late is not asked again on this model, since it may have sent an update, nor who
        sent one that is of no use, or kept failing. Where there is nobody like that, clients are
        only not there yet, and waited for. Where nobody else will come, or all have failed, no
        deadline need pass.
        """
        others = self.buffer.could_ask_others(self.collector.available())
        if others or not self.buffer.has_missed_any:
            return False
        have_all_failed = all(row.status is Status.FAILED for row in self.tally.rows)
        if have_all_failed or self.collector.wait is None:
            return True
        waited_s = self.exchange.elapsed_s() - self.opened_s - self.landed_s
        return waited_s >= self.collector.policy.deadline_s

    def _look_s(self) -> float:
        """Return when to look who has come since, in seconds since the opening."""
        return math.inf if self.collector.wait is None else self.now_s + _LOOK_S

    def _refill(self, draw: Draw) -> None:
        while True:
            # To draw takes time where somebody has to come first, or the run is paused.
            self.now_s = max(self.now_s, self.exchange.elapsed_s() - self.opened_s)
            self._ask(self.buffer.ask(self.now_s))
            if not (drawn := self.buffer.draw(draw)):
                return
            self._prepare(drawn)
            self.buffer.put(drawn)

    def go_on(self) -> None:
        """Ask those who are in flight, of whom an earlier process may have received something."""
        flight = sorted(self.buffer.flight, key=lambda each: (each.based_on, each.attempt))
        self._prepare(flight)
        self._ask(flight)

    def _prepare(self, asked: Sequence[Asked]) -> None:
        """Have what each is to be sent; what is alike is one object."""
        for (based_on, attempt), group in groupby(asked, key=lambda e: (e.based_on, e.attempt)):
            request = replace(self.requests[based_on], attempt=attempt)
            self.messages |= request.messages([each.client_id for each in group])

    def _ask(self, asked: Iterable[Asked]) -> None:
        """Send clients the model that each is to train: each is a question of its own."""
        for each in asked:
            message = {each.client_id: self.messages.pop(each.client_id)}
            self.exchange.ask(message, number=each.place)

    def _send_ahead(self) -> None:
        """Have those who work on an older model begin on this round's as soon as they are done.

        Only where nobody else could be asked in their place: they will be, next. Where that is not
        so any more, since others have come or fewer may be in flight, it is called off: who had it
        would be asked at any time, and answer with what is old by then. The question comes in a
        later round, and what answers it may take one more: younger updates alone are of use.
        """
        ahead, most = self.collector.ahead, self.collector.asynchrony.max_staleness
        if ahead is None or most < _LEAST_STALENESS or self.is_sent_ahead:
            return
        if self.requests[self.buffer.round_num].counted is not None:
            return  # what a client kept is known to count only once its update is in a buffer
        self.is_sent_ahead = True
        flight, round_num = self.buffer.flight, self.buffer.round_num
        available = self.collector.available()
        if self.buffer.is_over_limit or self.buffer.could_ask_others(available):
            ahead.call_ahead_off()
            return
        if all(each.based_on == round_num for each in flight):
            return
        messages = self.requests[round_num].messages([each.client_id for each in flight])
        for message in {id(each): each for each in messages.values()}.values():
            alike = [client_id for client_id, each in messages.items() if each is message]
            ahead.send_ahead(alike, message, last_round_num=round_num + most - 1)

    # ---- What becomes of them -------------------------------------------------------------

    def _take(self, arrival: Arrival) -> None:
        num_in_flight = len(self.buffer.flight)
        asked, self.landed_s = self.buffer.land(arrival.client_id), self.now_s
        if (congestion := self.collector.congestion) is not None:
            self.buffer.limit(congestion.landed(num_in_flight=num_in_flight))
        duration_s = arrival.took_s(self.opened_s + asked.asked_s)
        most = self.collector.asynchrony.max_staleness
        oldest = max(0, asked.based_on - most)  # what was begun ahead of the question
        update = judged(arrival, self.requests[asked.based_on], oldest=oldest)
        if isinstance(update, TrainReply):
            asked = asked._replace(based_on=update.round_num)
            if self.buffer.staleness(asked) > most:
                arrival.refuse(f"it is based on round {asked.based_on}, which is too old")
                self.tally.settle(asked, Status.STALE)
                self.buffer.excuse(arrival.client_id)  # it is in no buffer
                return
        row = participation(arrival.client_id, update, duration_s)
        if isinstance(update, TrainReply):
            self.buffer.take(asked)
            self.tally.add(row, asked)
            self.tally.metrics.add(update.metrics, num_examples=update.num_examples)
            factor = float(self.tally.factors([asked])[0])
            sent_S = self.collector.sent_statistics.get(update.round_num)
            self.fold.add(arrival.client_id, update, factor=factor, sent_S=sent_S)
            return
        self.tally.rows.append(row)
        self.num_failed += 1
        if update is arrival.reply:  # the client says so itself, and sends no update
            max_retries = self.collector.policy.max_retries
            self.buffer.fail(arrival.client_id, max_retries=max_retries)

    @property
    def _first(self) -> Asked:
        """Who in flight was asked first."""
        return min(self.buffer.flight, key=lambda each: each.asked_s)

    def _ends_s(self) -> float:
        """Return when the first in flight has taken too long, in seconds since the opening.

        After a restart, not before clients had time to return.
        """
        grace_until_s = self.exchange.grace_until_s() - self.opened_s
        return max(self._first.asked_s + self.collector.policy.deadline_s, grace_until_s)

    def _pass_deadline(self) -> None:
        """Give up the first in flight if it has taken too long; others take its place first."""
        if self._ends_s() <= self.now_s:
            late = self.buffer.land(self._first.client_id)
            self.landed_s = self.now_s
            self.give_up([late], Status.LATE)

    def give_up(self, asked: Iterable[Asked], status: Status) -> None:
        """Wait for some no more."""
        gone = list(asked)
        self.exchange.give_up([each.client_id for each in gone])
        for each in gone:
            self.tally.settle(each, status)

    def close(self) -> Collected:
        """Return what came of it."""
        return Collected(
            aggregate=self._aggregate() if self._is_enough else None,
            participations=Participations.of(self.tally.rows),
            duration_s=self.now_s,
            train_metrics=self.tally.metrics.close(),
            staleness=self.tally.ages(),
            flight=self.buffer.flight_after(self.now_s),
            counted={each: taken.based_on for each, taken in self.buffer.taken.items()},
        )

    @property
    def _is_enough(self) -> bool:
        return self.buffer.is_full or (self.is_short and bool(self.buffer.taken))

    def _aggregate(self) -> Aggregate:
        strategy = self.requests[self.buffer.round_num].strategy
        return self.tally.damp(
            self.fold.close(),
            strategy,
            weigh=lambda num_examples_B: weights(strategy.aggregation, num_examples_B),
        )
