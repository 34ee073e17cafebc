"""What runs achieved, as numbers: one run's summary, and two runs side by side."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self, TypeAlias

from pydantic_core import to_jsonable_python

from fedlearn.core.collecting import NUM_CAPPED, NUM_CLIPPED, Participation, Status
from fedlearn.core.distribution import NUM_CLIENTS, Direction, sign, split
from fedlearn.core.messages import ClientId
from fedlearn.core.words import printable
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus

History: TypeAlias = tuple[RunRecord, Sequence[RoundRecord]]

_ABSENT = "(absent)"
_SHOWN_CHARACTERS = 40
_LEAST_CHARACTERS = 6  # of a cell that is cut
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


def json_values(values: Mapping[str, object]) -> dict[str, object]:
    """Return JSON values with ``None`` for the numbers that JSON does not have, at any depth.

    Example:
        >>> json_values({"loss": math.nan, "metrics": {"auc": 0.5}, "bests": (math.inf, 1)})
        {'loss': None, 'metrics': {'auc': 0.5}, 'bests': [None, 1]}
    """
    made: dict[str, object] = to_jsonable_python(values, inf_nan_mode="null", fallback=dict)
    return made


def json_text(values: Mapping[str, object]) -> str:
    """Return :func:`json_values` as an object in one line."""
    return json.dumps(json_values(values), allow_nan=False)


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys and values of a configuration; an empty table is a value.

    Example:
        >>> list(leaves({"seed": 1, "client": {"epochs": 2}, "metrics": {}}))
        [('seed', 1), ('client.epochs', 2), ('metrics', {})]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def aligned(
    rows: Sequence[Sequence[str]], *, values_right: bool = False, width: int | None = None
) -> str:
    """Return aligned columns, a line a row; all but the first to the right if so asked.

    Where a terminal has ``width`` columns, the widest but the first are cut until a line fits.

    Example:
        >>> print(aligned([("id", "name"), ("17", "clinic-a")]))
        id  name
        17  clinic-a
        >>> print(aligned([("id", "name"), ("17", "clinic-a")], width=10))
        id  name
        17  cli...
    """
    side = ">" if values_right else "<"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        widths = _fitting(widths, width)
        rows = [[_cut(*each) for each in zip(row, widths, strict=True)] for row in rows]
    layout = [f"{side if place else '<'}{width}" for place, width in enumerate(widths)]
    lines = ("  ".join(map(format, row, layout)).rstrip() for row in rows)
    return "\n".join(lines)


def _fitting(widths: Sequence[int], width: int) -> list[int]:
    first, *others = widths
    while first + sum(2 + each for each in others) > width and max(others) > _LEAST_CHARACTERS:
        others[others.index(max(others))] -= 1
    return [first, *others]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def time_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit in which ``longest_s`` is a number a person reads, and its seconds."""
    units = (("days", _DAY_S), ("hours", _HOUR_S), ("minutes", _MINUTE_S))
    return next((unit for unit in units if longest_s >= 2 * unit[1]), ("seconds", 1))


# ---- One run ------------------------------------------------------------------------------


class Counts(NamedTuple):
    """How many of the clients asked ended how."""

    reported: int
    late: int
    failed: int
    stale: int

    @classmethod
    def of(cls, record: RoundRecord) -> Self:
        """Count one round."""
        return cls(*(record.count(Status(name)) for name in cls._fields))

    @classmethod
    def of_all(cls, participations: Iterable[Participation]) -> Self:
        """Count participations of any rounds."""
        found = Counter(each.status for each in participations)
        return cls(*(found[Status(name)] for name in cls._fields))

    def text(self) -> str:
        """Return them in words; who was stale is told where somebody was."""
        names = [name for name, num in self._asdict().items() if num or name != "stale"]
        return ", ".join(f"{getattr(self, name)} {name}" for name in names)


class Measured(Protocol):
    """A finished round, with its participations or without."""

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
        """What was measured after it, by name."""


class Point(NamedTuple):
    """A metric after so many rounds and virtual seconds of a run; its value is finite."""

    num_finished: int
    virtual_s: float
    value: float


def headline(metrics: Mapping[str, float], name: str) -> float | None:
    """Return the central metric, else its mean over clients, else ``None``: not measured."""
    return metrics.get(name, metrics.get(f"clients/{name}_mean"))


def series(rounds: Sequence[Measured], name: str) -> list[Point]:
    """Return the finite values of a metric over a run; ``train_loss`` is one, too."""
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
    """Return by measure which way is better, as the run's objective and metrics declare it."""
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
    """Return which way a metric of the record is better; ``None`` if nobody declared it."""
    return directions_of(record).get(split(name)[0])


