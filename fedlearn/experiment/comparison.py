"""Compares two runs side by side."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedlearn.core.distribution import Direction, improvement_sign, split_statistic
from fedlearn.core.json_values import iterate_leaves
from fedlearn.core.quantities import format_duration, format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.history import (
    History,
    Point,
    best_point,
    directions_of,
    headline_metric,
    series,
)
from fedlearn.experiment.layout import table_text
from fedlearn.experiment.summary import Summary, summarize
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import RunRecord

_ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of both runs; NaN if a run lacks it.

    ``less_is_better`` is ``None`` where neither direction is better.
    """

    name: str
    a: float
    b: float
    text: Callable[[float], str]
    less_is_better: bool | None

    def better(self) -> Literal["a", "b"] | None:
        """Return which run is better; ``None`` if neither. A missing value is the worse one."""
        way = -1.0 if self.less_is_better else 1.0
        # NaN would compare false either way; a missing value is the worse one.
        a, b = (-math.inf if math.isnan(value) else way * value for value in (self.a, self.b))
        return None if self.less_is_better is None or a == b else "a" if a > b else "b"

    def cells(self) -> tuple[str, ...]:
        """Format both values, each followed by a star if it is the better one."""
        better = self.better()
        a, b = ("-" if math.isnan(value) else self.text(value) for value in (self.a, self.b))
        return a, "*" if better == "a" else "", b, "*" if better == "b" else ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        metric: Metric by which the runs are judged; ``None`` if none was measured in both.
        target: Value of ``metric`` that both runs race to; NaN without a metric.
        differences: Differing configuration values by dotted key, as JSON or ``(absent)``.
    """

    names: tuple[str, str]
    metric: str | None
    target: float
    measures: tuple[Measure, ...]
    differences: Mapping[str, tuple[str, ...]]

    def render(self, *, width: int | None = None) -> str:
        """Format the comparison as plain-text tables, cut to ``width`` columns if given."""
        a, b = (replace_unprintable(name) for name in self.names)
        rows: list[tuple[str, ...]] = [("", a, "", b, "")]
        rows += [(measure.name, *measure.cells()) for measure in self.measures]
        text = f"{table_text(rows, values_right=True, width=width)}\n\n* the better of the two\n\n"
        if not self.differences:
            return f"{text}the configurations are equal\n"
        keys: list[tuple[str, ...]] = [("", a, b)]
        keys += [
            tuple(map(replace_unprintable, (key, *both))) for key, both in self.differences.items()
        ]
        number = len(self.differences)
        text += f"the configurations differ in {number} key{'' if number == 1 else 's'}\n"
        return f"{text}{table_text(keys, values_right=True, width=width)}\n"


def compare(
    a: History,
    b: History,
    *,
    target: float | None = None,
    spent: tuple[Spending | None, Spending | None] = (None, None),
) -> Comparison:
    """Compare two runs: their configurations and their results.

    Both race to ``target``; ``None`` means the worse of the two bests, which both reached.
    ``spent`` is the privacy spending of each, which is listed as well.
    """
    directions = _common_directions(a[0], b[0])
    metric = next((m for m in directions if series(a[1], m) and series(b[1], m)), None)
    goal = math.nan
    if metric is not None:
        goal = _common_best(a, b, metric, directions[metric]) if target is None else target
    of_a, of_b = summarize(*a), summarize(*b)
    totals = (
        Measure(name=name, a=total(of_a), b=total(of_b), text=text, less_is_better=None)
        for name, (total, text) in _TOTALS.items()
        if name != "stale" or total(of_a) or total(of_b)
    )
    return Comparison(
        names=(a[0].name, b[0].name),
        metric=metric,
        target=goal,
        measures=(*_race(a, b, metric, goal, directions), *_measure_privacy(*spent), *totals),
        differences=differences(a[0].config, b[0].config),
    )


def _measure_privacy(a: Spending | None, b: Spending | None) -> Iterator[Measure]:
    """Yield ε and δ of both runs; a run without privacy has no ε, which counts as worse."""
    if a is None and b is None:
        return
    epsilons = [math.nan if each is None else each.epsilon for each in (a, b)]
    deltas = [math.nan if each is None else each.target_delta for each in (a, b)]
    yield Measure(
        name="ε of the models", a=epsilons[0], b=epsilons[1], text=_short_text, less_is_better=True
    )
    yield Measure(name="  at δ", a=deltas[0], b=deltas[1], text=_short_text, less_is_better=None)


def _common_directions(a: RunRecord, b: RunRecord) -> dict[str, Direction]:
    """Return the metrics that two runs share: the one both watch first, the loss last."""
    of_a, of_b = directions_of(a), directions_of(b)
    agreed = {name: way for name, way in (of_b | of_a).items() if of_b.get(name, way) == way}
    leading, first = headline_metric(a), dict[str, Direction]()
    if leading == headline_metric(b) and split_statistic(leading)[0] in agreed:
        first[leading] = agreed[split_statistic(leading)[0]]
    # Last, since `compare` judges by the first metric that both runs have measured.
    last = {name: agreed.pop(name) for name in ("loss",) if name in agreed}
    return first | agreed | last


def _common_best(a: History, b: History, metric: str, direction: Direction) -> float:
    bests = (best_point(series(rounds, metric), direction) for _, rounds in (a, b))
    values = (best.value for best in bests if best is not None)
    return min(values, key=lambda value: improvement_sign(direction) * value)


def _race(
    a: History, b: History, metric: str | None, goal: float, directions: Mapping[str, Direction]
) -> Iterator[Measure]:
    """Yield the measurements: bests, last values, and when each run reached the goal."""
    for name, direction in directions.items():
        of_a, of_b = series(a[1], name), series(b[1], name)
        if of_a or of_b:
            bests = [best_point(points, direction) for points in (of_a, of_b)]
            lasts = [points[-1] if points else None for points in (of_a, of_b)]
            less = direction == "min"
            yield _measure(f"best {name}", bests, "value", format_number, less=less)
            yield _measure("  after round", bests, "num_finished", _count_text, less=None)
            yield _measure(f"final {name}", lasts, "value", format_number, less=less)
    if metric is not None:
        way = directions[metric]
        yield from _at_the_end_of_the_shorter(a, b, metric, less=way == "min")
        reached = [_first(series(rounds, metric), way, goal) for _, rounds in (a, b)]
        to = f"to {metric} {format_number(goal)}"
        yield _measure(f"rounds {to}", reached, "num_finished", _count_text, less=True)
        yield _measure(f"virtual time {to}", reached, "virtual_s", format_duration, less=True)


def _at_the_end_of_the_shorter(
    a: History, b: History, metric: str, *, less: bool
) -> Iterator[Measure]:
    """Yield the metric of both after the rounds of the shorter run, if their lengths differ."""
    common = min(len(a[1]), len(b[1]))
    if len(a[1]) == len(b[1]):
        return
    points = [series(rounds[:common], metric) for _, rounds in (a, b)]
    lasts = [each[-1] if each else None for each in points]
    yield _measure(f"{metric} by round {common}", lasts, "value", format_number, less=less)


def _short_text(value: float) -> str:
    return f"{value:.3g}"


def _count_text(value: float) -> str:
    return f"{value:.0f}"


def _first(points: Sequence[Point], direction: Direction, goal: float) -> Point | None:
    way = improvement_sign(direction)
    return next((point for point in points if way * (point.value - goal) >= 0.0), None)


def _measure(
    name: str,
    points: Sequence[Point | None],
    field: Literal["value", "num_finished", "virtual_s"],
    text: Callable[[float], str],
    *,
    less: bool | None,
) -> Measure:
    a, b = (math.nan if point is None else float(getattr(point, field)) for point in points)
    return Measure(name=name, a=a, b=b, text=text, less_is_better=less)


#: Totals of both runs by name: how to compute each and how to format it.
_TOTALS: Mapping[str, tuple[Callable[[Summary], float], Callable[[float], str]]] = {
    "rounds": (lambda run: run.num_finished, _count_text),
    "clients seen": (lambda run: run.num_clients, _count_text),
    "reported": (lambda run: run.counts.reported, _count_text),
    "late": (lambda run: run.counts.late, _count_text),
    "failed": (lambda run: run.counts.failed, _count_text),
    "stale": (lambda run: run.counts.stale, _count_text),
    "skipped rounds": (lambda run: run.num_skipped, _count_text),
    "virtual time": (lambda run: run.virtual_s, format_duration),
    "real time": (lambda run: run.seconds, format_duration),
}


def differences(*trees: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the values where configurations differ, by dotted key.

    Values are JSON, which distinguishes 1, true and "1", or ``(absent)``.
    """
    texts = [
        {k: json.dumps(v, sort_keys=True, ensure_ascii=False) for k, v in iterate_leaves(tree)}
        for tree in trees
    ]
    keys = sorted({key for each in texts for key in each})
    found = {key: tuple(each.get(key, _ABSENT) for each in texts) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}
