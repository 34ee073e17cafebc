"""What runs achieved, as numbers: one run's summary, and two runs side by side."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias

from fedlearn.core.collecting import Status
from fedlearn.core.words import printable
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus

History: TypeAlias = tuple[RunRecord, Sequence[RoundRecord]]
Kind: TypeAlias = Literal["metric", "count", "duration"]

CLIENT_PARTS = ("mean", "p10", "p50", "p90", "worst_decile")
_ABSENT = "(absent)"
_SHOWN_CHARACTERS = 40
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


# ---- Words --------------------------------------------------------------------------------


def number_text(value: float | None) -> str:
    """Return a metric with four decimals, or four digits of a large one; a dash for none.

    Example:
        >>> number_text(0.91234), number_text(123456.7), number_text(None), number_text(math.nan)
        ('0.9123', '1.235e+05', '-', 'nan')
    """
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"  # noqa: PLR2004 (a width)


def duration_text(seconds: float) -> str:
    """Return a duration in at most eight characters; a dash if it is not finite.

    Example:
        >>> [duration_text(s) for s in (0.0421, 8.13, 75.0, 3720.0, 180000.0)]
        ['42 ms', '8.1 s', '1m 15s', '1h 02m', '2d 02h']
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:  # noqa: PLR2004 (what does not round to a second)
        return f"{1000 * seconds:.0f} ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m {whole % _MINUTE_S:02d}s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}h {whole % _HOUR_S // _MINUTE_S:02d}m"
    return f"{whole // _DAY_S}d {whole % _DAY_S // _HOUR_S:02d}h"


class TimeUnit(NamedTuple):
    """What an axis of time is labelled in."""

    name: str
    seconds: float

    @classmethod
    def of(cls, longest_s: float) -> "TimeUnit":
        """Return the unit in which ``longest_s`` is a number a person reads."""
        units = (cls("days", 86400.0), cls("hours", 3600.0), cls("minutes", 60.0))
        return next((unit for unit in units if longest_s >= 2 * unit.seconds), cls("seconds", 1.0))


# ---- One run ------------------------------------------------------------------------------


class Counts(NamedTuple):
    """How many of the clients asked ended how."""

    reported: int
    late: int
    failed: int

    @classmethod
    def of(cls, record: RoundRecord) -> Self:
        """Count one round."""
        return cls(*(record.count(each) for each in (Status.REPORTED, Status.LATE, Status.FAILED)))


class Point(NamedTuple):
    """A metric at one moment of a run.

    Attributes:
        num_finished: Rounds finished when it was measured.
        virtual_s: Virtual seconds since the run began.
        value: Finite.
    """

    num_finished: int
    virtual_s: float
    value: float


def headline(metrics: Mapping[str, float], name: str) -> float | None:
    """Return the central metric, else its mean over clients, else ``None``: not measured."""
    return metrics.get(name, metrics.get(f"clients/{name}_mean"))


def series(rounds: Sequence[RoundRecord], name: str) -> list[Point]:
    """Return the finite values of a metric over a run.

    Args:
        rounds: The run.
        name: A key of ``metrics`` (``accuracy`` and ``loss`` as in :func:`headline`), or
            ``train_loss``.
    """
    values = (
        (record, record.train_loss if name == "train_loss" else headline(record.metrics, name))
        for record in rounds
    )
    return [
        Point(record.round_num + 1, record.virtual_s, value)
        for record, value in values
        if value is not None and math.isfinite(value)
    ]


def is_loss(name: str) -> bool:
    """Whether less of this metric is better."""
    return "loss" in name


def best_point(points: Sequence[Point], name: str) -> Point | None:
    """Return the first best value of a metric; ``None`` if it was never measured."""
    sign = 1.0 if is_loss(name) else -1.0
    return min(points, key=lambda point: sign * point.value, default=None)


