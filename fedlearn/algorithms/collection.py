"""One attempt at a round: whom to ask, whose updates count, and when it closes.

A state machine without network, clock and tensors. It is told what happened, and says what to do
next. Two drivers run it: over a channel (:mod:`fedlearn.rounds.plain`), and in the virtual time of
a simulation (:mod:`fedlearn.simulation.virtual_round`). Each stage of secure aggregation
(:mod:`fedlearn.rounds.secure`) is a synchronous one of its own. There are two kinds:

- :class:`CohortCollection` asks a cohort once and closes with as many reports as are wanted. In a
  synchronous round, a client that has not reported by then is late, and its update is lost. In a
  semi-synchronous one it works on, and its update counts in the round in which it arrives.
- :class:`BufferCollection` asks another client whenever one has answered, and closes when its
  buffer of updates is full.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.collecting import Collected, RoundRequest
from fedlearn.algorithms.flight import Draw, Flight, PendingTask
from fedlearn.algorithms.kept import Kept
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.staleness import Staleness
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.collecting import Participation, Participations, Status
from fedlearn.core.messages import ClientId
from fedlearn.core.reported import WeightedMeans
from fedlearn.errors import RoundError


class Attempt(NamedTuple):
    """Which attempt at which round.

    Attributes:
        round_num: Index, from 0.
        attempt: Index among those at this round, from 0.
        durations: What clients took in each of the last rounds, in seconds.
    """

    round_num: int
    attempt: int
    durations: tuple[tuple[float, ...], ...] = ()


class Collection(ABC):
    """One attempt at a round on its way to its close.

    Times are in seconds since the round opened.

    Args:
        policy: When a round closes, and how long a client may take.
        staleness: How staleness weighs; ``None``: all updates are based on this round's model.
        flight: Clients in flight when the round opens.
        of: Which attempt it is.

    Attributes:
        rows: One for each settled client, in the order of settling.
        metrics: What clients measured in training.
        waited_for: Clients whose replies, or silence, close the round; empty for a buffer.
    """

    #: Whether a client may have begun on a model before it was asked to.
    allows_early_work = False
    #: Whether the round opens once its clients are drawn, however long that takes.
    opens_when_drawn = False
    #: How long one client may take.
    patience_s = math.inf

    def __init__(
        self,
        policy: StragglerPolicy,
        staleness: Staleness | None,
        flight: Iterable[PendingTask],
        of: Attempt,
    ) -> None:
        self.policy, self.of, self.round_num = policy, of, of.round_num
        self.rows = list[Participation]()
        self.metrics = WeightedMeans()
        self.waited_for = set[ClientId]()
        self._staleness = staleness
        self._flying = {each.client_id: each for each in flight}
        self._taken = dict[ClientId, tuple[PendingTask, int]]()  # with the place of its row
        self._drawn = deque[PendingTask]()
        self._grace_s = 0.0

    # ---- What is known --------------------------------------------------------------------

    @property
    def flight(self) -> Flight:
        """The clients in flight, in the order of asking."""
        return tuple(self._flying.values())

    @property
    def counted(self) -> list[PendingTask]:
        """The tasks whose updates count, in the order of their arrival."""
        return [task for task, _ in self._taken.values()]

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether nothing else is waited for."""

    @property
    def closes_s(self) -> float:
        """When the round closes at the latest; infinite: whenever it is filled."""
        return math.inf

    @property
    @abstractmethod
    def is_enough(self) -> bool:
        """Whether the updates that count make a round."""

    @property
    def is_undone(self) -> bool:
        """Whether the updates so far are too few, and count in the next attempt again."""
        return False

    def age(self, task: PendingTask) -> int:
        """Return how many rounds older the model is that a client was sent."""
        return self.round_num - task.based_on

    def factors(self, some: Sequence[PendingTask]) -> NDArray[np.float64] | None:
        """Return by what staleness multiplies the weights of some updates: shape [B].

        ``None``: by nothing.
        """
        if self._staleness is None:
            return None
        return self._staleness.weights(np.asarray([self.age(each) for each in some], np.int64))

    # ---- Whom to ask ----------------------------------------------------------------------

    @property
    @abstractmethod
    def may_ask(self) -> bool:
        """Whether there may be more clients to ask in this attempt."""

    @abstractmethod
    def draw(self, draw: Draw) -> Sequence[PendingTask]:
        """Draw the clients to ask next; none if nobody is to be asked, or some are drawn."""

    def put(self, drawn: Iterable[PendingTask]) -> None:
        """Take the clients that were drawn, with what is known of each."""
        self._drawn.extend(drawn)

    @abstractmethod
    def ask(self, now_s: float) -> list[PendingTask]:
        """Return the clients to ask now: they are in flight from here on."""

    @abstractmethod
    def limit(self, most: int) -> None:
        """Have nobody asked while so many are in flight."""

    @property
    def is_over_limit(self) -> bool:
        """Whether more are in flight than may be."""
        return False

    @property
    def has_missed_any(self) -> bool:
        """Whether some had their turn in this round, and nothing of them counts."""
        return False

    def could_ask_others(self, available: Iterable[ClientId]) -> bool:
        """Return whether some of these are neither in flight nor have answered."""
        return False

    # ---- What happened --------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Let the round open so much later: those in flight were asked so much longer ago."""
        self._flying = {
            client_id: each._replace(asked_s=each.asked_s - seconds)
            for client_id, each in self._flying.items()
        }

    def give_up_stale(self) -> list[PendingTask]:
        """Stop waiting for clients whose updates would be too old, and return them."""
        if self._staleness is None:
            return []
        most = self._staleness.max_staleness
        stale = [each for each in self._flying.values() if self.age(each) > most]
        for each in stale:
            del self._flying[each.client_id]
            took_s = -each.asked_s if math.isnan(each.duration_s) else each.duration_s
            reason = self._staleness.why_stale(self.age(each))
            self.settle(each._replace(duration_s=took_s), Status.STALE, reason=reason)
        return stale

    def land(self, client_id: ClientId) -> PendingTask:
        """Return a client that is in flight no more: it answered, failed, or took too long.

        Raises:
            RoundError: It is not in flight.
        """
        if client_id not in self._flying:
            raise RoundError(
                f"client {client_id} was not asked, or has answered before in round "
                f"{self.round_num + 1}"
            )
        self.waited_for.discard(client_id)
        return self._flying.pop(client_id)

    def settle(self, task: PendingTask, status: Status, *, reason: str = "") -> None:
        """Add the row of a client without an update, with the duration that its task has."""
        self.rows.append(Participation(task.client_id, status, task.duration_s, reason=reason))

    def take(self, task: PendingTask, row: Participation) -> None:
        """Count the update of a client that landed."""
        self._taken[task.client_id] = task, len(self.rows)
        self.rows.append(row)

    def revise(self, client_id: ClientId, row: Participation) -> None:
        """Replace the row of an update that was counted before it was trained.

        It counts no more if the row is that of a failure.
        """
        _, place = self._taken[client_id]
        self.rows[place] = row
        if row.status is not Status.REPORTED:
            del self._taken[client_id]
            self._discount(client_id)

    @abstractmethod
    def _discount(self, client_id: ClientId) -> None:
        """Note that an update which was counted counts no more."""

    def fail(self, task: PendingTask, row: Participation, *, sent_nothing: bool) -> None:
        """Note that a client that landed has failed, or sent what cannot be used."""
        self.rows.append(row)

    @abstractmethod
    def excuse(self, client_id: ClientId) -> None:
        """Let a client that landed be asked again in this round."""

    def grant(self, until_s: float) -> None:
        """Let clients have until then to return to a coordinator that has restarted."""
        self._grace_s = until_s

    @abstractmethod
    def wakes_s(self) -> float:
        """Return when to call :meth:`expire` next; infinite: never."""

    @abstractmethod
    def expire(self, now_s: float) -> list[PendingTask]:
        """Let what is due by now be over; return the clients that are not waited for any more."""

    @abstractmethod
    def run_out(self, now_s: float) -> float:
        """Note that nobody will answer any more; return when the round closes then."""

    # ---- The close ------------------------------------------------------------------------

    @abstractmethod
    def finish(self) -> None:
        """Settle the clients that the close of the round leaves behind."""

    @abstractmethod
    def flight_after(self, closed_s: float) -> Flight:
        """Return the clients in flight when the round has closed, as the next round sees them."""

    def damp(
        self, aggregate: Aggregate, strategy: Strategy, *, weigh: Callable[[Tensor], Tensor]
    ) -> Aggregate:
        """Shorten the aggregate, in place, by how stale its updates are, and return it.

        A mean over weights that staleness has lowered is as long as if no update were stale.
        Multiplied by the sum of these weights over that of the unlowered ones it is FedBuff's: a
        buffer of stale updates is a short step.

        Args:
            aggregate: Of the updates, over weights that were multiplied by :meth:`factors`.
            strategy: Its weighted lanes are multiplied.
            weigh: Returns the weights of updates by their numbers of examples: shape [B].
        """
        factors = self.factors(self.counted)
        if factors is None:
            return aggregate
        rows = [self.rows[place] for _, place in self._taken.values()]
        num_examples_B = torch.tensor([each.num_examples for each in rows]).double()
        weights_B = weigh(num_examples_B)
        factor = float((weights_B * torch.from_numpy(factors)).sum() / weights_B.sum())
        if factor != 1.0:
            for spec in strategy.lanes:
                if spec.weighted:
                    aggregate.lanes[spec.name].mul_(factor)
        return aggregate

    def close(
        self,
        aggregate: Aggregate | None,
        *,
        closed_s: float,
        kept: Kept | None = None,
        counted: Mapping[ClientId, int] | None = None,
        participations: Participations | None = None,
    ) -> Collected:
        """Return the outcome, after :meth:`finish`.

        Args:
            aggregate: Of the updates that count; ``None``: they are too few.
            closed_s: When the round closed.
            kept: See :class:`Collected`.
            counted: See :class:`Collected`.
            participations: What is recorded; ``None``: the rows.
        """
        ages = Counter(self.age(each) for each in self.counted)
        return Collected(
            aggregate=aggregate,
            participations=participations or Participations.of(self.rows),
            duration_s=closed_s,
            train_metrics=self.metrics.close(),
            kept=kept or {},
            staleness={} if self._staleness is None else dict(sorted(ages.items())),
            flight=self.flight_after(closed_s),
            durations=self.durations(),
            counted=counted,
        )

    def durations(self) -> tuple[tuple[float, ...], ...]:
        """Return what clients took in the last rounds, this one included, if it is enough."""
        return self.of.durations


