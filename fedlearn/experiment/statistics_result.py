"""The result of any run of a plan of statistics, simulated or deployed."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedlearn.algorithms.cohorts import Adjacency
from fedlearn.algorithms.query import QueryStrategy
from fedlearn.assembly import build_secure_plan
from fedlearn.core.json_values import to_json_values
from fedlearn.core.params import Layout, NoModel
from fedlearn.core.participations import Status
from fedlearn.core.quantities import format_amount
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.clients import load_names
from fedlearn.experiment.data_names import load_data_names
from fedlearn.experiment.layout import table_text
from fedlearn.experiment.recorded import config_of
from fedlearn.experiment.spending import load_spending
from fedlearn.privacy.bounded_sum import BoundedLane
from fedlearn.privacy.spending import Spending
from fedlearn.statistics.counts import RowCount
from fedlearn.statistics.query import ANSWERS, NUM_OPEN, StatisticsQuery
from fedlearn.statistics.statistic import ResultRow
from fedlearn.store.runs import StoredRun

#: Most clients that a table shows, side by side.
_MOST_COLUMNS = 12
_HEADER = ("statistic", "column", "item", "value", "±", "note")


@dataclass(frozen=True, kw_only=True)
class StatisticsCharge:
    """What the statistics cost, and what the population's ledger has spent in all.

    Attributes:
        num_rounds: Rounds that were charged, each one release.
        epsilon: ε of the ledger after them.
        target_delta: δ.
        hidden: What the guarantee hides.
    """

    num_rounds: int
    epsilon: float
    target_delta: float
    hidden: str

    @classmethod
    def of(cls, spent: Spending) -> "StatisticsCharge":
        """Take the charge from the spending of a run."""
        return cls(
            num_rounds=spent.num_own,
            epsilon=spent.epsilon,
            target_delta=spent.target_delta,
            # A row whose contribution is zero is as one that is not in the table.
            hidden="one row added or removed"
            if spent.adjacency is Adjacency.ZERO_OUT
            else spent.hidden,
        )


@dataclass(frozen=True, kw_only=True)
class StatisticsResult:
    """The statistics of a plan.

    Attributes:
        run: Name of the run.
        num_clients: Clients in the sums; of several rounds, in that with the fewest.
        num_examples: Rows that counted, if the plan asks for a count; else ``None``.
        clients: The numbers of each client by its name, if the plan says ``per_client``.
        num_unfinished: Statistics that needed more rounds than the run had, such as when the
            privacy budget ended.
        charge: The charge to the privacy ledger; ``None``: there is no privacy.
        rows: The numbers, in the order of the plan.

    Example:
        >>> row = ResultRow(statistic="mean", column="age", item="mean", value=41.5)
        >>> result = StatisticsResult(
        ...     run="ages", num_clients=3, num_examples=None, charge=None, rows=(row,)
        ... )
        >>> result["mean", "age"]["mean"].value
        41.5
        >>> print(result)
        statistic  column  item  value    ±  note
        mean       age     mean  41.5000
        <BLANKLINE>
        3 clients
    """

    run: str
    num_clients: int
    num_examples: float | None
    charge: StatisticsCharge | None
    rows: tuple[ResultRow, ...]
    num_unfinished: int = 0
    clients: Mapping[str, tuple[ResultRow, ...]] = field(default_factory=dict)

    @property
    def num_suppressed(self) -> int:
        """How many counts are withheld."""
        return sum(each.suppressed for each in self.rows)

    def __getitem__(self, place: tuple[str, str]) -> dict[str, ResultRow]:
        """Return the numbers of a statistic and column, by item.

        Raises:
            KeyError: There are none.
        """
        return _find(self.rows, place)

    def of_client(self, name: str, place: tuple[str, str]) -> dict[str, ResultRow]:
        """Return a client's own numbers of a statistic and column, by item.

        Raises:
            KeyError: There are none.
        """
        if name not in self.clients:
            known = ", ".join(self.clients) or "none, since the plan does not say per_client"
            raise KeyError(f"there are no numbers of {name!r}; there are those of {known}")
        return _find(self.clients[name], place)

    def to_json(self) -> str:
        """Return the result as a JSON object; what is not known is null."""
        values = {**asdict(self), "num_suppressed": self.num_suppressed}
        return json.dumps(to_json_values(values), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "StatisticsResult":
        """Read what :meth:`to_json` returned."""
        values: dict[str, Any] = json.loads(text)  # Any: JSON
        charge = values["charge"]
        return cls(
            run=values["run"],
            num_clients=values["num_clients"],
            num_examples=values["num_examples"],
            charge=None if charge is None else StatisticsCharge(**charge),
            rows=tuple(ResultRow(**each) for each in values["rows"]),
            num_unfinished=values["num_unfinished"],
            clients={
                name: tuple(ResultRow(**each) for each in rows)
                for name, rows in values.get("clients", {}).items()
            },
        )

    def table(self) -> list[tuple[str, ...]]:
        """Return the result as rows of text, the header first."""
        return [_HEADER, *(tuple(map(replace_unprintable, _cells(each))) for each in self.rows)]

    def client_table(self) -> list[tuple[str, ...]]:
        """Return the numbers of the first clients as rows of text, one column for each client."""
        names = list(self.clients)[:_MOST_COLUMNS]
        if not names:
            return []
        values = {
            name: {(each.statistic, each.column, each.item): each for each in self.clients[name]}
            for name in names
        }
        # A client's most frequent values need not be another's.
        places = dict.fromkeys(place for of_one in values.values() for place in of_one)
        rows = [
            (*place, *(_value_cell(values[name].get(place)) for name in names)) for place in places
        ]
        header = (*_HEADER[:3], *names)
        return [tuple(map(replace_unprintable, row)) for row in (header, *rows)]

    def facts(self) -> list[str]:
        """Describe the whole result in short texts: clients, examples, suppression and charge."""
        found = [f"{self.num_clients} client{'' if self.num_clients == 1 else 's'}"]
        if self.num_examples is not None:
            found.append(f"{self.num_examples:,.0f} examples")
        if self.num_suppressed:
            found.append(f"{self.num_suppressed} counts suppressed")
        if len(self.clients) > _MOST_COLUMNS:
            found.append(f"the first {_MOST_COLUMNS} clients shown, all of them in the JSON")
        if self.num_unfinished:
            found.append(f"{self.num_unfinished} statistics unfinished, since the run ended before")
        if self.charge is not None:
            charge = self.charge
            found.append(
                f"ε {charge.epsilon:.3g} at δ {charge.target_delta:g} ({charge.hidden}), "
                f"{charge.num_rounds} round{'' if charge.num_rounds == 1 else 's'} charged"
            )
            found.append("± covers the noise in 95 % of cases")
        return found

    def __str__(self) -> str:
        tables = [table_text(each) for each in (self.table(), self.client_table()) if each]
        return "\n\n".join([*tables, ", ".join(self.facts())])

    def _repr_html_(self) -> str:
        """Return the tables for a notebook."""
        tables = [_to_html(each) for each in (self.table(), self.client_table()) if each]
        return f"{''.join(tables)}<p>{html.escape(', '.join(self.facts()))}</p>"


def _find(rows: Iterable[ResultRow], place: tuple[str, str]) -> dict[str, ResultRow]:
    found, known = dict[str, ResultRow](), dict[tuple[str, str], None]()
    for each in rows:
        known[each.statistic, each.column] = None
        if (each.statistic, each.column) == place:
            found[each.item] = each
    if not found:
        raise KeyError(f"there is no {place!r}; there are {', '.join(map(str, known))}")
    return found


def _to_html(table: Sequence[Sequence[str]]) -> str:
    header, *rows = [[html.escape(cell) for cell in row] for row in table]
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _value_cell(row: ResultRow | None) -> str:
    if row is None:
        return ""
    return "suppressed" if row.suppressed else format_amount(row.value)


def _cells(row: ResultRow) -> tuple[str, ...]:
    value = _value_cell(row)
    spread = ""
    if row.value is not None and row.low is not None and row.high is not None:
        spread = format_amount((row.high - row.low) / 2.0)
    return (row.statistic, row.column, row.item, value, spread, row.note)


def result_of(stored: StoredRun, query: StatisticsQuery) -> StatisticsResult:
    """Compute the result of a finished run of a plan, simulated or deployed.

    Raises:
        ConfigError: The run's configuration cannot be read.
        StoreError: The run has no checkpoint, or it is damaged.
    """
    rounds = stored.rounds()
    reports = [each.participations.num(Status.REPORTED) for each in rounds]
    sigma = _noise_of(stored, query, num_reports=max(reports))
    rows = tuple(query.result_rows(stored.state_tensors(), sigma=sigma))
    counted = [row.value for row in rows if (row.statistic, row.item) == (RowCount.kind, "rows")]
    spent = load_spending(stored)
    return StatisticsResult(
        run=stored.name,
        num_clients=min(reports),
        num_examples=counted[0] if counted else None,
        charge=None if spent is None else StatisticsCharge.of(spent),
        rows=rows,
        num_unfinished=round(rounds[-1].metrics[NUM_OPEN]),
        clients=_rows_of_clients(stored, query),
    )


def _rows_of_clients(stored: StoredRun, query: StatisticsQuery) -> dict[str, tuple[ResultRow, ...]]:
    if not query.per_client:
        return {}
    found = query.client_rows(stored.state_tensors())
    names: Mapping[int, str] = dict(load_names(stored).items())
    if not stored.record.is_deployed:
        names = dict(enumerate(load_data_names(stored.path).client_names or ()))
    return {names.get(each, str(each)): tuple(rows) for each, rows in found.items()}


def _noise_of(stored: StoredRun, query: StatisticsQuery, *, num_reports: int) -> float | None:
    """Return the standard deviation of the noise in each number of a sum; ``None``: no noise."""
    config, spec = config_of(stored.record), query.sums[ANSWERS]
    section = config.privacy
    if not section.is_on:
        return None
    assert spec.bound is not None  # privacy needs one
    assert section.noise_multiplier is not None  # the run has calibrated it
    if not section.is_distributed:
        size = math.prod(spec.shape)
        example_bound = spec.example_bound if section.hides_examples else None
        grid = BoundedLane(spec.bound, size, example_bound)
        return section.noise_multiplier * grid.sensitivity * grid.step
    secure = build_secure_plan(config, config.straggler_policy(), QueryStrategy(query))
    assert secure is not None  # distributed noise needs secure sums
    # Enough noise for the fewest clients that may be in a sum; with more of them, there is more.
    [lane] = secure.lanes(Layout.of(NoModel()))
    return lane.noise * lane.step * math.sqrt(num_reports)
