"""The state machine of a round: which clients to ask, which updates count, and when to close.

It has no network, clock or tensors: a driver reports events to it and asks what to do next. There
are two drivers, one over a channel (:mod:`fedlearn.rounds.plain`) and one in the virtual time of a
simulation (:mod:`fedlearn.simulation.virtual_round`). Each stage of secure aggregation
(:mod:`fedlearn.rounds.secure`) runs its own synchronous machine. There are two kinds:

- :class:`CohortRoundState` asks a cohort once and closes when enough clients have reported. In a
  synchronous round, a client that has not reported by then is late, and its update is lost. In a
  semi-synchronous round it continues, and its update counts in the round in which it arrives.
- :class:`BufferRoundState` asks another client whenever one has replied, and closes when its
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
from fedlearn.algorithms.client_state import ClientStates
from fedlearn.algorithms.collector import CollectedRound, RoundRequest
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.pending_tasks import Draw, PendingTask, PendingTasks
from fedlearn.algorithms.staleness import Staleness
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.core.reported_metrics import WeightedMeans
from fedlearn.errors import RoundError


class Attempt(NamedTuple):
    """Identifies one attempt at a round.

    Attributes:
        round_num: Round index, from 0.
        attempt: Retry number of the round, starting at 0.
        durations: Clients' durations in each of the last rounds, in seconds.
    """

    round_num: int
    attempt: int
    durations: tuple[tuple[float, ...], ...] = ()


class RoundState(ABC):
    """Base class of both kinds: one attempt at a round, from its opening to its close.

    A client *lands* when its task ends, by a reply, a failure or a timeout, and is then *settled*
    by a row in the record. Times are in seconds since the round opened.

    Args:
        policy: When a round closes, and how long a client may take.
        staleness: Weights of stale updates; ``None``: all updates are based on this round's model.
        pending: Pending tasks when the round opens.
        of: The attempt.

    Attributes:
        rows: One for each settled client, in the order of settling.
        metrics: Clients' training metrics.
        waited_for: Clients that the round waits for before it closes; empty for a buffer.
    """

    #: Whether a client may start on a model before it is asked to.
    allows_early_work = False
    #: Whether the round's clock starts only when its clients are drawn.
    opens_when_drawn = False
    #: Time limit of one task.
    patience_s = math.inf

    def __init__(
        self,
        policy: StragglerPolicy,
        staleness: Staleness | None,
        pending: Iterable[PendingTask],
        of: Attempt,
    ) -> None:
        self.policy, self.of, self.round_num = policy, of, of.round_num
        self.rows = list[Participation]()
        self.metrics = WeightedMeans()
        self.waited_for = set[ClientId]()
        self._staleness = staleness
        self._pending = {each.client_id: each for each in pending}
        self._taken = dict[ClientId, tuple[PendingTask, int]]()  # with the index of its row
        self._drawn = deque[PendingTask]()
        self._grace_s = 0.0

    # ---- What is known --------------------------------------------------------------------

    @property
    def pending(self) -> PendingTasks:
        """The pending tasks, in the order in which they were sent."""
        return tuple(self._pending.values())

    def awaits(self, client_id: ClientId) -> bool:
        """Whether a client is in flight."""
        return client_id in self._pending

    @property
    def counted(self) -> list[PendingTask]:
        """The tasks whose updates count, in the order of their arrival."""
        return [task for task, _ in self._taken.values()]

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the round waits for no further reply."""

    @property
    def closes_s(self) -> float:
        """Latest time at which the round closes; infinite if it waits until its buffer is full."""
        return math.inf

    @property
    @abstractmethod
    def is_enough(self) -> bool:
        """Whether enough updates have arrived for a step of the server."""

    @property
    def is_carried_over(self) -> bool:
        """Whether these updates, too few for a step, are carried over to the next attempt."""
        return False

    def age(self, task: PendingTask) -> int:
        """Return the staleness of a task: the age in rounds of the model that it trains."""
        return self.round_num - task.based_on

    def factors(self, some: Sequence[PendingTask]) -> NDArray[np.float64] | None:
        """Return the factors by which staleness lowers the weights of B updates: shape [B].

        ``None``: staleness plays no role in this round.
        """
        if self._staleness is None:
            return None
        return self._staleness.weights(np.asarray([self.age(each) for each in some], np.int64))

    # ---- Whom to ask ----------------------------------------------------------------------

    @property
    @abstractmethod
    def may_ask(self) -> bool:
        """Whether this attempt may ask more clients."""

    @abstractmethod
    def draw(self, draw: Draw) -> Sequence[PendingTask]:
        """Draw the clients to ask next; none if no more may be asked, or some are still queued."""

    def put(self, drawn: Iterable[PendingTask]) -> None:
        """Queue the drawn clients; a driver may have added their durations and failures."""
        self._drawn.extend(drawn)

    @abstractmethod
    def ask(self, now_s: float) -> list[PendingTask]:
        """Move queued clients in flight, as many as are allowed, and return their tasks to send."""

    @abstractmethod
    def limit(self, most: int) -> None:
        """Ask no further client while ``most`` are in flight."""

    @property
    def is_over_limit(self) -> bool:
        """Whether more clients are in flight than the limit allows."""
        return False

    @property
    def has_missed_any(self) -> bool:
        """Whether a client finished its task in this round without an update that counts."""
        return False

    def could_ask_others(self, available: Iterable[ClientId]) -> bool:
        """Return whether some of these clients are neither in flight nor have replied."""
        return False

    # ---- What happened --------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Shift the opening of the round by ``seconds``: pending tasks are older by that much."""
        self._pending = {
            client_id: each._replace(sent_s=each.sent_s - seconds)
            for client_id, each in self._pending.items()
        }

    def give_up_stale(self) -> list[PendingTask]:
        """Settle the pending tasks whose updates would be too stale to count, and return them."""
        if self._staleness is None:
            return []
        most = self._staleness.max_staleness
        stale = [each for each in self._pending.values() if self.age(each) > most]
        for each in stale:
            del self._pending[each.client_id]
            # sent_s is negative for a task of an earlier round: minus it is how long the client
            # has taken.
            took_s = -each.sent_s if math.isnan(each.duration_s) else each.duration_s
            reason = self._staleness.why_stale(self.age(each))
            self.settle(each._replace(duration_s=took_s), Status.STALE, reason=reason)
        return stale

    def land(self, client_id: ClientId) -> PendingTask:
        """End a client's task because it replied, failed or timed out, and return the task.

        Raises:
            RoundError: The client is not in flight.
        """
        if client_id not in self._pending:
            raise RoundError(
                f"client {client_id} was not asked in round {self.round_num + 1}, or has already "
                "answered"
            )
        self.waited_for.discard(client_id)
        return self._pending.pop(client_id)

    def settle(self, task: PendingTask, status: Status, *, reason: str = "") -> None:
        """Record a client that sent no update, with the duration of its task."""
        self.rows.append(Participation(task.client_id, status, task.duration_s, reason=reason))

    def take(self, task: PendingTask, row: Participation) -> None:
        """Count the update of a client that landed."""
        self._taken[task.client_id] = task, len(self.rows)
        self.rows.append(row)

    def revise(self, client_id: ClientId, row: Participation) -> None:
        """Replace the row of an update that was counted before it was trained.

        A simulation knows when a client replies before it trains it. If the training then fails,
        the update no longer counts.
        """
        _, place = self._taken[client_id]
        self.rows[place] = row
        if row.status is not Status.REPORTED:
            del self._taken[client_id]
            self._discount(client_id)

    @abstractmethod
    def _discount(self, client_id: ClientId) -> None:
        """Update the counters after an update that no longer counts."""

    def fail(self, task: PendingTask, row: Participation, *, sent_nothing: bool) -> None:
        """Record a client that failed or sent an unusable update."""
        self.rows.append(row)

    @abstractmethod
    def excuse(self, client_id: ClientId) -> None:
        """Allow a client whose task has ended to be asked again in this round."""

    def grant(self, until_s: float) -> None:
        """Time out no task before ``until_s``, so that clients can reconnect after a restart."""
        self._grace_s = until_s

    @abstractmethod
    def wakes_s(self) -> float:
        """Return when to call :meth:`expire` next; infinite: never."""

    @abstractmethod
    def expire(self, now_s: float) -> list[PendingTask]:
        """Apply the time limits that have passed, and return the clients that timed out."""

    @abstractmethod
    def run_out(self, now_s: float) -> float:
        """Handle that no further client will reply, and return when the round then closes."""

    # ---- The close ------------------------------------------------------------------------

    @abstractmethod
    def finish(self) -> None:
        """Settle the clients that are late at the close of the round."""

    @abstractmethod
    def pending_after(self, closed_s: float) -> PendingTasks:
        """Return the tasks still pending after the close, with times relative to the next round."""

    def damp(
        self, aggregate: Aggregate, strategy: Strategy, *, weigh: Callable[[Tensor], Tensor]
    ) -> Aggregate:
        """Scale the aggregate down, in place, by the staleness of its updates, and return it.

        A weighted mean divides by the sum of its weights, so lower weights alone do not make the
        step shorter. Multiplying by (sum of lowered weights) / (sum of original weights) gives the
        step of FedBuff: a buffer of stale updates moves the model less.

        Args:
            aggregate: Mean of the updates, over weights that were multiplied by :meth:`factors`.
            strategy: The strategy; its weighted lanes are scaled.
            weigh: Returns the weights of updates by their numbers of examples: shape [B].
        """
        factors = self.factors(self.counted)
        if factors is None:
            return aggregate
        rows = [self.rows[place] for _, place in self._taken.values()]
        num_examples_B = torch.tensor([each.num_examples for each in rows]).double()
        weights_B = weigh(num_examples_B)
        # sum of s(tau_i) w_i / sum of w_i.
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
        client_states: ClientStates | None = None,
        counted: Mapping[ClientId, int] | None = None,
        participations: Participations | None = None,
    ) -> CollectedRound:
        """Return the outcome; call :meth:`finish` first.

        Args:
            aggregate: Aggregate of the updates that count; ``None`` if there are too few.
            closed_s: When the round closed.
            client_states: See :class:`CollectedRound`.
            counted: See :class:`CollectedRound`.
            participations: Participations to record; ``None``: :attr:`rows`.
        """
        stale = [] if self._staleness is None else self.counted
        return CollectedRound(
            aggregate=aggregate,
            participations=participations or Participations.of(self.rows),
            duration_s=closed_s,
            train_metrics=self.metrics.close(),
            client_states=client_states or {},
            staleness=dict(sorted(Counter(map(self.age, stale)).items())),
            pending=self.pending_after(closed_s),
            durations=self.durations(),
            counted=counted,
        )

    def durations(self) -> tuple[tuple[float, ...], ...]:
        """Return the durations of the last rounds, for the deadlines of the next."""
        return self.of.durations


