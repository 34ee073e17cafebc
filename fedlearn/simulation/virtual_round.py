"""A round in virtual time: a queue of arrivals, and blocks of clients to train.

When a client would reply depends on its device alone. So arrivals are simulated in order until
the round would close. Only then are the clients trained whose updates count, each from the model
that it was sent. If an update turns out to be unusable, the round continues with the next arrival.
A client that is late is trained later if late updates are kept, or never. A client that fails or
becomes too stale is never trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.client_state import ClientStates, replace_states
from fedlearn.algorithms.collector import CollectedRound, RoundRequest
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.pending_tasks import Draw, PendingTask
from fedlearn.algorithms.round_state import RoundState
from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.core.reported_metrics import WeightedMeans
from fedlearn.simulation.reduction import Reduction
from fedlearn.simulation.secure import ModularSum

#: Outcome of a client that was trained: its update counts, is refused, or training raised an error.
REPORTED, REFUSED, RAISED = 1, 2, 3

#: Placeholder row of a client whose update is expected to count, replaced once it is trained.
_UNTRAINED = Participation(ClientId(-1), Status.REPORTED, math.nan)

#: Failure reason of a client whose device failed during a round.
DROPPED_OUT = "dropped out before reporting"


@dataclass(frozen=True)
class Wave:
    """Results of training a set of clients on all workers, except their updates.

    Attributes:
        losses: Mean training losses: shape [n].
        num_examples: Number of examples that each client trained on: shape [n].
        verdicts: Outcome of each client, such as :data:`REPORTED`: shape [n].
        reasons: Failure reasons, by the client's place in the wave.
        metrics: Other training metrics of reporting clients, by place in the wave.
        client_states: New client state of reporting clients.
    """

    losses: NDArray[np.float64]
    num_examples: NDArray[np.int64]
    verdicts: NDArray[np.int64]
    reasons: Mapping[int, str]
    metrics: Mapping[int, Mapping[str, float]]
    client_states: ClientStates

    def add_metrics(self, means: WeightedMeans) -> None:
        """Add the clients' training metrics to the means, in order of arrival."""
        for place, reported in sorted(self.metrics.items()):
            means.add(reported, num_examples=int(self.num_examples[place]))


class SimulatedClients(Protocol):
    """The clients of a virtual round: predicts their devices and trains them in blocks."""

    @property
    def summing(self) -> ModularSum | None:
        """How updates are summed if secure aggregation is simulated; else ``None``."""

    def reduction(self, request: RoundRequest) -> Reduction:
        """Create the accumulator for a round's updates."""

    def predict_tasks(
        self, drawn: Sequence[PendingTask], request: RoundRequest
    ) -> list[PendingTask]:
        """Predict the duration and failure of tasks that were drawn together."""

    def train(
        self,
        client_ids: NDArray[np.int64],
        requests: Sequence[RoundRequest],
        reduction: Reduction,
        *,
        factors: NDArray[np.float64] | None = None,
    ) -> Wave:
        """Train clients, each from the model that it was sent, and accumulate their updates."""

    def weights(self, num_examples_B: Tensor, request: RoundRequest) -> Tensor:
        """Return the aggregation weights of clients with these example counts: shape [B]."""


