"""Guards every request and response of the dashboard.

A web site that a user visits can point its own host name at the loopback address (DNS rebinding)
and would then read these pages. So the Host header must name this machine, or the public address
that is configured. No request may change anything but sign out, so only GET and HEAD are answered.
The headers let a browser run only the dashboard's own scripts, and let no other site embed or read
a page.
"""

from collections.abc import Mapping
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedlearn.errors import ConfigError

#: Content security policy of the dashboard's own pages.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_METHODS = ("GET", "HEAD")


def require_loopback(host: str) -> None:
    """Refuse an address that other machines can reach.

    Raises:
        ConfigError: ``host`` is not a loopback address.
    """
    if not _is_loopback(host):
        raise ConfigError(
            f"--host {host}: the dashboard has no sign-in, so it listens on this machine only; use "
            "127.0.0.1, and from another machine forward the port: `ssh -L 8765:127.0.0.1:8765 …`"
        )


class Guard:
    """ASGI middleware that refuses requests from elsewhere, and sets the headers of responses."""

    def __init__(self, app: ASGIApp, *, public_host: str | None) -> None:
        """Answer to ``public_host``, or without one to names of this machine."""
        self._app, self._public_host = app, public_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = _find_refusal(scope, self._public_host)
        await (refusal or self._app)(scope, receive, send_guarded)


def _find_refusal(scope: Scope, public_host: str | None) -> ASGIApp | None:
    host = Headers(scope=scope).get("host", "")
    is_named = (
        _is_loopback(_remove_port(host))
        if public_host is None
        else host.lower() == public_host.lower()
    )
    if not is_named:
        names = "names of this machine" if public_host is None else public_host
        return PlainTextResponse(f"The dashboard answers only to {names}, not to {host!r}.\n", 421)
    # A sign-out is the only change; without sign-in there is nothing to change.
    is_sign_out = public_host is not None and scope["path"] == "/sign-out"
    if scope["method"] not in (("POST",) if is_sign_out else _METHODS):
        refused = f"The dashboard changes nothing: {scope['method']} is not allowed.\n"
        return PlainTextResponse(refused, 405, headers={"allow": ", ".join(_METHODS)})
    return None


def _remove_port(host: str) -> str:
    """Return the name or address in a Host header.

    Example:
        >>> [_remove_port(each) for each in ("localhost:8765", "[::1]:80", "::1", "a.b")]
        ['localhost', '::1', '::1', 'a.b']
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