class CohortCollection(Collection):
    """A synchronous or semi-synchronous round: one cohort, and late updates of earlier ones.

    It closes with the wanted number of reports of the cohort, when the cohort is settled, or at
    the deadline. If nobody is left to ask, it closes when all clients in flight are settled.

    Args:
        late: How late updates count; ``None``: not at all.
    """

    opens_when_drawn = True

    def __init__(
        self,
        policy: StragglerPolicy,
        late: LateUpdates | None,
        flight: Iterable[PendingTask],
        of: Attempt,
    ) -> None:
        super().__init__(policy, late, flight, of)
        self._late = late
        self._is_drawn = self._is_asked = self._is_over = False
        self._cohort = frozenset[ClientId]()
        self._deadline_s = policy.deadline_s
        self._num_fresh = 0

    @property
    def may_ask(self) -> bool:
        """Whether the cohort is still to be asked."""
        return not self._is_asked

    @property
    def is_closed(self) -> bool:
        """Whether nothing else is waited for."""
        has_all = self._num_fresh >= self.policy.num_wanted or not self.waited_for
        return self._is_asked and (has_all or self._is_over)

    @property
    def is_enough(self) -> bool:
        """Whether the updates that count make a round."""
        return len(self._taken) >= self.policy.min_reports

    @property
    def is_undone(self) -> bool:
        """Whether the updates so far are too few, and count in the next attempt again."""
        return self._late is not None and not self.is_enough

    def draw(self, draw: Draw) -> Sequence[PendingTask]:
        """Draw the cohort, once."""
        if self._is_drawn:
            return ()
        drawn = draw(
            self.policy.num_asked,
            round_num=self.round_num,
            attempt=self.of.attempt,
            busy=self._flying.keys(),
        )
        self._is_drawn = True
        return [
            PendingTask(client_id, self.round_num, self.of.attempt, place, 0.0)
            for place, client_id in enumerate(drawn)
        ]

    def ask(self, now_s: float) -> list[PendingTask]:
        """Return the cohort: the round opens now."""
        if not self._is_drawn or self._is_asked:
            return []
        self._is_asked = True
        if self._late is not None:
            so_far_s = [-each.asked_s for each in self._flying.values()]
            self._deadline_s = self._late.deadline_s(
                self.of.durations, so_far_s, longest_s=self.policy.deadline_s
            )
        asked = list(self._drawn)
        self._drawn.clear()
        self._flying |= {each.client_id: each for each in asked}
        self._cohort = frozenset(each.client_id for each in asked)
        self.waited_for = set(self._cohort or self._flying)
        return asked

    def limit(self, most: int) -> None:
        """Do nothing: the whole cohort is asked at once."""

    def excuse(self, client_id: ClientId) -> None:
        """Do nothing: nobody is asked twice."""

    def take(self, task: PendingTask, row: Participation) -> None:
        """Count the update of a client that landed."""
        super().take(task, row)
        self._num_fresh += task.client_id in self._cohort

    def _discount(self, client_id: ClientId) -> None:
        self._num_fresh -= client_id in self._cohort

    @property
    def closes_s(self) -> float:
        """When the round closes at the latest.

        Clients may need longer to return to a coordinator that has restarted than to train.
        """
        return min(self.policy.deadline_s, max(self._deadline_s, self._grace_s))

    def wakes_s(self) -> float:
        """Return the deadline."""
        return self.closes_s

    def expire(self, now_s: float) -> list[PendingTask]:
        """Close the round at its deadline."""
        self._is_over = now_s >= self.closes_s
        return []

    def run_out(self, now_s: float) -> float:
        """Return the deadline, where there is one: until then, others might have answered."""
        return max(now_s, self.closes_s) if math.isfinite(self.closes_s) else now_s

    def finish(self) -> None:
        """Settle those of the cohort that are late; those of earlier ones were late then."""
        late = [each for each in self._flying.values() if each.client_id in self._cohort]
        for each in sorted(late, key=_lasts_s):
            self.settle(each, Status.LATE)

    def flight_after(self, closed_s: float) -> Flight:
        """Return the clients in flight; also those whose updates were too few."""
        if self._late is None:
            return ()
        flying = [*self._flying.values(), *(self.counted if self.is_undone else ())]
        flying.sort(key=lambda each: (each.asked_s, _lasts_s(each)))
        return tuple(each._replace(asked_s=each.asked_s - closed_s) for each in flying)

    def durations(self) -> tuple[tuple[float, ...], ...]:
        """Return what clients took in the last rounds, this one included, if it is enough."""
        if self._late is None or not self.is_enough:
            return self.of.durations
        latest_s = [self.rows[place].duration_s for _, place in self._taken.values()]
        return self._late.window(self.of.durations, latest_s)


