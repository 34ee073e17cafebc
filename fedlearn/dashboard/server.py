"""Serves the dashboard until it is interrupted."""

import socket
import ssl
import threading
import webbrowser
from asyncio import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedlearn.errors import ConfigError

#: An open page holds a connection for its live values; it is cut off at the end.
_GOODBYE_S = 1
#: Within which a request must be complete. A browser sends one at once, but opens spare connections
#: that it may never use.
_REQUEST_S = 10.0
#: Connections at once; the process may have 1024 open files.
_MOST_CONNECTIONS = 500


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The files of a certificate chain and its private key, PEM."""

    chain: Path
    key: Path

    def check(self) -> None:
        """Check that they can be read and belong together.

        Raises:
            ConfigError: Not so.
        """
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.chain, self.key)
        except OSError as error:
            raise ConfigError(
                f"the page's certificate {self.chain} with the key {self.key} cannot be used: "
                f"{error}; give a chain and its key, PEM"
            ) from error


def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    certificate: Certificate | None,
    on_ready: Callable[[str], None],
    opens_browser: bool,
) -> None:
    """Serve ``app`` at ``host`` and ``port`` until Ctrl-C or SIGTERM.

    Args:
        app: The application.
        host: The address; one that is not loopback needs an application with sign-in.
        port: The port; 0 takes a free one.
        certificate: For HTTPS; ``None`` is HTTP.
        on_ready: Called with the address of the first page, once it can be opened.
        opens_browser: Whether to open that page in the user's browser.

    Raises:
        ConfigError: The port is in use, or the certificate cannot be used.
    """
    if certificate is not None:
        certificate.check()
    with _listen(host, port) as listener:
        name = f"[{host}]" if ":" in host else host
        scheme = "http" if certificate is None else "https"
        url = f"{scheme}://{name}:{listener.getsockname()[1]}/"
        config = uvicorn.Config(
            app,
            http=PromptProtocol,
            log_level="warning",
            lifespan="off",
            server_header=False,
            # The address of a peer is that of its socket: a header could claim another one.
            proxy_headers=False,
            timeout_graceful_shutdown=_GOODBYE_S,
            limit_concurrency=_MOST_CONNECTIONS,
            ssl_certfile=None if certificate is None else certificate.chain,
            ssl_keyfile=None if certificate is None else certificate.key,
        )
        on_ready(url)
        if opens_browser:
            # A browser may keep its caller until it is closed.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        uvicorn.Server(config).run(sockets=[listener])


class PromptProtocol(H11Protocol):
    """Closes a connection that sends no complete request in time.

    Otherwise a peer could hold all connections, each with half a request (slow loris).
    """

    _deadline: TimerHandle | None = None

    def __init__(self, *arguments: Any, **more: Any) -> None:  # Any: uvicorn's
        super().__init__(*arguments, **more)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        self._stop_waiting()

    def _is_answering(self) -> bool:
        cycle = getattr(
            self, "cycle", None
        )  # none before the first request, whatever its type says
        return cycle is not None and not cycle.response_complete

    def _wait(self) -> None:
        if self._is_answering():
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_REQUEST_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the dashboard cannot listen on {host}, port {port}: {error.strerror}; choose another "
            "port, or 0 for any free one"
        ) from error
    listener.listen()
    return listener
