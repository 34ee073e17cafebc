"""Evaluation inside a simulation: pooled held-out examples, and client by client."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.distribution import distribution
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.simulation.cluster import Cluster
from fedlearn.simulation.population import Population
from fedlearn.training.resident import ResidentModel

#: Clients whose examples are held in memory at a time.
_CLIENTS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class CentralEvaluator:
    """Measures the model on examples that no client holds; the workers share them.

    Attributes:
        model: What computes.
        features: Shape [N, ...].
        labels: Shape [N, ...].
        batch_size: Examples at a time.
        cluster: The workers.
    """

    model: ResidentModel
    features: Tensor
    labels: Tensor
    batch_size: int
    cluster: Cluster

    def evaluate(self, params: Params, *, round_num: int) -> Mapping[str, float]:  # noqa: ARG002
        """Return the mean ``loss`` and the mean of each metric."""
        cut = np.linspace(0, len(self.labels), self.cluster.world_size + 1).astype(int)
        mine = slice(cut[self.cluster.rank], cut[self.cluster.rank + 1])
        values = self.model.measure(
            params, self.features[mine], self.labels[mine], batch_size=self.batch_size
        )
        sums = torch.stack([each.sum(dtype=torch.float64) for each in values.values()]).cpu()
        self.cluster.all_reduce([sums])
        means = (sums / len(self.labels)).tolist()
        return dict(zip(values, means, strict=True))


@dataclass(frozen=True, kw_only=True)
class ClientEvaluator:
    """Measures the model on the examples of a fixed sample of clients, one by one.

    Attributes:
        model: What computes.
        population: The clients.
        client_ids: Who is measured, the same every time: shape [n].
        batch_size: Examples at a time.
        cluster: The workers.
    """

    model: ResidentModel
    population: Population
    client_ids: NDArray[np.int64]
    batch_size: int
    cluster: Cluster

    def evaluate(self, params: Params, *, round_num: int) -> Mapping[str, float]:  # noqa: ARG002
        """Return how the loss and each metric are spread over the clients."""
        sample = self.client_ids
        cut = np.linspace(0, len(sample), self.cluster.world_size + 1).astype(int)
        begin, end = cut[self.cluster.rank], cut[self.cluster.rank + 1]
        per_client: dict[str, NDArray[np.float64]] = {}
        for start in range(begin, max(end, begin + 1), _CLIENTS_AT_ONCE):
            part = slice(start, min(end, start + _CLIENTS_AT_ONCE))
            for name, values in self._measure(params, sample[part]).items():
                per_client.setdefault(name, np.zeros(len(sample)))[part] = values
        shared = torch.from_numpy(np.stack(list(per_client.values())))
        self.cluster.all_reduce([shared])
        return distribution(dict(zip(per_client, shared.numpy(), strict=True)))

    def _measure(
        self, params: Params, client_ids: NDArray[np.int64]
    ) -> dict[str, NDArray[np.float64]]:
        rows = self.population.load(client_ids)
        index = torch.from_numpy(rows.rows).to(rows.features.device)
        features = rows.features.index_select(0, index).to(params.vector.device)
        labels = rows.labels.index_select(0, index).to(params.vector.device)
        values = self.model.measure(params, features, labels, batch_size=self.batch_size)
        owner = np.repeat(np.arange(len(client_ids)), np.diff(rows.offsets))
        return {
            name: np.bincount(owner, each.double().cpu().numpy(), minlength=len(client_ids))
            / np.diff(rows.offsets)
            for name, each in values.items()
        }


def evaluated_clients(population: int, num_clients: int, seed: Seed) -> NDArray[np.int64]:
    """Return the clients that are measured, the same in every round: shape [num_clients]."""
    rng = seed.derive("evaluated clients").numpy()
    return np.sort(rng.choice(population, num_clients, replace=False))
