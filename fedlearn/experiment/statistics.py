"""Federated statistics in a simulation, and the results of any run of a plan."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fedlearn.algorithms.query import QueryStrategy
from fedlearn.assembly import build_secure_plan
from fedlearn.core.calls import explain_calls
from fedlearn.core.json_values import to_json_values
from fedlearn.core.participations import Status
from fedlearn.core.quantities import format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.errors import ConfigError
from fedlearn.experiment.layout import table_text
from fedlearn.experiment.recorded import config_of
from fedlearn.experiment.run import Run
from fedlearn.experiment.simulate import simulate
from fedlearn.privacy.spending import Spending
from fedlearn.rounds.records import RoundRecord
from fedlearn.rounds.run import RoundCallback
from fedlearn.simulation.tables import from_tables
from fedlearn.statistics.counts import RowCount
from fedlearn.statistics.plan import StatisticsPlan
from fedlearn.statistics.query import ANSWERS, NUM_OPEN, StatisticsQuery
from fedlearn.statistics.schema import ClientTable
from fedlearn.statistics.statistic import ResultRow

_HEADER = ("statistic", "column", "item", "value", "±", "note")
#: The sums are short, so the most precise numbers cost nothing.
_MODULUS_BITS = 40


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
            hidden=spent.hidden,
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
        """Return what holds for the whole result, as short texts."""
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
    value = "suppressed" if row.suppressed else _format(row.value)
    spread = ""
    if row.value is not None and row.low is not None and row.high is not None:
        spread = _format((row.high - row.low) / 2.0)
    return (row.statistic, row.column, row.item, value, spread, row.note)


def _format(value: float | None) -> str:
    is_whole = value is not None and math.isfinite(value) and value == round(value)
    return f"{value:.0f}" if is_whole and abs(value or 0.0) < 1e15 else format_number(value)  # noqa: PLR2004 - exact


@explain_calls
def run_statistics(
    plan: StatisticsPlan | Mapping[str, Any],
    tables: Mapping[str, Any] | Sequence[Any],
    *,
    callbacks: Sequence[RoundCallback] = (),
    **settings: object,
) -> StatisticsResult:
    """Compute statistics over the tables of simulated clients, without pooling them.

    Privacy hides whole clients, as in training: a client's rows count up to ``max_examples``, and
    each round is one release, charged to the ledger. Statistics of one round share the first one.
    To charge the ledger of a training on the same clients, name it in both runs:
    ``privacy={"population": "ward 5", ...}``.

    Args:
        plan: What to compute: a :class:`~fedlearn.statistics.plan.StatisticsPlan`, or plain values
            as in a TOML file.
        tables: The clients' tables by name, or a list of them: pandas frames, or mappings from
            column names to lists or arrays.
        callbacks: Called after each round, as those of :func:`fedlearn.simulate`.
        **settings: Keys and tables of the configuration, as for :func:`fedlearn.simulate`:
            ``secure_aggregation={"mode": "complete"}, privacy={...}, seed=1``. All clients take
            part in each round, and the plan has the number of rounds.

    Raises:
        ConfigError: The plan or a setting is wrong, or privacy or secure aggregation needs a bound
            that the plan lacks.
        DataError: A table does not fit to the plan.
        FedlearnError: As :func:`fedlearn.simulate`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import fedlearn as fl
        >>> plan = {
        ...     "columns": {"age": {"kind": "number", "low": 0, "high": 120}},
        ...     "statistics": [{"kind": "mean", "columns": ["age"]}],
        ... }
        >>> tables = {"north": {"age": [31, None, 47]}, "south": {"age": [60]}}
        >>> with TemporaryDirectory() as folder:
        ...     result = fl.run_statistics(plan, tables, store={"runs_dir": folder})
        run ...
        >>> result["mean", "age"]["mean"].value, result["mean", "age"]["values"].value
        (46.0, 3.0)
    """
    parsed = plan if isinstance(plan, StatisticsPlan) else StatisticsPlan.of(plan)
    for name in ("cohort", "num_rounds", "stragglers", "centralized"):
        if name in settings:
            raise ConfigError(
                f"run_statistics(): {name} is given, but all clients take part in each round of "
                "the plan; leave it out"
            )
    for name in ("privacy", "secure_aggregation"):
        table = settings.get(name)
        if isinstance(table, Mapping) and table.get("mode", "off") != "off":
            parsed.require_bound(reason=name.replace("_", " "))
    given = _read_tables(tables, parsed)
    run = simulate(
        None,
        from_tables(given),
        StatisticsQuery.of(parsed),
        callbacks=[*callbacks, _StopWhenFinished()],
        **_complete(settings, parsed, num_clients=len(given)),
    )
    return result_of(run, parsed)


def result_of(run: Run, plan: StatisticsPlan) -> StatisticsResult:
    """Compute the result of a finished run of a plan, simulated or deployed.

    Raises:
        ConfigError: The run's configuration cannot be read.
        StoreError: The run has no checkpoint, or it is damaged.
    """
    query, rounds = StatisticsQuery.of(plan), run.history
    reports = [each.participations.num(Status.REPORTED) for each in rounds]
    sigma = _noise_of(run, query, num_reports=max(reports))
    rows = tuple(query.result_rows(run.state(), sigma=sigma))
    counted = [row.value for row in rows if (row.statistic, row.item) == (RowCount.kind, "rows")]
    spent = run.privacy
    return StatisticsResult(
        run=run.name,
        num_clients=min(reports),
        num_examples=counted[0] if counted else None,
        charge=None if spent is None else StatisticsCharge.of(spent),
        rows=rows,
        num_unfinished=round(rounds[-1].metrics[NUM_OPEN]),
    )


def _noise_of(run: Run, query: StatisticsQuery, *, num_reports: int) -> float | None:
    """Return the standard deviation of the noise in each number of a sum; ``None``: no noise."""
    config = config_of(run.record)
    section, bound = config.privacy, query.sums[ANSWERS].bound
    if not section.is_on:
        return None
    assert bound is not None  # privacy needs one
    assert section.noise_multiplier is not None  # the run has calibrated it
    if not section.is_distributed:
        return section.noise_multiplier * bound
    secure = build_secure_plan(config, config.straggler_policy(), QueryStrategy(query))
    assert secure is not None  # distributed noise needs secure sums
    # Enough noise for the fewest clients that may be in a sum; with more of them, there is more.
    return secure.noise_share * math.sqrt(num_reports) * bound


class _StopWhenFinished:
    """Ends the run when no statistic needs another round, such as after the longest text."""

    def after_round(
        self,
        record: RoundRecord,
        model: nn.Module,  # noqa: ARG002 - there is none
    ) -> bool:
        return record.metrics[NUM_OPEN] == 0.0


def _read_tables(
    tables: Mapping[str, Any] | Sequence[Any], plan: StatisticsPlan
) -> dict[str, ClientTable]:
    """Convert the clients' tables.

    Raises:
        ConfigError: They are not by client.
        DataError: One does not fit to the plan.
    """
    named: Iterable[tuple[str, Any]]
    if isinstance(tables, Mapping):
        named = [(str(name), each) for name, each in tables.items()]
    elif isinstance(tables, list | tuple):
        named = [(str(place), each) for place, each in enumerate(tables)]
    else:
        raise ConfigError(
            f"run_statistics(): tables is a {type(tables).__name__}; give the clients' tables by "
            "name, such as dict(list(frame.groupby('hospital')))"
        )
    found = {}
    for name, each in named:
        if name in found:
            raise ConfigError(
                f"run_statistics(): two clients have the name {name}; give each its own"
            )
        if isinstance(each, ClientTable):
            found[name] = ClientTable.from_features(each.features, each.labels, plan.columns)
        elif isinstance(each, Mapping) or hasattr(each, "columns"):
            found[name] = ClientTable.of(each, plan.columns, owner=name)
        else:
            raise ConfigError(
                f"run_statistics(): the table of client {name} is a {type(each).__name__}; give a "
                "data frame, or a mapping from columns to lists"
            )
    return found


def _complete(
    settings: Mapping[str, object], plan: StatisticsPlan, *, num_clients: int
) -> dict[str, Any]:
    """Add to the settings of a simulation what the plan decides."""
    made: dict[str, Any] = {
        **settings,
        "num_rounds": plan.num_rounds,
        "cohort": {"num_wanted": num_clients},
        "stragglers": {"over_selection": 1.0},
    }
    secure, privacy = settings.get("secure_aggregation"), settings.get("privacy")
    if isinstance(secure, Mapping) and secure.get("mode", "off") != "off":
        made["secure_aggregation"] = {"modulus_bits": _MODULUS_BITS, **secure}
    if isinstance(privacy, Mapping) and privacy.get("mode", "off") != "off":
        # The query's own bound takes its place, but privacy asks for one.
        made["privacy"] = {"clip_norm": plan.bound, **privacy}
    return made
