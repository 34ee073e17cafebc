"""Federated statistics in a simulation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fedlearn.config.statistics import complete_secure
from fedlearn.core.calls import explain_calls
from fedlearn.errors import ConfigError
from fedlearn.experiment.simulate import simulate
from fedlearn.experiment.statistics_result import StatisticsResult, result_of
from fedlearn.rounds.records import RoundRecord
from fedlearn.rounds.run import RoundCallback
from fedlearn.simulation.tables import from_tables
from fedlearn.statistics.plan import CLIENT, EXAMPLE, StatisticsPlan
from fedlearn.statistics.query import NUM_OPEN, StatisticsQuery
from fedlearn.statistics.schema import ClientTable


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
        callbacks: Called after each round, as those of ``fl.simulate``.
        **settings: Keys and tables of the configuration, as for ``fl.simulate``:
            ``secure_aggregation={"mode": "complete"}, privacy={...}, seed=1``. All clients take
            part in each round, and the plan has the number of rounds.

    Raises:
        ConfigError: The plan or a setting is wrong, or privacy or secure aggregation needs a bound
            that the plan lacks.
        DataError: A table does not fit to the plan.
        FedlearnError: As ``fl.simulate``.

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
    secure, privacy = (_table(settings, name) for name in ("secure_aggregation", "privacy"))
    unit = EXAMPLE if privacy.get("unit") == EXAMPLE else CLIENT
    if secure:
        parsed.require_bound(reason="secure aggregation")
    if privacy:
        parsed.require_private(unit=unit)
    given, query = _read_tables(tables, parsed), StatisticsQuery.of(parsed, unit=unit)
    run = simulate(
        None,
        from_tables(given),
        query,
        callbacks=[*callbacks, StopWhenFinished()],
        **_complete(settings, parsed, num_clients=len(given)),
    )
    return result_of(run.stored, query)


class StopWhenFinished:
    """Ends the run when no statistic needs another round, such as after the longest text."""

    def after_round(
        self,
        record: RoundRecord,
        model: nn.Module,  # noqa: ARG002 - there is none
    ) -> bool:
        """Return whether no statistic needs another round."""
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


def _table(settings: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a table of the settings with a mode; empty if it is off or no table."""
    table = settings.get(name)
    return table if isinstance(table, Mapping) and table.get("mode", "off") != "off" else {}


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
    secure, privacy = (_table(settings, name) for name in ("secure_aggregation", "privacy"))
    if secure or privacy.get("mode") == "distributed":
        engine = settings.get("engine")
        made["secure_aggregation"] = complete_secure(
            secure, engine=engine if isinstance(engine, Mapping) else {}
        )
    if privacy:
        # The query's own bound takes its place, but privacy asks for one.
        made["privacy"] = {"clip_norm": plan.bound, **privacy}
    return made
