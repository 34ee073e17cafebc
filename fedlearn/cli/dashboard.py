"""The command that shows runs and clients as web pages.

As in :mod:`fedlearn.cli.app`, it imports slow modules itself.
"""
# ruff: noqa: PLC0415 (the imports inside functions: see above)

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedlearn.cli.options import examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "dashboard",
        "dashboard ~/runs --open",
        "dashboard --database postgresql+psycopg://viewer@db/fedlearn",
    )
)
def dashboard(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUNS_DIR]",
            help="Directory of the runs; without it, FEDLEARN_RUNS_DIR or ./runs.",
        ),
    ] = None,
    *,
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            metavar="URL",
            help="Database of the runs; without it, FEDLEARN_STORE_URL or SQLite in RUNS_DIR.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Port; 0 takes a free one.")
    ] = 8765,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Loopback address; any other is refused: no sign-in."
        ),
    ] = "127.0.0.1",
    opens_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser.")
    ] = False,
) -> None:
    """Show runs, their clients and a deployment as web pages, live and read-only.

    The pages are for this machine only. Nothing is written: neither to the database nor to the
    directory of the runs.
    """
    from fedlearn.errors import ConfigError

    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise ConfigError(
                f"the dashboard needs the package {package}; run "
                '`pip install "fedlearn[dashboard]"`'
            )
    from fedlearn.config import ServingConfig, resolve_addresses
    from fedlearn.core.clock import SystemClock
    from fedlearn.core.redaction import remove_password
    from fedlearn.dashboard.app import build_app
    from fedlearn.dashboard.rendering import Dashboard
    from fedlearn.dashboard.security import require_loopback
    from fedlearn.dashboard.server import serve
    from fedlearn.store.runs import Database, sqlite_url

    require_loopback(host)
    addresses = resolve_addresses(ServingConfig(), environ=os.environ, runs_dir=folder)
    url = database or (None if folder else addresses.store_url)
    place = str(addresses.runs_dir) if url is None else remove_password(url)
    url = url or sqlite_url(addresses.runs_dir / "fedlearn.db")
    with Database.open_to_read(url, runs_dir=addresses.runs_dir) as found:
        serve(
            build_app(Dashboard(found, SystemClock(), place=place)),
            host=host,
            port=port,
            certificate=None,
            on_ready=lambda address: typer.echo(f"{address} shows {place}; Ctrl-C ends it"),
            opens_browser=opens_browser,
        )
