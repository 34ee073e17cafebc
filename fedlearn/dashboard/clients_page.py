"""The enrolled clients of a deployment."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.rendering import PAGE_SIZE, RequestQuery, dashboard_of
from fedlearn.store.client_list import (
    ClientFilter,
    ClientOrder,
    count_clients,
    count_participations,
    count_software,
    list_clients,
)
from fedlearn.store.lease import list_deployments
from fedlearn.store.registry import StoredRegistry

_ORDERS = {
    ClientOrder.NAME: "by name",
    ClientOrder.NUMBER: "by number",
    ClientOrder.SEEN: "last seen first",
    ClientOrder.ENROLLED: "newest first",
    ClientOrder.EXPIRES: "certificate ends first",
}
_SHOWN_SOFTWARE = 12


def _show_clients(request: Request) -> Response:
    dashboard, query = (
        dashboard_of(request),
        RequestQuery(request, "search", "which", "order", "page"),
    )
    search, which = query.text("search"), query.optional("which", ClientFilter)
    order, database = query.choice("order", ClientOrder.NAME), dashboard.database
    page = list_clients(
        database,
        search=search,
        which=which,
        order=order,
        page=query.number("page", 1),
        size=PAGE_SIZE,
    )
    numbers = [each.client.client_id for each in page.rows]
    return dashboard.render(
        request,
        "clients.html",
        page=page,
        counts=count_participations(database, numbers),
        totals=count_clients(database),
        invitations=StoredRegistry(database, dashboard.clock).open_invitations(),
        is_served=any(dashboard.is_alive(each) for each in list_deployments(database)),
        query={"search": search, "which": which, "order": order},
        software=count_software(database, most=_SHOWN_SOFTWARE),
        filters=list(ClientFilter),
        orders=_ORDERS,
    )


ROUTES: Sequence[BaseRoute] = (Route("/clients", _show_clients),)
