"""Plans of statistics: the columns of the clients' tables, and what is asked of them."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

from fedlearn.core.ranges import describe_out_of_range, is_whole
from fedlearn.core.words import did_you_mean
from fedlearn.errors import ConfigError
from fedlearn.statistics.counts import (
    ColumnHistogram,
    FrequentValues,
    GroupCounts,
    MissingValues,
    RowCount,
)
from fedlearn.statistics.distinct import DistinctValues
from fedlearn.statistics.moments import Correlation, MeanAndVariance
from fedlearn.statistics.schema import COLUMNS, CategoryColumn, Column, NumberColumn, Schema
from fedlearn.statistics.search import FrequentTexts, Quantiles
from fedlearn.statistics.statistic import Statistic

#: The statistics by kind; of two with one kind, the columns decide.
KINDS: Mapping[str, Sequence[type[Statistic]]] = {
    each.kind: [other for other in _ALL if other.kind == each.kind]
    for _ALL in [
        (
            RowCount,
            MissingValues,
            MeanAndVariance,
            ColumnHistogram,
            Quantiles,
            FrequentValues,
            FrequentTexts,
            Correlation,
            GroupCounts,
            DistinctValues,
        )
    ]
    for each in _ALL
}
#: What privacy hides, as in ``privacy.unit``.
CLIENT, EXAMPLE = "client", "example"
#: Rounding may make a client's sums this much longer, which should not count as clipped.
_MARGIN = 1e-9
_NO_SUMS = frozenset({"min", "max", "minimum", "maximum", "range"})


@dataclass(frozen=True, kw_only=True)
class StatisticsPlan:
    """What is asked of all clients.

    Attributes:
        columns: The columns of every client's table, by name.
        statistics: What to compute.
        max_examples: Most rows of a client that count, which secure sums and privacy need; of a
            longer table, a fixed random choice of rows counts. ``None``: all count.
        per_client: Whether the result shows the numbers of each client, too: of the statistics
            that take one round.

    Raises:
        ConfigError: A statistic does not fit to the columns, or to another one.

    Example:
        >>> plan = StatisticsPlan.of({
        ...     "columns": {"age": {"kind": "number", "low": 0, "high": 120}},
        ...     "statistics": [{"kind": "mean", "columns": ["age"]}],
        ... })
        >>> plan.num_rounds, plan.statistics[0].columns
        (1, ('age',))
    """

    columns: Schema
    statistics: tuple[Statistic, ...]
    max_examples: int | None = None
    per_client: bool = False

    def __post_init__(self) -> None:
        if not self.columns:
            raise ConfigError("columns is empty; describe one or more, such as kind = 'number'")
        if not self.statistics:
            raise ConfigError("statistics is empty; ask for one or more, such as kind = 'count'")
        if self.max_examples is not None and (
            not is_whole(self.max_examples) or self.max_examples < 1
        ):
            raise ConfigError(
                f"max_examples is {self.max_examples!r}; give a whole number >= 1, or leave it out"
            )
        for place, statistic in enumerate(self.statistics):
            self._check(statistic, f"statistics[{place}]")
            if (first := self.statistics.index(statistic)) < place:
                raise ConfigError(
                    f"statistics[{place}] repeats statistics[{first}], which would divide the "
                    "noise budget for nothing; leave one out"
                )
        self._require_no_margins()
        if not isinstance(self.per_client, bool):
            raise ConfigError(f"per_client is {self.per_client!r}; give true or false")
        if self.per_client and not self.places_per_client:
            raise ConfigError(
                "per_client is true, but all statistics search in several rounds, which show only "
                "the sums; ask for a histogram in place of quantiles, or leave per_client out"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "StatisticsPlan":
        """Build a plan from plain values, as a TOML file has them.

        Raises:
            ConfigError: A key is unknown or missing, or a value is wrong; the message begins with
                its place, such as ``statistics[2].edges``.
        """
        _require_mapping(values, "the plan")
        _require_known(values, [field.name for field in fields(cls)], place="the plan")
        for key in ("columns", "statistics"):
            if key not in values:
                raise ConfigError(f"the plan has no {key}; give them")
        _require_mapping(values["columns"], "columns")
        schema = {str(name): _read_column(name, each) for name, each in values["columns"].items()}
        asked = values["statistics"]
        if isinstance(asked, str | Mapping) or not isinstance(asked, Iterable):
            raise ConfigError(f"statistics is {asked!r}; give a list of tables")
        statistics = tuple(
            _read_statistic(each, f"statistics[{place}]", schema)
            for place, each in enumerate(asked)
        )
        return cls(
            columns=schema,
            statistics=statistics,
            max_examples=values.get("max_examples"),
            per_client=values.get("per_client", False),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the plan as plain values, which :meth:`of` reads."""
        found: dict[str, Any] = {
            "columns": {name: _to_mapping(column) for name, column in self.columns.items()},
            "statistics": [_to_mapping(each) for each in self.statistics],
        }
        if self.max_examples is not None:
            found["max_examples"] = self.max_examples
        return found | {"per_client": True} if self.per_client else found

    def to_json(self) -> str:
        """Return :meth:`to_mapping` as JSON."""
        return json.dumps(self.to_mapping(), ensure_ascii=False)

    @property
    def num_rounds(self) -> int:
        """Rounds that the plan takes: those of its longest statistic."""
        return max(each.count_rounds(self.columns) for each in self.statistics)

    @property
    def places_per_client(self) -> list[int]:
        """The places of the statistics that a client's own sums answer: those of one round."""
        return [
            place
            for place, each in enumerate(self.statistics)
            if each.count_rounds(self.columns) == 1
        ]

    def active(self, round_num: int) -> list[int]:
        """Return the places of the statistics that a round asks, the longest ones first."""
        num_rounds = [each.count_rounds(self.columns) for each in self.statistics]
        places = [place for place, number in enumerate(num_rounds) if number > round_num]
        return sorted(places, key=lambda place: -num_rounds[place])

    @cached_property
    def size(self) -> int:
        """How many numbers a client sends in each round."""
        # The first round asks all statistics, so it has the most.
        return sum(each.size(self.columns) for each in self.statistics)

    def scales(self, round_num: int) -> dict[int, float]:
        """Return what the sums of each statistic of a round are multiplied by, by its place.

        With w the share of a statistic in the weights and R the norm of a row's vector, the scale
        is √w / R, so that a row's scaled vectors together have a norm of at most 1.
        """
        active = self.active(round_num)
        total = sum(self.statistics[place].weight for place in active)
        norms = {place: self.statistics[place].row_norm(self.columns) for place in active}
        return {
            place: math.sqrt(self.statistics[place].weight / total) / norm
            if math.isfinite(norm)
            else 1.0
            for place, norm in norms.items()
        }

    @property
    def bound(self) -> float | None:
        """Largest L2 norm of what a client sends; ``None``: it has none."""
        is_bounded = all(math.isfinite(each.row_norm(self.columns)) for each in self.statistics)
        if self.max_examples is None or not is_bounded:
            return None
        return self.max_examples * (1.0 + _MARGIN)

    @property
    def row_bound(self) -> float:
        """Largest L2 norm of what one row adds to what its client sends."""
        return 1.0 + _MARGIN

    def require_bound(self, *, reason: str) -> None:
        """Check that what a client sends has a bound.

        Args:
            reason: What needs it, such as ``"privacy"``.

        Raises:
            ConfigError: It has none, or the plan shows the sums of single clients.
        """
        if self.per_client:
            raise ConfigError(
                f"per_client is true, but {reason} hides what single clients have; leave one out"
            )
        if self.max_examples is None:
            raise ConfigError(
                f"max_examples is missing, and {reason} needs a bound on what one client adds; "
                "give the most rows of a client that may count"
            )
        for place, statistic in enumerate(self.statistics):
            if not math.isfinite(statistic.row_norm(self.columns)):
                open_ended = [
                    name
                    for name in statistic.columns
                    if not getattr(self.columns[name], "has_range", True)
                ]
                raise ConfigError(
                    f"columns.{open_ended[0]} has no low and high, but statistics[{place}] "
                    f"({statistic.kind}) needs a range of it for {reason}; give one that you know "
                    "without looking at the data"
                )

    def require_private(self, *, unit: str) -> None:
        """Check that privacy can hide a client, or an example: one row.

        Raises:
            ConfigError: What is hidden adds without a bound, or could show by other means.
        """
        self.require_bound(reason="privacy")
        for place, statistic in enumerate(self.statistics):
            if statistic.needs_no_noise:
                raise ConfigError(
                    f"statistics[{place}] ({statistic.kind}) cannot be private: "
                    f"{statistic.needs_no_noise}; leave it out, or ask for it without privacy"
                )
        if unit == EXAMPLE:
            self._require_answers_to_any_row()

    def _require_answers_to_any_row(self) -> None:
        """Check that no number or known value that a row may have keeps its client from answering.

        Otherwise a client that does not answer would show that it has such a row, and privacy could
        not hide the row.

        Raises:
            ConfigError: A column lacks a range, or a name for other values.
        """
        for name, column in self.columns.items():
            if isinstance(column, CategoryColumn) and column.other is None:
                raise ConfigError(
                    f'columns.{name}.other is missing, and privacy.unit is "example": a client '
                    "with one row of another value could not answer, which would show the row; "
                    'give all other values a name, such as other = "other"'
                )
            if isinstance(column, NumberColumn) and not column.has_range:
                raise ConfigError(
                    f'columns.{name} has no low and high, and privacy.unit is "example": a client '
                    "with one infinite number could not answer, which would show its row; give a "
                    "range that you know without looking at the data"
                )

    def _check(self, statistic: Statistic, place: str) -> None:
        if problem := describe_out_of_range(statistic) or statistic.find_problem(self.columns):
            raise ConfigError(f"{place}.{problem}")
        if len(set(statistic.columns)) < len(statistic.columns):
            raise ConfigError(f"{place}.columns is {list(statistic.columns)!r}; name each once")

    def _require_no_margins(self) -> None:
        """Refuse two tables of counts from which suppressed cells could be computed.

        Raises:
            ConfigError: A column of a table with suppression is in another table.
        """
        tables = [
            (place, each) for place, each in enumerate(self.statistics) if each.cells is not None
        ]
        for place, one in tables:
            for other_place, other in tables:
                shared = [name for name in one.columns if name in other.columns]
                if place != other_place and shared and (one.cells or 0) > 1:
                    raise ConfigError(
                        f"statistics[{place}] ({one.kind}) suppresses counts below "
                        f"{one.cells}, but statistics[{other_place}] ({other.kind}) counts "
                        f"{shared[0]!r} as well, so that their difference could reveal them; "
                        "leave one out"
                    )


