"""What single clients of a run measured: read back with their names, or why there is nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.rounds.records import RunRecord
from fedlearn.store.registry import StoredRegistry
from fedlearn.store.runs import StoredRun

if TYPE_CHECKING:  # numpy takes a while, and most commands need none of it
    from fedlearn.core.client_metrics import ClientMetrics


def load_clients(stored: StoredRun) -> "ClientMetrics | None":
    """Load the clients' metrics of the last evaluation, with names; ``None`` if there are none.

    Raises:
        StoreError: The file is damaged, or the store cannot be read.
    """
    found = stored.client_metrics()
    if found is None or not stored.record.is_deployed:
        return found
    return found.with_names({int(each): name for each, name in load_names(stored).items()})


def load_names(stored: StoredRun) -> dict[ClientId, str]:
    """Return the names under which clients have enrolled, by id; empty for a simulation.

    Raises:
        StoreError: The store cannot be read.
    """
    if not stored.record.is_deployed:
        return {}
    registry = StoredRegistry(stored.database, SystemClock())
    return {each.client_id: each.name for each in registry.clients()}


def explain_hidden(record: RunRecord) -> str | None:
    """Return why the values of single clients are hidden, as a sentence; ``None``: they are not."""
    private, secure = (_find_mode(record, name) for name in ("privacy", "secure_aggregation"))
    if private is not None:
        return (
            f'Values of single clients are not kept: privacy.mode is "{private}", and they have no '
            "noise."
        )
    if secure is not None and record.is_deployed:
        return (
            f'Values of single clients are not known: secure_aggregation.mode is "{secure}", so '
            "the coordinator learns only the mean."
        )
    return None


def explain_absence(record: RunRecord) -> str:
    """Return why a run has no values of single clients, and how to get some, as a sentence."""
    hidden = explain_hidden(record)
    if hidden is not None:
        return hidden
    evaluation = record.config.get("evaluation")
    if not record.has_model:
        return "A query has no model to evaluate."
    if isinstance(evaluation, Mapping) and evaluation.get("clients") == 0:
        return "No clients were evaluated: evaluation.clients is 0; raise it."
    return (
        "No clients have been evaluated yet, or an earlier version of fedlearn, which did not keep "
        "their values, recorded the run."
    )


def _find_mode(record: RunRecord, table: str) -> str | None:
    """Return the mode of a table of the configuration; ``None`` if it is off."""
    found = record.config.get(table)
    mode = found.get("mode") if isinstance(found, Mapping) else None
    return mode if isinstance(mode, str) and mode != "off" else None
