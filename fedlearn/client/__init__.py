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
    from fedlearn.client.torch_trainer import TorchTrainer
    from fedlearn.client.trainer import (
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
    "Agent": "agent",
    "Conditions": "conditions",
    "LocalEvaluation": "trainer",
    "LocalResult": "trainer",
    "LocalTrainer": "trainer",
    "Policy": "policy",
    "SecureAggregationPolicy": "policy",
    "TaskControl": "trainer",
    "TorchTrainer": "torch_trainer",
    "TrainContext": "trainer",
}


def __getattr__(name: str) -> Any:  # Any: the type of a name is declared above
    if name in _HOME:
        return getattr(importlib.import_module(f"fedlearn.client.{_HOME[name]}"), name)
    raise AttributeError(f"module 'fedlearn.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
