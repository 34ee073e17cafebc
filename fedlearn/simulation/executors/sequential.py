"""One client after another on one resident model: always possible, and the reference."""

import numpy as np
import torch
from torch import Tensor

from fedlearn.client.resident import ResidentModel
from fedlearn.core.params import Layout
from fedlearn.simulation.executors.base import Trained, Work

#: Bytes of deltas that are summed up together: they are read again while still in the cache.
_CACHE_BYTES = 2 << 20
#: From here on more clients at once save nothing.
_LARGEST_BLOCK = 64


def preferred_block(layout: Layout) -> int:
    """Return how many clients to train before their deltas are summed up, >= 2.

    Example:
        >>> preferred_block(Layout.of(torch.nn.Linear(784, 200)))
        3
    """
    return min(_LARGEST_BLOCK, max(2, _CACHE_BYTES // (layout.dtype.itemsize * layout.size)))


class SequentialExecutor:
    """Trains the clients of a block in turn.

    Args:
        model: The model that stays in memory.
    """

    def __init__(self, model: ResidentModel) -> None:
        self._model = model
        self._deltas_KP = torch.empty(0, model.layout.size, dtype=model.layout.dtype)

    def train(self, work: Work) -> Trained:
        """Return the clients' deltas and losses."""
        num_clients, global_P = len(work.client_ids), work.params.vector
        if len(self._deltas_KP) < num_clients or self._deltas_KP.device != global_P.device:
            self._deltas_KP = global_P.new_empty(num_clients, len(global_P))
        losses_K = np.empty(num_clients)
        kept = []
        for client in range(num_clients):
            velocity = self._velocity(work, client)
            losses_K[client] = self._model.train(
                work.params,
                work.features,
                work.labels,
                _batches(work, client),
                local=work.local,
                velocity=velocity,
                seed=work.client_seed(client),
            )
            torch.sub(self._model.vector_P, global_P, out=self._deltas_KP[client])
            if work.velocity_KQ is not None:
                kept.append(torch.cat([value.flatten() for value in velocity]))
        return Trained(
            deltas_KP=self._deltas_KP[:num_clients],
            losses_K=losses_K,
            velocity_KQ=torch.stack(kept) if kept else None,
        )

    def _velocity(self, work: Work, client: int) -> list[Tensor]:
        if not work.local.momentum:
            return []
        velocity = self._model.new_velocity()
        if work.velocity_KQ is not None:
            parts = torch.split(work.velocity_KQ[client], [value.numel() for value in velocity])
            for value, part in zip(velocity, parts, strict=True):
                value.copy_(part.view_as(value))
        return velocity


def _batches(work: Work, client: int) -> list[Tensor]:
    counts = work.schedule.counts_TK[:, client]
    rows_TB = work.schedule.rows_TKB[:, client]
    return [rows_TB[step, :count] for step, count in enumerate(counts.tolist()) if count]
