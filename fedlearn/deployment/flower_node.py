"""Read the client's policy from a Flower node's configuration.

Keys of ``flower-supernode --node-config``, in addition to those that the trainer reads:

============================== ===========================================================
``partition-id``               the client's number
``identity``                   a folder for its keys and its state; default: both are kept
                               in the SuperNode's memory
``coordinator-key``            the coordinator's key in hexadecimal, or a file with it;
                               default: the first key seen is trusted
``roster``                     a file with the identity keys of all clients; default: the
                               first key seen of each client is trusted
``policy``                     a client's TOML file, of which only ``[policy]`` is used
``require-secure-aggregation`` true: refuse readable updates, whatever ``policy`` says
============================== ===========================================================
"""

from pathlib import Path

from fedlearn.client.conditions import Conditions
from fedlearn.client.flower import require_possible_policy
from fedlearn.client.policy import Policy
from fedlearn.config import load_client
from fedlearn.errors import ConfigError
from fedlearn.transport.flower import Node


def node_policy(node: Node) -> Policy:
    """Build the policy that the client of a node enforces.

    Raises:
        ConfigError: The node's configuration or its policy file is invalid, or asks for something
            that cannot be enforced on Flower: daily limits, conditions of the device, or worker
            processes.
    """
    path = node.node_config.get("policy")
    required = node.node_config.get("require-secure-aggregation", False)
    if not isinstance(required, bool):
        raise ConfigError(
            f"require-secure-aggregation is {required!r} in this node's configuration; give "
            "true or false"
        )
    config = load_client(None if path is None else Path(str(path)))
    policy = config.override(require_secure_aggregation=required).to_policy()
    require_possible_policy(policy, source=str(path))
    if config.to_conditions() != Conditions():
        raise ConfigError(
            f"{path}: [conditions] is set, but on Flower the SuperNode decides when to train; "
            "leave it out, and stop the SuperNode when the device is needed"
        )
    if config.training.num_workers > 1:
        raise ConfigError(
            f"{path}: training.num_workers is {config.training.num_workers}, but on Flower each "
            "message is answered in a new process, which then ends; leave it out"
        )
    return policy
