"""Formats runs as text and as JSON: one line each, or all about one run."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedlearn.cli.tables import client_text, format_status
from fedlearn.config.tables import PYTHON_OBJECTS, Use, has_plan, tables_with
from fedlearn.core.json_values import format_json, iterate_leaves
from fedlearn.core.quantities import format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.deployment.descriptions import find_missed
from fedlearn.experiment.clients import load_names
from fedlearn.experiment.layout import facts_text, table_text
from fedlearn.experiment.progress import describe_metrics, next_steps
from fedlearn.experiment.run import Run
from fedlearn.experiment.summary import Summary, staleness_text, summarize
from fedlearn.store.checkpoints import CheckpointFile

if TYPE_CHECKING:  # numpy takes a while, and most commands need none of it
    from fedlearn.core.client_metrics import ClientMetrics

_HEADER = ("name", "status", "rounds", "best accuracy", "created")
#: Limits on clients that did not report: rounds in the text, and clients of each.
_MISSED_ROUNDS, _MISSED_CLIENTS = 5, 5
#: Tables that say nothing about a run of statistics.
_NOT_OF_STATISTICS = (
    "model",
    "algorithm",
    "aggregation",
    "compression",
    "download_compression",
    "client",
    "late_updates",
    "asynchronous",
    "attack",
)
#: Modes of configuration tables that are not worth printing.
_OFF = ("off", "drop")
#: Values of a run that only ``--json`` prints.
_NOT_OF_PAGES = ("config", "config_hash", "versions", "missed", "checkpoints", "path")
#: Most clients in a table.
_TABLE_CLIENTS = 100


# ---- All runs -----------------------------------------------------------------------------


def runs_table(runs: Iterable[Mapping[str, Any]], *, width: int | None) -> str:  # Any: JSON
    """Format :func:`~fedlearn.deployment.descriptions.describe_runs` as an aligned table."""
    rows = [
        (
            replace_unprintable(str(each["run"])),
            str(each["status"]),
            f"{each['rounds']}/{each['num_rounds']}",
            format_number(each["best_accuracy"]),
            str(each["created_utc"]),
        )
        for each in runs
    ]
    return table_text([_HEADER, *rows], width=width)


# ---- One run ------------------------------------------------------------------------------


def run_page(run: Run, *, width: int | None) -> str:
    """Format everything about a run, one labeled fact a line, wrapped to ``width`` columns."""
    page, found = facts_text(_describe_run(run), width=width), run.statistics()
    return page if found is None else f"{page}\n\n{found}"


def _describe_run(run: Run) -> Iterator[tuple[str, str]]:
    record = run.record
    summary = summarize(record, run.history)
    yield "run", f"{replace_unprintable(record.name)} ({record.status.value})"
    yield "error", replace_unprintable(record.error)
    yield "created", record.created_utc
    yield "rounds", f"{summary.num_finished} of {record.num_rounds}"
    yield "study", record.study
    yield "starts from", replace_unprintable(_format_settings(record.start_from))
    yield "time", summary.times()
    yield from describe_metrics(summary)
    if (spent := run.privacy) is not None:
        of = "statistics" if has_plan(record.config) else "released models"
        yield "privacy", spent.format(of=of)
    yield from _describe_participation(summary)
    yield from _describe_missed(run)
    for each in [one for one in run.history if one.staleness][-_MISSED_ROUNDS:]:
        yield "staleness", f"round {each.round_num + 1}: {staleness_text(each.staleness)}"
    config, hidden = record.config, tables_with(Use.SIMULATED) if record.is_deployed else ()
    if has_plan(config):
        hidden, config = (*hidden, *_NOT_OF_STATISTICS), _without_plan(config)
    for name in (PYTHON_OBJECTS, *tables_with(Use.SHOWN)):
        table = config.get(name)
        is_off = isinstance(table, Mapping) and table.get("mode") in _OFF
        if not is_off and name not in hidden:
            yield name, _format_settings(table)
    for label, names in (
        ("classes", run.data_names.class_names),
        ("features", run.data_names.feature_names),
    ):
        numbered = (f"{number}: {name}" for number, name in enumerate(names or ()))
        yield label, replace_unprintable(", ".join(numbered))
    for file in run.stored.checkpoints():
        yield "checkpoint", _format_checkpoint(file)
    yield "path", replace_unprintable(str(run.path))
    yield from next_steps(summary, run.path, "report", *(() if has_plan(config) else ("export",)))


def _without_plan(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration without the plan, which the result shows, next to the data."""
    match config:
        case {"data": {"args": {"plan": _, **args}, **table}}:
            return {**config, "data": {**table, "args": args}}
        case {"python": {"data": clients}}:
            return {**config, PYTHON_OBJECTS: {"data": clients}}
        case _:
            return config


