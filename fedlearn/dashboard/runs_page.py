"""The list of runs."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.best import find_bests
from fedlearn.dashboard.live_events import events_url
from fedlearn.dashboard.rendering import PAGE_SIZE, RequestQuery, dashboard_of
from fedlearn.rounds.records import RunStatus
from fedlearn.store.run_list import RunOrder, list_runs

_ORDERS = {
    RunOrder.NEWEST: "newest first",
    RunOrder.OLDEST: "oldest first",
    RunOrder.NAME: "by name",
    RunOrder.ROUNDS: "most rounds first",
}


def _show_runs(request: Request) -> Response:
    dashboard, query = (
        dashboard_of(request),
        RequestQuery(request, "search", "status", "order", "page"),
    )
    search, status = query.text("search"), query.optional("status", RunStatus)
    order = query.choice("order", RunOrder.NEWEST)
    events = events_url(dashboard)
    page = list_runs(
        dashboard.database,
        search=search,
        status=status,
        order=order,
        page=query.number("page", 1),
        size=PAGE_SIZE,
    )
    return dashboard.render(
        "runs.html",
        events_url=events,
        page=page,
        bests=find_bests(dashboard.database, {each.run_id: each.record for each in page.rows}),
        query={"search": search, "status": status, "order": order},
        statuses=list(RunStatus),
        orders=_ORDERS,
    )


ROUTES: Sequence[BaseRoute] = (Route("/", _show_runs),)
