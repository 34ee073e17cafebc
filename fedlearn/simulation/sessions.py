"""Simulation through real client sessions and the wire codec, in one process.

It is slower than the engine and gives the same results. It serves to check that they agree, and to
run code that exists only in sessions.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.client_state import ClientStates, replace_states
from fedlearn.algorithms.collector import CollectedRound, Collector, RoundRequest
from fedlearn.algorithms.compression import count_delta_bytes
from fedlearn.algorithms.download_compression import restore_model
from fedlearn.algorithms.local import LocalUpdate, LocalWork
from fedlearn.algorithms.pending_tasks import Draw, PendingTasks
from fedlearn.algorithms.settings import transforms_from
from fedlearn.algorithms.transforms import Transform
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import encode, peek
from fedlearn.core.features import Features, cast_for_trainer
from fedlearn.core.messages import (
    ClientId,
    Failure,
    Reply,
    Request,
    SecureTrainRequest,
    TrainRequest,
)
from fedlearn.core.params import choose_delta_dtype
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.secagg.terms import Contribution
from fedlearn.session.faults import describe_failure, is_failure
from fedlearn.session.secure import SessionState
from fedlearn.session.session import ClientSession
from fedlearn.simulation.behavior import ClientBehavior, DeviceRound
from fedlearn.simulation.executors.trainers import MakeTrainer
from fedlearn.simulation.pooled import PooledExamples, Subpopulation
from fedlearn.simulation.population import Population, unread_rows
from fedlearn.simulation.schedule import rows_of_round
from fedlearn.simulation.secure import SimulatedIdentities
from fedlearn.simulation.virtual_round import DROPPED_OUT
from fedlearn.training.local_data import LocalData, TensorData
from fedlearn.training.resident import ResidentModel
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalTrainer, require_trainer
from fedlearn.transport.memory import Handler, MemoryChannel

#: Settings that determine the amount of a client's work.
_AMOUNTS = {"epochs", "batch_size", "drop_last", "max_steps"}


@dataclass(frozen=True, kw_only=True)
class ResidentTrainers:
    """Makes fedlearn's own trainer for each client; all share one model in memory.

    Attributes:
        model: The shared model.
        local_updates: As for :class:`~fedlearn.training.torch_trainer.TorchTrainer`.
    """

    model: ResidentModel
    local_updates: Collection[type[LocalUpdate]] = ()

    def __call__(self, features: Features, labels: Tensor) -> LocalTrainer:
        """Make the trainer of a client with these examples."""
        return self.reading(self.hold(features, labels))

    def hold(self, features: Features, labels: Tensor) -> LocalData:
        """Return examples in memory, on the model's device."""
        return TensorData(features, labels, device=self.model.device)

    def reading(self, data: LocalData, *, test: LocalData | None = None) -> LocalTrainer:
        """Make the trainer of a client that reads its examples in batches."""
        return TorchTrainer(self.model, data, test=test, local_updates=self.local_updates)


def trainers_on(
    model: ResidentModel, *, local_updates: Collection[type[LocalUpdate]] = ()
) -> ResidentTrainers:
    """Create a factory of fedlearn's own trainers that all share one model in memory."""
    return ResidentTrainers(model=model, local_updates=local_updates)


class AboveBounds(NamedTuple):
    """Whether a client's contribution to a secure sum exceeded its bounds.

    Attributes:
        is_clipped: Whether a vector was clipped.
        is_capped: Whether the loss or the number of examples was capped.
    """

    is_clipped: bool
    is_capped: bool


