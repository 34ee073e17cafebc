"""The trainer of a demo's client: its share of the data that the configuration divides."""

import os

from fedlearn.config import load
from fedlearn.core.messages import ClientId
from fedlearn.deployment.part import part_trainer
from fedlearn.training.torch_trainer import TorchTrainer

#: Environment variables that say which client this process is.
CONFIG, CLIENT = "FEDLEARN_DEMO_CONFIG", "FEDLEARN_DEMO_CLIENT"


def trainer() -> TorchTrainer:
    """Return the trainer of the client that the environment names."""
    config = load(os.environ[CONFIG], overrides=())
    return part_trainer(config, ClientId(int(os.environ[CLIENT])))
