"""The overview of a run: its figures, its curves, and what it is doing."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from fedlearn.config.tables import has_plan
from fedlearn.core.quantities import format_duration, format_number
from fedlearn.dashboard.best import find_bests
from fedlearn.dashboard.live_events import events_url
from fedlearn.dashboard.rendering import Dashboard, RequestQuery, dashboard_of, url_of
from fedlearn.deployment.explanation import CLIENT_PHASES, Explanation
from fedlearn.experiment.history import headline_metric
from fedlearn.experiment.spending import load_spending
from fedlearn.rounds.records import RunRecord
from fedlearn.store.client_list import read_names
from fedlearn.store.lease import find_deployment
from fedlearn.store.run_totals import LatestValue, RunTotals, find_first, read_latest, read_totals

#: Most clients of the current round that the page lists.
_SHOWN_CLIENTS = 12
#: Phases of clients that the round no longer waits for.
_ENDED = ("reported", "failed")
#: A report has its styles and pictures inside, and no script.
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
)
_REPORT = "report.html"


class RunHead(NamedTuple):
    """What the head of each page of a run shows."""

    record: RunRecord
    has_plan: bool
    has_report: bool
    events_url: str

    @classmethod
    def of(cls, dashboard: Dashboard, name: str) -> "RunHead":
        """Read the head of the run called ``name``.

        Raises:
            UnknownRun: There is no such run.
        """
        events = events_url(dashboard, [name])
        record = dashboard.database.run(name).record
        has_report = _find_report(dashboard, name) is not None
        return cls(record, has_plan(record.config), has_report, events)


def _show_run(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "with")
    name = request.path_params["name"]
    head = RunHead.of(dashboard, name)
    others = [each for each in query.texts("with") if each != name]
    for other in others:
        dashboard.database.run(other)  # raises if there is no such run
    totals = read_totals(dashboard.database, name)
    return dashboard.render(
        request,
        "run.html",
        **head._asdict(),
        totals=totals,
        tiles=list(_tiles(dashboard, head.record, totals)),
        others=others,
        curves_url=url_of("runs", name, "curves.json", **{"with": others}),
    )


def _tiles(
    dashboard: Dashboard, record: RunRecord, totals: RunTotals
) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and note of each figure."""
    latest = read_latest(dashboard.database, record.name)
    if not has_plan(record.config):
        yield from _tiles_of_model(dashboard, record, latest)
    share = totals.num_finished / record.num_rounds if record.num_rounds else 0.0
    trouble = {"skipped": totals.num_skipped, "retried": totals.num_retries}
    note = ", ".join(f"{num:,} {what}" for what, num in trouble.items() if num) or "none skipped"
    of = f"of {record.num_rounds:,}, {100 * share:.0f} %; {note}"
    yield "rounds", f"{totals.num_finished:,}", of
    yield "real time", format_duration(totals.seconds), _last_round_text(totals)
    if not record.is_deployed:
        yield "virtual time", format_duration(totals.virtual_s), "on the simulated devices"
    if (spent := latest.get("epsilon")) is not None:
        privacy = record.config.get("privacy")
        budget = privacy.get("epsilon") if isinstance(privacy, Mapping) else None
        most = f" of {budget:.3g}" if isinstance(budget, int | float) else ""
        yield "privacy spent, ε", f"{spent.value:.3g}{most}", f"after round {spent.num_finished:,}"


def _last_round_text(totals: RunTotals) -> str:
    if math.isnan(totals.last_round_s):
        return "no round has finished"
    return f"the last round took {format_duration(totals.last_round_s)}"


def _tiles_of_model(
    dashboard: Dashboard, record: RunRecord, latest: Mapping[str, LatestValue]
) -> Iterator[tuple[str, str, str]]:
    database, leading = dashboard.database, headline_metric(record)
    key = database.run(record.name).key
    best = find_bests(database, {key: record})[key]
    if best is None:
        yield f"best {leading}", "-", "nothing was evaluated"
    else:
        when = find_first(database, record.name, best.recorded_as, best.value)
        yield f"best {best.metric}", format_number(best.value), f"after round {when:,}"
    for metric in dict.fromkeys((leading, "loss")):
        found = latest.get(metric, latest.get(f"clients/{metric}_mean"))
        if found is not None:
            note = f"after round {found.num_finished:,}"
            yield f"latest {metric}", format_number(found.value), note


def _show_live(request: Request) -> Response:
    """Show what the current round of a deployed run waits for."""
    dashboard, name = dashboard_of(request), request.path_params["name"]
    RequestQuery(request)
    record = dashboard.database.run(name).record
    if not record.is_deployed:
        raise HTTPException(404)
    found = find_deployment(dashboard.database, name)
    status: Mapping[str, Any] = found.status  # Any: JSON
    numbers = [int(each) for key in ("clients", "failing") for each in status.get(key, {})]
    explanation = Explanation(
        start="fedlearn coordinator",
        deployment=found,
        is_alive=dashboard.is_alive(found),
        run=record,
        names=read_names(dashboard.database, numbers),
    )
    awaited = [each for each in explanation.clients if each["phase"] not in _ENDED]
    awaited.sort(key=lambda each: -each["since_s"])
    return dashboard.render(
        request,
        "live.html",
        explanation=explanation,
        phases=Counter(each["phase"] for each in explanation.clients),
        awaited=awaited[:_SHOWN_CLIENTS],
        num_awaited=len(awaited),
        texts=CLIENT_PHASES,
    )


def _show_privacy(request: Request) -> Response:
    """Show what a run's ledger has spent; the accountant takes a second to load."""
    dashboard, name = dashboard_of(request), request.path_params["name"]
    RequestQuery(request)
    stored = dashboard.database.run(name)
    privacy = stored.record.config.get("privacy")
    return dashboard.render(
        request,
        "privacy.html",
        spent=load_spending(stored),
        budget=privacy.get("epsilon") if isinstance(privacy, Mapping) else None,
        mode=privacy.get("mode") if isinstance(privacy, Mapping) else "off",
    )


def _find_report(dashboard: Dashboard, name: str) -> Path | None:
    """Return the report in a run's folder, if there is one.

    A doctored name or link that leads out of the folder of runs finds none.
    """
    stored = dashboard.database.run(name)
    folder = dashboard.database.runs_dir.resolve()
    path = (stored.path / _REPORT).resolve()
    return path if path.is_relative_to(folder) and path.is_file() else None


def _send_report(request: Request) -> Response:
    RequestQuery(request)
    path = _find_report(dashboard_of(request), request.path_params["name"])
    if path is None:
        raise HTTPException(404)
    return FileResponse(
        path, media_type="text/html", headers={"content-security-policy": _REPORT_POLICY}
    )


ROUTES: Sequence[BaseRoute] = (
    Route("/runs/{name}", _show_run),
    Route("/runs/{name}/live", _show_live),
    Route("/runs/{name}/privacy", _show_privacy),
    Route("/runs/{name}/report.html", _send_report),
)