def watched_metric(record: RunRecord, rounds: Sequence[RoundRecord]) -> str | None:
    """Return what the run is judged by: the metric it watches, else what was measured.

    Returns:
        The configuration's ``early_stopping.metric``, ``accuracy`` or ``loss``, the first
        that was measured; ``None`` without any evaluation.
    """
    section = record.config.get("early_stopping")
    configured = section.get("metric") if isinstance(section, Mapping) else None
    candidates = (configured, "accuracy", "loss")
    names = (name for name in candidates if isinstance(name, str))
    return next((name for name in names if series(rounds, name)), None)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best value of the metric a run is judged by."""

    metric: str
    point: Point


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to.

    Attributes:
        name: Of the run.
        status: Where it stands.
        error: Why it failed; empty otherwise.
        num_rounds: Rounds it was to have.
        num_finished: Rounds it has.
        best: Its best evaluation; ``None`` without any.
        metrics: Of the last evaluation; empty without any.
        measured_after: Rounds finished at the last evaluation; 0 without any.
        virtual_s: Virtual seconds in all.
        seconds: Real seconds in all.
        num_clients: Different clients asked.
        counts: Participations of all rounds.
        num_skipped: Rounds that left the model as it was.
        num_retries: Further attempts, all rounds together.
        reasons: Failure reasons and how often, the most frequent first.
        is_deployed: Whether a coordinator runs it with real clients.
    """

    name: str
    status: RunStatus
    error: str
    num_rounds: int
    num_finished: int
    best: Best | None
    metrics: Mapping[str, float]
    measured_after: int
    virtual_s: float
    seconds: float
    num_clients: int
    counts: Counts
    num_skipped: int
    num_retries: int
    reasons: tuple[tuple[str, int], ...]
    is_deployed: bool

    @property
    def is_resumable(self) -> bool:
        """Whether `fedlearn resume NAME` goes on with it; a coordinator does so by itself."""
        return self.status is not RunStatus.DONE and not self.is_deployed

    def times(self) -> str:
        """Return what it took, in words; a deployed run has no virtual time."""
        real = duration_text(self.seconds)
        return real if self.is_deployed else f"{duration_text(self.virtual_s)} virtual, {real} real"

    @property
    def accuracy(self) -> float | None:
        """The last accuracy; ``None`` if it was not measured."""
        return headline(self.metrics, "accuracy")

    @property
    def loss(self) -> float | None:
        """The last evaluation loss; ``None`` if it was not measured."""
        return headline(self.metrics, "loss")

    def client_metrics(self) -> dict[str, dict[str, float]]:
        """Return how each metric spread over clients at the last evaluation: by name, by part."""
        spread: dict[str, dict[str, float]] = {}
        for key, value in self.metrics.items():
            for part in CLIENT_PARTS:
                if key.startswith("clients/") and key.endswith(f"_{part}"):
                    name = key.removeprefix("clients/").removesuffix(f"_{part}")
                    spread.setdefault(name, {})[part] = value
        return spread

    def central_metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation that are not per client."""
        return {k: v for k, v in self.metrics.items() if not k.startswith("clients/")}


def summarize(record: RunRecord, rounds: Sequence[RoundRecord]) -> Summary:
    """Return what a run came to; ``None`` and zeros where it has no rounds."""
    metric = watched_metric(record, rounds)
    point = best_point(series(rounds, metric), metric) if metric else None
    evaluated = next((one for one in reversed(rounds) if one.metrics), None)
    participations = [each for one in rounds for each in one.participations]
    counts = [Counts.of(one) for one in rounds]
    reasons = Counter(each.reason for each in participations if each.status is Status.FAILED)
    return Summary(
        name=record.name,
        status=record.status,
        error=record.error,
        num_rounds=record.num_rounds,
        num_finished=len(rounds),
        best=Best(metric=metric, point=point) if metric and point else None,
        metrics=evaluated.metrics if evaluated else {},
        measured_after=evaluated.round_num + 1 if evaluated else 0,
        virtual_s=rounds[-1].virtual_s if rounds else 0.0,
        seconds=sum(one.seconds for one in rounds),
        num_clients=len({each.client_id for each in participations}),
        counts=Counts(*(sum(column) for column in zip((0, 0, 0), *counts, strict=True))),
        num_skipped=sum(one.outcome is Outcome.SKIPPED for one in rounds),
        num_retries=sum(one.attempt for one in rounds),
        reasons=tuple(reasons.most_common()),
        is_deployed=record.is_deployed,
    )


# ---- Two runs -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key on which two configurations differ.

    Attributes:
        key: Dotted.
        a: The first run's value as JSON, ``(absent)`` where it has none.
        b: The second's.
    """

    key: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of both runs.

    Attributes:
        name: What it is.
        a: The first run's; NaN where it has none.
        b: The second's.
        kind: How to write it.
        less_is_better: Which is better; ``None`` where neither is.
    """

    name: str
    a: float
    b: float
    kind: Kind
    less_is_better: bool | None

    def better(self) -> Literal["a", "b"] | None:
        """Return whose is better; ``None`` if neither is. Who has no value has the worse."""
        if self.less_is_better is None:
            return None
        sign = 1.0 if self.less_is_better else -1.0
        a, b = (math.inf if math.isnan(v) else sign * v for v in (self.a, self.b))
        return None if a == b else "a" if a < b else "b"

    def texts(self) -> tuple[str, str]:
        """Return both values as text, a star at the better."""
        better = self.better()
        a, b = (_value_text(value, self.kind) for value in (self.a, self.b))
        return f"{a} {'*' if better == 'a' else ' '}", f"{b} {'*' if better == 'b' else ' '}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        names: Of the two runs.
        metric: What they are judged by; ``None`` if no metric was measured in both.
        target: Value of ``metric`` that the race is to; NaN without one.
        measures: The numbers.
        differences: Where the configurations differ, sorted by key.
    """

    names: tuple[str, str]
    metric: str | None
    target: float
    measures: tuple[Measure, ...]
    differences: tuple[Difference, ...]

    def render(self) -> str:
        """Return an aligned plain-text table, the same on a terminal and off."""
        a, b = (printable(name) for name in self.names)
        rows = [("", f"{a}  ", f"{b}  ")]
        rows += [(measure.name, *measure.texts()) for measure in self.measures]
        lines = [*_aligned(rows), "", "* the better of the two", ""]
        if not self.differences:
            return "\n".join([*lines, "the configurations are equal"]) + "\n"
        lines.append(f"the configurations differ in {_keys(len(self.differences))}")
        keys = [("", a, b)]
        keys += [(printable(d.key), _short(d.a), _short(d.b)) for d in self.differences]
        return "\n".join([*lines, *_aligned(keys)]) + "\n"


