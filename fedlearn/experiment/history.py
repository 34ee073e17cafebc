"""Reads a run's metrics round by round, and picks the metric by which the run is judged."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from fedlearn.core.distribution import Direction, improvement_sign, split_statistic
from fedlearn.core.participations import NUM_CAPPED, NUM_CLIPPED
from fedlearn.rounds.records import RoundRecord, RunRecord

History: TypeAlias = tuple[RunRecord, Sequence[RoundRecord]]


class RoundMetrics(Protocol):
    """The measurements of a finished round; it may lack participations."""

    @property
    def round_num(self) -> int:
        """Index, from 0."""

    @property
    def virtual_s(self) -> float:
        """Virtual seconds since the run began."""

    @property
    def train_loss(self) -> float:
        """Mean training loss of the reports."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics that were measured after the round, by name."""


class Point(NamedTuple):
    """A finite value of a metric, with the finished rounds and virtual seconds at that time."""

    num_finished: int
    virtual_s: float
    value: float


def headline(metrics: Mapping[str, float], name: str) -> float | None:
    """Return the central metric, else its mean over clients, else ``None``."""
    return metrics.get(name, metrics.get(f"clients/{name}_mean"))


def series(rounds: Sequence[RoundMetrics], name: str) -> list[Point]:
    """Return the finite values of a metric over a run; ``train_loss`` counts as a metric."""
    values = (
        (record, record.train_loss if name == "train_loss" else headline(record.metrics, name))
        for record in rounds
    )
    return [
        Point(record.round_num + 1, record.virtual_s, value)
        for record, value in values
        if value is not None and math.isfinite(value)
    ]


def directions_of(record: RunRecord) -> dict[str, Direction]:
    """Return which way is better for each metric, as the run's objective and metrics declare it."""
    python, sections = record.config.get("python"), record.config.get("metrics")
    declared = dict(_mapping(_mapping(python).get("directions")))
    for name, section in _mapping(sections).items():
        declared[name] = _mapping(section).get("direction")
    directions: dict[str, Direction] = {"accuracy": "max", "loss": "min"}
    for name, direction in declared.items():
        if direction == "max":
            directions[name] = "max"
        elif direction == "min":
            directions[name] = "min"
    return directions


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def direction_of(record: RunRecord, name: str) -> Direction | None:
    """Return which way is better for a metric of the record; ``None`` if it is not declared."""
    return directions_of(record).get(split_statistic(name)[0])


def best_point(points: Sequence[Point], direction: Direction) -> Point | None:
    """Return the best value of a metric, the first if tied; ``None`` if it was never measured."""
    return max(points, key=lambda point: improvement_sign(direction) * point.value, default=None)


def metric_to_watch(record: RunRecord) -> str | None:
    """Return the metric that early stopping watches, if the configuration names a known one."""
    metric = _mapping(record.config.get("early_stopping")).get("metric")
    return metric if isinstance(metric, str) and direction_of(record, metric) else None


def headline_metric(record: RunRecord) -> str:
    """Return the metric to show next to the loss: the one the run watches, else ``accuracy``."""
    configured = metric_to_watch(record)
    return "accuracy" if configured in (None, "loss") else configured


def find_own_metrics(record: RoundRecord) -> dict[str, float]:
    """Return the metrics of a round that the algorithm itself computed in a run without a model."""
    general = {NUM_CLIPPED, NUM_CAPPED, "epsilon"}
    return {name: value for name, value in record.metrics.items() if name not in general}


def metric_to_draw(record: RunRecord, rounds: Sequence[RoundRecord]) -> str:
    """Return the metric to draw next to the loss.

    It is the leading metric, or the first declared one that was measured; without any, the loss. Of
    a query, which has no model, it is the first of its own metrics.
    """
    if not record.has_model:
        return next((name for one in rounds for name in find_own_metrics(one)), "accuracy")
    names = (headline_metric(record), *directions_of(record))
    further = (name for name in names if name != "loss" and series(rounds, name))
    return next(further, "loss" if series(rounds, "loss") else "accuracy")


def capitalize(metric: str) -> str:
    """Capitalize the name of a metric for the start of a heading.

    Example:
        >>> capitalize("accuracy"), capitalize("AUC")
        ('Accuracy', 'AUC')
    """
    return metric[:1].upper() + metric[1:]
