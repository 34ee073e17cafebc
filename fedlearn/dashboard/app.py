"""Builds the dashboard's web application from its pages."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

from fedlearn.config.dashboard import DashboardSection
from fedlearn.dashboard import (
    alerts_page,
    attendance_page,
    audit_page,
    budgets_page,
    clients_page,
    compare_page,
    curves_data,
    live_events,
    queue_page,
    record_page,
    releases_page,
    run_page,
    runs_page,
    statistics_page,
    studies_page,
)
from fedlearn.dashboard.rendering import Dashboard, dashboard_of
from fedlearn.dashboard.security import Guard
from fedlearn.dashboard.visits import VisitLog
from fedlearn.errors import StoreError, StoreUnavailable, UnknownRun

#: The pages: a new one adds its module here, and its link to ``templates/base.html``.
_PAGES: Sequence[Sequence[BaseRoute]] = (
    runs_page.ROUTES,
    run_page.ROUTES,
    attendance_page.ROUTES,
    record_page.ROUTES,
    statistics_page.ROUTES,
    compare_page.ROUTES,
    queue_page.ROUTES,
    studies_page.ROUTES,
    clients_page.ROUTES,
    releases_page.ROUTES,
    budgets_page.ROUTES,
    audit_page.ROUTES,
    alerts_page.ROUTES,
    curves_data.ROUTES,
    live_events.ROUTES,
)
_STATIC = Path(__file__).parent / "static"


def build_app(
    dashboard: Dashboard,
    section: DashboardSection | None = None,
    *,
    visits: VisitLog | None = None,
) -> Starlette:
    """Return the application that serves ``dashboard``, with the sign-in of ``section`` if any.

    A section with sign-in needs ``visits``, where sign-ins are recorded.

    Raises:
        ConfigError: The secret of the sign-in cannot be read.
    """
    gate, public_host = list[Middleware](), None
    if section is not None and section.has_sign_in:
        # Without sign-in, the page needs no library for it.
        from fedlearn.dashboard.sign_in import SignInGate  # noqa: PLC0415

        assert visits is not None
        gate = [Middleware(SignInGate, dashboard=dashboard, section=section, visits=visits)]
        public_host = urlsplit(section.public_url or "").netloc
    static = Mount("/static", StaticFiles(directory=_STATIC), name="static")
    app = Starlette(
        routes=[route for page in _PAGES for route in page] + [static],
        middleware=[
            Middleware(Guard, public_host=public_host),
            *gate,
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
        exception_handlers={
            HTTPException: _show_refusal,
            StoreError: _show_store_error,
            Exception: _show_failure,
        },
    )
    # A redirect would only add a slash or take one away, and lead somewhere by the Host header.
    app.router.redirect_slashes = False
    app.state.dashboard = dashboard
    return app


def _show_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = {404: "Not found", 400: "Bad request"}.get(error.status_code, "Refused")
    detail = error.detail if error.status_code != 404 else f"There is no page {request.url.path}."  # noqa: PLR2004 (HTTP)
    return _show_error(request, error.status_code, title, detail)


def _show_store_error(request: Request, error: Exception) -> Response:
    if isinstance(error, UnknownRun):
        return _show_error(request, 404, "No such run", str(error))
    code = 503 if isinstance(error, StoreUnavailable) else 500
    return _show_error(request, code, "The runs cannot be read", str(error))


def _show_failure(request: Request, _: Exception) -> Response:
    detail = "The terminal in which the dashboard runs shows the details."
    return _show_error(request, 500, "This page failed", detail)


def _show_error(request: Request, status_code: int, title: str, detail: str) -> Response:
    dashboard = dashboard_of(request)
    return dashboard.render_error(request, status_code=status_code, title=title, detail=detail)
