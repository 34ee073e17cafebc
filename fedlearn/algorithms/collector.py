"""The collector interface: sends a round's model to clients and returns their aggregate.

One :class:`Collector` talks to client sessions over a channel; another, the simulation engine,
trains blocks of clients. The round loop does not know which one it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from fedlearn.algorithms.client_state import ClientStates
from fedlearn.algorithms.compression import Parts, count_delta_bytes, restore_sum
from fedlearn.algorithms.download_compression import compress_model
from fedlearn.algorithms.lanes import DELTA, Aggregate, Lanes, TrainMetrics
from fedlearn.algorithms.late_updates import Durations
from fedlearn.algorithms.local import names_sent_once
from fedlearn.algorithms.pending_tasks import Draw, PendingTasks
from fedlearn.algorithms.settings import compressor_settings, settings_of
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.messages import ClientId, CompressedModel, TrainRequest
from fedlearn.core.params import Layout, Params
from fedlearn.core.participations import Participations, Status
from fedlearn.core.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """The work that a round asks of its cohort.

    Attributes:
        round_num: Round index, from 0.
        attempt: Retry number of the round, starting at 0.
        params: The model from which clients train: the global one, or what they restore of it if
            the strategy compresses it (:meth:`compress`).
        strategy: The federated algorithm.
        broadcast: Vectors that the strategy broadcasts together with the model.
        seed: Public seed of client-side randomness.
        client_states: Client state, for a collector that simulates the clients.
        durations: Clients' durations in the last rounds, if the deadline adapts to them.
        counted: See :class:`~fedlearn.core.messages.TrainRequest`.
        parts: The trained part of ``params`` as it is sent; empty: whole.
    """

    round_num: int
    attempt: int
    params: Params
    strategy: Strategy
    broadcast: Lanes
    seed: int
    client_states: ClientStates = field(default_factory=dict)
    durations: Durations = ()
    counted: Mapping[ClientId, int] | None = None
    parts: Parts = field(default_factory=dict)

    def compress(self) -> Self:
        """Return the request with its model compressed, if the strategy says so."""
        compressor, seed = self.strategy.download, Seed(self.seed)
        if compressor is None:
            return self
        params, parts = compress_model(self.params, compressor, seed=seed, round_num=self.round_num)
        return replace(self, params=params, parts=parts)

    def message(self) -> TrainRequest:
        """Build the message for clients that use the strategy's own local update."""
        return TrainRequest(
            round_num=self.round_num,
            attempt=self.attempt,
            tensors=self.params.to_tensors(),
            order=tuple(spec.name for spec in self.params.layout.specs),
            settings=settings_of(self.strategy.local, self.strategy.transforms),
            seed=self.seed,
            broadcast=self.broadcast,
            num_statistics=len(self.params.layout.statistics),
            counted=self.counted,
            local=self.params.local,
            sent_once=names_sent_once(self.strategy.broadcasts),
            compressed=self._describe_compressed(),
        )

    def _describe_compressed(self) -> CompressedModel | None:
        compressor, trainable = self.strategy.download, self.params.layout.trainable
        if compressor is None:
            return None
        return CompressedModel(
            settings=compressor_settings(compressor),
            parts=self.parts,
            shapes=self.params.layout.trainable_shapes,
            dtypes=[spec.dtype for spec in trainable],
        )

    def messages(self, cohort: Sequence[ClientId]) -> dict[ClientId, TrainRequest]:
        """Build the message for each client of a cohort.

        Clients with the same local update share one message object. Its ``counted`` lists clients
        of this cohort only.
        """
        usual, transforms = self.message(), self.strategy.transforms
        if self.counted is not None:
            # Clients need only their own entry; the whole population's would travel with every
            # request.
            mine = {each: self.counted[each] for each in cohort if each in self.counted}
            usual = replace(usual, counted=mine)
        known = [(self.strategy.local, usual)]
        found = dict[ClientId, TrainRequest]()
        for client_id, local in zip(cohort, self.strategy.locals_for(cohort), strict=True):
            # Compare, do not hash: a custom local update need not be hashable.
            same = next((message for each, message in known if each == local), None)
            if same is None:
                same = replace(usual, settings=settings_of(local, transforms))
                known.append((local, same))
            found[client_id] = same
        return found

    def restore_sum(self, aggregate: Aggregate) -> Aggregate:
        """Restore the delta of an aggregate of compressed updates, as a secure sum gives it."""
        layout = self.params.layout
        delta = restore_sum(
            aggregate.lanes[DELTA.name],
            self.strategy.transforms,
            round_num=self.round_num,
            shapes=layout.trainable_shapes,
            num_statistics=layout.size - layout.num_trainable,
            seed=Seed(self.seed),
        )
        return replace(aggregate, lanes={**aggregate.lanes, DELTA.name: delta})

    @property
    def download_bytes(self) -> int:
        """Size of the broadcast to one client: the model and the strategy's vectors.

        Without what a client is sent once, as in :attr:`~fedlearn.core.params.Params.num_bytes`.
        """
        model = self.params.num_bytes
        if self.parts:
            trainable = self.params.layout.trainable
            model -= sum(spec.size * spec.dtype.itemsize for spec in trainable)
        once = names_sent_once(self.strategy.broadcasts)
        sent = [vector for name, vector in self.broadcast.items() if name not in once]
        return model + sum(each.nbytes for each in (*self.parts.values(), *sent))

    @property
    def upload_bytes(self) -> int:
        """Size of one client's update: the model's delta, as it is sent, and the other lanes."""
        layout = self.params.layout
        delta = count_delta_bytes(
            self.strategy.transforms,
            layout.trainable_shapes,
            num_statistics=layout.size - layout.num_trainable,
            dtype=layout.dtype,
        )
        return delta + further_bytes(self.strategy, layout)


