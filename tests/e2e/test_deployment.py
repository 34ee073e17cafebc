"""A coordinator's process from start to end: stopped, killed, paused, aborted, and gone on with."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from fedlearn.config import load, render
from fedlearn.coordinator.records import RunStatus
from fedlearn.coordinator.store import Database, sqlite_url
from fedlearn.core.clock import SystemClock
from fedlearn.deployment import demo_client
from fedlearn.deployment.starter import starter

NUM_CLIENTS, NUM_ROUNDS = 2, 8
LONG_S = 120.0
OK, UNAVAILABLE = 200, 503

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


@dataclass
class Site:
    """A folder with a configuration, and the processes that were started in it."""

    folder: Path
    running: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "coordinator.toml"

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedlearn", *arguments],
                cwd=self.folder,
                env=kept | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if arguments[0] == "coordinator" else log,
                stderr=log,
                text=True,
            )
        self.running.append(process)
        return process

    def type(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedlearn", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def coordinator(self, *options: str) -> "subprocess.Popen[str]":
        process = self.start("coordinator", str(self.file), "--json", *options)
        http = load(self.file, overrides=()).coordinator.http_address
        self.wait_until(lambda: asked(http, "/readyz") == OK or process.poll() is not None)
        return process

    def join(self, number: int) -> None:
        self.type("invite", f"client-{number}")
        self.start(
            *("join", f"client-{number}.invitation", "--home", f"client-{number}"),
            *("--task", f"{demo_client.__name__}:trainer"),
            **{demo_client.CONFIG: str(self.file), demo_client.CLIENT: str(number)},
        )

    def why(self) -> dict[str, object]:
        answer: dict[str, object] = json.loads(self.type("why", "--json"))
        return answer

    def wait_until(self, holds: Callable[[], bool]) -> None:
        clock = SystemClock()
        ends_s = clock.now_s() + LONG_S
        while not holds():
            assert clock.now_s() < ends_s, (self.folder / "log").read_text()[-3000:]
            clock.sleep(0.05)


def asked(http: str, path: str) -> int | None:
    """Return the status of an answer; ``None``: nobody is there."""
    try:
        with urlopen(f"http://{http}{path}", timeout=5) as response:
            status: int = response.status
            return status
    except HTTPError as error:
        with error:
            return error.code
    except (URLError, ConnectionError):
        return None


def until_round(process: "subprocess.Popen[str]", number: int) -> None:
    """Read what a coordinator prints until it tells of a round."""
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("round", 0) >= number:
            return
    raise AssertionError(f"it ended before round {number}")


def free_addresses(num: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two clients are asked, and both must report."""
    door, enrolment, http = free_addresses(3)
    config = starter()
    changes = {
        "num_rounds": NUM_ROUNDS,
        "cohort": config.cohort.model_copy(update={"num_wanted": NUM_CLIENTS}),
        "stragglers": config.stragglers.model_copy(update={"over_selection": 1.0}),
        "coordinator": config.coordinator.model_copy(
            update={"address": door, "enrolment_address": enrolment, "http_address": http}
        ),
    }
    site = Site(tmp_path)
    site.file.write_text(render(config.model_copy(update=changes)))
    yield site
    for process in site.running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def stored_rounds(site: Site) -> tuple[RunStatus, list[int]]:
    runs_dir = site.folder / "runs"
    with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
        run = database.run("federation")
        return run.record.status, [record.round_num for record in run.rounds()]


def test_a_run_goes_on_after_a_stop_and_after_a_kill(site: Site) -> None:
    """Clients come back without being told; every round is there once."""
    first = site.coordinator()
    for number in range(NUM_CLIENTS):
        site.join(number)
    until_round(first, 2)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=LONG_S)
    assert first.returncode == 0
    second = site.coordinator()
    until_round(second, 4)
    second.kill()
    second.communicate()
    third = site.coordinator()
    third.communicate(timeout=LONG_S)
    assert third.returncode == 0
    assert stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))


def test_an_operator_pauses_resumes_looks_and_aborts(site: Site) -> None:
    """From another process, through the database."""
    coordinator = site.coordinator("--set", "num_rounds=5000")
    waiting = site.type("why")
    assert "it needs 2 clients" in waiting
    assert "goes on" in site.type("resume")
    site.type("pause")
    site.wait_until(lambda: "it is paused" in site.type("why"))
    for number in range(NUM_CLIENTS):
        site.join(number)
    site.wait_until(lambda: len(site.type("clients", "--json").splitlines()) == NUM_CLIENTS)
    site.type("resume")
    until_round(coordinator, 1)
    site.type("abort")
    coordinator.communicate(timeout=LONG_S)
    assert coordinator.returncode == 3
    status, rounds = stored_rounds(site)
    assert status is RunStatus.FAILED
    listed = site.type("rounds", "--json", "--last", "5000").splitlines()
    assert len(listed) == len(rounds) >= 1
    assert "aborted by the operator" in site.type("why")


def test_a_second_coordinator_takes_over(site: Site) -> None:
    """It lives and is not ready while the first one leads; the clients find it by themselves."""
    config = load(site.file, overrides=())
    door, enrolment, http = free_addresses(3)
    both = {"public_addresses": (config.coordinator.address, door)}
    section = config.coordinator.model_copy(update=both | {"lease_ttl_s": 2.0})
    site.file.write_text(render(config.model_copy(update={"coordinator": section})))
    first = site.coordinator()
    own = {"address": door, "enrolment_address": enrolment, "http_address": http}
    options = [f"--set=coordinator.{key}={value}" for key, value in own.items()]
    second = site.start("coordinator", str(site.file), "--json", *options)
    site.wait_until(lambda: asked(http, "/livez") == OK)
    assert asked(http, "/readyz") == UNAVAILABLE
    for number in range(NUM_CLIENTS):
        site.join(number)
    until_round(first, 2)
    assert asked(http, "/readyz") == UNAVAILABLE
    first.kill()
    second.communicate(timeout=LONG_S)
    assert second.returncode == 0
    assert stored_rounds(site) == (RunStatus.DONE, list(range(NUM_ROUNDS)))