def best_point(points: Sequence[Point], direction: Direction) -> Point | None:
    """Return the first best value of a metric; ``None`` if it was never measured."""
    return max(points, key=lambda point: sign(direction) * point.value, default=None)


def _configured(record: RunRecord) -> str | None:
    """Return the metric that the configuration says to watch, if it is one."""
    metric = _mapping(record.config.get("early_stopping")).get("metric")
    return metric if isinstance(metric, str) and direction_of(record, metric) else None


def leading_metric(record: RunRecord) -> str:
    """Return what is told beside the loss: the metric that the run watches, else ``accuracy``."""
    configured = _configured(record)
    return "accuracy" if configured in (None, "loss") else configured


def drawn_metric(record: RunRecord, rounds: Sequence[RoundRecord]) -> str:
    """Return what is drawn beside the loss: the first measured of what a reader may look for."""
    names = (leading_metric(record), *directions_of(record))
    further = (name for name in names if name != "loss" and series(rounds, name))
    return next(further, "loss" if series(rounds, "loss") else "accuracy")


def headed(metric: str) -> str:
    """Return the name of a metric as a heading begins with it.

    Example:
        >>> headed("accuracy"), headed("AUC")
        ('Accuracy', 'AUC')
    """
    return metric[:1].upper() + metric[1:]


class Best(NamedTuple):
    """The best value of the metric a run is judged by."""

    metric: str
    point: Point

    @classmethod
    def of(cls, record: RunRecord, rounds: Sequence[RoundRecord]) -> "Best | None":
        """Return that of the first measured of what the run watches, accuracy and loss."""
        for name in (_configured(record), "accuracy", "loss"):
            direction = None if name is None else direction_of(record, name)
            if name and direction and (best := best_point(series(rounds, name), direction)):
                return cls(name, best)
        return None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to.

    Attributes:
        record: The run.
        num_finished: Rounds it has.
        best: Its best evaluation; ``None`` without any.
        metrics: Of the last evaluation; empty without any.
        measured_after: Rounds finished at the last evaluation; 0 without any.
        virtual_s: Virtual seconds in all.
        seconds: Real seconds in all.
        num_clients: Different clients asked.
        counts: Participations of all rounds.
        again: Those of them of clients that were counted as late before, where late updates are
            kept: each was asked once, and has two.
        num_skipped: Rounds that left the model as it was.
        num_retries: Further attempts, all rounds together.
        num_clipped: Reports that a clip scaled down; 0 also where the count is not known.
        num_capped: Reports whose loss or number of examples a secure sum cut off; likewise.
        reasons: Failure reasons and how often, the most frequent first.
        privacy: What was spent of its clients, where the reader is told; else ``None``.
    """

    record: RunRecord
    num_finished: int
    best: Best | None
    metrics: Mapping[str, float]
    measured_after: int
    virtual_s: float
    seconds: float
    num_clients: int
    counts: Counts
    again: Counts
    num_skipped: int
    num_retries: int
    num_clipped: int
    num_capped: int
    reasons: tuple[tuple[str, int], ...]
    privacy: Spending | None = None

    @property
    def num_asked(self) -> int:
        """How many times clients were asked whose rounds are over."""
        return sum(self.counts) - sum(self.again)

    @property
    def num_in_time(self) -> int:
        """How many of these times they reported in the round that asked them."""
        return self.counts.reported - self.again.reported

    @property
    def is_resumable(self) -> bool:
        """Whether `fedlearn resume NAME` is what to type next.

        A coordinator continues by itself, and so does a run that is alive. A run that failed before
        its first round was committed, or without a single report of its clients, is fixed and
        started again: its model is still the initial one.
        """
        match self.record.status:
            case RunStatus.DONE | RunStatus.RUNNING:
                return False
            case RunStatus.FAILED if self.num_finished == 0:
                return False
            case RunStatus.FAILED if self.num_asked > 0 and self.counts.reported == 0:
                return False
            case _:
                return not self.record.is_deployed

    def times(self) -> str:
        """Return what it took, in words; a deployed run has no virtual time."""
        real = duration_text(self.seconds)
        if self.record.is_deployed:
            return real
        return f"{duration_text(self.virtual_s)} virtual, {real} real"

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
            name, part = split(key)
            if part is not None:
                spread.setdefault(name, {})[part] = int(value) if part == NUM_CLIENTS else value
        return spread

    def central_metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation that are not per client."""
        return {
            name: value
            for name, value in self.metrics.items()
            if not name.startswith("clients/") and name not in (NUM_CLIPPED, NUM_CAPPED)
        }


def staleness_text(staleness: Mapping[int, int]) -> str:
    """Return how many updates had which staleness, in words.

    Example:
        >>> staleness_text({0: 6, 1: 3, 4: 1})
        '6 x 0, 3 x 1, 1 x 4 (mean 0.7)'
    """
    total = sum(rounds * number for rounds, number in staleness.items())
    mean = total / max(1, sum(staleness.values()))
    each = ", ".join(f"{number} x {rounds}" for rounds, number in staleness.items())
    return f"{each} (mean {mean:.1f})"


