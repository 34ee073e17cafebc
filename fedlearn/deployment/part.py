"""Train on one part of a configuration's data, so that a deployment matches its simulation.

This is for trying things out; a real client brings its own data.
"""

import os
from typing import Any

import numpy as np
from torch.utils.data import Subset

from fedlearn import assembly
from fedlearn.config import Config, load, resolve_addresses
from fedlearn.core.features import Features
from fedlearn.core.messages import ClientId
from fedlearn.errors import DataError
from fedlearn.simulation.population import unread_rows
from fedlearn.training.torch_trainer import Pairs, TorchTrainer

#: Environment variables that tell this process which client of a demo it is.
CONFIG, CLIENT = "FEDLEARN_DEMO_CONFIG", "FEDLEARN_DEMO_CLIENT"


def trainer() -> TorchTrainer:
    """Build the trainer of the client named by the environment, for ``fedlearn join --task``."""
    config = load(os.environ[CONFIG], overrides=())
    return make_part_trainer(config, ClientId(int(os.environ[CLIENT])))


def make_part_trainer(config: Config, client_id: ClientId) -> TorchTrainer:
    """Build the trainer of one client of ``config``'s population.

    Raises:
        DataError: The population has fewer clients.
    """
    data_dir = resolve_addresses(config, environ=os.environ).data_dir
    data = config.data.load_clients(seed=config.seed, data_dir=data_dir)
    num_parts = data.population.num_clients
    if client_id >= num_parts:
        raise DataError(
            f"there is no part {client_id}: the data have {num_parts} parts, from 0; raise "
            "data.partition.num_clients"
        )
    client_ids = np.asarray([client_id])
    unread = unread_rows(data.population, client_ids)
    examples: Features | Pairs
    if unread is None:
        examples, labels = data.population.load(client_ids).gather()
    else:
        dataset: Any = unread.dataset  # a map-style dataset, of torch's class or not
        examples, labels = Subset(dataset, unread.rows.tolist()), None
    return TorchTrainer.of(
        assembly.build_model_factory(config, data),
        examples,
        labels,
        objective=config.loss.build(),
        metrics=assembly.build_metrics(config.metrics),
        device="cpu",
    )
