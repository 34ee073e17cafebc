"""The ClientApp of a node. Replace ``make_trainer`` by one that trains on the node's own data."""

from pathlib import Path

from fedlearn.client import LocalTrainer
from fedlearn.client.flower import Node, client_app
from fedlearn.deployment.flower_config import make_partition_trainer
from fedlearn.deployment.flower_node import node_policy


def make_trainer(node: Node) -> LocalTrainer:
    """Build a trainer on part ``partition-id`` of the digits; here every node has all of them."""
    return make_partition_trainer(node, Path(__file__).parent)


app = client_app(make_trainer, policy_of=node_policy)
