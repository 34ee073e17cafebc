"""What every run is checked for and told, simulated or deployed."""

from collections.abc import Mapping
from dataclasses import replace

from fedlearn.algorithms.asynchronous import require_asynchronous
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.extra_settings import WithExtra
from fedlearn.algorithms.strategy import Bounded
from fedlearn.assembly.pieces import PiecesT
from fedlearn.assembly.server_training import server_task
from fedlearn.config.pieces import built
from fedlearn.core.messages import Scalar
from fedlearn.errors import ConfigError
from fedlearn.parallel.distillation import Distilling


def furnished(pieces: PiecesT, extra: Mapping[str, Scalar]) -> PiecesT:
    """Return the pieces with all that the configuration puts around an algorithm.

    Raises:
        ConfigError: ``extra`` cannot be told, or updates of earlier models cannot be in a round.
    """
    return _asynchronous(_bounded(_distilling(_told(pieces, extra))))


def complete(pieces: PiecesT) -> PiecesT:
    """Return ``pieces`` if secure aggregation holds with them, and they fit together."""
    _ = pieces.secure, pieces.early_stopping()  # each raises otherwise
    pieces.require_settings_of_rounds()
    most, num_wanted = pieces.algorithm.max_reports, pieces.policy.num_wanted
    if most is not None and num_wanted > most:
        raise ConfigError(
            f"algorithm.cohort_size is {most}, but a round takes {num_wanted} reports; raise it to "
            "that, or lower cohort.num_wanted"
        )
    return pieces


def _bounded(pieces: PiecesT) -> PiecesT:
    """Return the pieces with the bounds of updates that the configuration asks for, if any."""
    bounds = built(UpdateBounds, pieces.config.updates)
    if bounds == GENEROUS:
        return pieces
    return replace(pieces, algorithm=Bounded(pieces.algorithm, bounds))


def _asynchronous(pieces: PiecesT) -> PiecesT:
    """Return ``pieces`` if updates of earlier models may be in their rounds, or are not."""
    modes = {"asynchronous": pieces.asynchrony, "late_updates": pieces.late_updates}
    for table, rule in modes.items():
        if rule is not None:
            try:
                require_asynchronous(pieces.algorithm)
            except ValueError as error:
                raise ConfigError(f"{table}.mode is on, but {error}") from error
    return pieces


def _told(pieces: PiecesT, extra: Mapping[str, Scalar]) -> PiecesT:
    """Return the pieces with free-form settings for the clients' trainers, if there are any.

    Raises:
        ConfigError: A name or a value cannot be told.
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
    """Return the pieces with rounds that end in distillation, if they shall."""
    num_steps = pieces.config.coordinator.training.distil_steps
    if not num_steps:
        return pieces
    algorithm = Distilling(pieces.algorithm, server_task(pieces), num_steps)
    return replace(pieces, algorithm=algorithm)
