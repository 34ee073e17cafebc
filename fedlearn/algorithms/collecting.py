"""The seam of a round: from a cohort and a request to an aggregate.

A :class:`Collector` over a channel talks to client sessions, the simulation engine trains blocks
of clients; the round does not know which one it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fedlearn.algorithms.flight import Draw, Flight
from fedlearn.algorithms.kept import Kept
from fedlearn.algorithms.lanes import DELTA, Aggregate, Lanes
from fedlearn.algorithms.late_updates import Durations
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.collecting import Participations, Status
from fedlearn.core.messages import ClientId, TrainRequest
from fedlearn.core.params import Layout, Params


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """What a round asks of its cohort.

    Attributes:
        round_num: Round index, from 0.
        attempt: 0, or how often the round was retried.
        params: The global model.
        strategy: What clients do and contribute, and how that is combined.
        told: What the strategy tells clients beside the model, one vector each.
        seed: Public seed of client-side randomness.
        kept: What clients kept, for a collector that plays them.
        durations: What clients took in the last rounds, where a deadline follows it.
        counted: As clients are told; see :class:`~fedlearn.core.messages.TrainRequest`.
    """

    round_num: int
    attempt: int
    params: Params
    strategy: Strategy
    told: Lanes
    seed: int
    kept: Kept = field(default_factory=dict)
    durations: Durations = ()
    counted: Mapping[ClientId, int] | None = None

    def message(self) -> TrainRequest:
        """Return the request as clients are sent it that do not differ."""
        return TrainRequest(
            round_num=self.round_num,
            attempt=self.attempt,
            tensors=self.params.named(),
            order=tuple(spec.name for spec in self.params.layout.specs),
            settings=settings_of(self.strategy.local, self.strategy.transforms),
            seed=self.seed,
            told=self.told,
            num_statistics=len(self.params.layout.statistics),
            counted=self.counted,
        )

    def messages(self, cohort: Sequence[ClientId]) -> dict[ClientId, TrainRequest]:
        """Return the request to each client; those that do the same are sent the same object.

        Clients are told of the cohort alone whose updates counted.
        """
        usual, transforms = self.message(), self.strategy.transforms
        if self.counted is not None:
            mine = {each: self.counted[each] for each in cohort if each in self.counted}
            usual = replace(usual, counted=mine)
        known = [(self.strategy.local, usual)]
        found = dict[ClientId, TrainRequest]()
        for client_id, local in zip(cohort, self.strategy.locals_for(cohort), strict=True):
            same = next((message for each, message in known if each == local), None)
            if same is None:
                same = replace(usual, settings=settings_of(local, transforms))
                known.append((local, same))
            found[client_id] = same
        return found

    @property
    def download_bytes(self) -> int:
        """Size of what a client is sent: the model, and what it is told."""
        return self.params.num_bytes + sum(vector.nbytes for vector in self.told.values())

    @property
    def upload_bytes(self) -> int:
        """Size of what it contributes: the model's delta, and the other lanes."""
        layout = self.params.layout
        return layout.size * layout.dtype.itemsize + further_bytes(self.strategy, layout)


def further_bytes(strategy: Strategy, layout: Layout) -> int:
    """Return the size of what a client contributes beside the model's delta."""
    further = [lane.size(layout) for lane in strategy.lanes if lane is not DELTA]
    return sum(further) * layout.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The outcome of one collection.

    Attributes:
        aggregate: What the reports come to; ``None``: there were fewer than the policy's minimum,
            so nothing is released.
        participations: One a client asked, in order of arrival.
        duration_s: Seconds from the broadcast to the close of the round.
        train_metrics: What the clients measured in training beyond the loss, by names of their
            own: means over the reports, weighted by examples. A secure sum has no lane for them.
        kept: What clients keep after the round; nothing over a channel: they do so themselves.
        staleness: Of an asynchronous round, or one that takes late updates, how many updates in the
            aggregate have which staleness.
        flight: Of such a round, who is in flight when it has closed.
        durations: What clients took in the last rounds, where a deadline follows it.
        culprits: By whose fault nothing is released; another attempt is better off without them.
        counted: By client in the aggregate the round whose model its update is based on; ``None``:
            all who reported, and this round.
    """

    aggregate: Aggregate | None
    participations: Participations
    duration_s: float
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    kept: Kept = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    flight: Flight = ()
    durations: Durations = ()
    culprits: frozenset[ClientId] = frozenset()
    counted: Mapping[ClientId, int] | None = None

    def count(self, status: Status) -> int:
        """Return how many clients ended with ``status``."""
        return self.participations.num(status)


class Collector(Protocol):
    """Sends a round's model to clients and combines their updates into one aggregate."""

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""

    def collect(
        self, flight: Flight, requests: Mapping[int, RoundRequest], *, round_num: int, draw: Draw
    ) -> Collected:
        """Collect one attempt at a round. A client's failure is data, never raised.

        Args:
            flight: Clients in flight when the round opens; none in a synchronous round.
            requests: The request of this round, and those that clients in flight were sent, by
                round.
            round_num: Index, from 0.
            draw: Draws the clients to ask.

        Returns:
            Who took part, and the clients in flight after the round. There is no aggregate if too
            few reported.
        """


class ChannelCollector(Collector, Protocol):
    """Collects over a channel, where clients may work on a task from one round to another."""

    def busy(self) -> frozenset[ClientId]:
        """Return the clients that have a task between two rounds."""

    def close(self) -> None:
        """End all tasks: the run is done."""


def draw_cohort(policy: StragglerPolicy, request: RoundRequest, draw: Draw) -> Sequence[ClientId]:
    """Draw the cohort of one attempt at a synchronous round."""
    return draw(
        policy.num_asked,
        round_num=request.round_num,
        attempt=request.attempt,
        busy=frozenset(),
    )


def collect_from(
    collector: Collector, cohort: Sequence[ClientId], request: RoundRequest
) -> Collected:
    """Collect one attempt at a synchronous round from a given cohort."""
    return collector.collect(
        (), {request.round_num: request}, round_num=request.round_num, draw=lambda *_, **__: cohort
    )