@dataclass(eq=False)
class VirtualRound:
    """Simulates one attempt at a round until it closes.

    Attributes:
        clients: Predicts devices and trains clients.
        round_state: Decides how many clients to ask, and when the round closes.
        requests: The requests sent to clients, by round.
        draw: Draws the clients to ask.
    """

    clients: SimulatedClients
    round_state: RoundState
    requests: Mapping[int, RoundRequest]
    draw: Draw
    now_s: float = 0.0
    #: A heap of (time of arrival or of giving up, turn, task). The turn, in order of asking, breaks
    #: ties.
    _arrivals: list[tuple[float, int, PendingTask]] = field(default_factory=list)
    #: Clients whose updates count and that are not trained yet.
    _waiting: list[PendingTask] = field(default_factory=list)
    _until_s: float = math.inf

    def __post_init__(self) -> None:
        self.request = self.requests[self.round_state.round_num]
        self.client_states = self.request.client_states
        self.reduction = self.clients.reduction(self.request)
        self._turns = count()

    def run(self) -> CollectedRound:
        """Process arrivals in order until the round closes; return its result."""
        # Before anything else, so that a client whose update is too stale may be drawn again.
        self.round_state.give_up_stale()
        self._expect(self.round_state.pending)
        round_state = self.round_state
        # Training may refuse updates and so open a round again that seemed complete.
        while not (round_state.is_closed and self._train_and_recheck()):
            if round_state.may_ask:
                self._ask()
            if not self._take_next():
                self._train()
                if not round_state.is_closed:
                    self.now_s = round_state.run_out(self.now_s)
                break
        self._train()  # some may still wait if the round closes because too many failed
        return self._close()

    def _train_and_recheck(self) -> bool:
        """Train the waiting clients; return whether the round is still closed after that."""
        self._train()
        return self.round_state.is_closed

    # ---- Arrivals -------------------------------------------------------------------------

    def _ask(self) -> None:
        while True:
            self._expect(self.round_state.ask(self.now_s))
            if not (drawn := self.round_state.draw(self.draw)):
                break
            self.round_state.put(self.clients.predict_tasks(drawn, self.request))
        self._expect(self.round_state.ask(self.now_s))
        if self.round_state.waited_for:
            self._until_s = self._closes_s()

    def _closes_s(self) -> float:
        """Return the latest time at which the round closes; infinite: after the last arrival.

        Without a deadline, the round does not wait for a client that never arrives.
        """
        waited_for, closes_s = self.round_state.waited_for, self.round_state.closes_s
        known_s = [due_s for due_s, _, task in self._arrivals if task.client_id in waited_for]
        # Some client in flight has no arrival in the queue: only the deadline ends the wait for it.
        if len(known_s) < len(waited_for) and math.isfinite(closes_s):
            return closes_s
        return min(closes_s, max([0.0, *known_s]) if known_s else math.inf)

    def _expect(self, tasks: Sequence[PendingTask]) -> None:
        """Queue the arrival or timeout of each client in flight, if it has either."""
        patience_s, arrivals, turns = self.round_state.patience_s, self._arrivals, self._turns
        for each in tasks:
            lasts_s = min(each.duration_s, patience_s)
            if math.isfinite(lasts_s):
                heappush(arrivals, (each.sent_s + lasts_s, next(turns), each))

    def _take_next(self) -> bool:
        """Process the next arrival; return whether there was one in time."""
        if not self._arrivals or self._arrivals[0][0] > self._until_s:
            return False
        due_s, _, task = heappop(self._arrivals)
        # Rounding may put an arrival slightly before the end of the last step; time never goes
        # back.
        self.now_s = max(self.now_s, due_s)
        round_state, client_id, took_s = self.round_state, task.client_id, task.duration_s
        round_state.land(client_id)
        if not took_s <= round_state.patience_s:
            round_state.settle(task, Status.LATE)
        elif task.fails:
            row = Participation(client_id, Status.FAILED, took_s, reason=DROPPED_OUT)
            round_state.fail(task, row, sent_nothing=True)
        else:
            round_state.take(task, _UNTRAINED)
            self._waiting.append(task)
        return True

    # ---- Training -------------------------------------------------------------------------

    def _train(self) -> None:
        """Train the waiting clients, if any, and mark those with unusable updates as failed."""
        if not self._waiting:
            return
        wave, self._waiting = self._waiting, []
        trained = self.clients.train(
            np.asarray([each.client_id for each in wave], np.int64),
            [self.requests[each.based_on] for each in wave],
            self.reduction,
            factors=self.round_state.factors(wave),
        )
        self.client_states = replace_states(self.client_states, trained.client_states)
        trained.add_metrics(self.round_state.metrics)
        columns = (trained.verdicts, trained.losses, trained.num_examples)
        outcomes = zip(wave, *(column.tolist() for column in columns), strict=True)
        for place, (task, verdict, loss, num_examples) in enumerate(outcomes):
            client_id, took_s = task.client_id, task.duration_s
            if verdict == REPORTED:
                row = Participation(client_id, Status.REPORTED, took_s, num_examples, loss)
            else:
                reason = trained.reasons[place]
                row = Participation(client_id, Status.FAILED, took_s, reason=reason)
            self.round_state.revise(client_id, row)

    # ---- The close ------------------------------------------------------------------------

    def _close(self) -> CollectedRound:
        self.round_state.finish()
        participations = Participations.of(self.round_state.rows)
        is_enough, summing = self.round_state.is_enough, self.clients.summing
        num_capped = None if summing is None else summing.num_capped(participations)
        if summing is not None:
            participations = summing.reduce_rows(participations)
            is_enough &= participations.num(Status.REPORTED) >= summing.min_survivors
        aggregate = self._aggregate() if is_enough else None
        if aggregate is not None and summing is not None:
            aggregate = replace(aggregate, num_capped=num_capped)
        return self.round_state.close(
            aggregate,
            closed_s=self.now_s,
            client_states=self.request.client_states
            if self.round_state.is_carried_over
            else self.client_states,
            participations=participations,
        )

    def _aggregate(self) -> Aggregate:
        return self.round_state.damp(
            self.reduction.close(),
            self.request.strategy,
            weigh=partial(self.clients.weights, request=self.request),
        )
