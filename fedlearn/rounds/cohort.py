"""Ask a cohort over a channel and fold its updates in until the round closes.

In a synchronous round, a client that has not replied by then is late, and its update is lost. In a
semi-synchronous one it continues, is not asked again meanwhile, and its update counts in the round
in which it arrives.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from fedlearn.algorithms.aggregations import weights
from fedlearn.algorithms.collecting import Collected, RoundRequest
from fedlearn.algorithms.flight import Asked, Draw, Flight
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.tally import Tally
from fedlearn.core.collecting import Participations, Status
from fedlearn.core.messages import ClientId, TrainReply
from fedlearn.errors import RoundError
from fedlearn.rounds.updates import Fold, judged, participation
from fedlearn.transport.base import Arrival, Channel, Exchange


class _Arrived(NamedTuple):
    """An update, its client's task, and how long that took."""

    asked: Asked
    update: TrainReply
    duration_s: float


@dataclass(kw_only=True, eq=False)
class CohortCollector:
    """Collects the updates of a cohort over a channel, and late ones of cohorts before it.

    Each reply is checked as it arrives and waits where it lies. As many as fit the bound, and those
    that wait at the close of the round, are one block for the aggregation, which passes over the
    sum once for all of them. Without room for two, replies are folded in one by one, to the last
    bit as by an engine at block size 1. An aggregation that needs all updates gets them at the
    close; those that came over the network lie on the disk until then.

    Where late updates count, the exchange stays open from round to round as long as a client is in
    flight. A process that resumes a run asks the clients in flight again.

    Memory: the aggregate, one reply, and those that wait.

    Attributes:
        channel: How clients are reached.
        policy: When a round closes.
        slab_bytes: Bound of the replies that wait; each is folded in at once if no two fit.
        late: How late updates count; ``None``: not at all.
    """

    channel: Channel
    policy: StragglerPolicy
    slab_bytes: int
    late: LateUpdates | None = None
    _exchange: Exchange | None = None
    _closed_s: float = 0.0  # when the last round closed, in the exchange's seconds
    _in_flight: frozenset[ClientId] = frozenset()
    #: Updates that came to an attempt with too few: they arrive at once in the next one.
    _held: dict[ClientId, _Arrived] = field(default_factory=dict)

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.channel.available()

    def busy(self) -> frozenset[ClientId]:
        """Return the clients in flight between two rounds: they have a task already."""
        return self._in_flight

    def close(self) -> None:
        """Stop waiting for clients."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def collect(
        self, flight: Flight, requests: Mapping[int, RoundRequest], *, round_num: int, draw: Draw
    ) -> Collected:
        """Ask a cohort and take replies until the round closes; see :class:`Collector`."""
        most = 0 if self.late is None else self.late.max_staleness
        stale = [each for each in flight if round_num - each.based_on > most]
        awaited = [each for each in flight if each not in stale]
        try:
            collected = self._collect(stale, awaited, requests, round_num=round_num, draw=draw)
        finally:
            if self.late is None:
                self.close()
        self._in_flight = frozenset(each.client_id for each in collected.flight)
        return collected

    def _collect(
        self,
        stale: Sequence[Asked],
        awaited: Sequence[Asked],
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> Collected:
        if not awaited:
            self.close()
        is_resumed = self._exchange is None
        if self._exchange is None:
            # Clients are told the deadline of an exchange, and may give up then.
            deadline_s = self.policy.deadline_s if self.late is None else math.inf
            self._exchange, self._closed_s = self.channel.open(deadline_s=deadline_s), 0.0
        attempt = _Attempt(self, self._exchange, self._closed_s, requests, round_num, awaited)
        attempt.give_up(stale)
        if is_resumed:
            attempt.ask([each for each in awaited if each.client_id not in self._held])
        drawn = draw(
            self.policy.num_asked,
            round_num=round_num,
            attempt=requests[round_num].attempt,
            busy={each.client_id for each in awaited},
        )
        attempt.ask_cohort(drawn)
        attempt.take_replies(self._held)
        self._closed_s = attempt.opened_s + attempt.now_s
        collected, self._held = attempt.close(), attempt.held
        return collected


@dataclass(eq=False)
class _Attempt:
    """One attempt at a round on its way to its close."""

    collector: CohortCollector
    exchange: Exchange
    opened_s: float
    requests: Mapping[int, RoundRequest]
    round_num: int
    awaited: Sequence[Asked]
    now_s: float = 0.0
    cohort: Mapping[ClientId, None] = field(default_factory=dict)
    num_fresh: int = 0
    #: Clients whose replies, or silence, close the round: the cohort, or else those awaited.
    waited_for: set[ClientId] = field(default_factory=set)
    #: Updates that have come as long as they are too few.
    held: dict[ClientId, _Arrived] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.request = self.requests[self.round_num]
        self.late, self.policy = self.collector.late, self.collector.policy
        self.flying = {each.client_id: each for each in self.awaited}
        num_together = max(1, self.collector.slab_bytes // self.request.params.vector.nbytes)
        self.fold = Fold(self.request, num_together=num_together)
        self.tally = Tally(self.round_num, self.late)
        self.sent_statistics = dict[int, Tensor | None]()

    # ---- Asking ---------------------------------------------------------------------------

    def give_up(self, stale: Sequence[Asked]) -> None:
        """Stop waiting for clients whose updates would be too old."""
        if self.late is None or not stale:
            return
        self.exchange.give_up([each.client_id for each in stale])
        for each in stale:
            reason = self.late.why_stale(self.tally.age(each))
            taken = each._replace(duration_s=-each.asked_s)
            self.tally.settle(taken, Status.STALE, reason=reason)

    def ask_cohort(self, drawn: Sequence[ClientId]) -> None:
        """Ask the cohort: the round opens now.

        Since the last one closed, its model was evaluated, clients had to come, or the run was
        paused.
        """
        since_s = max(0.0, self.exchange.elapsed_s() - self.opened_s)
        self.opened_s += since_s
        self.awaited = [each._replace(asked_s=each.asked_s - since_s) for each in self.awaited]
        attempt = self.request.attempt
        asked = [Asked(each, self.round_num, attempt, at, 0.0) for at, each in enumerate(drawn)]
        if self.late is None:  # all are one question, with one deadline, also after a restart
            self.exchange.ask(self.request.messages(drawn))
        else:
            self.ask(asked)
        self.cohort = dict.fromkeys(drawn)
        self.flying = {each.client_id: each for each in (*self.awaited, *asked)}

    def ask(self, asked: Iterable[Asked]) -> None:
        """Send clients what each is to train; each is a question of its own."""
        in_order = sorted(asked, key=lambda each: (each.based_on, each.attempt))
        for (based_on, attempt), group in groupby(in_order, key=lambda e: (e.based_on, e.attempt)):
            some = list(group)
            request = replace(self.requests[based_on], attempt=attempt)
            messages = request.messages([each.client_id for each in some])
            for each in some:
                self.exchange.ask({each.client_id: messages[each.client_id]}, number=each.place)

    # ---- Replies --------------------------------------------------------------------------

    def take_replies(self, held: Mapping[ClientId, _Arrived]) -> None:
        """Take replies until as many of the cohort have reported as the round wants.

        Or until the cohort is settled, or the deadline is over.
        """
        deadline_s = self._deadline_s(held)
        # The exchange of a synchronous round ends by itself, later than that after a restart.
        until_s = math.inf if self.late is None else self.opened_s + deadline_s
        for each in held.values():
            self._count(each)
        self.waited_for = set(self.cohort or self.flying)
        while self.waited_for and self.num_fresh < self.policy.num_wanted:
            arrival = self.exchange.next(until_s=until_s)
            if arrival is None:
                if math.isfinite(deadline_s):
                    self.now_s = max(self.now_s, deadline_s)
                return
            self.now_s = max(self.now_s, arrival.elapsed_s - self.opened_s)
            self._take(arrival)
            del arrival  # before the next one is read: it may be as large as the model

    def _deadline_s(self, held: Mapping[ClientId, _Arrived]) -> float:
        if self.late is None:
            return self.policy.deadline_s
        so_far_s = [-each.asked_s for each in self.awaited if each.client_id not in held]
        longest_s = self.policy.deadline_s
        deadline_s = self.late.deadline_s(self.request.durations, so_far_s, longest_s=longest_s)
        # Clients may need longer to return to a coordinator that has restarted than to train.
        return min(longest_s, max(deadline_s, self.exchange.grace_until_s() - self.opened_s))

    def _take(self, arrival: Arrival) -> None:
        if arrival.client_id not in self.flying:
            raise RoundError(
                f"client {arrival.client_id} was not asked, or has answered before in round "
                f"{self.round_num + 1}"
            )
        asked = self.flying[arrival.client_id]
        self.waited_for.discard(arrival.client_id)
        duration_s = arrival.took_s(self.opened_s + asked.asked_s)
        update = judged(arrival, self.requests[asked.based_on])
        if isinstance(update, TrainReply):
            self._count(_Arrived(asked, update, duration_s))
            return
        del self.flying[arrival.client_id]
        self.tally.rows.append(participation(arrival.client_id, update, duration_s))

    def _count(self, arrived: _Arrived) -> None:
        asked, update, duration_s = arrived
        del self.flying[asked.client_id]
        self.tally.add(participation(asked.client_id, update, duration_s), asked)
        self.tally.metrics.add(update.metrics, num_examples=update.num_examples)
        self.fold.add(
            asked.client_id,
            update,
            factor=float(self.tally.factors([asked])[0]),
            sent_S=self._statistics_of(asked.based_on),
        )
        self.num_fresh += asked.client_id in self.cohort
        if self.late is not None:
            self.held[asked.client_id] = arrived
        if self._is_enough:  # what is in the sum need not be in memory as well
            self.held.clear()

    def _statistics_of(self, based_on: int) -> Tensor | None:
        if based_on not in self.sent_statistics:
            sent_S = self.requests[based_on].params.sent_statistics()
            self.sent_statistics[based_on] = sent_S
        return self.sent_statistics[based_on]

    @property
    def _is_enough(self) -> bool:
        return len(self.tally.counted) >= self.policy.min_reports

    # ---- The close ------------------------------------------------------------------------

    def close(self) -> Collected:
        """Return the outcome, and the clients in flight."""
        for each in self.flying.values():
            if each.client_id in self.cohort:  # those of earlier ones were late then
                self.tally.settle(each, Status.LATE)
        in_flight, durations = list[Asked](), self.request.durations
        if self.late is not None:
            in_flight = [*self.flying.values(), *(each.asked for each in self.held.values())]
            if self._is_enough:
                latest_s = [each.duration_s for each in self.tally.counted]
                durations = self.late.window(durations, latest_s)
        counted = (each.asked for each in self.tally.counted)
        return Collected(
            aggregate=self._aggregate() if self._is_enough else None,
            participations=Participations.of(self.tally.rows),
            duration_s=self.now_s,
            train_metrics=self.tally.metrics.close(),
            staleness=self.tally.ages(),
            flight=tuple(
                each._replace(asked_s=each.asked_s - self.now_s)
                for each in sorted(in_flight, key=lambda each: each.asked_s)
            ),
            durations=durations,
            counted={each.client_id: each.based_on for each in counted},
        )

    def _aggregate(self) -> Aggregate:
        strategy = self.request.strategy
        return self.tally.damp(
            self.fold.close(),
            strategy,
            weigh=lambda num_examples_B: weights(strategy.aggregation, num_examples_B),
        )