def summarize(record: RunRecord, rounds: Sequence[RoundRecord]) -> Summary:
    """Return what a run came to; ``None`` and zeros where it has no rounds."""
    measures = directions_of(record)  # what a strategy says of its step is no evaluation
    evaluated = next(
        (
            one
            for one in reversed(rounds)
            if any(split(each)[0] in measures for each in one.metrics)
        ),
        None,
    )
    participations = [each for one in rounds for each in one.participations]
    reasons = Counter(each.reason for each in participations if each.status is Status.FAILED)
    return Summary(
        record=record,
        num_finished=len(rounds),
        best=Best.of(record, rounds),
        metrics=evaluated.metrics if evaluated else {},
        measured_after=evaluated.round_num + 1 if evaluated else 0,
        virtual_s=rounds[-1].virtual_s if rounds else 0.0,
        seconds=sum(one.seconds for one in rounds),
        num_clients=len({each.client_id for each in participations}),
        counts=Counts.of_all(participations),
        again=Counts.of_all(_again(record, participations)),
        num_skipped=sum(one.outcome is Outcome.SKIPPED for one in rounds),
        num_retries=sum(one.attempt for one in rounds),
        num_clipped=round(sum(one.metrics.get(NUM_CLIPPED, 0.0) for one in rounds)),
        num_capped=round(sum(one.metrics.get(NUM_CAPPED, 0.0) for one in rounds)),
        reasons=tuple(reasons.most_common()),
    )


def _again(record: RunRecord, participations: Iterable[Participation]) -> Iterator[Participation]:
    """Yield what became of clients that were late in an earlier round, and not asked again."""
    table = record.config.get("late_updates")
    if not isinstance(table, Mapping) or table.get("mode") != "keep":
        return
    awaited = set[ClientId]()
    for each in participations:
        if each.client_id in awaited:
            awaited.remove(each.client_id)
            yield each
        elif each.status is Status.LATE:
            awaited.add(each.client_id)


# ---- Two runs -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of both runs, NaN where one has none; ``less_is_better`` may be neither."""

    name: str
    a: float
    b: float
    text: Callable[[float], str]
    less_is_better: bool | None

    def better(self) -> Literal["a", "b"] | None:
        """Return whose is better; ``None`` if neither is. Who has no value has the worse."""
        way = -1.0 if self.less_is_better else 1.0
        a, b = (-math.inf if math.isnan(value) else way * value for value in (self.a, self.b))
        return None if self.less_is_better is None or a == b else "a" if a > b else "b"

    def texts(self) -> tuple[str, str]:
        """Return both values as text, a star at the better."""
        better = self.better()
        a, b = ("-" if math.isnan(value) else self.text(value) for value in (self.a, self.b))
        return f"{a} {'*' if better == 'a' else ' '}", f"{b} {'*' if better == 'b' else ' '}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        metric: What they are judged by; ``None`` if no metric was measured in both.
        target: Value of ``metric`` that the race is to; NaN without one.
        differences: By dotted key where the configurations differ: JSON, or ``(absent)``.
    """

    names: tuple[str, str]
    metric: str | None
    target: float
    measures: tuple[Measure, ...]
    differences: Mapping[str, tuple[str, str]]

    def render(self, *, width: int | None = None) -> str:
        """Return an aligned plain-text table; a terminal may be of some ``width``."""
        a, b = (printable(name) for name in self.names)
        rows = [("", f"{a}  ", f"{b}  ")]
        rows += [(measure.name, *measure.texts()) for measure in self.measures]
        table = aligned(rows, values_right=True, width=width)
        told = f"{table}\n\n* the better of the two\n\n"
        if not self.differences:
            return f"{told}the configurations are equal\n"
        keys = [("", a, b)]
        keys += [(printable(k), _short(a), _short(b)) for k, (a, b) in self.differences.items()]
        number = len(self.differences)
        told += f"the configurations differ in {number} key{'' if number == 1 else 's'}\n"
        return f"{told}{aligned(keys, values_right=True, width=width)}\n"


def compare(
    a: History,
    b: History,
    *,
    target: float | None = None,
    spent: tuple[Spending | None, Spending | None] = (None, None),
) -> Comparison:
    """Return how two runs differ, in what was asked and in what came of it.

    Both race to ``target``; ``None`` takes the worse of the two bests, which both reached. What was
    ``spent`` of their clients stands beside it.
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
        measures=(*_race(a, b, metric, goal, directions), *_private(*spent), *totals),
        differences=_differences(a[0].config, b[0].config),
    )


