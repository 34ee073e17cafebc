"""What simulated clients keep from one of their rounds to the next: their momentum.

A deployed client keeps its state on its own disk; a simulation keeps it for all clients
that have ever trained, and no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.local import LocalSgd
from fedlearn.core.params import Params
from fedlearn.simulation.cluster import Cluster


@dataclass
class KeptVelocities:
    """The velocities of the clients that have trained, by client id: shape [Q] each.

    Attributes:
        by_client: The velocities.
    """

    by_client: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, client_ids: NDArray[np.int64], params: Params, local: LocalSgd) -> Tensor | None:
        """Return the clients' velocities as rows, zero where there is none yet: [K, Q].

        ``None`` where the update rule keeps nothing.
        """
        if not local.keep_momentum:
            return None
        zero = params.vector.new_zeros(params.layout.num_trainable)
        return torch.stack([self.by_client.get(int(c), zero) for c in client_ids])

    def keep(
        self,
        client_ids: NDArray[np.int64],
        velocity_KQ: Tensor | None,
        *,
        rows: NDArray[np.bool_],
    ) -> None:
        """Take the velocities of clients that have trained.

        Args:
            client_ids: Whose: shape [n].
            velocity_KQ: The velocities of a block; ``None`` if nothing is kept.
            rows: Which of its rows are theirs, in order: n true ones of K. A client that
                diverged keeps what it had.
        """
        if velocity_KQ is not None:
            kept = velocity_KQ[torch.from_numpy(rows)].unbind(0)
            self.by_client |= dict(zip(client_ids.tolist(), kept, strict=True))

    def share(
        self,
        client_ids: NDArray[np.int64],
        params: Params,
        cluster: Cluster,
        *,
        mine: NDArray[np.int64],
    ) -> None:
        """Give every worker the velocities that any worker has just computed.

        Another worker may train the same client in a later round.

        Args:
            client_ids: The clients that were trained, on any worker.
            params: The global model.
            cluster: The workers.
            mine: Indices into ``client_ids`` of those trained here.
        """
        if cluster.world_size == 1:
            return
        rows = params.vector.new_zeros(len(client_ids), params.layout.num_trainable)
        for index in mine.tolist():
            velocity = self.by_client.get(int(client_ids[index]))
            if velocity is not None:
                rows[index] = velocity
        cluster.all_reduce([rows])
        self.keep(client_ids, rows, rows=np.ones(len(client_ids), np.bool_))

    def tensors(self) -> Mapping[str, Tensor]:
        """Return everything kept, for a checkpoint."""
        if not self.by_client:
            return {}
        return {
            "ids": torch.tensor(list(self.by_client)),
            "velocity": torch.stack(list(self.by_client.values())),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`tensors` returned."""
        self.by_client.clear()
        if tensors:
            rows = tensors["velocity"].unbind(0)
            self.by_client |= dict(zip(tensors["ids"].tolist(), rows, strict=True))
