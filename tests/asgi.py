"""Asks a web application in this process, with the target exactly as a client would send it."""

import re
from dataclasses import dataclass
from urllib.parse import unquote

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Answer:
    """An answer, as sent."""

    status_code: int
    headers: Headers
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()


@dataclass(frozen=True)
class Browser:
    """Asks ``app``; it follows no redirects and normalizes no paths, unlike a real browser."""

    app: ASGIApp

    def get(self, target: str, *, host: str = "127.0.0.1:8765", method: str = "GET") -> Answer:
        """Ask for ``target``, a path with a query."""
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(b"host", host.encode())],
        }
        sent: list[Message] = []

        requests = iter([True])

        async def receive() -> Message:
            if not next(requests, False):
                await anyio.sleep_forever()  # the client stays connected, and says no more
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        anyio.run(self.app, scope, receive, send)
        body = b"".join(each.get("body", b"") for each in sent[1:])
        return Answer(sent[0]["status"], Headers(raw=sent[0]["headers"]), body)


def rows_of(text: str) -> list[str]:
    """Return the text of each row of the first table's body."""
    body = text.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = [re.sub(r"<[^>]*>", " ", each) for each in body.split("<tr>")[1:]]
    return [" ".join(each.split()) for each in rows]
