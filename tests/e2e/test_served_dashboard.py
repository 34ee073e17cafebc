"""The page that a service serves: its process ends with the service, and never hurts it."""

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.addresses import free_addresses
from tests.processes import Launcher, Process, children_of, until

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Served:
    """A service with a page.

    Attributes:
        process: The process of the service.
        page: Address of the page.
        metrics: Address of the service's own endpoints.
    """

    process: Process
    page: str
    metrics: str

    @property
    def page_pid(self) -> int:
        """The process of the page."""
        [found] = (each for each in children_of(self.process.pid) if is_page(each))
        return found

    def answers(self) -> bool:
        """Whether the page shows the runs."""
        if not is_open(self.page):
            return False
        with urlopen(f"http://{self.page}/", timeout=60) as answer:
            return b"There are no runs yet" in answer.read()


def is_page(pid: int) -> bool:
    return b"fedlearn.dashboard.process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
def served(launcher: Launcher, tmp_path: Path) -> Iterator[Served]:
    gateway, metrics, page = free_addresses(3)
    file = tmp_path / "service.toml"
    file.write_text(
        f'name = "clinics"\n[service]\n[coordinator]\naddress = "{gateway}"\n'
        f'http_address = "{metrics}"\n'
        f'[coordinator.dashboard]\naddress = "{page}"\n[store]\nruns_dir = "runs"\n'
    )
    process = launcher.launch(
        tmp_path / "service", "serve", str(file), "--json", environ={}, cwd=tmp_path
    )
    served = Served(process, page, metrics)
    try:
        until(served.answers, told=process.tail)
        until(lambda: process.said("serving") > 0, told=process.tail)
        yield served
    finally:
        process.close()


def test_a_page_that_is_killed_comes_back_and_the_service_does_not_notice(served: Served) -> None:
    """And it goes when the service stops."""
    first = served.page_pid
    assert first != served.process.pid
    nice = Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[16]
    assert int(nice) >= 10
    os.kill(first, signal.SIGKILL)
    until(lambda: served.process.said("dashboard_ended") == 1, told=served.process.tail)
    with urlopen(f"http://{served.metrics}/readyz", timeout=60) as answer:
        assert answer.status == 200
    until(served.answers, told=served.process.tail)
    assert served.page_pid != first
    served.process.send(signal.SIGTERM)
    assert served.process.wait() == 0
    assert not is_open(served.page)


def test_a_page_does_not_outlive_a_killed_service(served: Served) -> None:
    served.process.kill()
    until(lambda: not is_open(served.page))