def _read_column(name: Any, values: Any) -> Column:  # Any: not looked at yet
    place = f"columns.{name}"
    _require_mapping(values, place)
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in COLUMNS:
        raise ConfigError(f"{place}.kind is {kind!r}; give one of: {', '.join(COLUMNS)}")
    given = {key: each for key, each in values.items() if key != "kind"}
    column: Column = _build(COLUMNS[kind], given, place)
    return column


def _read_statistic(values: Any, place: str, schema: Schema) -> Statistic:  # Any: as above
    _require_mapping(values, place)
    kind = values.get("kind")
    if kind in _NO_SUMS:
        raise ConfigError(
            f"{place}.kind is {kind!r}, which is no sum over clients, and one person decides it; "
            "ask for kind = 'quantiles' with levels such as [0.01, 0.99]; without privacy, [0, 1]"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f"{place}.kind is {kind!r}; {did_you_mean(str(kind), KINDS)}give one of: "
            f"{', '.join(KINDS)}"
        )
    columns = values.get("columns", [])
    if isinstance(columns, str) or not isinstance(columns, list | tuple):
        raise ConfigError(f"{place}.columns is {columns!r}; give a list of names")
    for name in columns:
        if name not in schema:
            raise ConfigError(
                f"{place}.columns has {name!r}, which is not one of the columns; "
                f"{did_you_mean(str(name), schema)}they are {', '.join(schema) or 'none'}"
            )
    options = KINDS[kind]
    taken = {type(schema[name]) for name in columns}
    chosen = next((each for each in options if taken <= set(each.takes)), None)
    if chosen is None:
        kinds = " or ".join(type_.kind for each in options for type_ in each.takes)
        wrong = (
            next(
                name for name in columns if not any(type(schema[name]) in o.takes for o in options)
            )
            if len(taken) == 1
            else columns[-1]
        )
        raise ConfigError(
            f"{place}.columns has {wrong!r}, a {schema[wrong].kind} column, but {kind} takes "
            f"columns of one kind: {kinds}"
        )
    given = {key: each for key, each in values.items() if key != "kind"}
    statistic: Statistic = _build(chosen, given, place)
    return statistic


