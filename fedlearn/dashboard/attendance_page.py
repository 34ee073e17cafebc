"""Who reported, was late or failed in a run: a map, the clients, and reasons of failures."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from fedlearn.core.participations import STATUSES
from fedlearn.dashboard.rendering import PAGE_SIZE, Dashboard, RequestQuery, dashboard_of, url_of
from fedlearn.dashboard.run_page import RunHead
from fedlearn.rounds.records import RunRecord
from fedlearn.store.attendance import (
    SELECTED,
    AttendanceOrder,
    Window,
    list_attendance,
    list_reasons,
    read_cells,
)
from fedlearn.store.client_list import find_clients, read_names
from fedlearn.store.run_totals import read_totals

_NUM_COLUMNS = 250
_SHOWN_REASONS = 15
#: Most clients that a search by name may find.
_MOST_FOUND = 500


class Span(StrEnum):
    """How many of the latest rounds to look at."""

    LAST_100 = "100"
    LAST_500 = "500"
    LAST_2000 = "2000"
    ALL = "all"


_SPANS = {
    Span.LAST_100: "last 100 rounds",
    Span.LAST_500: "last 500 rounds",
    Span.LAST_2000: "last 2,000 rounds",
    Span.ALL: "all rounds",
}
_ORDERS = {
    AttendanceOrder.MISSED: "most missed first",
    AttendanceOrder.SLOWEST: "slowest first",
    AttendanceOrder.ASKED: "most asked first",
    AttendanceOrder.CLIENT: "by number",
}


def _show_attendance(request: Request) -> Response:
    dashboard, name = dashboard_of(request), request.path_params["name"]
    query = RequestQuery(request, "search", "order", "span", "page")
    head = RunHead.of(dashboard, name)
    record = head.record
    search, order = query.text("search"), query.choice("order", AttendanceOrder.MISSED)
    span = query.choice("span", Span.LAST_500)
    window = _window(dashboard, name, span)
    page = list_attendance(
        dashboard.database,
        name,
        window,
        order=order,
        clients=_find(dashboard, search, record) if search else None,
        page=query.number("page", 1),
        size=PAGE_SIZE,
    )
    clients = [each.client_id for each in page.rows]
    rounds = {"first": window.first, "end": window.end}
    return dashboard.render(
        request,
        "attendance.html",
        **head._asdict(),
        page=page,
        window=window,
        names=read_names(dashboard.database, clients) if record.is_deployed else {},
        reasons=list_reasons(dashboard.database, name, window, most=_SHOWN_REASONS),
        map_url=url_of("runs", name, "map.json", **rounds, client=clients),
        query={"search": search, "order": order, "span": span},
        orders=_ORDERS,
        spans=_SPANS,
        statuses=STATUSES,
    )


def _window(dashboard: Dashboard, name: str, span: Span) -> Window:
    num_finished = read_totals(dashboard.database, name).num_finished
    num_rounds = num_finished if span is Span.ALL else min(num_finished, int(span))
    return Window(first=num_finished - num_rounds, end=num_finished)


def _find(dashboard: Dashboard, search: str, record: RunRecord) -> list[int]:
    """Return the clients of this number or whose name contains the text."""
    found = find_clients(dashboard.database, search, most=_MOST_FOUND) if record.is_deployed else []
    number = search.removeprefix("client ")
    is_number = number.isascii() and number.isdecimal() and len(number) < len(str(2**63))
    return [*found, int(number)] if is_number else found


def _send_map(request: Request) -> Response:
    """Send the cells of a map, by client and column; a cell is the index of a status."""
    dashboard, name = dashboard_of(request), request.path_params["name"]
    query = RequestQuery(request, "first", "end", "client")
    clients = query.numbers("client", most=PAGE_SIZE)
    window = Window(first=query.number("first", 0, least=0), end=query.number("end", 0, least=0))
    rounds_per_column = max(1, -(-window.num_rounds // _NUM_COLUMNS))
    cells = read_cells(
        dashboard.database, name, window, clients=clients, rounds_per_column=rounds_per_column
    )
    return JSONResponse(
        {
            "first": window.first,
            "end": window.end,
            "rounds_per_column": rounds_per_column,
            "clients": clients,
            "statuses": {SELECTED: "selected", **_status_names()},
            "cells": cells,
        }
    )


def _status_names() -> Mapping[int, str]:
    return {index: status.value for index, status in enumerate(STATUSES)}


ROUTES: Sequence[BaseRoute] = (
    Route("/runs/{name}/clients", _show_attendance),
    Route("/runs/{name}/map.json", _send_map),
)
