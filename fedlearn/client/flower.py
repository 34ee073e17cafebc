"""Run a fedlearn client in a Flower federation, as a Flower ``ClientApp``."""

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
from fedlearn.session.secure import end_session_after_failure, has_sent_masked
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

#: Names that Flower's examples and strategies use for fedlearn's settings.
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
    """Build a Flower ``ClientApp`` that trains with fedlearn.

    The state that the trainer returns is kept between messages: in the node's folder if one is
    configured (``--node-config 'identity="/path"'``), or else in Flower's ``Context.state``, which
    is lost when the SuperNode stops.

    Args:
        make_trainer: Returns the trainer of a node. It is called for each message, because Flower
            starts a process for each. The coordinator sees only the type of an exception raised in
            it or in the trainer.
        policy_of: Returns the policy of a node, also for each message. The coordinator sees an
            exception raised in it with its traceback, including the ConfigError for a policy with
            daily limits, which a client on Flower cannot count.
            :func:`fedlearn.deployment.flower_node.node_policy` reads the node's configuration.
        local: How to train for one of Flower's own strategies, such as
            ``flwr.serverapp.strategy.FedAvg``, which sends no fedlearn settings. Its config
            overrides ``local`` (see :func:`settings_for`). Without ``local``, the client refuses
            such a strategy.
        mods: Flower mods around the app, the first one outermost. They see encoded requests and
            signed replies; the coordinator rejects a reply that a mod has changed.
    """

    def answer(node: Node, keys: Keys) -> flower.Answer:
        policy, history_file = policy_of(node), _history_file(keys)
        require_possible_policy(policy, source="the policy of this node")
        judge = Judge(policy)
        trainer = _LazyTrainer(node, make_trainer)
        secure = judge.build_secure_client(
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
                Judge(policy, is_bound=is_bound(history_file, state)).check_request(
                    data, num_tasks_today=0, spent=0.0
                )
            except PolicyViolation as violation:
                log_refusal(violation)
                return encode(Failure(str(violation))), end_session_after_failure(state)
            return session.handle(data, state, personal=personal, constants=constants)

        return handle

    return flower.client_app(answer, settings_of=partial(settings_for, local), mods=mods)


def require_possible_policy(policy: Policy, *, source: str) -> None:
    """Reject what a client on Flower cannot keep: daily limits, and a number of runs.

    Flower starts a process for each message, and decides how many run at the same time.

    Args:
        policy: The client's policy.
        source: Where the policy comes from, for the error message.

    Raises:
        ConfigError: The policy has a daily limit, or allows several runs at the same time.
    """
    limits = {
        "max_tasks_per_day": policy.max_tasks_per_day,
        "max_evaluations_per_day": policy.max_evaluations_per_day,
        "privacy.max_epsilon_per_day": policy.privacy.max_epsilon_per_day,
    }
    for name, limit in limits.items():
        if limit is not None:
            raise ConfigError(
                f"{source}: policy.{name} is {limit}, but a client on Flower does not count per "
                "day; leave it out"
            )
    if policy.max_concurrent_runs > 1:
        raise ConfigError(
            f"{source}: policy.max_concurrent_runs is {policy.max_concurrent_runs}, but on Flower "
            "the SuperNode decides how many runs it works for; leave it out"
        )


def settings_for(local: LocalUpdate | None, config: Settings) -> Settings:
    """Merge the config of one of Flower's own strategies into the client's training settings.

    Every entry of the config is a setting, with dashes read as underscores. It overrides the same
    setting of ``local``; a setting that the trainer does not honor is refused later. ``lr`` and
    ``local-epochs``, the names in Flower's examples, mean ``learning_rate`` and ``epochs``.
    ``proximal-mu``, from Flower's FedProx, adds the proximal term.

    Args:
        local: The client's default training; ``None`` if it has none.
        config: The config of the message, without ``server-round``.

    Raises:
        SettingsRefused: ``local`` is ``None``.

    Example:
        >>> from fedlearn.algorithms.local import LocalSgd
        >>> local = LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
        >>> settings = settings_for(local, {"lr": 0.5, "batch-size": 4})
        >>> settings["learning_rate"], settings["batch_size"], settings["epochs"]
        (0.5, 4, 1)
    """
    if local is None:
        raise SettingsRefused(
            "this client does not define how to train for Flower's own strategies; pass "
            "client_app(local=...), for example a LocalSgd, or run fedlearn's ServerApp"
        )
    named = {name.replace("-", "_"): value for name, value in config.items()}
    settings = {_USUAL_NAMES.get(name, name): value for name, value in named.items()}
    if settings.get("proximal"):
        local = Proximal(inner=local, proximal=1.0)  # a placeholder, overridden by `settings` below
    else:
        # Flower's FedProx sends 0 for "no term", which a trainer without that setting would
        # refuse.
        settings.pop("proximal", None)
    return {**settings_of(local), **settings}


def is_bound(history_file: HistoryFile | None, state: bytes) -> bool:
    """Check whether a node's client has sent masked updates to its coordinator before.

    Args:
        history_file: The record of that over all runs; ``None`` if only ``state`` has one.
        state: The client's state in this run.

    Raises:
        DeploymentError: The file cannot be read.
    """
    return has_sent_masked(state) if history_file is None else history_file.read().is_bound


def _history_file(keys: Keys) -> HistoryFile | None:
    """Return the file that records, over all runs, which sums were opened; ``None`` if none can."""
    if keys.folder is None or not keys.coordinator_key:
        return None
    return HistoryFile(path=keys.folder / "history.json", coordinator_key=keys.coordinator_key)


def _pin_file(node: Node, keys: Keys) -> PinFile | None:
    """Return the file that pins other clients' keys over all runs, after loading any roster.

    Raises:
        DeploymentError: There is a roster but no folder, the roster belongs to another coordinator,
            or it has another key for this client.
    """
    roster = node.node_config.get("roster")
    if keys.folder is None:
        if roster is not None:
            raise DeploymentError(
                "roster is set in this node's configuration, but identity (a folder) is not; set "
                "it, because without it this client has a new key in every run, which no roster has"
            )
        return None
    file = PinFile(path=keys.folder / "pins.json", coordinator_key=keys.coordinator_key)
    if roster is not None and keys.coordinator_key:
        own = Lineage(keys.identity.public_key)
        given = IdentityRoster.load(Path(str(roster)))
        file.take(given, client_id=node.client_id, lineage=own)
    return file


@dataclass(frozen=True)
class _LazyTrainer:
    """Creates the trainer on first use, inside the session, which hides error messages."""

    node: Node
    make_trainer: Callable[[Node], LocalTrainer]

    @cached_property
    def _trainer(self) -> LocalTrainer:
        return self.make_trainer(self.node)

    @property
    def honors(self) -> Collection[str]:
        return self._trainer.honors

    @property
    def own_transforms(self) -> Collection[type[Transform]]:
        return getattr(self._trainer, "own_transforms", ())

    @property
    def answers(self) -> LocalTrainer | None:
        return getattr(self._trainer, "answers", None)

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        return self._trainer.train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return self._trainer.evaluate(tensors, control=control)
