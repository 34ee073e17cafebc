"""The client: the trainer interface to implement, and the agent that talks to a coordinator.

Public names are imported on first use, so that ``fedlearn`` can diagnose a connection without
waiting for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlearn.client.agent import Agent as Agent
    from fedlearn.client.backoff import Reconnection as Reconnection
    from fedlearn.client.bundle_policy import BundlePolicy as BundlePolicy
    from fedlearn.client.conditions import Conditions as Conditions
    from fedlearn.client.options import Connection as Connection
    from fedlearn.client.options import Resources as Resources
    from fedlearn.client.policy import ExtraPolicy as ExtraPolicy
    from fedlearn.client.policy import Policy as Policy
    from fedlearn.client.policy import PrivacyPolicy as PrivacyPolicy
    from fedlearn.client.policy import SecureAggregationPolicy as SecureAggregationPolicy
    from fedlearn.parallel.local_async import Hogwild as Hogwild
    from fedlearn.training.data_names import DataNames as DataNames
    from fedlearn.training.data_names import TableEncoding as TableEncoding
    from fedlearn.training.labels import number_labels as number_labels
    from fedlearn.training.query_trainer import QueryTrainer as QueryTrainer
    from fedlearn.training.site_table import read_examples as read_examples
    from fedlearn.training.table_trainer import TableTrainer as TableTrainer
    from fedlearn.training.torch_trainer import TorchTrainer as TorchTrainer
    from fedlearn.training.trainer import LocalEvaluation as LocalEvaluation
    from fedlearn.training.trainer import LocalResult as LocalResult
    from fedlearn.training.trainer import LocalTrainer as LocalTrainer
    from fedlearn.training.trainer import TaskControl as TaskControl
    from fedlearn.training.trainer import TrainContext as TrainContext

_HOME = {
    "client.agent": "Agent",
    "client.backoff": "Reconnection",
    "client.bundle_policy": "BundlePolicy",
    "client.conditions": "Conditions",
    "client.options": "Connection Resources",
    "client.policy": "ExtraPolicy Policy PrivacyPolicy SecureAggregationPolicy",
    "parallel.local_async": "Hogwild",
    "training.data_names": "DataNames TableEncoding",
    "training.labels": "number_labels",
    "training.query_trainer": "QueryTrainer",
    "training.site_table": "read_examples",
    "training.table_trainer": "TableTrainer",
    "training.torch_trainer": "TorchTrainer",
    "training.trainer": "LocalEvaluation LocalResult LocalTrainer TaskControl TrainContext",
}

__all__ = [name for names in _HOME.values() for name in names.split()]


def __getattr__(name: str) -> Any:  # Any: the type of a name is declared above
    for module, names in _HOME.items():
        if name in names.split():
            return getattr(importlib.import_module(f"fedlearn.{module}"), name)
    raise AttributeError(f"module 'fedlearn.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
