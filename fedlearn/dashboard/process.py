"""The process of a deployment's page, which the coordinator starts.

    python -m fedlearn.dashboard.process ORDER

``ORDER`` is an :class:`Order` as JSON. A URL of a database with a password is in the environment,
``FEDLEARN_STORE_URL``. Pages take time that the coordinator has first: this process is nicer.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import structlog

from fedlearn.config.dashboard import DashboardSection
from fedlearn.core.clock import SystemClock
from fedlearn.core.log_format import LOG_FORMAT_VARIABLE, LogFormat
from fedlearn.core.logs import configure_logs
from fedlearn.core.redaction import remove_password
from fedlearn.dashboard.app import build_app
from fedlearn.dashboard.rendering import Dashboard
from fedlearn.dashboard.server import Certificate, serve
from fedlearn.dashboard.visits import VisitLog
from fedlearn.deployment.page import NICENESS, PageOrder
from fedlearn.errors import FedlearnError
from fedlearn.store.runs import Database, sqlite_url
from fedlearn.transport.addresses import is_loopback

_log = structlog.get_logger(__name__)


def main(order: PageOrder, environ: Mapping[str, str]) -> int:
    """Serve the page until SIGTERM; return the exit code."""
    section = DashboardSection.model_validate(order["section"])
    runs_dir = Path(order["runs_dir"])
    given = environ.get("FEDLEARN_STORE_URL")
    url = given or sqlite_url(runs_dir / "fedlearn.db")
    assert section.address is not None
    host, _, port = section.address.rpartition(":")
    try:
        with ExitStack() as stack:
            database = stack.enter_context(Database.open_to_read(url, runs_dir=runs_dir))
            place = remove_password(given) if given else order["name"]
            dashboard, visits = Dashboard(database, SystemClock(), place=place), None
            if section.has_sign_in:
                writer = stack.enter_context(Database.open_as_it_is(url, runs_dir=runs_dir))
                visits = VisitLog(writer, dashboard.clock)
            serve(
                build_app(dashboard, section, visits=visits),
                host=host.strip("[]"),
                port=int(port),
                certificate=_find_certificate(section, Path(order["keys_folder"])),
                on_ready=lambda address: _log.info("dashboard", address=address),
                opens_browser=False,
            )
    except FedlearnError as error:
        _log.error("dashboard_failed", reason=str(error))
        return 1
    return 0


def _find_certificate(section: DashboardSection, keys_folder: Path) -> Certificate | None:
    """Return the certificate of the section, else the coordinator's unless on loopback."""
    if section.certificate is not None and section.key is not None:
        return Certificate(chain=Path(section.certificate), key=Path(section.key))
    assert section.address is not None
    if is_loopback(section.address):
        return None
    return Certificate(chain=keys_folder / "server.pem", key=keys_folder / "server.key")


if __name__ == "__main__":
    chosen = LogFormat(os.environ.get(LOG_FORMAT_VARIABLE) or "auto")
    configure_logs(level=logging.INFO, quiet=False, log_format=chosen)
    if sys.platform != "win32":
        os.nice(NICENESS)
    # Ctrl-C in a terminal is for the coordinator, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main(json.loads(sys.argv[1]), os.environ))
