"""Wraps the algorithm and runs the checks that simulated and deployed runs have in common."""

from collections.abc import Mapping
from dataclasses import replace

from fedlearn.algorithms.asynchronous import require_asynchronous
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.extra_settings import WithExtra
from fedlearn.algorithms.strategy import Bounded
from fedlearn.assembly.pieces import PiecesT
from fedlearn.assembly.server_training import server_task
from fedlearn.config.components import build_component
from fedlearn.core.messages import Scalar
from fedlearn.errors import ConfigError
from fedlearn.parallel.distillation import Distilling


def furnished(pieces: PiecesT, extra: Mapping[str, Scalar]) -> PiecesT:
    """Add every wrapper around the algorithm that the configuration asks for.

    Raises:
        ConfigError: ``extra`` cannot be broadcast, or the run allows updates of earlier models and
            the algorithm cannot aggregate them.
    """
    return _asynchronous(_bounded(_distilling(_told(pieces, extra))))


def complete(pieces: PiecesT) -> PiecesT:
    """Check that the components of a run fit together, and return them.

    Raises:
        ConfigError: They do not fit together, or secure aggregation is not secure with them.
    """
    _ = pieces.secure, pieces.early_stopping()  # both raise ConfigError if they cannot be built
    pieces.require_settings_of_rounds()
    most, num_wanted = pieces.algorithm.max_reports, pieces.policy.num_wanted
    if most is not None and num_wanted > most:
        raise ConfigError(
            f"algorithm.cohort_size is {most}, but a round takes {num_wanted} reports; raise it to "
            "that, or lower cohort.num_wanted"
        )
    return pieces


def _bounded(pieces: PiecesT) -> PiecesT:
    """Add the bounds on updates that the configuration sets, if any."""
    bounds = build_component(UpdateBounds, pieces.config.updates)
    if bounds == GENEROUS:
        return pieces
    return replace(pieces, algorithm=Bounded(pieces.algorithm, bounds))


def _asynchronous(pieces: PiecesT) -> PiecesT:
    """Check that the algorithm accepts updates of earlier models, if the run allows them."""
    modes = {"asynchronous": pieces.asynchrony, "late_updates": pieces.late_updates}
    for table, rule in modes.items():
        if rule is not None:
            try:
                require_asynchronous(pieces.algorithm)
            except ValueError as error:
                raise ConfigError(f"{table}.mode is on, but {error}") from error
    return pieces


def _told(pieces: PiecesT, extra: Mapping[str, Scalar]) -> PiecesT:
    """Broadcast the free-form settings to the clients' trainers, if there are any.

    Raises:
        ConfigError: A name or a value cannot be sent.
    """
    if not extra:
        return pieces
    algorithm = WithExtra.around(pieces.algorithm, extra)
    try:
        _ = algorithm.local
    except ValueError as error:
        raise ConfigError(f"client.{error}") from error
    return replace(pieces, algorithm=algorithm)


def _distilling(pieces: PiecesT) -> PiecesT:
    """End each round with distillation, if the configuration asks for it."""
    num_steps = pieces.config.coordinator.training.distil_steps
    if not num_steps:
        return pieces
    algorithm = Distilling(pieces.algorithm, server_task(pieces), num_steps)
    return replace(pieces, algorithm=algorithm)