def _describe_participation(summary: Summary) -> Iterator[tuple[str, str]]:
    counts = summary.counts
    tasks = f"{summary.num_clients} different clients, asked {summary.num_tasks} times"
    yield "took part", f"{tasks}: {counts.text()}"
    for reason, count in summary.reasons:
        yield "failed", f"{count} x {replace_unprintable(reason or 'no reason given')}"
    if summary.num_skipped or summary.num_retries:
        yield "trouble", f"{summary.num_skipped} rounds skipped, {summary.num_retries} retries"


def _describe_missed(run: Run) -> Iterator[tuple[str, str]]:
    names = load_names(run.stored)
    found = [(each, missed) for each in run.history if (missed := find_missed(each))]
    for record, missed in found[-_MISSED_ROUNDS:]:
        listed = [
            f"{client_text(each.client_id, names)} {format_status(each)}"
            for each in missed[:_MISSED_CLIENTS]
        ]
        more = [f"{len(missed) - len(listed)} more"] if len(missed) > len(listed) else []
        yield "missed", f"round {record.round_num + 1}: {'; '.join(listed + more)}"


def _format_settings(table: object) -> str:
    """Format a table of the configuration in one line; empty if there is none."""
    if not isinstance(table, Mapping):
        return ""
    set_ones = ((key, value) for key, value in iterate_leaves(table) if value not in (None, {}))
    texts = ((k, value if isinstance(value, str) else json.dumps(value)) for k, value in set_ones)
    return replace_unprintable(" ".join(f"{key}={text}" for key, text in texts))


def _format_checkpoint(file: CheckpointFile) -> str:
    return f"after round {file.round_num}: {file.path.name}, {file.num_bytes / 1e6:.1f} MB"


def format_facts(run: Mapping[str, Any], *, width: int | None) -> str:  # Any: JSON
    """Format what :func:`~fedlearn.deployment.descriptions.describe_run` says of a run."""
    facts = (
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in run.items()
        if name not in _NOT_OF_PAGES and value not in (None, "", {}, [])
    )
    return facts_text(((name, replace_unprintable(text)) for name, text in facts), width=width)


# ---- Clients of one run -------------------------------------------------------------------


def clients_table(clients: "ClientMetrics", *, width: int | None) -> str:
    """Format what clients measured as a table, the worst first."""
    shown = clients.worst_first().to_rows()[:_TABLE_CLIENTS]
    rows = [
        (
            str(each["client_id"]),
            replace_unprintable(each["name"] or "-"),
            str(each["num_examples"]),
            *(format_number(each[name]) for name in clients.metrics),
        )
        for each in shown
    ]
    table = table_text([("id", "name", "examples", *clients.metrics), *rows], width=width)
    text = f"{table}\n\nmeasured after round {clients.measured_after}"
    if len(clients) > len(shown):
        text += f"; {len(clients) - len(shown):,} more clients: --json prints all"
    return text


def clients_lines(clients: "ClientMetrics") -> str:
    """Format what clients measured as JSON, one client a line, the worst first."""
    after = {"measured_after": clients.measured_after}
    return "\n".join(format_json(after | each) for each in clients.worst_first())
