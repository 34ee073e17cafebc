"""Keeps the process of a deployment's page at work, which can neither slow nor end the rounds."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final, Self, TypedDict

import structlog

from fedlearn.config.dashboard import DashboardSection
from fedlearn.core.log_format import LOG_FORMAT_VARIABLE
from fedlearn.core.logs import find_log_format
from fedlearn.deployment.places import Places
from fedlearn.errors import ConfigError
from fedlearn.processes.starting import start_module

#: How much later than the coordinator the page gets the processor.
NICENESS: Final = 10

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_END_S = 5.0
_PACKAGES = ("starlette", "uvicorn")
_FOR_SIGN_IN = ("authlib", "joserfc", "requests")


class PageOrder(TypedDict):
    """What the process of the page is told; JSON.

    Attributes:
        section: The section of the configuration.
        runs_dir: Directory of the runs.
        keys_folder: Folder of the coordinator's certificate.
        name: Name of the run or the service.
    """

    section: Mapping[str, Any]  # Any: JSON
    runs_dir: str
    keys_folder: str
    name: str


def require_page_packages(section: DashboardSection) -> None:
    """Check that a page can be served as configured, if any is.

    Raises:
        ConfigError: A package is missing.
    """
    needed = (*_PACKAGES, *(_FOR_SIGN_IN if section.has_sign_in else ()))
    missing = [each for each in needed if find_spec(each) is None]
    if section.address is not None and missing:
        raise ConfigError(
            f"coordinator.dashboard.address: the dashboard needs the package {missing[0]}; run "
            '`pip install "fedlearn[dashboard]"`, or leave the address out'
        )


class PageProcess:
    """The process of the page; a context manager that keeps it at work while it is entered.

    Whatever ends the process, another one starts after a pause. It exits when this process dies.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._section = places.config.coordinator.dashboard
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="page", daemon=True)
        self._log = structlog.get_logger(__name__)

    def __enter__(self) -> Self:
        """Start the process, unless no page is configured."""
        if self._section.address is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._is_over.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()

    def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while (process := self._start()) is not None:
            code = process.wait()
            if self._is_over.is_set():
                return
            self._log.warning("dashboard_ended", exit_code=code, starts_again_in_s=pause_s)
            if self._is_over.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _start(self) -> "subprocess.Popen[bytes] | None":
        """Start the process; ``None`` if the page is over."""
        addresses = self._places.addresses
        order = PageOrder(
            section=self._section.model_dump(mode="json", exclude_unset=True),
            runs_dir=str(addresses.runs_dir.absolute()),
            keys_folder=str(self._places.keys_folder.absolute()),
            name=self._places.run_name,
        )
        environ = {key: value for key, value in os.environ.items() if key != "FEDLEARN_STORE_URL"}
        if addresses.store_url is not None:  # it may have a password, which arguments would show
            environ["FEDLEARN_STORE_URL"] = addresses.store_url
        environ[LOG_FORMAT_VARIABLE] = find_log_format()
        with self._lock:
            if self._is_over.is_set():
                return None
            try:
                self._process = start_module(
                    "fedlearn.processes.tethered",
                    "fedlearn.dashboard.process",
                    json.dumps(order),
                    environ=environ,
                    python=sys.executable,
                    stdout=subprocess.DEVNULL,
                )
            except OSError as error:
                self._log.warning("dashboard_not_started", reason=str(error))
                return None
            return self._process
