"""Add rounds to a run that is running, was interrupted, or is done."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedlearn.config.tables import PYTHON_OBJECTS
from fedlearn.core.clock import Clock, WallClock
from fedlearn.deployment.submission import load_config
from fedlearn.errors import ConfigError
from fedlearn.experiment.privacy import build_components, start_accounting
from fedlearn.experiment.recorded import config_of
from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.store.queue import RunQueue
from fedlearn.store.runs import Database, StoredRun


def extend(
    database: Database, name: str, *, num_rounds: int, data_dir: Path, clock: Clock
) -> RunRecord:
    """Raise the number of rounds of a run to ``num_rounds``, and return its new record.

    Settings that were derived from the old number, such as a noise multiplier, do not change. A
    run in progress reads the new number before its last round.

    Args:
        database: The database with the run.
        name: Name of the run.
        num_rounds: New total number of rounds, more than the run has now.
        data_dir: Folder of its data, which the privacy cost depends on.
        clock: Real time.

    Raises:
        ConfigError: ``num_rounds`` is not more than before, the run has stopped early, or its
            privacy budget does not cover the new rounds.
        StoreError: There is no such run, or it cannot be read or written.
    """
    stored = database.run(name)
    record = stored.record
    if num_rounds <= record.num_rounds:
        raise ConfigError(
            f"{name} has {record.num_rounds} rounds already; give more than that "
            "(--rounds), or go back to an earlier one (`fedlearn rollback`)"
        )
    changed: Mapping[str, object] = {**record.config, "num_rounds": num_rounds}
    config_of(replace(record, config=changed))  # raises if num_rounds is out of range
    finished = stored.checkpoints()
    num_finished = finished[-1].round_num if finished else 0
    if record.status is RunStatus.DONE and num_finished < record.num_rounds:
        raise ConfigError(
            f"{name} stopped early, after {num_finished} of {record.num_rounds} rounds, and would "
            "stop again at once; start another run, with another target or more patience "
            "(early_stopping)"
        )
    _require_affordable(stored, record, num_rounds, num_finished, data_dir=data_dir, clock=clock)
    stored.extend(num_rounds)
    return stored.record


def extend_queued(database: Database, name: str, *, num_rounds: int, clock: WallClock) -> bool:
    """Raise the number of rounds of a run that waits in the queue; return whether it does.

    A run that has started before is left to :func:`extend`.

    Raises:
        ConfigError: ``num_rounds`` is out of range.
        DeploymentError: It is not more than before.
        StoreError: The database cannot be read or written.
    """
    queue = RunQueue(database, clock)
    found = next((each for each in queue.list() if each.name == name), None)
    if found is None or any(record.name == name for record in database.runs()):
        return False
    load_config(replace(found, config={**found.config, "num_rounds": num_rounds}))  # raises
    queue.extend(name, num_rounds)
    return True


def _require_affordable(
    stored: StoredRun,
    record: RunRecord,
    num_rounds: int,
    num_finished: int,
    *,
    data_dir: Path,
    clock: Clock,
) -> None:
    config = config_of(record)
    budget = config.privacy.epsilon
    if not config.privacy.is_on or budget is None or config.privacy.reproducible:
        return
    if PYTHON_OBJECTS in record.config:
        raise ConfigError(
            f"{record.name} has a privacy budget (epsilon {budget:g}) and was started from Python, "
            "so its data are only in that Python program; start another run there"
        )
    components = build_components(config, data_dir=data_dir)
    _, charging, _ = start_accounting(components, stored, num_finished=num_finished, clock=clock)
    due = num_rounds - num_finished
    if charging is not None and (affordable := charging.count_affordable(due)) < due:
        raise ConfigError(
            f"{num_rounds} rounds of {record.name} would exceed its privacy budget, epsilon "
            f"{budget:g}: it covers {affordable} more after the {num_finished} that are "
            f"finished; give --rounds {num_finished + affordable} at most"
            + ("" if num_finished + affordable > record.num_rounds else ", which it has already")
        )
