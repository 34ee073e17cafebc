"""A semi-synchronous round over a channel: a cohort is asked, and late answers count later."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedlearn.algorithms.aggregations import weights
from fedlearn.algorithms.collecting import Collected, RoundRequest, damped
from fedlearn.algorithms.flight import Asked, Draw, Flight
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.collecting import Participation, Participations, Status
from fedlearn.core.messages import ClientId, TrainReply
from fedlearn.core.reported import WeightedMeans
from fedlearn.rounds.plain import Fold, judged, participation
from fedlearn.transport.base import Arrival, Channel, Exchange


class _Came(NamedTuple):
    """An update, of whom, and how long its client took."""

    asked: Asked
    update: TrainReply
    duration_s: float


class _Taken(NamedTuple):
    """What is remembered of an update that is in the sum."""

    asked: Asked
    num_examples: int
    duration_s: float


@dataclass(kw_only=True, eq=False)
class SemiSynchronousCollector:
    """Collects the updates of a cohort, and late ones of those before it, over a channel.

    Its exchange stays open from round to round, as long as anybody is in flight. Where a process
    goes on with a run, it asks those who are in flight anew.

    Attributes:
        channel: How clients are reached.
        policy: When a round closes.
        late: What becomes of who is late, and what the deadline follows.
        slab_bytes: Bound of the replies that wait; each is folded in at once if no two fit.
    """

    channel: Channel
    policy: StragglerPolicy
    late: LateUpdates
    slab_bytes: int
    _exchange: Exchange | None = None
    _closed_s: float = 0.0  # when the last round closed, in the exchange's seconds
    _in_flight: frozenset[ClientId] = frozenset()
    #: Updates that came to an attempt with too few: they arrive at once in the next one.
    _held: dict[ClientId, _Came] = field(default_factory=dict)

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.channel.available()

    def busy(self) -> frozenset[ClientId]:
        """Return who is in flight between two rounds: they have a task already."""
        return self._in_flight

    def close(self) -> None:
        """Wait for nobody any more."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def collect(
        self, flight: Flight, requests: Mapping[int, RoundRequest], *, round_num: int, draw: Draw
    ) -> Collected:
        """Ask a cohort and take replies until the round closes; see :class:`Collector`."""
        stale = [each for each in flight if round_num - each.based_on > self.late.max_staleness]
        awaited = [each for each in flight if each not in stale]
        if not awaited:
            self.close()
        goes_on = self._exchange is None
        if self._exchange is None:
            self._exchange, self._closed_s = self.channel.open(deadline_s=math.inf), 0.0
        played = _Round(self, self._exchange, self._closed_s, requests, round_num, awaited)
        played.give_up(stale)
        if goes_on:
            played.ask([each for each in awaited if each.client_id not in self._held])
        drawn = draw(
            self.policy.num_asked,
            round_num=round_num,
            attempt=requests[round_num].attempt,
            busy={each.client_id for each in awaited},
        )
        played.ask_cohort(drawn)
        played.play(self._held)
        self._closed_s = played.opened_s + played.now_s
        collected, self._held = played.close(), played.held
        self._in_flight = frozenset(each.client_id for each in collected.flight)
        return collected


