"""A trainer on one part of a configuration's data, to try things out.

Where all clients hold the same public data set: to see a deployment do what the simulation of
the same file does. A real client brings data of its own.
"""

import os

import numpy as np
import torch

from fedlearn import build
from fedlearn.config import Config, resolve_addresses
from fedlearn.core.messages import ClientId
from fedlearn.errors import DataError
from fedlearn.training.torch_trainer import TorchTrainer


def part_trainer(config: Config, client_id: ClientId) -> TorchTrainer:
    """Return the trainer of one client of ``config``'s population.

    Raises:
        ConfigError: The configuration is wrong.
        DataError: There is no such part.
    """
    data_dir = resolve_addresses(config, environ=os.environ).data_dir
    data = build.federated_data(config, data_dir=data_dir)
    num_parts = data.population.num_clients
    if client_id >= num_parts:
        raise DataError(
            f"client {client_id} of {num_parts}: there are more clients than parts; raise "
            "data.partition.num_clients"
        )
    rows = data.population.load(np.asarray([client_id]))
    index = torch.from_numpy(rows.rows)
    return TorchTrainer.of(
        build.model_factory(config, data),
        rows.features[index],
        rows.labels[index],
        objective=build.objective(config.loss),
        device="cpu",
    )