def compare(a: History, b: History, *, target: float | None = None) -> Comparison:
    """Return how two runs differ, in what was asked and in what came of it.

    Args:
        a: The first run.
        b: The second.
        target: Value that both race to; ``None`` takes the worse of the two bests, which
            both reached.
    """
    metric = next((m for m in ("accuracy", "loss") if series(a[1], m) and series(b[1], m)), None)
    goal = math.nan
    if metric is not None:
        goal = _common_best(a, b, metric) if target is None else target
    measures = (*_race(a, b, metric, goal), *_totals(summarize(*a), summarize(*b)))
    return Comparison(
        names=(a[0].name, b[0].name),
        metric=metric,
        target=goal,
        measures=measures,
        differences=tuple(_differences(a[0].config, b[0].config)),
    )


def _common_best(a: History, b: History, metric: str) -> float:
    bests = [best_point(series(rounds, metric), metric) for _, rounds in (a, b)]
    values = [best.value for best in bests if best is not None]
    return max(values) if is_loss(metric) else min(values)


def _race(a: History, b: History, metric: str | None, goal: float) -> Iterator[Measure]:
    """Yield what was measured: bests, last values, and who reached the goal first."""
    for name in ("accuracy", "loss"):
        of_a, of_b = series(a[1], name), series(b[1], name)
        if of_a or of_b:
            bests = [best_point(points, name) for points in (of_a, of_b)]
            lasts = [points[-1] if points else None for points in (of_a, of_b)]
            yield _measure(f"best {name}", bests, "value", "metric", less=is_loss(name))
            yield _measure("  after round", bests, "num_finished", "count", less=None)
            yield _measure(f"final {name}", lasts, "value", "metric", less=is_loss(name))
    if metric is not None:
        reached = [_first(series(rounds, metric), metric, goal) for _, rounds in (a, b)]
        to = f"to {metric} {number_text(goal)}"
        yield _measure(f"rounds {to}", reached, "num_finished", "count", less=True)
        yield _measure(f"virtual time {to}", reached, "virtual_s", "duration", less=True)


def _first(points: Sequence[Point], metric: str, goal: float) -> Point | None:
    sign = -1.0 if is_loss(metric) else 1.0
    return next((point for point in points if sign * (point.value - goal) >= 0.0), None)


def _measure(
    name: str,
    points: Sequence[Point | None],
    field: Literal["value", "num_finished", "virtual_s"],
    kind: Kind,
    *,
    less: bool | None,
) -> Measure:
    a, b = (math.nan if point is None else float(getattr(point, field)) for point in points)
    return Measure(name=name, a=a, b=b, kind=kind, less_is_better=less)


def _totals(a: Summary, b: Summary) -> Iterator[Measure]:
    """Yield what both runs took."""
    counted = {
        "rounds": (a.num_finished, b.num_finished),
        "clients seen": (a.num_clients, b.num_clients),
        "reported": (a.counts.reported, b.counts.reported),
        "late": (a.counts.late, b.counts.late),
        "failed": (a.counts.failed, b.counts.failed),
        "skipped rounds": (a.num_skipped, b.num_skipped),
    }
    for name, (of_a, of_b) in counted.items():
        yield Measure(name=name, a=of_a, b=of_b, kind="count", less_is_better=None)
    times = {"virtual time": (a.virtual_s, b.virtual_s), "real time": (a.seconds, b.seconds)}
    for name, (a_s, b_s) in times.items():
        yield Measure(name=name, a=a_s, b=b_s, kind="duration", less_is_better=None)


def _differences(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Difference]:
    flat_a, flat_b = dict(_flat(a, "")), dict(_flat(b, ""))
    for key in sorted(flat_a.keys() | flat_b.keys()):
        of_a, of_b = flat_a.get(key, _ABSENT), flat_b.get(key, _ABSENT)
        if of_a != of_b:
            yield Difference(key=key, a=of_a, b=of_b)


def _flat(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and their values as JSON, which tells 1 from true and "1"."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, sort_keys=True, ensure_ascii=False)


def _value_text(value: float, kind: Kind) -> str:
    if math.isnan(value):
        return "-"
    match kind:
        case "metric":
            return number_text(value)
        case "duration":
            return duration_text(value)
        case "count":
            return f"{value:.0f}"


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return one line a row: names to the left, values to the right."""
    first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"{n:<{first}}  {a:>{second}}  {b:>{third}}".rstrip() for n, a, b in rows]


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _keys(number: int) -> str:
    return "1 key" if number == 1 else f"{number} keys"
