"""A block of clients with everything an executor needs to train it."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.local import LocalSgd
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.simulation.executors.base import Work
from fedlearn.simulation.population import Population
from fedlearn.simulation.schedule import schedule


def work_of(
    population: Population,
    client_ids: NDArray[np.int64],
    *,
    params: Params,
    local: LocalSgd,
    round_num: int,
    seed: Seed,
    velocity_KQ: Tensor | None,
) -> Work:
    """Load the examples of some clients and schedule their batches.

    Args:
        population: Who has the examples.
        client_ids: Shape [K], those with most steps first.
        params: The global model; its device is where the block is trained.
        local: The update rule.
        round_num: Round index.
        seed: The run's.
        velocity_KQ: What the clients kept; ``None`` unless the rule keeps it.

    Raises:
        DataError: The examples of a client cannot be trained on.
    """
    rows, vector = population.load(client_ids), params.vector
    batches = schedule(
        local,
        rows,
        client_ids,
        round_num=round_num,
        seed=seed,
        dtype=vector.dtype,
        device=vector.device,
    )
    features, labels = rows.features.to(vector.device), rows.labels.to(vector.device)
    return Work(
        params=params,
        local=local,
        client_ids=client_ids,
        features=features,
        labels=labels,
        schedule=batches,
        round_num=round_num,
        seed=seed,
        velocity_KQ=velocity_KQ,
    )
