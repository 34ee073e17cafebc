"""Several runs side by side."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.best import find_bests
from fedlearn.dashboard.live_events import events_url
from fedlearn.dashboard.rendering import RequestQuery, dashboard_of, url_of
from fedlearn.experiment.comparison import differences
from fedlearn.store.run_totals import read_totals


def _show_comparison(request: Request) -> Response:
    dashboard, names = dashboard_of(request), RequestQuery(request, "with").texts("with")
    database = dashboard.database
    events = events_url(dashboard, names)
    runs = [database.run(name) for name in names]
    records = {run.key: run.record for run in runs}
    return dashboard.render(
        request,
        "compare.html",
        events_url=events,
        records=records,
        bests=find_bests(database, records),
        totals={run.key: read_totals(database, run.name) for run in runs},
        changed=differences(*(each.config for each in records.values())),
        curves_url=url_of("compare", "curves.json", **{"with": names}),
    )


ROUTES: Sequence[BaseRoute] = (Route("/compare", _show_comparison),)