@dataclass(eq=False)
class _Round:
    """One attempt at a round on its way to its close."""

    collector: SemiSynchronousCollector
    exchange: Exchange
    opened_s: float
    requests: Mapping[int, RoundRequest]
    round_num: int
    awaited: Sequence[Asked]
    now_s: float = 0.0
    metrics: WeightedMeans = field(default_factory=WeightedMeans)
    rows: list[Participation] = field(default_factory=list)
    taken: list[_Taken] = field(default_factory=list)
    cohort: frozenset[ClientId] = frozenset()
    num_fresh: int = 0
    #: Whose answers, or silence, close the round: the cohort, or else those that are awaited.
    waited_for: set[ClientId] = field(default_factory=set)
    #: Those that have come as long as they are too few.
    held: dict[ClientId, _Came] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.request = self.requests[self.round_num]
        self.flying = {each.client_id: each for each in self.awaited}
        num_together = max(1, self.collector.slab_bytes // self.request.params.vector.nbytes)
        self.fold = Fold(self.request, num_together=num_together)

    # ---- Who is asked ---------------------------------------------------------------------

    def give_up(self, stale: Sequence[Asked]) -> None:
        """Wait for those no more whose updates would be too old."""
        self.exchange.give_up([each.client_id for each in stale])
        for each in stale:
            reason = self.collector.late.why_stale(self.round_num - each.based_on)
            self.rows.append(
                Participation(each.client_id, Status.STALE, -each.asked_s, reason=reason)
            )

    def ask_cohort(self, drawn: Sequence[ClientId]) -> None:
        """Ask those of whom the round is: it opens now.

        Since the last one closed, its model was evaluated, somebody had to come, or the run was
        paused.
        """
        since_s = max(0.0, self.exchange.elapsed_s() - self.opened_s)
        self.opened_s += since_s
        self.awaited = [each._replace(asked_s=each.asked_s - since_s) for each in self.awaited]
        self.flying = {each.client_id: each for each in self.awaited}
        asked = [
            Asked(
                client_id=client_id,
                based_on=self.round_num,
                attempt=self.request.attempt,
                place=place,
                asked_s=0.0,
            )
            for place, client_id in enumerate(drawn)
        ]
        self.ask(asked)
        self.cohort = frozenset(drawn)
        self.flying |= {each.client_id: each for each in asked}

    def ask(self, asked: Iterable[Asked]) -> None:
        """Send clients what each is to train; each is a question of its own."""
        in_order = sorted(asked, key=lambda each: (each.based_on, each.attempt))
        for (based_on, attempt), group in groupby(in_order, key=lambda e: (e.based_on, e.attempt)):
            some = list(group)
            request = replace(self.requests[based_on], attempt=attempt)
            messages = request.messages([each.client_id for each in some])
            for each in some:
                self.exchange.ask({each.client_id: messages[each.client_id]}, number=each.place)

    # ---- What becomes of them -------------------------------------------------------------

    def play(self, held: Mapping[ClientId, _Came]) -> None:
        """Take replies until as many of the cohort have reported as the round wants.

        Or until the cohort is settled, or the deadline is over.
        """
        so_far_s = [-each.asked_s for each in self.awaited if each.client_id not in held]
        until_s = self.collector.late.deadline_s(
            self.request.durations, so_far_s, longest_s=self.collector.policy.deadline_s
        )
        for each in held.values():
            self._count(each)
        self.waited_for = set(self.cohort or self.flying)
        while not self._is_closed():
            arrival = self.exchange.next(until_s=self.opened_s + until_s)
            if arrival is None:
                self.now_s = max(self.now_s, until_s) if math.isfinite(until_s) else self.now_s
                return
            self.now_s = max(self.now_s, arrival.elapsed_s - self.opened_s)
            self._take(arrival)

    def _is_closed(self) -> bool:
        return not self.waited_for or self.num_fresh == self.collector.policy.num_wanted

    def _take(self, arrival: Arrival) -> None:
        asked = self.flying[arrival.client_id]
        self.waited_for.discard(arrival.client_id)
        duration_s = arrival.took_s(self.opened_s + asked.asked_s)
        update = judged(arrival, self.requests[asked.based_on])
        if isinstance(update, TrainReply):
            self._count(_Came(asked, update, duration_s))
            return
        del self.flying[arrival.client_id]
        self.rows.append(participation(arrival.client_id, update, duration_s))

    def _count(self, came: _Came) -> None:
        asked, update, duration_s = came
        del self.flying[asked.client_id]
        self.rows.append(participation(asked.client_id, update, duration_s))
        self.fold.add(
            asked.client_id,
            update,
            factor=float(self._factors([asked])[0]),
            sent_S=self.requests[asked.based_on].params.sent_statistics(),
        )
        self.metrics.add(update.metrics, num_examples=update.num_examples)
        self.num_fresh += asked.client_id in self.cohort
        self.taken.append(_Taken(asked, update.num_examples, duration_s))
        self.held[asked.client_id] = came
        if self._is_enough:  # what is in the sum need not be in memory as well
            self.held.clear()

    @property
    def _is_enough(self) -> bool:
        return len(self.taken) >= self.collector.policy.min_reports

    def _factors(self, some: Sequence[Asked]) -> NDArray[np.float64]:
        staleness = np.asarray([self.round_num - each.based_on for each in some])
        return self.collector.late.weights(staleness)

    # ---- The close ------------------------------------------------------------------------

    def close(self) -> Collected:
        """Return what came of it, and who is in flight."""
        for client_id in self.flying:
            if client_id in self.cohort:  # those of earlier ones were late then
                self.rows.append(Participation(client_id, Status.LATE, math.nan))
        late, durations = self.collector.late, self.request.durations
        is_enough = self._is_enough
        in_flight = [*self.flying.values(), *(each.asked for each in self.held.values())]
        ages = Counter(self.round_num - each.asked.based_on for each in self.taken)
        if is_enough:
            durations = late.window(durations, [each.duration_s for each in self.taken])
        return Collected(
            aggregate=self._aggregate() if is_enough else None,
            participations=Participations.of(self.rows),
            duration_s=self.now_s,
            train_metrics=self.metrics.close(),
            staleness=dict(sorted(ages.items())),
            flight=tuple(
                each._replace(asked_s=each.asked_s - self.now_s)
                for each in sorted(in_flight, key=lambda each: each.asked_s)
            ),
            durations=durations,
            counted={each.asked.client_id: each.asked.based_on for each in self.taken},
        )

    def _aggregate(self) -> Aggregate:
        strategy = self.request.strategy
        num_examples_B = torch.tensor([each.num_examples for each in self.taken]).double()
        return damped(
            self.fold.close(),
            strategy.lanes,
            weights_B=weights(strategy.aggregation, num_examples_B),
            factors_B=torch.from_numpy(self._factors([each.asked for each in self.taken])),
        )
