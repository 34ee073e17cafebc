"""The same simulation through real client sessions and the wire codec, in one process.

Slower than the engine and equal to it: what a deployment would compute, for parity and for
code that lives in sessions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedlearn.algorithms.local import LocalSgd
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, Failure, Request, TrainRequest, training_in
from fedlearn.core.randomness import Seed
from fedlearn.session.session import ClientSession
from fedlearn.simulation.behaviour import ClientBehaviour
from fedlearn.simulation.population import Population
from fedlearn.simulation.secure import SimulatedIdentities
from fedlearn.simulation.timeline import DROPPED_OUT
from fedlearn.training.local_data import TensorData
from fedlearn.training.resident import ResidentModel
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.transport.memory import Handler, MemoryChannel


def session_channel(
    population: Population,
    behaviour: ClientBehaviour,
    model: ResidentModel,
    *,
    identities: SimulatedIdentities | None = None,
) -> MemoryChannel:
    """Return a channel to one session per client of the population.

    Args:
        population: Who there is, and their examples.
        behaviour: How long their rounds take and which of them fail.
        model: What trains, one client at a time.
        identities: Who signs what in secure aggregation; ``None``: nobody takes part in it.
    """
    sessions = _Sessions(population, behaviour, model, identities)
    return MemoryChannel(sessions, sessions.latency_s, VirtualClock())


@dataclass(frozen=True)
class _Sessions(Mapping[ClientId, Handler]):
    """A handler per client, made when it is asked: idle clients cost nothing."""

    population: Population
    behaviour: ClientBehaviour
    model: ResidentModel
    identities: SimulatedIdentities | None

    def __len__(self) -> int:
        return self.population.num_clients

    def __iter__(self) -> Iterator[ClientId]:
        return (ClientId(client_id) for client_id in range(len(self)))

    def __getitem__(self, client_id: ClientId) -> Handler:
        return lambda data, state: self._handle(client_id, data, state)

    def latency_s(self, clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
        """Return when the replies arrive: at once for what is not training."""
        train = training_in(request)
        if train is None:
            return np.zeros(len(clients))
        client_ids = np.asarray(clients, np.int64)
        local = LocalSgd.from_settings(train.settings)
        num_bytes = sum(t.numel() * t.element_size() for t in train.tensors.values())
        return self.behaviour.durations_s(
            client_ids,
            round_num=train.round_num,
            attempt=train.attempt,
            num_examples_processed=self.population.num_examples(client_ids) * local.epochs,
            download_bytes=num_bytes,
            upload_bytes=num_bytes,
            seed=Seed(train.seed),
        )

    def _handle(self, client_id: ClientId, data: bytes, state: bytes) -> tuple[bytes, bytes]:
        train = training_in(decode(data))
        if train is not None and self._drops(client_id, train):
            return encode(Failure(DROPPED_OUT)), state
        rows = self.population.load(np.asarray([client_id]))
        index = torch.from_numpy(rows.rows)
        device = self.model.vector_P.device
        examples = TensorData(rows.features[index], rows.labels[index], device=device)
        trainer = TorchTrainer(self.model, examples)
        secure = None if self.identities is None else self.identities.client(client_id)
        return ClientSession(client_id, trainer, secure).handle(data, state)

    def _drops(self, client_id: ClientId, request: TrainRequest) -> bool:
        drops = self.behaviour.failures(
            np.asarray([client_id]),
            round_num=request.round_num,
            attempt=request.attempt,
            seed=Seed(request.seed),
        )
        return bool(drops[0])
