"""The registry of models: all releases, and the card of one."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.rendering import PAGE_SIZE, RequestQuery, dashboard_of, record_reading
from fedlearn.errors import StoreError
from fedlearn.experiment.model_card import render_card
from fedlearn.identity.releases import is_id_prefix
from fedlearn.store.paging import Page
from fedlearn.store.releases import ReleaseStore, StoredRelease


def _show_releases(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "search", "page")
    search, number = query.text("search"), query.number("page", 1)
    releases = [
        each
        for each in reversed(ReleaseStore(dashboard.database).list_all())
        if search.casefold() in " ".join((each.run, each.signed.id, *each.tags)).casefold()
    ]
    first = (number - 1) * PAGE_SIZE
    shown = releases[first : first + PAGE_SIZE]
    return dashboard.render(
        request,
        "releases.html",
        page=Page(rows=shown, number=number, size=PAGE_SIZE, total=len(releases)),
        facts={each.signed.id: _read_facts(each) for each in shown},
        query={"search": search},
    )


def _show_release(request: Request) -> Response:
    dashboard, reference = dashboard_of(request), request.path_params["id"]
    RequestQuery(request)
    if not is_id_prefix(reference):
        raise HTTPException(404)
    try:
        release = ReleaseStore(dashboard.database).find(reference)
    except StoreError as error:
        raise HTTPException(404) from error
    facts = _read_facts(release)
    record_reading(request, release.signed.id)
    return dashboard.render(
        request,
        "release.html",
        release=release,
        facts=facts,
        card=() if facts is None else render_card(release.signed).splitlines(),
        kept_files=sorted(each.name for each in release.path.glob("*")),
    )


def _read_facts(release: StoredRelease) -> Mapping[str, Any] | None:  # Any: JSON
    """Return the statement's values; ``None`` if it is damaged."""
    try:
        return release.signed.facts
    except StoreError:
        return None


ROUTES: Sequence[BaseRoute] = (
    Route("/releases", _show_releases),
    Route("/releases/{id}", _show_release),
)