class CohortRoundState(RoundState):
    """A synchronous or semi-synchronous round: one cohort, and late updates of earlier ones.

    It closes when enough clients of the cohort have reported, when all have settled, or at the
    deadline. If the cohort is empty, it closes when all clients in flight are settled.

    Args:
        late: Settings for late updates; ``None``: they do not count.
    """

    opens_when_drawn = True

    def __init__(
        self,
        policy: StragglerPolicy,
        late: LateUpdates | None,
        pending: Iterable[PendingTask],
        of: Attempt,
    ) -> None:
        super().__init__(policy, late, pending, of)
        self._late = late
        self._is_drawn = self._is_sent = self._is_over = False
        self._cohort = frozenset[ClientId]()
        # Until the cohort is asked; an adaptive deadline is computed then.
        self._deadline_s = policy.deadline_s
        self._num_fresh = 0

    @property
    def may_ask(self) -> bool:
        """Whether the cohort has not been asked yet."""
        return not self._is_sent

    @property
    def is_closed(self) -> bool:
        """Whether enough clients reported, all have settled, or the deadline has passed."""
        has_all = self._num_fresh >= self.policy.num_wanted or not self.waited_for
        return self._is_sent and (has_all or self._is_over)

    @property
    def is_enough(self) -> bool:
        """Whether the minimum of reports has arrived, late ones of earlier rounds included."""
        return len(self._taken) >= self.policy.min_reports

    @property
    def is_carried_over(self) -> bool:
        """Whether these updates, too few for a step, are carried over to the next attempt."""
        return self._late is not None and not self.is_enough

    def draw(self, draw: Draw) -> Sequence[PendingTask]:
        """Draw the cohort, once."""
        # Not again, even if the draw came back empty.
        if self._is_drawn:
            return ()
        drawn = draw(
            self.policy.cohort_size,
            round_num=self.round_num,
            attempt=self.of.attempt,
            busy=self._pending.keys(),
        )
        self._is_drawn = True
        return [
            PendingTask(client_id, self.round_num, self.of.attempt, place, 0.0)
            for place, client_id in enumerate(drawn)
        ]

    def ask(self, now_s: float) -> list[PendingTask]:
        """Return the tasks of the whole cohort, and set the deadline: the round opens now."""
        if not self._is_drawn or self._is_sent:
            return []
        self._is_sent = True
        if self._late is not None:
            so_far_s = [-each.sent_s for each in self._pending.values()]
            self._deadline_s = self._late.deadline_s(
                self.of.durations, so_far_s, longest_s=self.policy.deadline_s
            )
        tasks = list(self._drawn)
        self._drawn.clear()
        self._pending |= {each.client_id: each for each in tasks}
        self._cohort = frozenset(each.client_id for each in tasks)
        # Without anyone to ask, wait for the tasks of earlier rounds.
        self.waited_for = set(self._cohort or self._pending)
        return tasks

    def limit(self, most: int) -> None:
        """Do nothing: the whole cohort is asked at once."""

    def excuse(self, client_id: ClientId) -> None:
        """Do nothing: a cohort is asked only once."""

    def take(self, task: PendingTask, row: Participation) -> None:
        """Count the update of a client that landed."""
        super().take(task, row)
        # Late updates of earlier cohorts count, but do not close the round.
        self._num_fresh += task.client_id in self._cohort

    def _discount(self, client_id: ClientId) -> None:
        self._num_fresh -= client_id in self._cohort

    @property
    def closes_s(self) -> float:
        """Latest time at which the round closes.

        After a restart of the coordinator, clients may need more time to reconnect than to train,
        so the grace period can extend an adaptive deadline, but never the fixed one.
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
        """Close at the deadline, if it is finite, as if clients might still reply until then."""
        return max(now_s, self.closes_s) if math.isfinite(self.closes_s) else now_s

    def finish(self) -> None:
        """Settle late clients of this cohort; those of earlier ones were settled in their round."""
        # In order of arrival, as if the round had waited for them; a simulation knows their
        # durations.
        late = [each for each in self._pending.values() if each.client_id in self._cohort]
        for each in sorted(late, key=_lasts_s):
            self.settle(each, Status.LATE)

    def pending_after(self, closed_s: float) -> PendingTasks:
        """Return the pending tasks; after too few reports, also the tasks of those reports."""
        if self._late is None:
            return ()
        # After too few reports the next attempt takes these updates again, as if they had not
        # landed.
        flying = [*self._pending.values(), *(self.counted if self.is_carried_over else ())]
        flying.sort(key=lambda each: (each.sent_s, _lasts_s(each)))
        return tuple(each._replace(sent_s=each.sent_s - closed_s) for each in flying)

    def durations(self) -> tuple[tuple[float, ...], ...]:
        """Return the durations of the last rounds, including this one if enough reported."""
        if self._late is None or not self.is_enough:
            return self.of.durations
        latest_s = [self.rows[place].duration_s for _, place in self._taken.values()]
        return self._late.window(self.of.durations, latest_s)


class BufferRoundState(RoundState):
    """An asynchronous round: it starts after one step of the server and ends with the next.

    Guarantees:
        A client has at most one task at a time and is not asked again in a round in which it
        replied. So each client sends at most one update per round's model, and has at most one in
        a buffer. A client that failed is asked again only if no client is in flight and no other
        one is available. At most ``num_counting`` clients are in flight: with more, at least one
        update would be too stale to count.
    """

    allows_early_work = True

    def __init__(
        self,
        policy: StragglerPolicy,
        asynchrony: Asynchrony,
        pending: Iterable[PendingTask],
        of: Attempt,
    ) -> None:
        super().__init__(policy, asynchrony, pending, of)
        self._asynchrony, self._most = asynchrony, asynchrony.concurrency
        self.patience_s = policy.deadline_s
        self._answered = set[ClientId]()
        self._failed = set[ClientId]()  # may be asked again, after all others
        self._times_failed = Counter[ClientId]()
        self._num_draws = self._num_failed = 0
        self._is_short = False  # whether to close with the updates so far

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full, so that the server steps."""
        return len(self._taken) == self._asynchrony.buffer_size

    @property
    def is_closed(self) -> bool:
        """Whether the buffer is full or cannot be filled."""
        # Allow as many failures as all attempts of a synchronous round could have.
        at_once = max(self.policy.num_wanted, self._asynchrony.concurrency)
        has_failed = self._num_failed > (self.policy.max_retries + 1) * at_once
        return self.is_full or has_failed or self._is_short

    @property
    def is_enough(self) -> bool:
        """Whether the buffer is full, or has some updates and cannot get more."""
        return self.is_full or (self._is_short and bool(self._taken))

    # ---- Whom to ask ----------------------------------------------------------------------

    @property
    def may_ask(self) -> bool:
        """Always true: any reply may free a slot for another client."""
        return True

    def limit(self, most: int) -> None:
        """Ask no further client while ``most`` are in flight; pending tasks continue."""
        self._most = most

    def draw(self, draw: Draw) -> Sequence[PendingTask]:
        """Draw clients for the rest of the round, so that one draw is enough unless some fail."""
        if self._drawn or not self._num_askable:
            return ()
        free = self._most - len(self._pending)
        # All but the last reply of the buffer free a slot for another client in this round.
        to_come = self._asynchrony.buffer_size - len(self._taken) - 1
        num, attempt = min(free + max(0, to_come), self._num_counting_more), self._num_draws
        others = partial(draw, num, round_num=self.round_num, attempt=attempt)
        # Also without those that replied: at most one update per client and model.
        busy = self._pending.keys() | self._answered
        # Clients that failed come last: only if there is no other and none is in flight.
        drawn = others(busy=busy | self._failed)
        if not drawn and self._failed and not self._pending:
            self._failed.clear()  # no other client is left
            drawn = others(busy=busy)
        self._num_draws += bool(drawn)
        return [
            PendingTask(client_id, self.round_num, attempt, place, math.nan)
            for place, client_id in enumerate(drawn)
        ]

    def ask(self, now_s: float) -> list[PendingTask]:
        """Move queued clients in flight, as many as are allowed, and return their tasks to send."""
        tasks = list[PendingTask]()
        while self._drawn and self._num_askable:
            each = self._drawn.popleft()._replace(sent_s=now_s)
            # After a resume, replies may arrive in another order, so a drawn client may be busy.
            if each.client_id not in self._pending and each.client_id not in self._answered:
                self._pending[each.client_id] = each
                tasks.append(each)
        return tasks

    @property
    def has_missed_any(self) -> bool:
        """Whether a client finished its task in this round without an update in the buffer.

        It was late, kept failing, or sent an unusable update, and is not asked again in this round.
        """
        return not self._answered <= self._taken.keys()

    @property
    def is_over_limit(self) -> bool:
        """Whether more clients are in flight than the limit allows: then a reply frees no slot."""
        return len(self._pending) > self._most

    def could_ask_others(self, available: Iterable[ClientId]) -> bool:
        """Return whether some of these clients are neither in flight nor have replied."""
        return not (self._pending.keys() | self._answered).issuperset(available)

    @property
    def _num_askable(self) -> int:
        free = self._most - len(self._pending)
        return max(0, min(free, self._num_counting_more))

    @property
    def _num_counting_more(self) -> int:
        # With more in flight, the last ones would be too stale when their turn comes.
        return self._asynchrony.num_counting - len(self._pending) - len(self._taken)

    # ---- What happened --------------------------------------------------------------------

    def land(self, client_id: ClientId) -> PendingTask:
        """End a client's task and return it; the client is not asked again in this round."""
        task = super().land(client_id)
        self._answered.add(client_id)
        return task

    def excuse(self, client_id: ClientId) -> None:
        """Allow a client to be asked again in this round: none of its updates is in the buffer."""
        self._answered.discard(client_id)

    def fail(self, task: PendingTask, row: Participation, *, sent_nothing: bool) -> None:
        """Record a failure; a client that sent nothing may be asked again, after all others.

        It may be asked again up to ``max_retries`` times, so that a client that always fails
        cannot hold up the round.
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
        """Return when the oldest pending task times out."""
        first_s = min((each.sent_s for each in self._pending.values()), default=math.inf)
        return max(first_s + self.patience_s, self._grace_s)

    def expire(self, now_s: float) -> list[PendingTask]:
        """Settle the oldest pending task as late, if it has timed out.

        Only one per call, so that the driver can ask a replacement before the next one.
        """
        if not self.wakes_s() <= now_s:
            return []
        first = min(self._pending.values(), key=lambda each: each.sent_s)
        self.settle(self.land(first.client_id), Status.LATE)
        return [first]

    def run_out(self, now_s: float) -> float:
        """Close a buffer that is not full if some clients finished without an update for it."""
        self._is_short = self.has_missed_any
        return now_s

    def finish(self) -> None:
        """Do nothing: all pending tasks continue in the next round."""

    def pending_after(self, closed_s: float) -> PendingTasks:
        """Return the pending tasks, in the order in which they were sent."""
        return tuple(
            each._replace(sent_s=each.sent_s - closed_s) for each in self._pending.values()
        )


def round_state_for(
    policy: StragglerPolicy,
    round_mode: LateUpdates | Asynchrony | None,
    pending: Iterable[PendingTask],
    request: RoundRequest,
) -> RoundState:
    """Create the state machine for one attempt: a buffer for :class:`Asynchrony`, else a cohort."""
    of = Attempt(request.round_num, request.attempt, request.durations)
    if isinstance(round_mode, Asynchrony):
        return BufferRoundState(policy, round_mode, pending, of)
    return CohortRoundState(policy, round_mode, pending, of)


def _lasts_s(task: PendingTask) -> float:
    return math.inf if math.isnan(task.duration_s) else task.duration_s
