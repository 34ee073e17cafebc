"""A semi-synchronous round in virtual time: a cohort, and those of earlier ones that arrive.

As in :mod:`fedlearn.simulation.event_queue` a client is trained when its update is needed, from the
model that it was sent.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedlearn.algorithms.collecting import Collected, RoundRequest
from fedlearn.algorithms.flight import Asked, Draw, Flight
from fedlearn.algorithms.kept import Kept, updated
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.tally import Tally
from fedlearn.core.collecting import Participation, Participations, Status
from fedlearn.core.messages import ClientId
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.reduction import Reduction
from fedlearn.simulation.timeline import DROPPED_OUT, REPORTED


@dataclass(frozen=True, kw_only=True)
class SemiSynchronous:
    """Collects the updates of a cohort, and late ones of those before it.

    Attributes:
        engine: Trains them; its policy says when a round closes.
        late: What becomes of who is late, and what the deadline follows.
    """

    engine: Engine
    late: LateUpdates

    def available(self) -> Sequence[ClientId]:
        """Return the whole population."""
        return self.engine.available()

    def collect(
        self, flight: Flight, requests: Mapping[int, RoundRequest], *, round_num: int, draw: Draw
    ) -> Collected:
        """Play a round until it closes.

        Of too few reports nothing is released and nothing is lost: who has answered is in flight
        as before, and arrives at once in the next attempt.

        Raises:
            DataError: See :meth:`Engine.collect`.
            EngineError: See :meth:`Engine.collect`.
        """
        request = requests[round_num]
        stale = [each for each in flight if self._staleness(each, round_num) > self._most]
        awaited = [each for each in flight if self._staleness(each, round_num) <= self._most]
        drawn = draw(
            self.engine.policy.num_asked,
            round_num=round_num,
            attempt=request.attempt,
            busy={each.client_id for each in awaited},
        )
        cohort = self.engine.foreseen(
            [
                Asked(
                    client_id=client_id,
                    based_on=round_num,
                    attempt=request.attempt,
                    place=place,
                    asked_s=0.0,
                )
                for place, client_id in enumerate(drawn)
            ],
            request,
        )
        played = _Round(self.engine, self.late, requests, request, awaited, cohort)
        for each in stale:
            reason = self.late.why_stale(self._staleness(each, round_num))
            played.tally.settle(each, Status.STALE, reason=reason)
        played.play()
        return played.close()

    @property
    def _most(self) -> int:
        return self.late.max_staleness

    def _staleness(self, asked: Asked, round_num: int) -> int:
        return round_num - asked.based_on


@dataclass(eq=False)
class _Round:
    """One attempt at a round on its way to its close."""

    engine: Engine
    late: LateUpdates
    requests: Mapping[int, RoundRequest]
    request: RoundRequest
    awaited: Sequence[Asked]
    cohort: Sequence[Asked]
    closed_s: float = 0.0

    def __post_init__(self) -> None:
        self.fresh = {each.client_id for each in self.cohort}
        self.kept: Kept = self.request.kept
        self.tally = Tally(self.request.round_num, self.late)
        self.reduction: Reduction = self.engine.reduction(self.request)
        # In order of arrival, at equal times of asking; who never arrives comes last.
        self.to_come = deque(sorted([*self.awaited, *self.cohort], key=_arrives_s))

    def play(self) -> None:
        """Take events in order until as many of the cohort have reported as the round wants.

        Or until the cohort is settled, or the deadline is over.
        """
        num_wanted, until_s = self.engine.policy.num_wanted, self._until_s()
        num_fresh = 0
        while num_fresh < num_wanted:
            wave = self._wave(num_wanted - num_fresh, until_s)
            if not wave:
                break
            num_fresh += self._num_fresh(self._trained(wave))
        if num_fresh < num_wanted and math.isfinite(until_s):
            self.closed_s = until_s

    def _wave(self, num_missing: int, until_s: float) -> list[Asked]:
        """Return who comes next, until as many of the cohort are among them as are missing."""
        wave, num_fresh = list[Asked](), 0
        while num_fresh < num_missing and self._comes_next(until_s):
            asked = self.to_come.popleft()
            self.closed_s = max(0.0, _arrives_s(asked))
            if asked.fails:
                self.tally.settle(asked, Status.FAILED, reason=DROPPED_OUT)
            else:
                wave.append(asked)
                num_fresh += asked.client_id in self.fresh
        return wave

    def _until_s(self) -> float:
        """Return when the round closes at the latest; infinite: when nobody comes any more.

        A cohort of nobody, since all are at work, is those that are. Without a deadline a client
        that will never be heard of is not waited for.
        """
        policy = self.engine.policy
        so_far_s = [-each.asked_s for each in self.awaited]
        deadline_s = self.late.deadline_s(
            self.request.durations, so_far_s, longest_s=policy.deadline_s
        )
        arrive_s = [max(0.0, _arrives_s(each)) for each in self.cohort or self.awaited]
        heard_of_s = [each_s for each_s in arrive_s if math.isfinite(each_s)]
        if len(heard_of_s) < len(arrive_s) and math.isfinite(deadline_s):
            return deadline_s
        return min(deadline_s, max(heard_of_s, default=math.inf))

    def _comes_next(self, until_s: float) -> bool:
        if not self.to_come:
            return False
        arrives_s = _arrives_s(self.to_come[0])
        return arrives_s <= until_s and math.isfinite(arrives_s)

    def _num_fresh(self, some: Sequence[Asked]) -> int:
        """Return how many of some clients were asked in this attempt."""
        return sum(each.client_id in self.fresh for each in some)

    def _trained(self, wave: Sequence[Asked]) -> list[Asked]:
        """Train clients in order of arrival, and return those whose updates count."""
        trained = self.engine.train(
            np.asarray([each.client_id for each in wave], np.int64),
            [self.requests[each.based_on] for each in wave],
            self.reduction,
            factors=self.tally.factors(wave),
        )
        self.kept = updated(self.kept, trained.kept)
        trained.add_metrics(self.tally.metrics)
        columns = (trained.verdicts, trained.losses, trained.num_examples)
        counting = list[Asked]()
        told = zip(wave, *(column.tolist() for column in columns), strict=True)
        for place, (asked, verdict, loss, num_examples) in enumerate(told):
            if verdict == REPORTED:
                client_id, took_s = asked.client_id, asked.duration_s
                row = Participation(client_id, Status.REPORTED, took_s, num_examples, loss)
                self.tally.add(row, asked)
                counting.append(asked)
            else:
                self.tally.settle(asked, Status.FAILED, reason=trained.reasons[place])
        return counting

    def close(self) -> Collected:
        """Return what came of it, and who is in flight."""
        in_flight = list(self.to_come)
        for each in in_flight:
            if each.client_id in self.fresh:  # those of earlier ones were late then
                self.tally.settle(each, Status.LATE)
        counted = self.tally.counted
        is_enough = len(counted) >= self.engine.policy.min_reports
        if not is_enough:
            in_flight += [each.asked for each in counted]
        in_flight.sort(key=lambda each: each.asked_s)
        latest_s, durations = [each.duration_s for each in counted], self.request.durations
        return Collected(
            aggregate=self._aggregate() if is_enough else None,
            participations=Participations.of(self.tally.rows),
            duration_s=self.closed_s,
            train_metrics=self.tally.metrics.close(),
            kept=self.kept if is_enough else self.request.kept,
            staleness=self.tally.ages(),
            flight=tuple(each._replace(asked_s=each.asked_s - self.closed_s) for each in in_flight),
            durations=self.late.window(durations, latest_s) if is_enough else durations,
        )

    def _aggregate(self) -> Aggregate:
        return self.tally.damp(
            self.reduction.close(),
            self.request.strategy,
            weigh=partial(self.engine.weights, request=self.request),
        )


def _arrives_s(asked: Asked) -> float:
    """Return when a client answers: seconds since the round opened."""
    return asked.asked_s + asked.duration_s
