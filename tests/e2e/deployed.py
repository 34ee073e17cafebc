"""A deployment as an operator and its clients have it: commands, typed in one folder."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from fedlearn.client.backoff import Backoff
from fedlearn.client.home import Home
from fedlearn.client.keyring import Enrolment
from fedlearn.config import Config, load, render
from fedlearn.config.cohort import DEVICES
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.deployment import part
from fedlearn.deployment.operator import Operator
from fedlearn.deployment.places import Places
from fedlearn.deployment.starter import starter
from fedlearn.identity.identity import Invitation
from fedlearn.rounds.records import RoundRecord
from fedlearn.store.runs import Database
from fedlearn.transport.grpc_client import enrol
from tests.addresses import free_addresses
from tests.processes import LONG_S, Change, Crash, Function, Launcher, Process, json_lines, until

OK, UNAVAILABLE = 200, 503

#: Overrides for secure aggregation of all who are asked, with a clip that does not bind.
SECURE = (
    "stragglers.over_selection=1.0",
    "stragglers.deadline_s=60.0",
    "secure_aggregation.mode=complete",
    "secure_aggregation.clip_norm=100.0",
    "secure_aggregation.modulus_bits=40",
)


#: A client's file for cohorts of a few, whom it knows.
SMALL = "[policy.secure_aggregation]\nmin_cohort = 2\n"


def hurry(_: Function) -> Function:
    """Look for the coordinator several times a second; a client's patience is not the test's."""
    return lambda backoff: 0.3 * backoff.jitter()


HURRY = Change(Backoff.next_s, hurry)


@dataclass
class Site:
    """A folder with a configuration, and the processes that were started in it.

    Client ``n`` is called ``client-n``. The files of the ``k``-th process of a name begin with
    ``NAME.k``: see :class:`tests.processes.Process`.

    Attributes:
        launcher: Starts the processes; those that are left end with the context.
        folder: Of everything.
        task: The clients' trainer.
        store_url: Of a database that is not SQLite among the runs.
        hurries: Whether clients look for the coordinator more often than the product does.
    """

    launcher: Launcher
    folder: Path
    task: str = f"{part.__name__}:trainer"
    store_url: str | None = None
    hurries: bool = False
    _config: Config | None = None
    _started: list[Process] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.close()

    @property
    def file(self) -> Path:
        return self.folder / "coordinator.toml"

    @property
    def config(self) -> Config:
        assert self._config is not None
        return self._config

    def write(self, config: Config) -> None:
        """Write ``coordinator.toml``."""
        self._config = config
        self.file.write_text(render(config))

    def change(self, *overrides: str) -> None:
        """Write ``coordinator.toml`` anew."""
        self.write(load(self.file, overrides=overrides))

    @property
    def environ(self) -> dict[str, str]:
        """What the processes have: nothing that this environment says of places."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
        url = {} if self.store_url is None else {"FEDLEARN_STORE_URL": self.store_url}
        return kept | url | {"OMP_NUM_THREADS": "1", part.CONFIG: str(self.file)}

    # Processes

    def start(
        self,
        name: str,
        *arguments: str,
        crash: Crash | None = None,
        changes: Sequence[Change] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a command; see :meth:`tests.processes.Launcher.launch`.

        Args:
            name: Of the process.
            arguments: Of the command.
            crash: Where it is to kill itself.
            changes: How it differs from the product.
            variables: More of its environment.
        """
        number = sum(each.stem.name.startswith(f"{name}.") for each in self._started)
        process = self.launcher.launch(
            self.folder / f"{name}.{number}.log",
            *arguments,
            environ=self.environ | dict(variables or {}),
            crash=crash,
            changes=changes,
        )
        self._started.append(process)
        return process

    def type(self, *arguments: str) -> str:
        """Return what a command prints, which must end well."""
        process = self.start("typed", *arguments)
        assert process.wait() == 0, process.tail()
        return process.out()

    def coordinator(
        self, *options: str, crash: Crash | None = None, changes: Sequence[Change] = ()
    ) -> Process:
        """Start one."""
        command = ("coordinator", str(self.file), "--json", *options)
        return self.start("coordinator", *command, crash=crash, changes=changes)

    def serving(
        self, *options: str, crash: Crash | None = None, changes: Sequence[Change] = ()
    ) -> Process:
        """Start a coordinator and return when its door is open."""
        process = self.coordinator(*options, crash=crash, changes=changes)
        until_said(process, "serving")
        return process

    def join(
        self,
        number: int,
        *options: str,
        task: str = "",
        crash: Crash | None = None,
        changes: Sequence[Change] = (),
        **variables: str,
    ) -> Process:
        """Start a client and return when it is enrolled.

        Args:
            number: Which; who is not enrolled yet must be numbered so by the coordinator.
            options: More of the command.
            task: Its trainer, if it is not that of the others.
            crash: Where it kills itself, counted from its start.
            changes: How it differs from the product.
            variables: More of its environment.
        """
        name = f"client-{number}"
        if not self._invitation(number).exists():
            self.invite(name)
        process = self.start(
            name,
            *("join", str(self._invitation(number)), "--home", str(self.folder / name)),
            *("--task", task or self.task, *self._own(options)),
            crash=crash,
            changes=[*([HURRY] if self.hurries else []), *changes],
            variables={part.CLIENT: str(number), **variables},
        )
        until(lambda: self.home(number).keys.enrolment() is not None, told=process.tail)
        return process

    def _own(self, options: Sequence[str]) -> Sequence[str]:
        """Return options with a file by which a client takes part in sums as small as here."""
        if "--config" in options:
            return options
        path = self.folder / "small.toml"
        path.write_text(SMALL)
        return (*options, "--config", str(path))

    def invite(self, name: str) -> None:
        """Do what the command does, in no process of its own."""
        with self.database() as database:
            operator = Operator(self.places, database, SystemClock())
            operator.invite(name, tags=(), path=self.folder / f"{name}.invitation")

    def revoke(self, number: int) -> None:
        """Do what the command does, in no process of its own."""
        with self.database() as database:
            Operator(self.places, database, SystemClock()).registry.revoke(f"client-{number}")

    def enrol(self, number: int) -> None:
        """Do what joining begins with, so that its process can be started at any time."""
        self.invite(f"client-{number}")
        keys, invitation = self.home(number).keys, Invitation.load(self._invitation(number))
        address = self.config.coordinator.address  # a standby has another one
        certificate_pem, client_id = asyncio.run(enrol(address, invitation, keys.coming_identity()))
        assert client_id == number
        keys.enrol(invitation, certificate_pem=certificate_pem, client_id=ClientId(client_id))

    def _invitation(self, number: int) -> Path:
        return self.folder / f"client-{number}.invitation"

    # What they leave

    def until_round(self, coordinator: Process, number: int) -> None:
        """Wait until a coordinator has told of a round."""

        def told() -> bool:
            is_over = not coordinator.is_running
            lines = json_lines(coordinator.out())
            found = any(line.get("round", 0) >= number for line in lines)
            assert found or not is_over, f"ended before round {number}: {coordinator.tail()}"
            return found

        until(told, told=coordinator.tail)

    def log(self, name: str = "*") -> str:
        """Return what processes of that name have logged, one after the other."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}.*.err")))

    def home(self, number: int) -> Home:
        return Home(self.folder / f"client-{number}")

    def enrolment(self, number: int) -> Enrolment:
        found = self.home(number).keys.enrolment()
        assert found is not None
        return found

    @property
    def places(self) -> Places:
        return Places.of(self.config, environ=self.environ)

    @contextmanager
    def database(self) -> Iterator[Database]:
        with self.places.database() as database:
            yield database

    def rounds(self) -> list[RoundRecord]:
        """Return the rounds that are committed; none where there is no run yet."""
        with self.database() as database:
            if not any(run.name == self.places.run_name for run in database.runs()):
                return []
            return list(database.run(self.places.run_name).rounds())


