"""Which run a Flower run is, for the coordinator and for clients that try it out.

What ``flwr run`` is given (``[tool.flwr.app.config]`` and ``--run-config``): ``config``,
``overrides``, ``num-rounds``, ``min-clients`` and ``patience-s``, as ``server/flower/README.md``
explains them.
"""

from pathlib import Path

import torch

from fedlearn.config import Config, load
from fedlearn.core.messages import Settings
from fedlearn.deployment.part import part_trainer
from fedlearn.errors import ConfigError
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.transport.flower import Node


def configuration(run_config: Settings, folder: Path) -> Config:
    """Return the configuration that a Flower run names.

    Raises:
        ConfigError: It is missing or wrong.
    """
    name, overrides = run_config.get("config"), run_config.get("overrides", "")
    if not isinstance(name, str) or not isinstance(overrides, str):
        raise ConfigError(
            f"config is {name!r} and overrides is {overrides!r} in the run's configuration; "
            "both are texts: a TOML file in the app's folder, and a.b=value;c=value"
        )
    laid_over = [text for text in overrides.split(";") if text.strip()]
    if num_rounds := number(run_config, "num-rounds"):
        laid_over.append(f"num_rounds={num_rounds}")
    return load(folder / name, overrides=laid_over)


def number(run_config: Settings, name: str) -> int:
    """Return a whole number of the run's settings, 0 where there is none.

    Raises:
        ConfigError: It is something else.
    """
    value = run_config.get(name, 0)
    if type(value) is not int or value < 0:
        raise ConfigError(f"{name} is {value!r} in the run's configuration; it is a number >= 0")
    return value


def partition_trainer(node: Node, folder: Path) -> TorchTrainer:
    """Return :func:`~fedlearn.deployment.part.part_trainer` of the run's configuration."""
    torch.set_num_threads(1)  # sums as in a simulation, whatever the number of cores
    return part_trainer(configuration(node.run_config, folder), node.client_id)
