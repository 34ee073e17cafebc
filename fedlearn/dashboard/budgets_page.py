"""What each privacy ledger has spent, over all runs that charge it."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.ledgers import read_ledgers
from fedlearn.dashboard.rendering import RequestQuery, dashboard_of


def _show_budgets(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "page")
    page = read_ledgers(dashboard, page=query.number("page", 1))
    return dashboard.render(request, "budgets.html", page=page)


ROUTES: Sequence[BaseRoute] = (Route("/budgets", _show_budgets),)
