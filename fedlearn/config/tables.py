"""The top-level keys and tables of a run's configuration, and who uses each.

This is the only list of them. :class:`~fedlearn.config.tree.Config` adds types, defaults and
descriptions, but imports torch; commands that need only the names should not wait for that.
"""

from collections.abc import Mapping
from enum import Flag, auto
from typing import Any, Final


class Use(Flag):
    """What a key or table is used for, besides describing the computation."""

    NONE = 0
    SERVING = auto()
    """It says how a deployment is served and recorded: operators' commands read it alone."""
    RESTART = auto()
    """It may change when a deployed run resumes, since it changes no result."""
    SIMULATED = auto()
    """A deployed coordinator ignores it. Single keys of a table have this mark on their field."""
    ARGUMENT = auto()
    """An argument of ``fl.simulate`` takes its place."""
    SHOWN = auto()
    """``fedlearn show`` prints it."""


#: Key in a run's record that describes the objects passed to ``fl.simulate``. It is not a table.
PYTHON_OBJECTS: Final = "python"

#: Keys of a plan of statistics, which :mod:`fedlearn.config.statistics` expands into the others.
PLAN_KEYS: Final = ("columns", "statistics", "max_examples", "per_client")
#: The algorithm of an expanded plan.
PLAN_ALGORITHM: Final = "fedlearn.statistics.query:StatisticsQuery"

#: In the order of :class:`~fedlearn.config.tree.Config`.
TABLES: Final[Mapping[str, Use]] = {
    "name": Use.SERVING | Use.RESTART,
    "seed": Use.NONE,
    "num_rounds": Use.NONE,
    "centralized": Use.SIMULATED,
    "data": Use.ARGUMENT | Use.SHOWN,
    "model": Use.ARGUMENT | Use.SHOWN,
    "loss": Use.ARGUMENT,
    "metrics": Use.ARGUMENT,
    "algorithm": Use.ARGUMENT | Use.SHOWN,
    "aggregation": Use.ARGUMENT | Use.SHOWN,
    "compression": Use.ARGUMENT | Use.SHOWN,
    "download_compression": Use.ARGUMENT | Use.SHOWN,
    "client": Use.ARGUMENT | Use.SHOWN,
    "cohort": Use.SHOWN,
    "stragglers": Use.SHOWN,
    "late_updates": Use.SHOWN,
    "asynchronous": Use.SHOWN,
    "staleness": Use.NONE,
    "updates": Use.NONE,
    "secure_aggregation": Use.SHOWN,
    "privacy": Use.SHOWN,
    "devices": Use.SIMULATED | Use.RESTART | Use.SHOWN,
    "attack": Use.SIMULATED | Use.SHOWN,
    "evaluation": Use.NONE,
    "early_stopping": Use.NONE,
    "engine": Use.RESTART,
    "callbacks": Use.NONE,
    "trackers": Use.RESTART,
    "telemetry": Use.SERVING | Use.RESTART,
    "store": Use.SERVING | Use.RESTART,
    "coordinator": Use.SERVING | Use.RESTART,
    "flower": Use.SIMULATED,
}


def tables_with(use: Use) -> tuple[str, ...]:
    """Return the keys and tables that have a use, in order."""
    return tuple(name for name, uses in TABLES.items() if use in uses)


def has_plan(config: Mapping[str, Any]) -> bool:
    """Whether a configuration, as a run's record has it, is that of a plan of statistics."""
    algorithm = config.get("algorithm")
    return isinstance(algorithm, Mapping) and algorithm.get("factory") == PLAN_ALGORITHM
