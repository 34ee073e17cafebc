"""A client of a Flower federation: the session that answers everywhere else, as a ClientApp."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedlearn.client.policy import Policy
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import Failure, settings_in
from fedlearn.errors import DeploymentError, PolicyViolation, ProtocolError
from fedlearn.identity.lineage import fingerprint
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.secagg.client import SecureClient
from fedlearn.session.pins import PinFile, Pins
from fedlearn.session.secure import after_failure
from fedlearn.session.session import ClientSession, log_refusal
from fedlearn.training.trainer import (
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)
from fedlearn.transport import flower
from fedlearn.transport.flower import Keys, Node

__all__ = ["Node", "client_app"]


def client_app(
    make_trainer: Callable[[Node], LocalTrainer], *, policy_of: Callable[[Node], Policy]
) -> flower.ClientApp:
    """Return the Flower ClientApp of a client that trains with ``make_trainer``'s result.

    What the trainer returns as its state is kept from message to message, in the node's folder
    (``--node-config 'identity="/path"'``) or, lost with the SuperNode, in Flower's
    ``Context.state``.

    Args:
        make_trainer: Returns the trainer of a node; called once a message, since Flower starts
            a process for each. An error in it reaches the coordinator only as the name of its
            type, as one in the trainer does.
        policy_of: Returns what the client of a node refuses; likewise called once a message. An
            error in it goes to the coordinator with its traceback.
            :func:`fedlearn.deployment.flower_node.node_policy` reads the node's configuration.
    """

    def answer(node: Node, keys: Keys) -> flower.Answer:
        policy = policy_of(node)
        trainer = _WhenAsked(node, make_trainer)
        session = ClientSession(
            node.client_id,
            trainer,
            _secure(node, keys, policy),
            pin_file=_pin_file(node, keys),
        )
        return _WithinPolicy(policy, session).handle

    return flower.client_app(answer)


def _secure(node: Node, keys: Keys, policy: Policy) -> SecureClient | None:
    """Return this client's side of secure aggregation; ``None``: it has no key to trust."""
    if not keys.coordinator_key:
        return None
    return SecureClient(
        client_id=node.client_id,
        signer=keys.identity,
        coordinator_key=keys.coordinator_key,
        directory={node.client_id: keys.identity.public_key},
        policy=policy.secure_aggregation.terms(),
        num_threads=torch.get_num_threads(),
    )


def _pin_file(node: Node, keys: Keys) -> PinFile | None:
    """Return where the keys of other clients outlive the run, with those of the node's roster.

    Raises:
        DeploymentError: There is a roster and no folder, or it is of another coordinator, or has
            another key for this client.
    """
    roster = node.node_config.get("roster")
    if keys.folder is None:
        if roster is not None:
            raise DeploymentError(
                "roster is set in this node's configuration, but no folder (identity): without one "
                "this client's own key is new in every run, and in nobody's roster"
            )
        return None
    file = PinFile(path=keys.folder / "pins.json", coordinator_key=keys.coordinator_key)
    if roster is not None and keys.coordinator_key:
        given = IdentityRoster.load(Path(str(roster)))
        _require_own(given, node, keys)
        if file.read().roster != given.digest:
            file.write(Pins.of(given))  # from now on these clients and nobody else
    return file


def _require_own(roster: IdentityRoster, node: Node, keys: Keys) -> None:
    if roster.coordinator_key != keys.coordinator_key:
        raise DeploymentError(
            "the roster of this node's configuration is of another coordinator than the one it "
            "has pinned; take that one's roster"
        )
    entry, own = roster.clients.get(node.client_id), keys.identity.public_key
    if entry is not None and entry.key != own:
        raise DeploymentError(
            f"the roster of this node's configuration has {fingerprint(entry.key)} for client "
            f"{node.client_id}, whose key here is {fingerprint(own)}; ask for a new roster"
        )


@dataclass(frozen=True)
class _WithinPolicy:
    """A session that is asked only what the policy allows."""

    policy: Policy
    session: ClientSession

    def handle(self, data: bytes, state: bytes, *, personal: bytes) -> tuple[bytes, bytes]:
        try:
            self._judge(data)
        except PolicyViolation as violation:
            log_refusal(violation)
            return encode(Failure(str(violation))), after_failure(state)
        return self.session.handle(data, state, personal=personal)

    def _judge(self, data: bytes) -> None:
        try:
            request = decode(data)
        except ProtocolError:
            return  # the session says so
        kind, settings = type(request).__name__, settings_in(request)
        # Nobody counts days here: who makes a policy for Flower leaves that limit out.
        self.policy.judge(kind, settings=settings, num_tasks_today=0)


@dataclass(frozen=True)
class _WhenAsked:
    """A trainer that is made inside the session, whose errors tell nothing of the data."""

    node: Node
    make_trainer: Callable[[Node], LocalTrainer]

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        return self.make_trainer(self.node).train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return self.make_trainer(self.node).evaluate(tensors, control=control)
