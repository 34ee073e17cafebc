"""The audit log, newest first, and whether its chain of hashes holds."""

import json
from collections.abc import Mapping, Sequence
from datetime import date

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.core.json_values import iterate_leaves
from fedlearn.dashboard.rendering import PAGE_SIZE, RequestQuery, dashboard_of
from fedlearn.identity.audit import Action, AuditEntry
from fedlearn.store.audit_list import AuditSearch, list_entries

#: First words of actions.
_KINDS = tuple(dict.fromkeys(each.partition(".")[0] for each in Action))
#: Whose records have pages, by the first word of an action.
_PAGES = {"run": "runs", "release": "releases"}


def _show_log(request: Request) -> Response:
    dashboard = dashboard_of(request)
    query = RequestQuery(request, "kind", "actor", "subject", "since", "until", "page")
    kind = query.text("kind")
    if kind not in ("", *_KINDS):
        raise HTTPException(400, f"kind: {kind!r} is none of {', '.join(_KINDS)}")
    search = AuditSearch(
        kind=kind,
        actor=query.text("actor"),
        subject=query.text("subject"),
        since=_day(query, "since"),
        until=_day(query, "until"),
    )
    page = list_entries(dashboard.database, search, page=query.number("page", 1), size=PAGE_SIZE)
    return dashboard.render(
        request,
        "audit.html",
        page=page,
        details={each.position: list(_read_details(each)) for each in page.rows},
        query=vars(search),
        kinds=_KINDS,
        pages=_PAGES,
    )


def _show_verification(request: Request) -> Response:
    """Show whether the log is as it was written; a long log takes seconds."""
    dashboard = dashboard_of(request)
    RequestQuery(request)
    return dashboard.render(request, "verification.html", checked=dashboard.checked_log())


def _day(query: RequestQuery, key: str) -> str:
    text = query.text(key)
    try:
        return date.fromisoformat(text).isoformat() if text else ""
    except ValueError:
        raise HTTPException(400, f"{key}: {text!r} is no day; write 2026-01-31") from None


def _read_details(entry: AuditEntry) -> Sequence[tuple[str, object]]:
    try:
        details = json.loads(entry.details)
    except ValueError:
        details = None
    is_readable = isinstance(details, Mapping)
    return list(iterate_leaves(details)) if is_readable else [("damaged", entry.details)]


ROUTES: Sequence[BaseRoute] = (
    Route("/audit", _show_log),
    Route("/audit/verification", _show_verification),
)