class BufferCollection(Collection):
    """An asynchronous round, from the step before to its own.

    Guarantees:
        No client is in flight twice, or asked again in a round in which it answered: of one client
        one update at the most is sent by the model of a round, and is in a buffer. One that failed
        is asked again only where nobody is in flight and nobody else is there. No more are in
        flight than can count: of more than ``num_counting`` one would be too stale, whatever
        happens.
    """

    allows_early_work = True

    def __init__(
        self,
        policy: StragglerPolicy,
        asynchrony: Asynchrony,
        flight: Iterable[PendingTask],
        of: Attempt,
    ) -> None:
        super().__init__(policy, asynchrony, flight, of)
        self._asynchrony, self._most = asynchrony, asynchrony.concurrency
        self.patience_s = policy.deadline_s
        self._answered = set[ClientId]()
        self._failed = set[ClientId]()  # and may be asked again
        self._times_failed = Counter[ClientId]()
        self._num_draws = self._num_failed = 0
        self._is_short = False  # whether it closes with what there is

    @property
    def is_full(self) -> bool:
        """Whether the server steps."""
        return len(self._taken) == self._asynchrony.buffer_size

    @property
    def is_closed(self) -> bool:
        """Whether the buffer is full, or will not be filled."""
        # As many may fail as in as many synchronous rounds.
        at_once = max(self.policy.num_wanted, self._asynchrony.concurrency)
        has_failed = self._num_failed > (self.policy.max_retries + 1) * at_once
        return self.is_full or has_failed or self._is_short

    @property
    def is_enough(self) -> bool:
        """Whether the updates that count make a round."""
        return self.is_full or (self._is_short and bool(self._taken))

    # ---- Whom to ask ----------------------------------------------------------------------

    @property
    def may_ask(self) -> bool:
        """Whether there may be more clients to ask."""
        return True

    def limit(self, most: int) -> None:
        """Have nobody asked while so many are in flight; those that are, go on."""
        self._most = most

    def draw(self, draw: Draw) -> Sequence[PendingTask]:
        """Draw as many as the round asks if nobody fails: one drawing is of nearly all."""
        if self._drawn or not self._num_askable:
            return ()
        free = self._most - len(self._flying)
        to_come = self._asynchrony.buffer_size - len(self._taken) - 1
        num, attempt = min(free + max(0, to_come), self._num_counting_more), self._num_draws
        others = partial(draw, num, round_num=self.round_num, attempt=attempt)
        busy = self._flying.keys() | self._answered
        drawn = others(busy=busy | self._failed)
        if not drawn and self._failed and not self._flying:
            self._failed.clear()  # it is they, or nobody
            drawn = others(busy=busy)
        self._num_draws += bool(drawn)
        return [
            PendingTask(client_id, self.round_num, attempt, place, math.nan)
            for place, client_id in enumerate(drawn)
        ]

    def ask(self, now_s: float) -> list[PendingTask]:
        """Return the clients to ask now: they are in flight from here on."""
        asked = list[PendingTask]()
        while self._drawn and self._num_askable:
            each = self._drawn.popleft()._replace(asked_s=now_s)
            # Where a process goes on with a round, some may have landed in another order.
            if each.client_id not in self._flying and each.client_id not in self._answered:
                self._flying[each.client_id] = each
                asked.append(each)
        return asked

    @property
    def has_missed_any(self) -> bool:
        """Whether some had their turn in this round, and nothing of them is in the buffer.

        They were late, kept failing, or sent what cannot be used, and are not asked again on this
        model.
        """
        return not self._answered <= self._taken.keys()

    @property
    def is_over_limit(self) -> bool:
        """Whether more are in flight than may be: somebody who lands is not asked next."""
        return len(self._flying) > self._most

    def could_ask_others(self, available: Iterable[ClientId]) -> bool:
        """Return whether some of these are neither in flight nor have answered."""
        return not (self._flying.keys() | self._answered).issuperset(available)

    @property
    def _num_askable(self) -> int:
        free = self._most - len(self._flying)
        return max(0, min(free, self._num_counting_more))

    @property
    def _num_counting_more(self) -> int:
        """How many updates can count beside those in the buffer and in flight."""
        return self._asynchrony.num_counting - len(self._flying) - len(self._taken)

    # ---- What happened --------------------------------------------------------------------

    def land(self, client_id: ClientId) -> PendingTask:
        """Return a client that is in flight no more."""
        task = super().land(client_id)
        self._answered.add(client_id)
        return task

    def excuse(self, client_id: ClientId) -> None:
        """Let one that landed be asked again in this round: what it sent is in no buffer."""
        self._answered.discard(client_id)

    def fail(self, task: PendingTask, row: Participation, *, sent_nothing: bool) -> None:
        """Let a client that sent nothing be asked again after all others.

        So many times: one that always fails has had its turn.
        """
        super().fail(task, row, sent_nothing=sent_nothing)
        self._num_failed += 1
        if sent_nothing:
            self._times_failed[task.client_id] += 1
            if self._times_failed[task.client_id] <= self.policy.max_retries:
                self.excuse(task.client_id)
                self._failed.add(task.client_id)

    def _discount(self, client_id: ClientId) -> None:
        self._num_failed += 1

    def wakes_s(self) -> float:
        """Return when the client that was asked first has taken too long."""
        first_s = min((each.asked_s for each in self._flying.values()), default=math.inf)
        return max(first_s + self.patience_s, self._grace_s)

    def expire(self, now_s: float) -> list[PendingTask]:
        """Give up the client that was asked first, if it has taken too long.

        One at a time: others take its place first.
        """
        if not self.wakes_s() <= now_s:
            return []
        first = min(self._flying.values(), key=lambda each: each.asked_s)
        self.settle(self.land(first.client_id), Status.LATE)
        return [first]

    def run_out(self, now_s: float) -> float:
        """Close the buffer as it is, if it lacks clients that have had their turn."""
        self._is_short = self.has_missed_any
        return now_s

    def finish(self) -> None:
        """Do nothing: all in flight work on."""

    def flight_after(self, closed_s: float) -> Flight:
        """Return the clients in flight, in the order of asking."""
        return tuple(
            each._replace(asked_s=each.asked_s - closed_s) for each in self._flying.values()
        )


def collection_for(
    policy: StragglerPolicy,
    staleness: LateUpdates | Asynchrony | None,
    flight: Iterable[PendingTask],
    request: RoundRequest,
) -> Collection:
    """Return the collection of one attempt at a round, of the kind that ``staleness`` makes it."""
    of = Attempt(request.round_num, request.attempt, request.durations)
    if isinstance(staleness, Asynchrony):
        return BufferCollection(policy, staleness, flight, of)
    return CohortCollection(policy, staleness, flight, of)


def _lasts_s(task: PendingTask) -> float:
    """Return the duration of a task; infinite where nobody knows it."""
    return math.inf if math.isnan(task.duration_s) else task.duration_s