def _private(a: Spending | None, b: Spending | None) -> Iterator[Measure]:
    """Yield ε of both runs' releases; one that promises nothing has none, which is the worse."""
    if a is None and b is None:
        return
    epsilons = [math.nan if each is None else each.epsilon for each in (a, b)]
    deltas = [math.nan if each is None else each.target_delta for each in (a, b)]
    yield Measure(
        name="ε of the models", a=epsilons[0], b=epsilons[1], text=_short_text, less_is_better=True
    )
    yield Measure(name="  at δ", a=deltas[0], b=deltas[1], text=_short_text, less_is_better=None)


def _common_directions(a: RunRecord, b: RunRecord) -> dict[str, Direction]:
    """Return what two runs can be compared by: what both watch first, the loss last."""
    of_a, of_b = directions_of(a), directions_of(b)
    agreed = {name: way for name, way in (of_b | of_a).items() if of_b.get(name, way) == way}
    leading, first = leading_metric(a), dict[str, Direction]()
    if leading == leading_metric(b) and split(leading)[0] in agreed:
        first[leading] = agreed[split(leading)[0]]
    loss = agreed.pop("loss")
    return first | agreed | {"loss": loss}


def _common_best(a: History, b: History, metric: str, direction: Direction) -> float:
    bests = (best_point(series(rounds, metric), direction) for _, rounds in (a, b))
    values = (best.value for best in bests if best is not None)
    return min(values, key=lambda value: sign(direction) * value)


def _race(
    a: History, b: History, metric: str | None, goal: float, directions: Mapping[str, Direction]
) -> Iterator[Measure]:
    """Yield what was measured: bests, last values, and who reached the goal first."""
    for name, direction in directions.items():
        of_a, of_b = series(a[1], name), series(b[1], name)
        if of_a or of_b:
            bests = [best_point(points, direction) for points in (of_a, of_b)]
            lasts = [points[-1] if points else None for points in (of_a, of_b)]
            less = direction == "min"
            yield _measure(f"best {name}", bests, "value", number_text, less=less)
            yield _measure("  after round", bests, "num_finished", _count_text, less=None)
            yield _measure(f"final {name}", lasts, "value", number_text, less=less)
    if metric is not None:
        way = directions[metric]
        yield from _at_the_end_of_the_shorter(a, b, metric, less=way == "min")
        reached = [_first(series(rounds, metric), way, goal) for _, rounds in (a, b)]
        to = f"to {metric} {number_text(goal)}"
        yield _measure(f"rounds {to}", reached, "num_finished", _count_text, less=True)
        yield _measure(f"virtual time {to}", reached, "virtual_s", duration_text, less=True)


def _at_the_end_of_the_shorter(
    a: History, b: History, metric: str, *, less: bool
) -> Iterator[Measure]:
    """Yield the metric of both after as many rounds: the last values are of unlike lengths."""
    common = min(len(a[1]), len(b[1]))
    if len(a[1]) == len(b[1]):
        return
    points = [series(rounds[:common], metric) for _, rounds in (a, b)]
    lasts = [each[-1] if each else None for each in points]
    yield _measure(f"{metric} by round {common}", lasts, "value", number_text, less=less)


def _short_text(value: float) -> str:
    return f"{value:.3g}"


def _count_text(value: float) -> str:
    return f"{value:.0f}"


def _first(points: Sequence[Point], direction: Direction, goal: float) -> Point | None:
    way = sign(direction)
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


#: What both runs took: how to find it and how to write it.
_TOTALS: Mapping[str, tuple[Callable[[Summary], float], Callable[[float], str]]] = {
    "rounds": (lambda run: run.num_finished, _count_text),
    "clients seen": (lambda run: run.num_clients, _count_text),
    "reported": (lambda run: run.counts.reported, _count_text),
    "late": (lambda run: run.counts.late, _count_text),
    "failed": (lambda run: run.counts.failed, _count_text),
    "stale": (lambda run: run.counts.stale, _count_text),
    "skipped rounds": (lambda run: run.num_skipped, _count_text),
    "virtual time": (lambda run: run.virtual_s, duration_text),
    "real time": (lambda run: run.seconds, duration_text),
}


def _differences(a: Mapping[str, object], b: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return where two trees differ; as JSON, which tells 1 from true and "1"."""
    of_a, of_b = (
        {k: json.dumps(v, sort_keys=True, ensure_ascii=False) for k, v in leaves(tree)}
        for tree in (a, b)
    )
    pairs = {key: (of_a.get(key, _ABSENT), of_b.get(key, _ABSENT)) for key in sorted(of_a | of_b)}
    return {key: (in_a, in_b) for key, (in_a, in_b) in pairs.items() if in_a != in_b}


def _short(text: str) -> str:
    return _cut(printable(text), _SHOWN_CHARACTERS)
