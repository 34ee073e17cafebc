"""The result of a run of a plan of statistics."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.rendering import RequestQuery, dashboard_of
from fedlearn.dashboard.run_page import RunHead
from fedlearn.experiment.run import Run


def _show_statistics(request: Request) -> Response:
    dashboard, name = dashboard_of(request), request.path_params["name"]
    RequestQuery(request)
    head = RunHead.of(dashboard, name)
    found = Run(dashboard.database.run(name)).statistics()
    return dashboard.render(request, "statistics.html", **head._asdict(), result=found)


ROUTES: Sequence[BaseRoute] = (Route("/runs/{name}/statistics", _show_statistics),)
