"""The client: what someone with data implements, and what speaks for it to a coordinator.

The public names are imported when they are first used: diagnosing a connection does not
wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlearn.client.agent import Agent
    from fedlearn.client.conditions import Conditions
    from fedlearn.client.policy import Policy, SecureAggregationPolicy
    from fedlearn.training.torch_trainer import TorchTrainer
    from fedlearn.training.trainer import (
        LocalEvaluation,
        LocalResult,
        LocalTrainer,
        TaskControl,
        TrainContext,
    )

__all__ = [
    "Agent",
    "Conditions",
    "LocalEvaluation",
    "LocalResult",
    "LocalTrainer",
    "Policy",
    "SecureAggregationPolicy",
    "TaskControl",
    "TorchTrainer",
    "TrainContext",
]

_HOME = {
    "Agent": "client.agent",
    "Conditions": "client.conditions",
    "LocalEvaluation": "training.trainer",
    "LocalResult": "training.trainer",
    "LocalTrainer": "training.trainer",
    "Policy": "client.policy",
    "SecureAggregationPolicy": "client.policy",
    "TaskControl": "training.trainer",
    "TorchTrainer": "training.torch_trainer",
    "TrainContext": "training.trainer",
}


def __getattr__(name: str) -> Any:  # Any: the type of a name is declared above
    if name in _HOME:
        return getattr(importlib.import_module(f"fedlearn.{_HOME[name]}"), name)
    raise AttributeError(f"module 'fedlearn.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
