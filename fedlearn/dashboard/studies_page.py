"""The studies, and each with its clients and their consent, its runs, and its privacy budget."""

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.best import find_bests
from fedlearn.dashboard.ledgers import read_ledgers
from fedlearn.dashboard.live_events import events_url
from fedlearn.dashboard.rendering import PAGE_SIZE, Dashboard, RequestQuery, dashboard_of
from fedlearn.experiment.study_terms import load_spent
from fedlearn.store.run_list import RunOrder, list_runs
from fedlearn.store.studies import Consent
from fedlearn.store.study_list import StudyLine, list_members, list_studies, read_studies

_MOST_DATA_SETS = 100


def _show_studies(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "page")
    page = list_studies(dashboard.database, page=query.number("page", 1), size=PAGE_SIZE)
    return dashboard.render(request, "studies.html", page=page)


def _show_study(request: Request) -> Response:
    dashboard = dashboard_of(request)
    query = RequestQuery(request, "search", "consent", "page", "runs")
    database, events = dashboard.database, events_url(dashboard)
    study = _find(dashboard, request)
    search, consent = query.text("search"), query.optional("consent", Consent)
    runs = list_runs(
        database,
        search="",
        status=None,
        study=study.name,
        order=RunOrder.NEWEST,
        page=query.number("runs", 1),
        size=PAGE_SIZE,
    )
    members = list_members(
        database,
        study.name,
        search=search,
        consent=consent,
        page=query.number("page", 1),
        size=PAGE_SIZE,
    )
    return dashboard.render(
        request,
        "study.html",
        events_url=events,
        study=study,
        runs=runs,
        bests=find_bests(database, {each.run_id: each.record for each in runs.rows}),
        members=members,
        query={"search": search, "consent": consent},
        consents=list(Consent),
    )


def _show_spent(request: Request) -> Response:
    """Show what each data set's ledger has spent; the accountant takes a second to load."""
    dashboard = dashboard_of(request)
    RequestQuery(request)
    study = _find(dashboard, request)
    page = read_ledgers(dashboard, page=1, study=study.name)
    charged = {each.data_set for each in page.rows}
    return dashboard.render(
        request,
        "study_spent.html",
        study=study,
        page=page,
        spent=load_spent(study, dashboard.database),
        uncharged=[each for each in study.data if each not in charged][:_MOST_DATA_SETS],
    )


def _find(dashboard: Dashboard, request: Request) -> StudyLine:
    name = request.path_params["name"]
    study = read_studies(dashboard.database, [name]).get(name)
    if study is None:
        raise HTTPException(404)
    return study


ROUTES: Sequence[BaseRoute] = (
    Route("/studies", _show_studies),
    Route("/studies/{name}", _show_study),
    Route("/studies/{name}/spent", _show_spent),
)
