"""A deployment as an operator and clients run it: commands in one folder."""

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
from fedlearn.deployment.starter import make_starter
from fedlearn.identity.identity import Invitation
from fedlearn.rounds.records import RoundRecord
from fedlearn.store.runs import Database
from fedlearn.transport.grpc_client import enrol
from tests.addresses import free_addresses
from tests.processes import LONG_S, Change, Crash, Function, Launcher, Process, json_lines, until

OK, UNAVAILABLE = 200, 503

#: Overrides for secure aggregation of all asked clients, without clipping any update.
SECURE = (
    "stragglers.over_selection=1.0",
    "stragglers.deadline_s=60.0",
    "secure_aggregation.mode=complete",
    "secure_aggregation.clip_norm=100.0",
    "secure_aggregation.modulus_bits=40",
)


#: A client's configuration for small cohorts.
SMALL = "[policy.secure_aggregation]\nmin_cohort = 2\n"


def hurry(_: Function) -> Function:
    """Let clients reconnect several times a second, so that tests need not wait."""
    return lambda backoff: 0.3 * backoff.jitter()


HURRY = Change(Backoff.next_s, hurry)


@dataclass
class Site:
    """A folder with a configuration, and the processes that were started in it.

    Client ``n`` is called ``client-n``. The files of the ``k``-th process of a name start with
    ``NAME.k``: see :class:`tests.processes.Process`.

    Attributes:
        launcher: Starts the processes; remaining ones are ended with the context.
        folder: Folder of all files.
        task: The clients' trainer.
        store_url: URL of the database, if it is not SQLite in the runs directory.
        hurries: Whether clients try to reconnect more often than the product does.
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

    def write_text(self, text: str) -> None:
        """Write ``coordinator.toml`` as it is, such as a plan of statistics."""
        self.file.write_text(text)
        self._config = load(self.file, overrides=())

    def change(self, *overrides: str) -> None:
        """Write ``coordinator.toml`` again, with overrides."""
        self.write(load(self.file, overrides=overrides))

    @property
    def environ(self) -> dict[str, str]:
        """Environment of the processes, without FEDLEARN variables of this one."""
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
            name: Name of the process.
            arguments: Arguments of the command.
            crash: Where it kills itself.
            changes: Changes to the product in this process.
            variables: Further environment variables.
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
        """Run a command, which must succeed, and return its output."""
        process = self.start("typed", *arguments)
        assert process.wait() == 0, process.tail()
        return process.out()

    def coordinator(
        self, *options: str, crash: Crash | None = None, changes: Sequence[Change] = ()
    ) -> Process:
        """Start a coordinator."""
        command = ("coordinator", str(self.file), "--json", *options)
        return self.start("coordinator", *command, crash=crash, changes=changes)

    def serving(
        self, *options: str, crash: Crash | None = None, changes: Sequence[Change] = ()
    ) -> Process:
        """Start a coordinator and return when its gateway is open."""
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
            number: Number of the client; if it is not enrolled yet, it must get this id.
            options: Further options of the command.
            task: Its trainer, if it differs from that of the others.
            crash: Where it kills itself, counted from its start.
            changes: Changes to the product in this process.
            variables: Further environment variables.
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
        until(lambda: self.home(number).keys.load_enrolment() is not None, told=process.tail)
        return process

    def _own(self, options: Sequence[str]) -> Sequence[str]:
        """Add a configuration file that allows small cohorts, unless the options have one."""
        if "--config" in options:
            return options
        path = self.folder / "small.toml"
        if not path.exists():  # a client that starts may be reading it
            path.write_text(SMALL)
        return (*options, "--config", str(path))

    def invite(self, name: str) -> None:
        """Invite a client, like the command but in this process."""
        with self.database() as database:
            operator = Operator(self.places, database, SystemClock())
            operator.invite(name, tags=(), path=self.folder / f"{name}.invitation")

    def revoke(self, number: int) -> None:
        """Revoke a client, like the command but in this process."""
        with self.database() as database:
            Operator(self.places, database, SystemClock()).registry.revoke(f"client-{number}")

    def enrol(self, number: int) -> None:
        """Invite and enrol a client in this process, so that its own can be started at any time."""
        self.invite(f"client-{number}")
        keys, invitation = self.home(number).keys, Invitation.load(self._invitation(number))
        address = self.config.coordinator.address  # not a standby's
        certificate_pem, client_id = asyncio.run(
            enrol(address, invitation, keys.load_next_identity())
        )
        assert client_id == number
        keys.enrol(invitation, certificate_pem=certificate_pem, client_id=ClientId(client_id))

    def _invitation(self, number: int) -> Path:
        return self.folder / f"client-{number}.invitation"

    # What they leave

    def until_round(self, coordinator: Process, number: int) -> None:
        """Wait until a coordinator has reported a round."""

        def told() -> bool:
            is_over = not coordinator.is_running
            lines = json_lines(coordinator.out())
            found = any(line.get("round", 0) >= number for line in lines)
            assert found or not is_over, f"ended before round {number}: {coordinator.tail()}"
            return found

        until(told, told=coordinator.tail)

    def log(self, name: str = "*") -> str:
        """Return the logs of all processes of that name, one after another."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}.*.err")))

    def home(self, number: int) -> Home:
        return Home(self.folder / f"client-{number}")

    def enrolment(self, number: int) -> Enrolment:
        found = self.home(number).keys.load_enrolment()
        assert found is not None
        return found

    @property
    def places(self) -> Places:
        return Places.of(self.config, environ=self.environ)

    @contextmanager
    def database(self) -> Iterator[Database]:
        with self.places.open_database() as database:
            yield database

    def rounds(self) -> list[RoundRecord]:
        """Return the committed rounds; none if there is no run yet."""
        with self.database() as database:
            if not any(run.name == self.places.run_name for run in database.runs()):
                return []
            return list(database.run(self.places.run_name).rounds())


def own_coordinator() -> dict[str, object]:
    """Return settings of a test's coordinator: free addresses, and enough patience."""
    gateway, http = free_addresses(2)
    return {
        "address": gateway,
        "http_address": http,
        "patience_s": LONG_S,  # so that clients that are still starting are not left out
    }


@contextmanager
def site_in(launcher: Launcher, folder: Path, *overrides: str) -> Iterator[Site]:
    """Configure a deployment of the demo's clients; its processes are ended with the block.

    Args:
        launcher: Starts its processes.
        folder: Folder of its files.
        overrides: Changes to the configuration that ``fedlearn init`` writes.
    """
    with Site(launcher, folder) as site:
        # Only simulations use devices; in one of this configuration none is slow or fails.
        site.write(make_starter().model_copy(update={"devices": DEVICES.of("ideal")}))
        own = (f"coordinator.{name}={value}" for name, value in own_coordinator().items())
        site.change(*own, f"store.runs_dir={folder / 'runs'}", *overrides)
        yield site


def until_said(process: Process, event: str) -> None:
    """Wait until a process has logged ``event``; it must not end before."""

    def has_said() -> bool:
        is_over = not process.is_running
        found = process.said(event) > 0
        assert found or not is_over, f"ended before {event!r}: {process.tail()}"
        return found

    until(has_said, told=process.tail)


def asked(http: str, path: str) -> int | None:
    """Return the HTTP status of an answer; ``None`` if no server answers."""
    try:
        with urlopen(f"http://{http}{path}", timeout=30) as response:
            status: int = response.status
            return status
    except HTTPError as error:
        with error:
            return error.code
    except (URLError, ConnectionError, TimeoutError):
        return None
