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
from fedlearn.assembly.completed import complete, furnished
from fedlearn.assembly.pieces import Deployment
from fedlearn.assembly.private import with_privacy
from fedlearn.assembly.secure import roster_draw
from fedlearn.assembly.server_training import own_population
from fedlearn.assembly.training import training_of
from fedlearn.config.components import build_component
from fedlearn.config.data import NoDataSection
from fedlearn.config.tree import Config
from fedlearn.core.distribution import split
from fedlearn.errors import ConfigError
from fedlearn.gateway.eligibility import Requirements
from fedlearn.gateway.meanings import MEANINGS

#: Suffixes that Prometheus adds to a metric's name in the names of its series.
_OF_A_SERIES = re.compile(r"_(total|bucket|count|sum)$")


def deployment(config: Config, *, data_dir: Path) -> Deployment:
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
    data = config.data.load(seed=config.seed, data_dir=data_dir) if has_data else None
    pieces = complete(
        Deployment(
            **training_of(config, data),
            own=own_population(config, data),
            test=None if data is None else data.stored_test,
            sampler=config.cohort.build(),
            policy=config.straggler_policy(),
            requirements=build_component(Requirements, config.coordinator.eligibility),
            draw=roster_draw(config),
            config=config,
            by_round=config.client.settings_by_round(),
            callbacks=config.round_callbacks(),
        )
    )
    pieces = furnished(pieces, config.client.extra)
    _require_names(config, pieces.objective)
    _require_free_in_telemetry(pieces.directions)
    pieces = _deployed_privately(pieces) if config.privacy.is_on else pieces
    require_travels([pieces.algorithm.local], pieces.algorithm.transforms)
    if config.secure_aggregation.is_on:
        _require_evaluable(pieces)
    if config.flower.is_foreign:
        _require_nothing_of_clients(pieces.algorithm, apps=config.flower.client_apps)
    return pieces


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
    asked = {
        "gives clients things of their own to do": isinstance(algorithm, PerClient),
        f"needs the lane {algorithm.lanes[-1].name!r} of clients": len(algorithm.lanes) > 1,
        "changes updates before they leave their clients": bool(algorithm.transforms),
        "says how clients train": local != own,
    }
    problem = next((text for text, is_asked in asked.items() if is_asked), None)
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
                f"metrics: a measure is called {name!r}, but fedlearn_{name} of /metrics tells "
                "something else of every coordinator; give another name"
            )


def _require_evaluable(pieces: Deployment) -> None:
    """Check that client metrics can be measured through secure sums.

    Each metric takes one sum over enough clients, so the coordinator learns its mean and no other
    statistic.

    Raises:
        ConfigError: Too few clients evaluate, or early stopping watches another statistic.
    """
    config = pieces.config
    mode, num_clients = config.secure_aggregation.mode, config.evaluation.num_clients
    if num_clients:
        try:
            config.secure_aggregation.evaluation_plan(
                num_clients, measures=tuple(pieces.directions)
            )
        except ConfigError as error:
            raise ConfigError(
                f"evaluation.clients: {num_clients} clients evaluate, and with "
                f'secure_aggregation.mode "{mode}" in a sum, which cannot hold: {error}; raise it, '
                "or set it to 0"
            ) from error
    watched, part = split(pieces.early_stopping().metric)
    if part not in (None, "mean"):
        raise ConfigError(
            f'early_stopping.metric is "{config.early_stopping.metric}", but with '
            f'secure_aggregation.mode "{mode}" the coordinator learns the mean over the clients '
            f'alone; watch "clients/{watched}_mean"'
        )


def _deployed_privately(pieces: Deployment) -> Deployment:
    """Add differential privacy for all clients that may enrol."""
    section = pieces.config.privacy
    num_users = section.num_users
    if num_users is None:
        raise ConfigError(
            "privacy.num_users is missing: how many clients may enrol; ε rests on it, so it is "
            "fixed before anybody does"
        )
    if section.is_distributed and section.reproducible:
        raise ConfigError(
            'privacy.reproducible is true, but privacy.mode is "distributed", and the clients of a '
            "deployment draw secret noise; leave it out"
        )
    if section.mode == "central" and not draws_each_alone(pieces.sampler):
        raise ConfigError(
            f'cohort.sampling is "{pieces.config.cohort.sampling}", but clients come and go, and '
            "of few that are there each would be asked more often than is accounted for; set it to "
            '"poisson", by whose coins who else is there does not matter, or to "cyclic", with '
            "privacy.bands"
        )
    if section.population == "auto":
        section = section.model_copy(update={"population": "enrolled"})
    config = pieces.config.model_copy(update={"privacy": section})
    return complete(with_privacy(replace(pieces, config=config), num_users))