@dataclass(frozen=True)
class SimulatedSessions(Mapping[ClientId, Handler]):
    """A session for each client, created for each request, so that idle clients cost nothing.

    Attributes:
        population: The clients and their examples.
        behavior: Model of the clients' devices: durations and failures.
        make_trainer: Makes the trainer of a client, from its features and labels.
        work: A client's work, unless the request's settings say otherwise.
        further_bytes: Size of a client's upload in addition to the model's delta.
        masked_bytes: Size of a client's upload in secure aggregation; ``None``: it is not used.
        identities: Keys of the clients for secure aggregation; ``None``: it is not used.
        transforms: Classes of custom transforms, which all clients know.
        dtype: The model's dtype.
        client_tests: The clients with the examples that they are evaluated on, if their trainers
            are fedlearn's; ``None``: on those that they train on.
        bounded: Which clients' contributions to secure sums exceeded their bounds, since this was
            last cleared. A real coordinator cannot know this.
    """

    population: Population
    behavior: ClientBehavior
    make_trainer: MakeTrainer
    _: KW_ONLY
    work: LocalWork
    further_bytes: int = 0
    masked_bytes: int | None = None
    identities: SimulatedIdentities | None = None
    transforms: Collection[type[Transform]] = ()
    dtype: torch.dtype = torch.float32
    client_tests: Population | None = None
    bounded: dict[ClientId, AboveBounds] = field(default_factory=dict)

    def channel(self) -> MemoryChannel:
        """Create a channel to these sessions, in virtual time."""
        return MemoryChannel(self, self.latency_s, VirtualClock())

    def __len__(self) -> int:
        return self.population.num_clients

    def __iter__(self) -> Iterator[ClientId]:
        return (ClientId(client_id) for client_id in range(len(self)))

    def __getitem__(self, client_id: ClientId) -> Handler:
        return lambda data, state: self._handle(client_id, data, state)

    def latency_s(self, clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
        """Return the seconds until each reply arrives: shape [B]; 0 unless it is training."""
        train = _training(request)
        if train is None:
            return np.zeros(len(clients))
        return self.behavior.durations_s(self._describe_device_round(clients, train))

    def _handle(self, client_id: ClientId, data: bytes, state: bytes) -> tuple[bytes, bytes]:
        train = _training(peek(data))
        if train is not None:
            train = restore_model(train, known=self.transforms)
        if (
            train is not None
            and self.behavior.failures(self._describe_device_round([client_id], train))[0]
        ):
            return encode(Failure(DROPPED_OUT)), state
        try:
            trainer = self._trainer(client_id, train)
        except BaseException as error:  # a client boundary: custom code raises anything
            if not is_failure(error):
                raise
            return encode(Failure(describe_failure(error))), state
        secure = None if self.identities is None else self.identities.client(client_id)
        session = ClientSession(
            client_id,
            trainer,
            secure,
            transforms=self.transforms,
            on_bounded=partial(self._note_bounded, client_id),
            reason_of=describe_failure,
        )
        return session.handle(data, state)

    def _trainer(self, client_id: ClientId, train: TrainRequest | None) -> LocalTrainer:
        """Make the trainer of a client; ``train`` is the training request, or ``None``."""
        client_ids = np.asarray([client_id])
        trainers, tests = self.make_trainer, self.client_tests
        if isinstance(trainers, ResidentTrainers):
            # A training request needs no tests.
            test = None if train or tests is None else self._read(tests, client_ids, trainers)
            if unread_rows(self.population, client_ids) is not None or test is not None:
                return trainers.reading(
                    self._read(self.population, client_ids, trainers), test=test
                )
        if train is None:
            rows = self.population.load(client_ids)
        else:
            rows = rows_of_round(
                self.population, client_id, round_num=train.round_num, seed=Seed(train.seed)
            )
        features, labels = rows.gather()
        if isinstance(trainers, ResidentTrainers):
            return trainers(features, labels)
        return require_trainer(trainers(cast_for_trainer(features, self.dtype), labels))

    @staticmethod
    def _read(
        population: Population, client_ids: NDArray[np.int64], trainers: ResidentTrainers
    ) -> LocalData:
        """Return a client's examples, read in batches if a dataset reads them."""
        if unread_rows(population, client_ids) is None:
            return trainers.hold(*population.load(client_ids).gather())
        # As a deployed client does: each batch's key seeds its random draws.
        return PooledExamples(Subpopulation(population, client_ids), trainers.model.device)

    def _note_bounded(self, client_id: ClientId, contribution: Contribution) -> None:
        self.bounded[client_id] = AboveBounds(bool(contribution.clipped), bool(contribution.capped))

    def _describe_device_round(
        self, clients: Sequence[ClientId], train: TrainRequest
    ) -> DeviceRound:
        client_ids = np.asarray(clients, np.int64)
        # The request says how much a client trains, as in the engine.
        amounts: dict[str, Any] = {n: each for n, each in train.settings.items() if n in _AMOUNTS}
        work = replace(self.work, **amounts)
        parts = {} if train.compressed is None else train.compressed.parts
        broadcast = [each for name, each in train.broadcast.items() if name not in train.sent_once]
        sent = (*train.sent_tensors.values(), *parts.values(), *broadcast)
        return DeviceRound(
            client_ids=client_ids,
            round_num=train.round_num,
            attempt=train.attempt,
            num_examples_processed=work.num_processed(self.population.num_examples(client_ids)),
            download_bytes=sum(each.nbytes for each in sent),
            upload_bytes=self._count_upload_bytes(train),
            seed=Seed(train.seed),
        )

    def _count_upload_bytes(self, train: TrainRequest) -> int:
        if self.masked_bytes is not None:
            return self.masked_bytes
        shapes, all_sizes = train.trained_shapes, [train.tensors[n].numel() for n in train.order]
        delta = count_delta_bytes(
            transforms_from(train.settings, known=self.transforms),
            shapes,
            num_statistics=sum(all_sizes[len(shapes) :]),
            dtype=choose_delta_dtype(train.tensors, train.order),
        )
        return delta + self.further_bytes


@dataclass(frozen=True)
class SessionStates:
    """Transfers client state between in-memory sessions and the run's state.

    As with the engine, the trainers' client state is part of the run's state.

    Attributes:
        channel: The channel to the sessions.
    """

    channel: MemoryChannel

    def restore(self, client_states: ClientStates) -> None:
        """Restore the client state of sessions that have not started in this process."""
        # A session that has run in this process is ahead of the run's state: do not overwrite it.
        for client_id in client_states.keys() - self.channel.states.keys():
            state = SessionState(trainer=client_states[client_id], session=None)
            self.channel.states[ClientId(client_id)] = state.to_bytes()

    def add_to(self, collected: CollectedRound, *, before: ClientStates) -> CollectedRound:
        """Add the new client state of the clients whose updates are in a round to its result.

        The other clients keep their previous state. Their sessions also restore it, once they
        learn that their update did not count.
        """
        rows = collected.participations
        counted = {each.client_id for each in rows if each.status is Status.REPORTED}
        states = {each: self.channel.states.get(each, b"") for each in counted}
        changes: ClientStates = {
            each: SessionState.of(state).trainer for each, state in states.items()
        }
        return replace(collected, client_states=replace_states(before, changes))


@dataclass(frozen=True, kw_only=True)
class SessionCollector:
    """A collector over in-memory sessions that also saves and restores their client state.

    Attributes:
        inner: The collector that runs the round.
        sessions: Access to the sessions' client state.
        bounded: As in :class:`SimulatedSessions`. ``None``: there is no secure sum, or clients add
            noise, so that counts must not be published without noise.
    """

    inner: Collector
    sessions: SessionStates
    bounded: dict[ClientId, AboveBounds] | None = None

    def available(self) -> Sequence[ClientId]:
        """Return the available clients of the inner collector."""
        return self.inner.available()

    def collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        """Run the round with the inner collector, and add the sessions' client state."""
        before = requests[round_num].client_states
        self.sessions.restore(before)
        if self.bounded is not None:
            self.bounded.clear()
        collected = self.inner.collect(pending, requests, round_num=round_num, draw=draw)
        return self.sessions.add_to(self._with_counts(collected), before=before)

    def _with_counts(self, collected: CollectedRound) -> CollectedRound:
        if self.bounded is None or collected.aggregate is None:
            return collected
        rows = [row for row in collected.participations if row.status is Status.REPORTED]
        found = [self.bounded[row.client_id] for row in rows if row.client_id in self.bounded]
        aggregate = replace(
            collected.aggregate,
            num_clipped=sum(each.is_clipped for each in found),
            num_capped=sum(each.is_capped for each in found),
        )
        return replace(collected, aggregate=aggregate)


def _training(request: Request | Reply) -> TrainRequest | None:
    train = request.train if isinstance(request, SecureTrainRequest) else request
    return train if isinstance(train, TrainRequest) else None
