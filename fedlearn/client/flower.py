"""A client of a Flower federation: the session that answers everywhere else, as a ClientApp."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedlearn.client.judging import Judge
from fedlearn.client.policy import Policy
from fedlearn.core.codec import encode
from fedlearn.core.messages import Failure
from fedlearn.errors import DeploymentError, PolicyViolation
from fedlearn.identity.lineage import Lineage
from fedlearn.identity.rosters import IdentityRoster
from fedlearn.session.history import HistoryFile
from fedlearn.session.pins import PinFile
from fedlearn.session.secure import after_failure, has_sent_masked
from fedlearn.session.session import ClientSession, log_refusal
from fedlearn.training.trainer import (
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)
from fedlearn.transport import flower
from fedlearn.transport.flower import Keys, Mod, Node

__all__ = ["Node", "client_app"]


def client_app(
    make_trainer: Callable[[Node], LocalTrainer],
    *,
    policy_of: Callable[[Node], Policy],
    mods: Sequence[Mod] = (),
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
        mods: Flower's mods around the app, the first one outermost. They see encoded requests and
            signed replies, which the coordinator refuses if one changes them.
    """

    def answer(node: Node, keys: Keys) -> flower.Answer:
        policy, history_file = policy_of(node), _history_file(keys)
        judge = Judge(policy)
        trainer = _WhenAsked(node, make_trainer)
        secure = judge.secure_client(
            node.client_id,
            keys.identity,
            coordinator_key=keys.coordinator_key,
            num_threads=torch.get_num_threads(),
        )
        pin_file = _pin_file(node, keys)
        session = ClientSession(
            node.client_id, trainer, secure, pin_file=pin_file, history_file=history_file
        )

        def handle(data: bytes, state: bytes, *, personal: bytes) -> tuple[bytes, bytes]:
            try:
                # Nobody counts days here: who makes a policy for Flower leaves that limit out.
                Judge(policy, is_bound=is_bound(history_file, state)).encoded(
                    data, num_tasks_today=0, spent=0.0
                )
            except PolicyViolation as violation:
                log_refusal(violation)
                return encode(Failure(str(violation))), after_failure(state)
            return session.handle(data, state, personal=personal)

        return handle

    return flower.client_app(answer, mods=mods)


def is_bound(history_file: HistoryFile | None, state: bytes) -> bool:
    """Return whether a node's client has sent masked updates to its coordinator before.

    Args:
        history_file: Where that is kept; ``None``: nowhere but in ``state``.
        state: What the client keeps of this run.

    Raises:
        DeploymentError: The file cannot be read.
    """
    return has_sent_masked(state) if history_file is None else history_file.read().is_bound


def _history_file(keys: Keys) -> HistoryFile | None:
    """Return where it outlives the run which sums were opened; ``None``: it does not."""
    if keys.folder is None or not keys.coordinator_key:
        return None
    return HistoryFile(path=keys.folder / "history.json", coordinator_key=keys.coordinator_key)


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
        own = Lineage(keys.identity.public_key)
        given = IdentityRoster.load(Path(str(roster)))
        file.take(given, client_id=node.client_id, lineage=own)
    return file


@dataclass(frozen=True)
class _WhenAsked:
    """A trainer that is made inside the session, whose errors tell nothing of the data."""

    node: Node
    make_trainer: Callable[[Node], LocalTrainer]

    @cached_property
    def _trainer(self) -> LocalTrainer:
        return self.make_trainer(self.node)

    @property
    def honours(self) -> Collection[str]:
        return self._trainer.honours

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        return self._trainer.train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return self._trainer.evaluate(tensors, control=control)
