"""Server-sent events that tell an open page that something has changed.

An event carries no values: the page asks again for the parts that show them.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from hashlib import sha256

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from fedlearn.dashboard.rendering import Dashboard, RequestQuery, dashboard_of, url_of
from fedlearn.errors import StoreError
from fedlearn.store.run_list import ProgressMark, read_progress

_LOOK_S = 1.0
#: Open pages, each of which reads the database once a second.
MAX_STREAMS = 100
#: A comment keeps proxies and browsers from giving up a silent connection.
_TICKS_TO_COMMENT = 15


def events_url(dashboard: Dashboard, names: Sequence[str] = ()) -> str:
    """Return the address of the events about runs, or about all runs.

    It holds what a page has seen. So a page that calls this first, before it reads what it shows,
    misses no change.
    """
    return url_of("events", run=names, seen=_mark(read_progress(dashboard.database, names)))


def _mark(progress: Sequence[ProgressMark]) -> str:
    """Return a short text that differs if any run has another status or number of rounds."""
    values = [each._replace(beat=None) for each in progress]
    return sha256(repr(values).encode()).hexdigest()[:16]


def _send_events(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "run", "seen")
    names, seen = query.texts("run"), query.text("seen")
    if request.method == "HEAD":
        return _stream(_no_events())
    if dashboard.whole.num_streams >= MAX_STREAMS:
        # The page stays as it is; it offers to be loaded again.
        return PlainTextResponse("Too many pages are open.\n", 503, headers={"retry-after": "30"})
    may_stay = getattr(request.state, "may_stay", lambda: True)
    return _stream(_watch(dashboard, names, seen=seen, may_stay=may_stay))


def _stream(events: AsyncIterator[str]) -> Response:
    # Otherwise nginx collects the small events until it has a full buffer.
    headers = {"x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _watch(
    dashboard: Dashboard, names: Sequence[str], *, seen: str, may_stay: Callable[[], bool]
) -> AsyncIterator[str]:
    """Yield an event ``rounds`` for new rounds or another status, else ``beat`` for a heartbeat."""
    dashboard.whole.num_streams += 1
    try:
        async for event in _find_events(dashboard, names, seen=seen, may_stay=may_stay):
            yield event
    finally:
        dashboard.whole.num_streams -= 1


async def _find_events(
    dashboard: Dashboard, names: Sequence[str], *, seen: str, may_stay: Callable[[], bool]
) -> AsyncIterator[str]:
    beats: list[int | None] | None = None
    num_silent = 0
    yield "retry: 3000\n\n"
    while True:
        # While the store cannot be read, the page keeps what it shows; a request tells why.
        with suppress(StoreError):
            if not await anyio.to_thread.run_sync(may_stay):
                return  # signed out, or the session is over
            now = await anyio.to_thread.run_sync(read_progress, dashboard.database, names)
            mark, new_beats, event = _mark(now), [each.beat for each in now], ""
            if mark != seen:
                event = "rounds"
            elif beats is not None and new_beats != beats:
                event = "beat"
            seen, beats, num_silent = mark, new_beats, 0 if event else num_silent + 1
            if event:
                yield f"event: {event}\ndata:\n\n"
        if num_silent % _TICKS_TO_COMMENT == _TICKS_TO_COMMENT - 1:
            yield ":\n\n"
        await anyio.sleep(_LOOK_S)


async def _no_events() -> AsyncIterator[str]:
    return
    yield


ROUTES: Sequence[BaseRoute] = (Route("/events", _send_events),)
