"""A deployment as an operator and its clients have it: commands, typed in one folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from fedlearn.client.home import Enrolment, Home
from fedlearn.config import Config, IdealDevices, load, render
from fedlearn.core.clock import SystemClock
from fedlearn.deployment import demo_client
from fedlearn.deployment.operator import Operator
from fedlearn.deployment.places import Places
from fedlearn.deployment.starter import starter
from fedlearn.store.runs import Database, sqlite_url
from tests.addresses import free_addresses

LONG_S = 300.0
OK, UNAVAILABLE = 200, 503

#: Overrides for secure aggregation of all who are asked, with a clip that does not bind.
SECURE = (
    "stragglers.over_selection=1.0",
    "stragglers.deadline_s=60.0",
    "secure_aggregation.mode=complete",
    "secure_aggregation.clip_norm=100.0",
    "secure_aggregation.modulus_bits=40",
)


@dataclass
class Site:
    """A folder with a configuration, and the processes that were started in it.

    Client ``n`` is called ``client-n``. What a process logs is in ``NAME.log``, what it prints, if
    it is the last of its name, in ``NAME.out``.
    """

    folder: Path
    running: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "coordinator.toml"

    def config(self) -> Config:
        return load(self.file, overrides=())

    def change(self, *overrides: str) -> None:
        """Write the configuration anew."""
        self.file.write_text(render(load(self.file, overrides=overrides)))

    def start(self, name: str, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
        with (
            (self.folder / f"{name}.log").open("a") as log,
            (self.folder / f"{name}.out").open("w") as out,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "fedlearn", *arguments],
                cwd=self.folder,
                env=kept | variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                text=True,
            )
        self.running.append(process)
        return process

    def type(self, *arguments: str) -> str:
        """Return what a command prints, which must end well."""
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
        """Start one and wait until it leads."""
        process = self.start("coordinator", "coordinator", str(self.file), "--json", *options)
        http = self.config().coordinator.http_address
        self.until(lambda: asked(http, "/readyz") == OK or process.poll() is not None)
        return process

    def join(self, number: int, *options: str, task: str = "") -> "subprocess.Popen[str]":
        """Start a client and wait until it is enrolled.

        Args:
            number: Which part of the data it holds; the coordinator must number it so, too.
            options: More of the command.
            task: Its trainer, if it is not that of the demo.
        """
        name = f"client-{number}"
        if not (self.folder / f"{name}.invitation").exists():
            self.invite(name)
        process = self.start(
            name,
            *("join", f"{name}.invitation", "--home", name, *options),
            *("--task", task or f"{demo_client.__name__}:trainer"),
            **{demo_client.CONFIG: str(self.file), demo_client.CLIENT: str(number)},
        )
        self.until(lambda: self.home(number).enrolment() is not None)
        return process

    def invite(self, name: str) -> None:
        """Do what the command does, in no process of its own."""
        with self.database() as database:
            operator = Operator(Places.of(self.config(), environ={}), database, SystemClock())
            operator.invite(name, tags=(), path=self.folder / f"{name}.invitation")

    def until_round(self, coordinator: "subprocess.Popen[str]", number: int) -> None:
        """Wait until what :meth:`coordinator` has started last tells of a round."""

        def told() -> bool:
            is_over = coordinator.poll() is not None
            lines = (self.folder / "coordinator.out").read_text().splitlines(keepends=True)
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            found = any(line.get("round", 0) >= number for line in whole)
            assert found or not is_over, f"it ended before round {number}: {self.log()[-3000:]}"
            return found

        self.until(told)

    def home(self, number: int) -> Home:
        return Home(self.folder / f"client-{number}")

    def enrolment(self, number: int) -> Enrolment:
        found = self.home(number).enrolment()
        assert found is not None
        return found

    def database(self) -> Database:
        runs_dir = self.folder / "runs"
        return Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir)

    def log(self, name: str = "*") -> str:
        """Return what the process of that name has logged, or all of them one after the other."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}.log")))

    def until(self, holds: Callable[[], bool]) -> None:
        clock = SystemClock()
        ends_s = clock.now_s() + LONG_S
        while not holds():
            assert clock.now_s() < ends_s, self.log()[-3000:]
            clock.sleep(0.05)


@contextmanager
def site_in(folder: Path, *overrides: str) -> Iterator[Site]:
    """Configure a deployment, and end what was started in it.

    Args:
        folder: Where.
        overrides: What differs from the configuration that ``fedlearn init`` writes.
    """
    site = Site(folder)
    # Devices are of simulations; one of this very configuration has none that are slow or fail.
    site.file.write_text(render(starter().model_copy(update={"devices": IdealDevices()})))
    door, enrolment, http = free_addresses(3)
    own = (
        *(f"address={door}", f"enrolment_address={enrolment}", f"http_address={http}"),
        f"patience_s={LONG_S}",  # nobody is left out who is only starting
    )
    site.change(*(f"coordinator.{each}" for each in own), *overrides)
    try:
        yield site
    finally:
        for process in site.running:
            process.kill()
            process.wait()


def asked(http: str, path: str) -> int | None:
    """Return the status of an answer; ``None``: nobody is there."""
    try:
        with urlopen(f"http://{http}{path}", timeout=30) as response:
            status: int = response.status
            return status
    except HTTPError as error:
        with error:
            return error.code
    except (URLError, ConnectionError, TimeoutError):
        return None