def _build(kind: Any, values: Mapping[str, Any], place: str) -> Any:  # Any: one of our dataclasses
    known = [field.name for field in fields(kind)]
    _require_known(values, known, place=place)
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    for name in needed:
        if name not in values:
            raise ConfigError(f"{place}.{name} is missing; {kind.kind} needs it")
    plain = {
        key: tuple(each) if isinstance(each, list | tuple) else each for key, each in values.items()
    }
    for field in fields(kind):
        is_list = str(field.type).find("tuple") >= 0
        if is_list and field.name in plain and not isinstance(plain[field.name], tuple):
            raise ConfigError(f"{place}.{field.name} is {plain[field.name]!r}; give a list")
    try:
        return kind(**plain)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{place}.{error}") from error


def _to_mapping(component: Any) -> dict[str, Any]:  # Any: one of our dataclasses
    found = {"kind": component.kind}
    for field in fields(component):
        value = getattr(component, field.name)
        if value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _require_mapping(values: Any, place: str) -> None:  # Any: not looked at yet
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place} is {values!r}; give a table")


def _require_known(values: Mapping[str, Any], known: Sequence[str], *, place: str) -> None:
    for key in values:
        if key not in known and key != "kind":
            raise ConfigError(
                f"{place} has the unknown key {key!r}; {did_you_mean(str(key), known)}the keys "
                f"are {', '.join(known)}"
            )
