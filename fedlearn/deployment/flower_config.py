"""Read fedlearn's configuration from a Flower run, for the coordinator and for trial clients.

The run configuration (``[tool.flwr.app.config]`` and ``flwr run --run-config``) has the keys
``config``, ``overrides``, ``num-rounds``, ``min-clients`` and ``patience-s``, which
``server/flower/README.md`` explains.
"""

from pathlib import Path

import torch

from fedlearn.config import Config, load
from fedlearn.core.messages import Settings
from fedlearn.deployment.part import make_part_trainer
from fedlearn.errors import ConfigError
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.transport.flower import Node


def load_configuration(run_config: Settings, folder: Path) -> Config:
    """Load the configuration file that a Flower run names, with the run's overrides.

    Raises:
        ConfigError: The file or an override is missing or invalid.
    """
    name, overrides = run_config.get("config"), run_config.get("overrides", "")
    if not isinstance(name, str) or not isinstance(overrides, str):
        raise ConfigError(
            f"config is {name!r} and overrides is {overrides!r} in the run's configuration; "
            "both must be strings: a TOML file in the app's folder, and a.b=value;c=value"
        )
    texts = [text for text in overrides.split(";") if text.strip()]
    if num_rounds := read_whole_number(run_config, "num-rounds"):
        texts.append(f"num_rounds={num_rounds}")
    return load(folder / name, overrides=texts)


def read_whole_number(run_config: Settings, name: str) -> int:
    """Read a whole number >= 0 from the run's settings; 0 if the key is missing.

    Raises:
        ConfigError: The value is something else.
    """
    value = run_config.get(name, 0)
    if type(value) is not int or value < 0:
        raise ConfigError(f"{name} is {value!r} in the run's configuration; give a number >= 0")
    return value


def make_partition_trainer(node: Node, folder: Path) -> TorchTrainer:
    """Build the trainer of a node's client: see :mod:`fedlearn.deployment.part`."""
    # The order of a floating-point sum depends on the number of threads; a simulation uses one.
    torch.set_num_threads(1)
    return make_part_trainer(load_configuration(node.run_config, folder), node.client_id)