def own_coordinator() -> dict[str, object]:
    """Return settings of a coordinator of a test: where it listens, and that it can wait."""
    door, http = free_addresses(2)
    return {
        "address": door,
        "http_address": http,
        "patience_s": LONG_S,  # nobody is left out who is only starting
    }


@contextmanager
def site_in(launcher: Launcher, folder: Path, *overrides: str) -> Iterator[Site]:
    """Configure a deployment of the demo's clients, and end what was started in it.

    Args:
        launcher: Starts its processes.
        folder: Where.
        overrides: What differs from the configuration that ``fedlearn init`` writes.
    """
    with Site(launcher, folder) as site:
        # Devices are of simulations; one of this very configuration has none that are slow or fail.
        site.write(starter().model_copy(update={"devices": DEVICES.of("ideal")}))
        own = (f"coordinator.{name}={value}" for name, value in own_coordinator().items())
        site.change(*own, f"store.runs_dir={folder / 'runs'}", *overrides)
        yield site


def until_said(process: Process, event: str) -> None:
    """Wait until a process, which must run on, has logged ``event``."""

    def has_said() -> bool:
        is_over = not process.is_running
        found = process.said(event) > 0
        assert found or not is_over, f"ended before {event!r}: {process.tail()}"
        return found

    until(has_said, told=process.tail)


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
