"""A client of a Flower federation: the session that answers everywhere else, as a ClientApp."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from fedlearn.algorithms.local import LocalUpdate
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.transforms import Transform
from fedlearn.client.judging import Judge
from fedlearn.client.policy import Policy
from fedlearn.core.codec import encode
from fedlearn.core.messages import Failure, Settings
from fedlearn.errors import ConfigError, DeploymentError, PolicyViolation, SettingsRefused
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

__all__ = ["Node", "client_app", "settings_for"]

#: What Flower's examples and strategies call settings.
_USUAL_NAMES: Mapping[str, str] = {
    "lr": "learning_rate",
    "local_epochs": "epochs",
    "proximal_mu": "proximal",
}


def client_app(
    make_trainer: Callable[[Node], LocalTrainer],
    *,
    policy_of: Callable[[Node], Policy],
    local: LocalUpdate | None = None,
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
            error in it goes to the coordinator with its traceback, and so does the ConfigError for
            a policy with a limit a day, which nobody counts here.
            :func:`fedlearn.deployment.flower_node.node_policy` reads the node's configuration.
        local: How to train where one of Flower's own strategies asks
            (``flwr.serverapp.strategy.FedAvg``), which has no settings of fedlearn's; what its
            config says wins (see :func:`settings_for`). Without it such a client refuses.
        mods: Flower's mods around the app, the first one outermost. They see encoded requests and
            signed replies, which the coordinator refuses if one changes them.
    """

    def answer(node: Node, keys: Keys) -> flower.Answer:
        policy, history_file = policy_of(node), _history_file(keys)
        require_no_daily_limit(policy, source="the policy of this node")
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

        def handle(
            data: bytes, state: bytes, *, personal: bytes, constants: bytes
        ) -> tuple[bytes, bytes]:
            try:
                Judge(policy, is_bound=is_bound(history_file, state)).encoded(
                    data, num_tasks_today=0, spent=0.0
                )
            except PolicyViolation as violation:
                log_refusal(violation)
                return encode(Failure(str(violation))), after_failure(state)
            return session.handle(data, state, personal=personal, constants=constants)

        return handle

    return flower.client_app(answer, settings_of=partial(settings_for, local), mods=mods)


def require_no_daily_limit(policy: Policy, *, source: str) -> None:
    """Refuse a limit that a client on Flower cannot keep, since it does not remember the day.

    Args:
        policy: Of the client.
        source: Where it is from.

    Raises:
        ConfigError: It has a limit a day.
    """
    limits = {
        "max_tasks_per_day": policy.max_tasks_per_day,
        "max_evaluations_per_day": policy.max_evaluations_per_day,
        "privacy.max_epsilon_per_day": policy.privacy.max_epsilon_per_day,
    }
    for name, limit in limits.items():
        if limit is not None:
            raise ConfigError(
                f"{source}: policy.{name} is {limit}, but a client on Flower does not remember the "
                "day; leave it out"
            )


def settings_for(local: LocalUpdate | None, config: Settings) -> Settings:
    """Return how to train for one of Flower's own strategies.

    Every entry of its config is a setting, with dashes read as underscores: it takes the place of
    that of ``local``, and one that the trainer does not honour is refused. ``lr`` and
    ``local-epochs``, as Flower's examples have them, are ``learning_rate`` and ``epochs``;
    ``proximal-mu`` of Flower's FedProx adds its term.

    Args:
        local: What the client does otherwise; ``None``: nobody has said.
        config: Of the message, without ``server-round``.

    Raises:
        SettingsRefused: Nobody has said.

    Example:
        >>> from fedlearn.algorithms.local import LocalSgd
        >>> local = LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
        >>> settings = settings_for(local, {"lr": 0.5, "batch-size": 4})
        >>> settings["learning_rate"], settings["batch_size"], settings["epochs"]
        (0.5, 4, 1)
    """
    if local is None:
        raise SettingsRefused(
            "this client does not say how it trains for Flower's own strategies; give "
            "client_app(local=...) a LocalSgd, say, or run fedlearn's ServerApp"
        )
    named = {name.replace("-", "_"): value for name, value in config.items()}
    asked = {_USUAL_NAMES.get(name, name): value for name, value in named.items()}
    if asked.get("proximal"):
        local = Proximal(inner=local, proximal=1.0)  # of which the value is laid over
    else:
        asked.pop("proximal", None)
    return {**settings_of(local), **asked}


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

    @property
    def own_transforms(self) -> Collection[type[Transform]]:
        return getattr(self._trainer, "own_transforms", ())

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        return self._trainer.train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return self._trainer.evaluate(tensors, control=control)
