"""The trainer of a demo's client: its share of the data that the configuration divides."""

import os

import numpy as np
import torch

from fedlearn import build
from fedlearn.client.torch_trainer import TorchTrainer
from fedlearn.config import load, resolve_addresses

#: Environment variables that say which client this process is.
CONFIG, CLIENT = "FEDLEARN_DEMO_CONFIG", "FEDLEARN_DEMO_CLIENT"


def trainer() -> TorchTrainer:
    """Return the trainer of the client that the environment names."""
    config = load(os.environ[CONFIG], overrides=())
    data_dir = resolve_addresses(config, environ=os.environ).data_dir
    data = build.federated_data(config, data_dir=data_dir)
    rows = data.population.load(np.asarray([int(os.environ[CLIENT])]))
    index = torch.from_numpy(rows.rows)
    return TorchTrainer.of(
        build.model_factory(config, data),
        rows.features[index],
        rows.labels[index],
        objective=build.objective(config.loss),
        device="cpu",
    )
