"""A client. Replace ``make_trainer`` by one that trains on what this node holds."""

from pathlib import Path

from fedlearn.client import LocalTrainer
from fedlearn.client.flower import Node, client_app
from fedlearn.deployment.flower_config import partition_trainer
from fedlearn.deployment.flower_node import node_policy


def make_trainer(node: Node) -> LocalTrainer:
    """Return a trainer on part ``partition-id`` of the digits; every node has them all."""
    return partition_trainer(node, Path(__file__).parent)


app = client_app(make_trainer, policy_of=node_policy)
