"""Serves the dashboard on this machine until it is interrupted."""

import socket
import threading
import webbrowser
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from fedlearn.dashboard.security import require_loopback
from fedlearn.errors import ConfigError

#: An open page holds a connection for its live values; it is cut off at the end.
_GOODBYE_S = 1


def serve(
    app: ASGIApp, *, host: str, port: int, on_ready: Callable[[str], None], opens_browser: bool
) -> None:
    """Serve ``app`` at ``host`` and ``port`` until Ctrl-C or SIGTERM.

    Args:
        app: The application.
        host: A loopback address.
        port: The port; 0 takes a free one.
        on_ready: Called with the address of the first page, once it can be opened.
        opens_browser: Whether to open that page in the user's browser.

    Raises:
        ConfigError: The address is not a loopback address, or the port is in use.
    """
    require_loopback(host)
    with _listen(host, port) as listener:
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{listener.getsockname()[1]}/"
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_GOODBYE_S,
        )
        on_ready(url)
        if opens_browser:
            # A browser may keep its caller until it is closed.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: {error.strerror}; choose another port, or 0 for any free one"
        ) from error
    listener.listen()
    return listener
