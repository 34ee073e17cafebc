"""An asynchronous round in virtual time: a queue of events, and blocks of clients.

Who is asked when, and who arrives when, follows from the devices alone. So the events of a round
are played until as many clients have arrived as the buffer holds, and only then are those trained,
from the model that each was sent, those of one model as blocks. A client that is late, fails or
becomes too stale is never trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

import numpy as np

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.collecting import Collected, RoundRequest
from fedlearn.algorithms.flight import Asked, Buffer, Draw, Flight
from fedlearn.algorithms.kept import updated
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.tally import Counted, Tally
from fedlearn.core.collecting import Participations, Status
from fedlearn.core.messages import ClientId
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.reduction import Reduction
from fedlearn.simulation.timeline import DROPPED_OUT, REPORTED


@dataclass(frozen=True, kw_only=True)
class EventQueue:
    """Fills buffers with the updates of simulated clients.

    Attributes:
        engine: Trains them.
        asynchrony: When a buffer is full, and what staleness does.
    """

    engine: Engine
    asynchrony: Asynchrony

    def available(self) -> Sequence[ClientId]:
        """Return the whole population."""
        return self.engine.available()

    def collect(
        self, flight: Flight, requests: Mapping[int, RoundRequest], *, round_num: int, draw: Draw
    ) -> Collected:
        """Play events until the buffer is full; see :class:`Collector`.

        Raises:
            DataError: See :meth:`Engine.collect`.
            EngineError: See :meth:`Engine.collect`.
        """
        buffer = Buffer(self.asynchrony, flight, round_num=round_num)
        played = _Round(self.engine, self.asynchrony, buffer, requests, draw)
        for stale in buffer.give_up():
            played.tally.settle(stale, Status.STALE)
        played.plan(buffer.flight)
        played.play()
        return played.close()


@dataclass(eq=False)
class _Round:
    """One round on its way to a full buffer."""

    engine: Engine
    asynchrony: Asynchrony
    buffer: Buffer
    requests: Mapping[int, RoundRequest]
    draw: Draw
    now_s: float = 0.0
    #: A heap: when, the how manieth to be asked, and who.
    events: list[tuple[float, int, Asked]] = field(default_factory=list)
    #: Those in the buffer that are to be trained yet: their places among the rows.
    waiting: list[tuple[int, Asked]] = field(default_factory=list)
    num_failed: int = 0
    is_short: bool = False  # whether it closes with what there is

    def __post_init__(self) -> None:
        self.request = self.requests[self.buffer.round_num]
        # Rows are in order of arrival; the loss and the examples are not known before training.
        self.tally = Tally(self.buffer.round_num, self.asynchrony)
        self.kept = self.request.kept
        self.reduction: Reduction = self.engine.reduction(self.request)
        self._numbers = count()

    # ---- Events ---------------------------------------------------------------------------

    def play(self) -> None:
        """Take events in order until the buffer is full of sound updates, or none is left.

        Who was late, of no use, or kept failing is not asked again on this model. Where that leaves
        nobody to fill the buffer, it closes as it is.
        """
        while not self._is_closed() and self.num_failed <= self._most_failed:
            self._ask()
            if not self.events:
                self._train()
                self.is_short = self.buffer.has_missed_any
                return
            due_s, _, asked = heappop(self.events)
            self.now_s = max(self.now_s, due_s)  # rounding may put a tie of the last step before it
            self.buffer.land(asked.client_id)
            if not asked.duration_s <= self.engine.policy.deadline_s:
                self.tally.settle(asked, Status.LATE)
            elif asked.fails:
                max_retries = self.engine.policy.max_retries
                self.buffer.fail(asked.client_id, max_retries=max_retries)
                self.tally.settle(asked, Status.FAILED, reason=DROPPED_OUT)
                self.num_failed += 1
            else:
                self.buffer.take(asked)
                self.waiting.append((len(self.tally.rows), asked))
                self.tally.settle(asked, Status.REPORTED)

    @property
    def _most_failed(self) -> int:
        """How many may fail before the round is given up: as in as many synchronous rounds."""
        policy = self.engine.policy
        return (policy.max_retries + 1) * max(policy.num_wanted, self.asynchrony.concurrency)

    def _is_closed(self) -> bool:
        if self.buffer.is_full:
            self._train()
        return self.buffer.is_full

    def _ask(self) -> None:
        """Ask as many as may be in flight, now and on this round's model."""
        while True:
            self.plan(self.buffer.ask(self.now_s))
            if not (drawn := self.buffer.draw(self.draw)):
                return
            self.buffer.put(self.engine.foreseen(drawn, self.request))

    def plan(self, asked: Sequence[Asked]) -> None:
        """Have events of clients that are in flight."""
        deadline_s = self.engine.policy.deadline_s
        for each in asked:
            lasts_s = min(each.duration_s, deadline_s)
            if math.isfinite(lasts_s):  # of another one nothing is ever heard
                heappush(self.events, (each.asked_s + lasts_s, next(self._numbers), each))

    # ---- Training -------------------------------------------------------------------------

    def _train(self) -> None:
        """Train those that wait, if any, and take out of the buffer what is not sound."""
        if not self.waiting:
            return
        trained = self.engine.train(
            np.asarray([each.client_id for _, each in self.waiting], np.int64),
            [self.requests[each.based_on] for _, each in self.waiting],
            self.reduction,
            factors=self.tally.factors([each for _, each in self.waiting]),
        )
        self.kept = updated(self.kept, trained.kept)
        trained.add_metrics(self.tally.metrics)
        columns = (trained.verdicts, trained.losses, trained.num_examples)
        told = zip(*(column.tolist() for column in columns), strict=True)
        waiting = enumerate(zip(self.waiting, told, strict=True))
        for at, ((place, asked), (verdict, loss, num_examples)) in waiting:
            row = self.tally.rows[place]
            if verdict == REPORTED:
                row = row._replace(num_examples=num_examples, loss=loss)
                self.tally.counted.append(Counted(asked, num_examples, asked.duration_s))
            else:
                row = row._replace(status=Status.FAILED, reason=trained.reasons[at])
                self.buffer.refuse(asked.client_id)
                self.num_failed += 1
            self.tally.rows[place] = row
        self.waiting.clear()

    def close(self) -> Collected:
        """Return what came of it."""
        self._train()  # where too many have failed
        is_enough = self.buffer.is_full or (self.is_short and bool(self.buffer.taken))
        return Collected(
            aggregate=self._aggregate() if is_enough else None,
            participations=Participations.of(self.tally.rows),
            duration_s=self.now_s,
            train_metrics=self.tally.metrics.close(),
            kept=self.kept,
            staleness=self.tally.ages(),
            flight=self.buffer.flight_after(self.now_s),
        )

    def _aggregate(self) -> Aggregate:
        return self.tally.damp(
            self.reduction.close(),
            self.request.strategy,
            weigh=partial(self.engine.weights, request=self.request),
        )