def further_bytes(strategy: Strategy, layout: Layout) -> int:
    """Return the size of the lanes in an update other than the model's delta."""
    further = [lane.size(layout) for lane in strategy.lanes if lane is not DELTA]
    return sum(further) * layout.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class GlobalModel:
    """The global model between two rounds, as evaluators receive it.

    Attributes:
        params: The model.
        round_num: Number of finished rounds.
        client_states: Client state, in a process that simulates the clients.
        counted: See :class:`~fedlearn.core.messages.TrainRequest`; empty if clients keep nothing.
        sent_once: See :class:`~fedlearn.core.messages.EvaluateRequest`.
    """

    params: Params
    round_num: int
    client_states: ClientStates = field(default_factory=dict)
    counted: Mapping[ClientId, int] = field(default_factory=dict)
    sent_once: Lanes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CollectedRound:
    """The outcome of one attempt at a round, as its collector returns it.

    Attributes:
        aggregate: Aggregate of the reports; ``None`` if there were fewer than the policy's minimum,
            so that nothing is released.
        participations: One for each client asked, in order of arrival.
        duration_s: Seconds from the broadcast to the close of the round.
        train_metrics: Training metrics of the clients other than the loss, by the clients' own
            names: means over the reports, weighted by examples. A secure sum has no lane for them.
        client_states: Client state after the round; empty over a channel, where clients store it
            themselves.
        staleness: Number of updates in the aggregate by staleness, for an asynchronous or
            semi-synchronous round.
        pending: Pending tasks at the close of such a round.
        durations: Clients' durations in the last rounds, if the deadline adapts to them.
        culprits: Clients that caused the failure to release anything; a retry should leave them
            out.
        counted: For each client in the aggregate, the round whose model its update is based on;
            ``None``: all clients that reported, each based on this round's model.
        dropouts: Number of clients lost by stage of secure aggregation, including those that were
            lost after their update had arrived; empty in other rounds.
    """

    aggregate: Aggregate | None
    participations: Participations
    duration_s: float
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    client_states: ClientStates = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    pending: PendingTasks = ()
    durations: Durations = ()
    culprits: frozenset[ClientId] = frozenset()
    counted: Mapping[ClientId, int] | None = None
    dropouts: Mapping[str, int] = field(default_factory=dict)

    def train(self) -> TrainMetrics:
        """Return the mean loss and the number of examples of the reports."""
        rows = self.participations
        return TrainMetrics(loss=rows.mean_loss(), num_examples=int(rows.num_examples.sum()))

    def count(self, status: Status) -> int:
        """Return how many clients ended with ``status``."""
        return self.participations.num(status)


class Collector(Protocol):
    """Sends a round's model to clients and combines their updates into one aggregate."""

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""

    def collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        """Collect one attempt at a round. A client's failure is data, never raised.

        Args:
            pending: Pending tasks when the round opens; none in a synchronous round.
            requests: By round, this round's request and those that the pending tasks belong to.
            round_num: Round index, from 0.
            draw: Draws the clients to ask.

        Returns:
            The outcome, with the tasks that are still pending. There is no aggregate if too few
            clients reported.
        """


class ChannelCollector(Collector, Protocol):
    """Collects over a channel, where clients may work on a task from one round to another."""

    def busy(self) -> frozenset[ClientId]:
        """Return the clients that still have a task between two rounds."""

    def close(self) -> None:
        """Cancel all tasks at the end of the run."""


def draw_cohort(policy: StragglerPolicy, request: RoundRequest, draw: Draw) -> Sequence[ClientId]:
    """Draw the cohort of one attempt at a synchronous round."""
    return draw(
        policy.cohort_size,
        round_num=request.round_num,
        attempt=request.attempt,
        busy=frozenset(),
    )


def collect_from(
    collector: Collector, cohort: Sequence[ClientId], request: RoundRequest
) -> CollectedRound:
    """Collect one attempt at a synchronous round from a given cohort."""
    return collector.collect(
        (), {request.round_num: request}, round_num=request.round_num, draw=lambda *_, **__: cohort
    )
