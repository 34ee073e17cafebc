"""What needs an operator's attention now."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.rendering import RequestQuery, dashboard_of


def _show_alerts(request: Request) -> Response:
    dashboard = dashboard_of(request)
    RequestQuery(request)
    return dashboard.render(request, "alerts.html", alerts=dashboard.alerts())


ROUTES: Sequence[BaseRoute] = (Route("/alerts", _show_alerts),)
