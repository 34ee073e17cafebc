"""The result of any run of a plan of statistics, simulated or deployed."""

import html
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from fedlearn.algorithms.cohorts import Adjacency
from fedlearn.algorithms.query import QueryStrategy
from fedlearn.assembly import build_secure_plan
from fedlearn.core.json_values import to_json_values
from fedlearn.core.params import Layout, NoModel
from fedlearn.core.participations import Status
from fedlearn.core.quantities import format_amount
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.layout import table_text
from fedlearn.experiment.recorded import config_of
from fedlearn.experiment.spending import load_spending
from fedlearn.privacy.bounded_sum import BoundedLane
from fedlearn.privacy.spending import Spending
from fedlearn.statistics.counts import RowCount
from fedlearn.statistics.query import ANSWERS, NUM_OPEN, StatisticsQuery
from fedlearn.statistics.statistic import ResultRow
from fedlearn.store.runs import StoredRun

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

    @property
    def num_suppressed(self) -> int:
        """How many counts are withheld."""
        return sum(each.suppressed for each in self.rows)

    def __getitem__(self, place: tuple[str, str]) -> dict[str, ResultRow]:
        """Return the numbers of a statistic and column, by item.

        Raises:
            KeyError: There are none.
        """
        found = {each.item: each for each in self.rows if (each.statistic, each.column) == place}
        if not found:
            known = dict.fromkeys((each.statistic, each.column) for each in self.rows)
            raise KeyError(f"there is no {place!r}; there are {', '.join(map(str, known))}")
        return found

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
        )

    def table(self) -> list[tuple[str, ...]]:
        """Return the result as rows of text, the header first."""
        return [_HEADER, *(tuple(map(replace_unprintable, _cells(each))) for each in self.rows)]

    def facts(self) -> list[str]:
        """Describe the whole result in short texts: clients, examples, suppression and charge."""
        found = [f"{self.num_clients} client{'' if self.num_clients == 1 else 's'}"]
        if self.num_examples is not None:
            found.append(f"{self.num_examples:,.0f} examples")
        if self.num_suppressed:
            found.append(f"{self.num_suppressed} counts suppressed")
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
        return f"{table_text(self.table())}\n\n{', '.join(self.facts())}"

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        header, *rows = [[html.escape(cell) for cell in row] for row in self.table()]
        head = "".join(f"<th>{cell}</th>" for cell in header)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        facts = html.escape(", ".join(self.facts()))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{facts}</p>"


def _cells(row: ResultRow) -> tuple[str, ...]:
    value = "suppressed" if row.suppressed else format_amount(row.value)
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
    )


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
