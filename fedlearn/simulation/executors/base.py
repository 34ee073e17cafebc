"""What every executor is given and what it returns."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.local import LocalSgd
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.simulation.schedule import Schedule
from fedlearn.training.keyed_dropout import step_keys


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """A block of K clients to train.

    Attributes:
        params: The global model.
        local: The update rule.
        client_ids: Shape [K], those with most steps first.
        features: The examples' features, [N, ...]; the schedule says which rows.
        labels: The examples' labels, [N, ...].
        schedule: Batches.
        round_num: Round index.
        seed: The run's.
        velocity_KQ: The velocities that the clients kept, one row each over the trainable
            parameters; ``None`` unless the update rule keeps them.
    """

    params: Params
    local: LocalSgd
    client_ids: NDArray[np.int64]
    features: Tensor
    labels: Tensor
    schedule: Schedule
    round_num: int
    seed: Seed
    velocity_KQ: Tensor | None

    def step_keys(self) -> NDArray[np.int64]:
        """Return the key of the dropout masks of each client's step: shape [K, T]."""
        client_ids = self.client_ids.tolist()
        seeds = [self.seed.derive("masks", self.round_num, client) for client in client_ids]
        return step_keys(seeds, self.schedule.num_steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trained block.

    Attributes:
        deltas_KP: Local minus global, one row a client. Valid until the executor's next
            call, which may reuse the memory.
        losses_K: Mean training loss over each client's steps, float64.
        velocity_KQ: The velocities to keep; ``None`` unless the update rule keeps them.
    """

    deltas_KP: Tensor
    losses_K: NDArray[np.float64]
    velocity_KQ: Tensor | None


class Executor(Protocol):
    """Trains blocks of clients."""

    def train(self, work: Work) -> Trained:
        """Return the clients' deltas and losses."""
