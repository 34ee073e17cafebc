"""Formats runs as text and as JSON: one line each, or all about one run."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from fedlearn.cli.tables import client_text, describe_missed, format_status
from fedlearn.config.tables import PYTHON_OBJECTS, Use, has_plan, tables_with
from fedlearn.core.json_values import format_json, iterate_leaves
from fedlearn.core.participations import Participation, Status
from fedlearn.core.quantities import format_number
from fedlearn.core.words import replace_unprintable
from fedlearn.experiment.clients import load_names
from fedlearn.experiment.history import RoundMetrics, best_point, series
from fedlearn.experiment.layout import facts_text, table_text
from fedlearn.experiment.progress import describe_metrics, next_steps
from fedlearn.experiment.run import Run
from fedlearn.experiment.summary import Summary, staleness_text, summarize
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.rounds.scheduling import QueuedRun, QueueState
from fedlearn.store.checkpoints import CheckpointFile

if TYPE_CHECKING:  # numpy takes a while, and most commands need none of it
    from fedlearn.core.client_metrics import ClientMetrics

#: A run and its rounds, without their participations.
Brief: TypeAlias = tuple[RunRecord, Sequence[RoundMetrics]]

_HEADER = ("name", "status", "rounds", "best accuracy", "created")
#: Limits on clients that did not report: rounds in the text, clients of each, JSON objects in all.
_MISSED_ROUNDS, _MISSED_CLIENTS, _MISSED_OBJECTS = 5, 5, 1000
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
#: Most clients in a table.
_TABLE_CLIENTS = 100


# ---- All runs -----------------------------------------------------------------------------


def runs_table(
    histories: Sequence[Brief], queued: Sequence[QueuedRun] = (), *, width: int | None
) -> str:
    """Format runs as an aligned table of name, status, rounds, best accuracy and creation time.

    Runs of the queue that have not started come last.
    """
    rows = [
        (
            replace_unprintable(str(each["run"])),
            str(each["status"]),
            f"{each['rounds']}/{each['num_rounds']}",
            format_number(each["best_accuracy"]),
            str(each["created_utc"]),
        )
        for each in _describe_all(histories, queued)
    ]
    return table_text([_HEADER, *rows], width=width)


def run_lines(histories: Sequence[Brief], queued: Sequence[QueuedRun] = ()) -> Iterator[str]:
    """Format each run as a JSON object with the columns of :func:`runs_table`."""
    return map(format_json, _describe_all(histories, queued))


def _describe_all(
    histories: Sequence[Brief], queued: Sequence[QueuedRun]
) -> Iterator[dict[str, Any]]:  # Any: JSON values
    states = {each.name: each.state for each in queued}
    for history in histories:
        described = _describe_briefly(history)
        if states.get(history[0].name) is QueueState.QUEUED:  # it waits to continue
            described["status"] = QueueState.QUEUED.value
        yield described
    begun = {record.name for record, _ in histories}
    for each in queued:
        if each.name not in begun:
            yield {
                "run": each.name,
                "status": each.state.value,
                "rounds": 0,
                "num_rounds": each.config["num_rounds"],
                "best_accuracy": None,
                "created_utc": each.submitted_utc,
            }


def _describe_briefly(history: Brief) -> dict[str, Any]:  # Any: JSON values
    record, rounds = history
    return {
        "run": record.name,
        "status": record.status.value,
        "rounds": len(rounds),
        "num_rounds": record.num_rounds,
        "best_accuracy": _best_accuracy(history),
        "created_utc": record.created_utc,
    }


def _best_accuracy(history: Brief) -> float | None:
    best = best_point(series(history[1], "accuracy"), "max")
    return None if best is None else best.value


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
    found = [(each, missed) for each in run.history if (missed := _find_missed(each))]
    for record, missed in found[-_MISSED_ROUNDS:]:
        listed = [
            f"{client_text(each.client_id, names)} {format_status(each)}"
            for each in missed[:_MISSED_CLIENTS]
        ]
        more = [f"{len(missed) - len(listed)} more"] if len(missed) > len(listed) else []
        yield "missed", f"round {record.round_num + 1}: {'; '.join(listed + more)}"


def _find_missed(record: RoundRecord) -> list[Participation]:
    if record.count(Status.REPORTED) == len(record.participations):
        return []
    return [each for each in record.participations if each.status is not Status.REPORTED]


def _format_settings(table: object) -> str:
    """Format a table of the configuration in one line; empty if there is none."""
    if not isinstance(table, Mapping):
        return ""
    set_ones = ((key, value) for key, value in iterate_leaves(table) if value not in (None, {}))
    texts = ((k, value if isinstance(value, str) else json.dumps(value)) for k, value in set_ones)
    return replace_unprintable(" ".join(f"{key}={text}" for key, text in texts))


def _format_checkpoint(file: CheckpointFile) -> str:
    return f"after round {file.round_num}: {file.path.name}, {file.num_bytes / 1e6:.1f} MB"


def run_object(run: Run) -> str:
    """Format everything about a run as a one-line JSON object; values that are not finite are null.

    Clients that did not report are limited to the latest.
    """
    record, rounds = run.record, run.history
    summary, spent = summarize(record, rounds), run.privacy
    best, counts = summary.best, summary.counts
    found = best and {
        "metric": best.metric,
        "value": best.point.value,
        "rounds": best.point.num_finished,
    }
    checkpoints = [
        {"rounds": f.round_num, "path": str(f.path), "sha256": f.sha256, "bytes": f.num_bytes}
        for f in run.stored.checkpoints()
    ]
    statistics = run.statistics()
    names, latest = load_names(run.stored), deque[dict[str, object]](maxlen=_MISSED_OBJECTS)
    for each in rounds:
        values = describe_missed(_find_missed(each), names)
        latest.extend({"round": each.round_num + 1} | value for value in values)
    everything = _describe_briefly((record, rounds)) | {
        "error": record.error,
        "best": found,
        "metrics": summary.metrics,
        "data_names": asdict(run.data_names),
        "participation": {**counts._asdict(), "clients": summary.num_clients},
        "failures": dict(summary.reasons),
        "missed": list(latest),
        "staleness": {each.round_num + 1: each.staleness for each in rounds if each.staleness},
        "skipped_rounds": summary.num_skipped,
        "privacy": spent and asdict(spent),
        **({} if statistics is None else {"statistics": json.loads(statistics.to_json())}),
        "retries": summary.num_retries,
        "virtual_s": summary.virtual_s,
        "seconds": summary.seconds,
        "checkpoints": checkpoints,
        "path": str(run.path),
        "config": record.config,
        "config_hash": record.config_hash,
        "versions": record.versions,
    }
    return format_json(everything)


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
