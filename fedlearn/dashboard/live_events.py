"""Server-sent events that tell an open page that something has changed.

An event carries no values: the page asks again for the parts that show them.
"""

from collections.abc import AsyncIterator, Sequence

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.rendering import Dashboard, RequestQuery, dashboard_of
from fedlearn.errors import StoreError
from fedlearn.store.run_list import ProgressMark, read_progress

_LOOK_S = 1.0
#: A comment keeps proxies and browsers from giving up a silent connection.
_TICKS_TO_COMMENT = 15


def _send_events(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "run")
    events = _no_events() if request.method == "HEAD" else _watch(dashboard, query.texts("run"))
    return StreamingResponse(events, media_type="text/event-stream")


async def _watch(dashboard: Dashboard, names: Sequence[str]) -> AsyncIterator[str]:
    """Yield an event ``rounds`` for new rounds or another status, else ``beat`` for a heartbeat."""
    before: list[ProgressMark] | None = None
    num_silent = 0
    yield "retry: 3000\n\n"
    while True:
        try:
            now = await anyio.to_thread.run_sync(read_progress, dashboard.database, names)
        except StoreError:
            now = before or []  # the page keeps what it shows; a request for more tells why
        if before is not None and now != before:
            num_silent = 0
            yield f"event: {_name_change(before, now)}\ndata:\n\n"
        elif (num_silent := num_silent + 1) % _TICKS_TO_COMMENT == 0:
            yield ":\n\n"
        before = now
        await anyio.sleep(_LOOK_S)


def _name_change(before: Sequence[ProgressMark], now: Sequence[ProgressMark]) -> str:
    without_beat = [[each._replace(beat=None) for each in of] for of in (before, now)]
    return "rounds" if without_beat[0] != without_beat[1] else "beat"


async def _no_events() -> AsyncIterator[str]:
    return
    yield


ROUTES: Sequence[BaseRoute] = (Route("/events", _send_events),)
