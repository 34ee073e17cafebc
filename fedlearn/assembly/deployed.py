"""Builds the components of a deployed run from its configuration."""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fedlearn.algorithms.extra_settings import ExtraSettings
from fedlearn.algorithms.metrics import require_name
from fedlearn.algorithms.objectives import Objective
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.sampling import draws_each_alone
from fedlearn.algorithms.settings import require_travels
from fedlearn.algorithms.strategy import Strategy
from fedlearn.assembly.callbacks import LoggedCallback
from fedlearn.assembly.components import Deployment
from fedlearn.assembly.private import add_privacy
from fedlearn.assembly.root_training import add_root_training
from fedlearn.assembly.secure import load_roster_draw
from fedlearn.assembly.server_training import find_own_population
from fedlearn.assembly.training import build_training
from fedlearn.assembly.wrappers import add_wrappers, validate_components
from fedlearn.config.components import build_component
from fedlearn.config.data import NoDataSection
from fedlearn.config.tree import Config
from fedlearn.core.distribution import split_statistic
from fedlearn.errors import ConfigError
from fedlearn.gateway.eligibility import Requirements
from fedlearn.gateway.meanings import MEANINGS

#: Suffixes that Prometheus adds to a metric's name in the names of its series.
_OF_A_SERIES = re.compile(r"_(total|bucket|count|sum)$")


def build_deployment(config: Config, *, data_dir: Path) -> Deployment:
    """Build the components of the coordinator's run from its configuration.

    Args:
        config: The resolved configuration. Its devices and engine describe a simulation and are
            ignored here, except ``engine.slab_bytes``: replies wait for each other in a
            coordinator as well.
        data_dir: Directory of data sets that the configuration names without a path.

    Raises:
        ConfigError: A factory cannot be imported, or the components do not fit together.
        DataError: Data are missing.
    """
    if config.centralized:
        raise ConfigError(
            "centralized is true, but a coordinator has no pooled examples; remove it, or run "
            "`fedlearn simulate`"
        )
    config = config.resolve(num_clients=None)
    has_data = not isinstance(config.data, NoDataSection)
    data = config.data.load_clients(seed=config.seed, data_dir=data_dir) if has_data else None
    components = validate_components(
        Deployment(
            **build_training(config, data),
            own=find_own_population(config, data),
            test=None if data is None else data.stored_test,
            sampler=config.cohort.build(),
            policy=config.straggler_policy(),
            requirements=build_component(Requirements, config.coordinator.eligibility),
            draw=load_roster_draw(config),
            config=config,
            by_round=config.client.settings_by_round(),
            callbacks=tuple(LoggedCallback(each) for each in config.round_callbacks()),
        )
    )
    components = add_root_training(
        add_wrappers(components, config.client.extra), None if data is None else data.population
    )
    _require_names(config, components.objective)
    _require_free_in_telemetry(components.directions)
    # After the other wrappers, so that privacy is outermost: it bounds what all of them compute.
    components = _add_deployment_privacy(components) if config.privacy.is_on else components
    require_travels([components.algorithm.local], components.algorithm.transforms)
    if config.secure_aggregation.is_on:
        _require_evaluable(components)
    if config.flower.is_foreign:
        _require_nothing_of_clients(components.algorithm, apps=config.flower.client_apps)
    return components


def _require_names(config: Config, objective: Objective) -> None:
    """Refuse metrics that cannot be recorded under their names.

    ClientApps written for Flower name their own metrics, and may use "accuracy" and "loss".
    """
    for name, section in config.metrics.items():
        is_theirs = config.flower.is_foreign and section.factory is None
        require_name(name, taken=() if is_theirs else ("loss", *objective.directions))


def _require_nothing_of_clients(algorithm: Strategy, *, apps: str) -> None:
    """Refuse an algorithm whose clients must do more than train and return their model."""
    local, own = algorithm.local, OwnTraining()
    if isinstance(local, ExtraSettings):  # Flower's ClientApps read these in their `config`
        local = local.inner
    requirements = {
        "gives each client its own task": isinstance(algorithm, PerClient),
        f"needs the lane {algorithm.lanes[-1].name!r} from its clients": len(algorithm.lanes) > 1,
        "transforms updates on the clients": bool(algorithm.transforms),
        "keeps parts of the model on the clients": bool(algorithm.keep_local),
        "compresses the model, which its clients restore": algorithm.download is not None,
        "prescribes how clients train": local != own,
    }
    problem = next((text for text, is_required in requirements.items() if is_required), None)
    if problem is not None:
        raise ConfigError(
            f"algorithm.name: {type(algorithm).__name__} {problem}, but flower.client_apps is "
            f'"{apps}", whose ClientApps train as they are written and return their model; take '
            'another algorithm (fedavg, fedadam, ...), or set flower.client_apps to "fedlearn"'
        )


def _require_free_in_telemetry(measures: Collection[str]) -> None:
    """Refuse a metric whose name already has another meaning in ``/metrics``."""
    for name in set(measures) - {"accuracy", "loss"}:
        if name in MEANINGS or _OF_A_SERIES.sub("", name) in MEANINGS:
            raise ConfigError(
                f"metrics: a metric is called {name!r}, but fedlearn_{name} already has another "
                "meaning in /metrics; give it another name"
            )


def _require_evaluable(components: Deployment) -> None:
    """Check that client metrics can be measured through secure sums.

    Each metric takes one sum over enough clients, so the coordinator learns its mean and no other
    statistic.

    Raises:
        ConfigError: Too few clients evaluate, or early stopping watches another statistic.
    """
    config = components.config
    mode, num_clients = config.secure_aggregation.mode, config.evaluation.num_clients
    if num_clients:
        try:
            config.secure_aggregation.evaluation_plan(
                num_clients, measures=tuple(components.directions)
            )
        except ConfigError as error:
            raise ConfigError(
                f"evaluation.clients: {num_clients} clients evaluate, but with "
                f'secure_aggregation.mode "{mode}" their metrics are summed securely, which is '
                f"impossible: {error}; raise it, or set it to 0"
            ) from error
    watched, part = split_statistic(components.early_stopping().metric)
    if part not in (None, "mean"):
        raise ConfigError(
            f'early_stopping.metric is "{config.early_stopping.metric}", but with '
            f'secure_aggregation.mode "{mode}" the coordinator learns only the mean over the '
            f'clients; watch "clients/{watched}_mean"'
        )


def _add_deployment_privacy(components: Deployment) -> Deployment:
    section = components.config.privacy
    num_users = section.num_users
    if num_users is None:
        raise ConfigError(
            "privacy.num_users is missing; give the largest number of clients that may enrol. ε "
            "depends on it, so it is fixed before the first client enrols"
        )
    if section.is_distributed and section.reproducible:
        raise ConfigError(
            'privacy.reproducible is true, but privacy.mode is "distributed", and the clients of a '
            "deployment draw secret noise; leave it out"
        )
    if section.mode == "central" and not draws_each_alone(components.sampler):
        raise ConfigError(
            f'cohort.sampling is "{components.config.cohort.sampling}", but clients come and go, '
            "and while few are connected each would be asked more often than is accounted for; set "
            'it to "poisson", which draws each client independently of the others, or to "cyclic", '
            "with privacy.bands"
        )
    if section.population == "auto":
        section = section.model_copy(update={"population": "enrolled"})
    config = components.config.model_copy(update={"privacy": section})
    return validate_components(add_privacy(replace(components, config=config), num_users))
