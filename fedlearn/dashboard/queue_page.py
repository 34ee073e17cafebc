"""The queue of a service of many runs: what is at work, what waits and why, and what ended."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.live_events import events_url
from fedlearn.dashboard.rendering import PAGE_SIZE, RequestQuery, dashboard_of
from fedlearn.rounds.scheduling import QueuedRun, QueueState
from fedlearn.store.paging import Page
from fedlearn.store.run_list import read_progress


class QueuePart(StrEnum):
    """Parts of the queue."""

    QUEUED = QueueState.QUEUED
    RUNNING = QueueState.RUNNING
    DONE = QueueState.DONE
    FAILED = QueueState.FAILED
    CANCELLED = QueueState.CANCELLED


def _show_queue(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "search", "state", "page")
    search, part = query.text("search"), query.optional("state", QueuePart)
    number, database = query.number("page", 1), dashboard.database
    events = events_url(dashboard)
    runs, waits = dashboard.read_queue()
    matching = [
        run
        for run in _in_order(runs, waits)
        if search.casefold() in f"{run.name} {run.submitted_by} {run.study}".casefold()
        and (part is None or run.state == part.value)
    ]
    first = (number - 1) * PAGE_SIZE
    shown = matching[first : first + PAGE_SIZE]
    page = Page(rows=shown, number=number, size=PAGE_SIZE, total=len(matching))
    progress = read_progress(database, [run.name for run in shown]) if shown else []
    return dashboard.render(
        request,
        "queue.html",
        events_url=events,
        page=page,
        waits=waits,
        finished={each.name: each.num_finished for each in progress},
        counts={state: sum(run.state is state for run in runs) for state in QueueState},
        has_studies=any(run.study for run in runs),
        query={"search": search, "state": part},
        states=list(QueuePart),
    )


def _in_order(runs: Sequence[QueuedRun], waits: Mapping[str, str]) -> list[QueuedRun]:
    """Return what runs, then what waits in the order of its turn, then the others, newest first."""
    running = [run for run in runs if run.state is QueueState.RUNNING]
    turns = {name: turn for turn, name in enumerate(waits)}
    waiting = sorted((run for run in runs if run.name in turns), key=lambda run: turns[run.name])
    over = sorted((run for run in runs if run.state.is_over), key=lambda run: run.ended_utc)
    return [*running, *waiting, *reversed(over)]


ROUTES: Sequence[BaseRoute] = (Route("/queue", _show_queue),)
