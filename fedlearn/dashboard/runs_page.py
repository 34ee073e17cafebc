"""The list of runs."""

from collections.abc import Sequence
from enum import StrEnum

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.best import find_bests, rank_by_best
from fedlearn.dashboard.live_events import events_url
from fedlearn.dashboard.rendering import PAGE_SIZE, RequestQuery, dashboard_of
from fedlearn.rounds.records import RunStatus
from fedlearn.store.run_list import RunOrder, find_runs, list_runs


class RunsOrder(StrEnum):
    """Orders of the list: those of the database, and the best value first."""

    NEWEST = RunOrder.NEWEST
    OLDEST = RunOrder.OLDEST
    NAME = RunOrder.NAME
    ROUNDS = RunOrder.ROUNDS
    BEST = "best"


_ORDERS = {
    RunsOrder.NEWEST: "newest first",
    RunsOrder.OLDEST: "oldest first",
    RunsOrder.NAME: "by name",
    RunsOrder.ROUNDS: "most rounds first",
    RunsOrder.BEST: "best value first",
}


def _show_runs(request: Request) -> Response:
    dashboard, query = (
        dashboard_of(request),
        RequestQuery(request, "search", "status", "order", "page"),
    )
    search, status = query.text("search"), query.optional("status", RunStatus)
    order = query.choice("order", RunsOrder.NEWEST)
    events = events_url(dashboard)
    keys: RunOrder | Sequence[int]
    if order is not RunsOrder.BEST:
        keys = RunOrder(order)
    else:
        found = find_runs(dashboard.database, search=search, status=status)
        keys = rank_by_best(dashboard.database, found)
    page = list_runs(
        dashboard.database,
        search=search,
        status=status,
        order=keys,
        page=query.number("page", 1),
        size=PAGE_SIZE,
    )
    return dashboard.render(
        request,
        "runs.html",
        events_url=events,
        page=page,
        bests=find_bests(dashboard.database, {each.run_id: each.record for each in page.rows}),
        query={"search": search, "status": status, "order": order},
        statuses=list(RunStatus),
        orders=_ORDERS,
    )


ROUTES: Sequence[BaseRoute] = (Route("/", _show_runs),)
