"""Plan files of federated statistics: a configuration whose algorithm is a plan.

A plan file has the tables of an experiment where they apply, and in place of a model and an
algorithm the keys of a :class:`~fedlearn.statistics.plan.StatisticsPlan`. It is expanded into an
ordinary configuration, so every command takes one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedlearn.config.own_functions import bind_own_function, wrong_return_error
from fedlearn.config.tables import PLAN_ALGORITHM, PLAN_KEYS
from fedlearn.core.words import did_you_mean
from fedlearn.errors import ConfigError
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.tables import from_tables
from fedlearn.statistics.plan import CLIENT, EXAMPLE, StatisticsPlan
from fedlearn.statistics.query import StatisticsQuery
from fedlearn.statistics.schema import ClientTable
from fedlearn.training.csv_columns import CsvFormat, find_csv_files
from fedlearn.training.table_trainer import read_tables, read_tables_by

_STOP = "fedlearn.experiment.statistics:StopWhenFinished"
_CSV, _OWN = (f"{__name__}:{name}" for name in ("load_csv_tables", "load_own_tables"))
#: The sums are short, so the most precise numbers cost nothing.
_MODULUS_BITS = 40
_CSV_OPTIONS = [field.name for field in fields(CsvFormat)]
_SOURCES = ("csv", "python", "none")
#: Why a plan file cannot have a key.
_DECIDED = {
    "model": "statistics train no model",
    "algorithm": "the plan is what clients compute",
    "num_rounds": "the plan has the number of rounds",
    "client": "clients train nothing",
    "evaluation": "there is no model to evaluate",
    "early_stopping": "there is no model to evaluate",
    "centralized": "statistics of pooled tables need no clients",
    "flower": "statistics are not served on Flower",
}


def is_plan(raw: Mapping[str, Any]) -> bool:
    """Whether the values of a file are those of a plan file."""
    return any(key in raw for key in PLAN_KEYS)


def expand_plan(raw: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Expand the values of a plan file into those of an ordinary configuration.

    Args:
        raw: The values, with absolute paths.
        source: The file, for messages.

    Raises:
        ConfigError: The plan is not valid, or a key does not apply to statistics.
        DataError: The tables cannot be read.
    """
    try:
        return _expand(raw)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def query_in(config: Mapping[str, Any]) -> StatisticsQuery:
    """Return the query of an expanded configuration with a plan, as a run's record has it."""
    return StatisticsQuery(**config["algorithm"]["args"])


def load_csv_tables(
    *, path: str, plan: str, client_column: str | None = None, csv_format: Mapping[str, Any]
) -> FederatedData:
    """Load CSV files as the tables of simulated clients.

    Args:
        path: A folder with one file for each client, or a file.
        plan: The plan as JSON, whose columns are read.
        client_column: The column with the client of each row; ``None``: each file is a client.
        csv_format: See :class:`~fedlearn.training.csv_columns.CsvFormat`.

    Raises:
        ConfigError: The format is not one.
        DataError: A file cannot be read, or does not fit to the plan.
    """
    try:
        options: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in csv_format.items()
        }
        written = CsvFormat(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data: {error}") from error
    files = tuple(
        (each, stat.st_mtime_ns, stat.st_size)
        for each in find_csv_files(Path(path))
        for stat in [each.stat()]
    )
    return _read_files(path, plan, client_column, written, files)


@lru_cache(maxsize=1)  # expanding a plan counts the clients; a run needs their tables again
def _read_files(
    path: str,
    plan: str,
    client_column: str | None,
    written: CsvFormat,
    files: tuple[tuple[Path, int, int], ...],  # noqa: ARG001 - so that a changed file is read again
) -> FederatedData:
    schema = _parse(plan).columns
    if client_column is None:
        return from_tables(read_tables(path, schema, csv_format=written))
    return from_tables(
        read_tables_by(path, schema, client_column=client_column, csv_format=written)
    )


def load_own_tables(*, factory: str, args: Mapping[str, Any], plan: str) -> FederatedData:
    """Load the tables of simulated clients that a function of the user returns, by client.

    Raises:
        ConfigError: The function cannot be called, or returned something else.
        DataError: A table does not fit to the plan.
    """
    made = bind_own_function("data.factory", factory, args)()
    needed = "the clients' tables by name, such as dict(list(frame.groupby('hospital')))"
    if not isinstance(made, Mapping) or not all(hasattr(each, "keys") for each in made.values()):
        raise wrong_return_error("data.factory", factory, made, needed)
    schema = _parse(plan).columns
    return from_tables(
        {str(name): ClientTable.of(each, schema, owner=str(name)) for name, each in made.items()}
    )


def _parse(plan: str) -> StatisticsPlan:
    return StatisticsPlan.of(json.loads(plan))


def _expand(raw: Mapping[str, Any]) -> dict[str, Any]:
    for key, why in _DECIDED.items():
        if key in raw:
            raise ConfigError(f"{key} is given, but {why}; leave it out")
    plan = StatisticsPlan.of({key: raw[key] for key in PLAN_KEYS if key in raw})
    rest = {key: value for key, value in raw.items() if key not in PLAN_KEYS}
    data = _expand_data(rest.get("data"), plan)
    # What is no unit is reported when the whole is validated.
    unit = EXAMPLE if _table(rest, "privacy").get("unit") == EXAMPLE else CLIENT
    made = {
        **rest,
        "data": data,
        "model": {"kind": "none"},
        "algorithm": {"name": PLAN_ALGORITHM, "args": asdict(StatisticsQuery.of(plan, unit=unit))},
        "num_rounds": plan.num_rounds,
        "cohort": _expand_cohort(_table(rest, "cohort"), data),
        # All are asked: the result is over those that answer in time.
        "stragglers": {"over_selection": 1.0, **_table(rest, "stragglers")},
        "callbacks": {"statistics": {"factory": _STOP}, **_table(rest, "callbacks")},
    }
    secure, privacy = _table(rest, "secure_aggregation"), _table(rest, "privacy")
    is_private = privacy.get("mode", "off") != "off"
    if is_private:
        plan.require_private(unit=unit)
        # The bound of the plan takes its place, but privacy asks for one.
        made["privacy"] = {"clip_norm": plan.bound, **privacy}
    if secure.get("mode", "off") != "off" or privacy.get("mode") == "distributed":
        plan.require_bound(reason="secure aggregation")
        is_simulated = data["source"] != "none"
        made["secure_aggregation"] = (
            complete_secure(secure, engine=_table(rest, "engine"))
            if is_simulated
            else {"modulus_bits": _MODULUS_BITS, **secure}
        )
    return made


def complete_secure(
    secure: Mapping[str, Any], *, engine: Mapping[str, Any]
) -> dict[str, Any]:  # Any: not looked at yet
    """Complete the table of secure sums of a simulation, which adds levels if nothing is said."""
    runs_protocol = engine.get("transport", "engine") == "memory"
    how = {} if runs_protocol else {"simulate_as": "modular_sum"}
    return {"modulus_bits": _MODULUS_BITS, **how, **secure}


def _table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table; what is no table is reported when the whole is validated."""
    found = raw.get(key, {})
    return found if isinstance(found, Mapping) else {}


def _expand_data(data: Any, plan: StatisticsPlan) -> Mapping[str, Any]:  # Any: not looked at yet
    source = data.get("source") if isinstance(data, Mapping) else None
    if source not in _SOURCES:
        raise ConfigError(
            f"data.source is {source!r}, but statistics are of tables with named columns; give "
            '"csv" with a path, "python" with a factory, or "none" for a coordinator whose clients '
            "have the tables"
        )
    given = {key: value for key, value in data.items() if key != "source"}
    known = {"csv": ("path", "client_column", *_CSV_OPTIONS), "python": ("factory", "args")}
    keys = known.get(source, ())
    if unknown := [key for key in given if key not in keys]:
        raise ConfigError(
            f"data.{unknown[0]} is unknown; {did_you_mean(unknown[0], keys)}with data.source = "
            f'"{source}", the keys are {", ".join(keys) or "none"}'
        )
    if source == "none":
        return {"source": "none"}
    if keys[0] not in given:
        raise ConfigError(f'data.{keys[0]} is missing; data.source = "{source}" needs it')
    plan_json = plan.to_json()
    if source == "python":
        args = {"factory": given["factory"], "args": given.get("args", {}), "plan": plan_json}
        return {"source": "python", "factory": _OWN, "args": args}
    options = {key: value for key, value in given.items() if key in _CSV_OPTIONS}
    args = {"path": given["path"], "plan": plan_json, "csv_format": options}
    if "client_column" in given:
        args["client_column"] = given["client_column"]
    return {"source": "python", "factory": _CSV, "args": args}


def _expand_cohort(cohort: Mapping[str, Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Let all clients take part, since statistics of a sample are another question.

    Raises:
        ConfigError: Their number is not given in a deployment, or another one in a simulation.
        DataError: The tables cannot be read.
    """
    wanted = cohort.get("num_wanted")
    if data["source"] == "none":
        if wanted is None:
            raise ConfigError(
                "cohort.num_wanted is missing; give the number of clients, which all take part in "
                "each round"
            )
        return cohort
    is_csv = data["factory"] == _CSV
    loaded = load_csv_tables(**data["args"]) if is_csv else load_own_tables(**data["args"])
    num_clients = loaded.population.num_clients
    if wanted not in (None, num_clients):
        raise ConfigError(
            f"cohort.num_wanted is {wanted!r}, but there are tables of {num_clients} clients, "
            "which all take part in each round; leave it out"
        )
    return {**cohort, "num_wanted": num_clients}
