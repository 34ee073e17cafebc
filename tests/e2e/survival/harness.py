"""A deployment of real processes that a test kills, freezes, starves and cuts off.

Clients vote (:mod:`tests.e2e.survival.ballots`), so the final model is the account of every
round; :func:`audit` holds it against the database and against the receipts that clients got.
"""

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import torch

from fedlearn.client.home import Home
from fedlearn.config import Config, from_mapping, render
from fedlearn.core.clock import SystemClock
from fedlearn.core.collecting import Status
from fedlearn.core.messages import ClientId, TrainRequest
from fedlearn.deployment.operator import Operator
from fedlearn.deployment.places import Places
from fedlearn.rounds.records import RoundRecord, RunStatus
from fedlearn.transport.grpc_client import enrol
from tests.addresses import free_addresses
from tests.e2e.survival import ballots

HERE = Path(__file__).parent
RUN = "survival"

#: Long enough for anything that happens at all, on a busy machine.
LONG_S = 180.0

#: 4 MB: a model that is downloaded and uploaded in pieces.
LARGE = 1_000_000

_LOOK_S = 0.02
#: Of a sleep: whoever oversleeps by so much did not get the machine.
_STALL_S = 0.25


@dataclass
class Stalls:
    """How long the machine stood still, as a thread that only sleeps has noticed.

    Attributes:
        seconds: So far, all stalls together; short ones do not count.
    """

    seconds: float = 0.0


@contextmanager
def stalls() -> Iterator[Stalls]:
    """Watch while a duration is measured: nobody keeps a bound on a machine that stands still."""
    found, ended, clock = Stalls(), Event(), SystemClock()

    def watch() -> None:
        before_s = clock.now_s()
        while not ended.wait(_LOOK_S):
            now_s = clock.now_s()
            late_s = now_s - before_s - _LOOK_S
            found.seconds += late_s if late_s > _STALL_S else 0.0
            before_s = now_s

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def until(holds: Callable[[], bool], *, within_s: float = LONG_S, told: str = "") -> float:
    """Wait until ``holds``; return the seconds that took."""
    clock = SystemClock()
    began_s = clock.now_s()
    while not holds():
        assert clock.now_s() - began_s < within_s, f"not within {within_s:g} s: {told}"
        clock.sleep(_LOOK_S)
    return clock.now_s() - began_s


@dataclass(frozen=True)
class Crash:
    """Where a process kills itself, or stands still.

    Attributes:
        phase: In words.
        target: Function, as for the launcher.
        when: ``before`` or ``after`` its call.
        nth: Which call, counted from 1.
        by: The signal that it sends itself.
    """

    phase: str
    target: str
    when: str
    nth: int = 1
    by: signal.Signals = signal.SIGKILL

    def request(self, stem: Path, *, is_armed: bool) -> dict[str, object]:
        """Return what the launcher is told."""
        return {
            "target": self.target,
            "when": self.when,
            "nth": self.nth,
            "by": self.by,
            "mark": str(stem.with_suffix(".crash")),
            "is_armed": is_armed,
        }


@dataclass(frozen=True)
class Process:
    """A process that the launcher has started; named by a descriptor that is never reused.

    Attributes:
        pid: Its number.
        stem: Of its files: ``.out``, ``.err``, ``.exit``, ``.crash``.
    """

    pid: int
    stem: Path
    _descriptor: int

    @classmethod
    def of(cls, pid: int, stem: Path) -> "Process":
        return cls(pid, stem, os.pidfd_open(pid))

    @property
    def is_running(self) -> bool:
        return not select.select([self._descriptor], [], [], 0.0)[0]

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Kill it, and return when it is gone."""
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.wait()

    def wait(self, *, within_s: float = LONG_S) -> int | None:
        """Return its exit code once it has ended; ``None``: it was killed."""
        ended = select.select([self._descriptor], [], [], within_s)[0]
        assert ended, f"{self.stem.name} runs on\n{self.tail()}"
        exit_file = self.stem.with_suffix(".exit")
        return int(exit_file.read_text()) if exit_file.exists() else None

    def close(self) -> None:
        self.kill()
        os.close(self._descriptor)

    def has_crashed_itself(self) -> bool:
        return self.stem.with_suffix(".crash").exists()

    def log(self) -> list[dict[str, Any]]:
        """Return what it logged."""
        return _json_lines(self.stem.with_suffix(".err"))

    def said(self, event: str) -> int:
        """Return how often it logged ``event``."""
        return sum(line["event"] == event for line in self.log())

    def lines(self) -> list[str]:
        """Return what it printed on standard output."""
        return self.stem.with_suffix(".out").read_text().splitlines()

    def tail(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-3000:]
            for path in (self.stem.with_suffix(end) for end in (".out", ".err"))
        )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().split("\n")[:-1]  # the last one may be on its way
    return [json.loads(line) for line in lines if line.startswith("{")]


class Launcher:
    """Starts processes; see ``launcher.py``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert self._line() == "ready"

    @classmethod
    @contextmanager
    def start(cls) -> Iterator["Launcher"]:
        """Start the launcher; its processes end with it."""
        with subprocess.Popen(
            [sys.executable, str(HERE / "launcher.py")],
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def launch(
        self,
        stem: Path,
        *arguments: str,
        environ: Mapping[str, str],
        crash: Mapping[str, object] | None = None,
        sabotages: Sequence[str] = (),
    ) -> Process:
        """Start ``fedlearn`` with ``arguments``; its files begin with ``stem``."""
        request = {
            "arguments": arguments,
            "cwd": str(stem.parent),
            "env": dict(environ),
            "out": str(stem.with_suffix(".out")),
            "err": str(stem.with_suffix(".err")),
            "exit": str(stem.with_suffix(".exit")),
            "crash": crash,
            "sabotages": list(sabotages),
        }
        for end in (".out", ".err"):
            stem.with_suffix(end).touch()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Process.of(int(self._line()), stem)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def until_said(process: Process, event: str) -> float:
    """Wait until ``process`` has logged ``event``; return the seconds that took."""
    return until(lambda: process.said(event) > 0, told=f"{event}\n{process.tail()}")


@dataclass
class Site:
    """One deployment: its folder, its configuration, its processes.

    Attributes:
        launcher: Starts them.
        folder: Of everything.
        store_url: Of a database that is not SQLite in the folder.
    """

    launcher: Launcher
    folder: Path
    store_url: str | None
    _config: Config | None = None
    _started: list[Process] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.stage.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.close()

    @property
    def stage(self) -> Path:
        return self.folder / "stage"

    @property
    def file(self) -> Path:
        return self.folder / "coordinator.toml"

    @property
    def config(self) -> Config:
        assert self._config is not None
        return self._config

    @property
    def environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
        url = {} if self.store_url is None else {"FEDLEARN_STORE_URL": self.store_url}
        return kept | url | {ballots.STAGE: str(self.stage), "OMP_NUM_THREADS": "1"}

    @property
    def places(self) -> Places:
        return Places.of(self.config, environ=self.environ)

    def configure(
        self,
        *,
        num_rounds: int,
        num_clients: int = 3,
        min_reports: int | None = None,
        ballast: int = LARGE,
        deadline_s: float = LONG_S,
        evaluated: int = 0,
        runs_dir: Path | None = None,
        sections: Mapping[str, object] | None = None,
        **coordinator: object,
    ) -> None:
        """Write ``coordinator.toml``: all clients are asked, and all must report by default.

        ``sections`` stand in the place of those that are written otherwise.
        """
        door, enrolment, http = free_addresses(3)
        section: dict[str, object] = {
            "address": door,
            "enrolment_address": enrolment,
            "http_address": http,
            "lease_ttl_s": 0.6,
            "recovery_grace_s": LONG_S,
            "patience_s": LONG_S,  # nobody is left out who is only starting
            "shutdown_grace_s": 2.0,
        }
        self._config = from_mapping(
            {
                "name": RUN,
                "num_rounds": num_rounds,
                "data": {"partition": {"kind": "iid", "num_clients": num_clients}},
                "model": {
                    "kind": "python",
                    "factory": f"{HERE / 'ballots.py'}:Ballots",
                    "args": {"ballast": ballast},
                },
                "cohort": {"num_wanted": num_clients},
                "stragglers": {
                    "over_selection": 1.0,
                    "deadline_s": deadline_s,
                    "min_reports": num_clients if min_reports is None else min_reports,
                    "below_minimum": "fail",
                },
                "evaluation": {"clients": evaluated},
                "store": {"runs_dir": str(runs_dir or self.folder / "runs")},
                "coordinator": section | coordinator,
                **(sections or {}),
            },
            source="the survival tests",
        )
        self.file.write_text(render(self._config))

    def reconfigure(self, **coordinator: object) -> None:
        """Write ``coordinator.toml`` again with other settings of how the run is served."""
        section = self.config.coordinator.model_copy(update=coordinator)
        self._config = self.config.model_copy(update={"coordinator": section})
        self.file.write_text(render(self._config))

    # Processes

    def coordinator(
        self,
        *options: str,
        crash: Crash | None = None,
        is_armed: bool = True,
        sabotages: Sequence[str] = (),
    ) -> Process:
        """Start a coordinator; one that is to crash is told where."""
        stem = self._stem("coordinator")
        process = self.launcher.launch(
            stem,
            *("coordinator", str(self.file), "--json", *options),
            environ=self.environ,
            crash=None if crash is None else crash.request(stem, is_armed=is_armed),
            sabotages=sabotages,
        )
        self._started.append(process)
        return process

    def serving(self, *options: str, **how: Any) -> Process:
        """Start a coordinator and return when its door is open."""
        process = self.coordinator(*options, **how)
        until(lambda: process.said("serving") > 0 or not process.is_running)
        assert process.is_running, process.tail()
        return process

    def enrol(self, number: int) -> None:
        """Invite and enrol client ``number``; one after the other, so that this is its id."""
        path = self.folder / f"client-{number}.invitation"
        home = Home(self.folder / f"client-{number}")
        with self.places.database() as database:
            operator = Operator(self.places, database, SystemClock())
            invitation = operator.invite(f"client-{number}", tags=(), path=path)
        (address,) = invitation.enrolment_addresses
        certificate_pem, client_id = asyncio.run(enrol(address, invitation, home.coming_identity()))
        assert client_id == number
        home.enrol(invitation, certificate_pem=certificate_pem, client_id=ClientId(client_id))

    def join(
        self,
        number: int,
        *,
        hurries: bool = True,
        task: str = f"{HERE / 'ballots.py'}:Voter",
        crash: Crash | None = None,
        sabotages: Sequence[str] = (),
        **variables: str,
    ) -> Process:
        """Start the process of a client that is enrolled.

        Args:
            number: Which.
            hurries: Whether it looks for the coordinator more often than the product does.
            task: Its trainer.
            crash: Where it kills itself, counted from its start.
            sabotages: Ways to behave differently.
            variables: Of its environment.
        """
        home, stem = self.folder / f"client-{number}", self._stem(f"joined-{number}")
        process = self.launcher.launch(
            stem,
            *("join", f"{home}.invitation", "--task", task, "--home", str(home)),
            environ=self.environ | variables,
            crash=None if crash is None else crash.request(stem, is_armed=True),
            sabotages=[*(["hurry"] if hurries else []), *sabotages],
        )
        self._started.append(process)
        return process

    def populate(self, *, hurries: bool = True) -> list[Process]:
        """Enrol all clients, which needs a coordinator that serves, and start them."""
        numbers = range(self.config.cohort.num_wanted)
        for number in numbers:
            self.enrol(number)
        return [self.join(number, hurries=hurries) for number in numbers]

    def _stem(self, name: str) -> Path:
        number = sum(each.stem.name.startswith(f"{name}.") for each in self._started)
        return self.folder / f"{name}.{number}.log"

    # The stage

    @contextmanager
    def holding(self, *numbers: int) -> Iterator[None]:
        """Have these clients, or all, train until the block ends."""
        holds = [self.stage / f"hold-{number}" for number in numbers] or [self.stage / "hold"]
        for hold in holds:
            hold.touch()
        try:
            yield
        finally:
            for hold in holds:
                hold.unlink(missing_ok=True)

    def trained(self, number: int) -> list[int]:
        """Return the rounds that a client has begun to train, in order; one may be there twice."""
        path = self.stage / f"trained-{number}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def told(self, number: int, verdict: str) -> set[int]:
        """Return the rounds whose training a client was told ``verdict`` of, in all its lives."""
        return {
            line["round_num"]
            for path in self.folder.glob(f"joined-{number}.*.err")
            for line in _json_lines(path)
            if line["event"] == "reply_settled"
            and (line["kind"], line["verdict"]) == (TrainRequest.__name__, verdict)
        }

    # The record

    def rounds(self) -> list[RoundRecord]:
        """Return the rounds that are committed; none where there is no run yet."""
        with self.places.database() as database:
            if not any(run.name == RUN for run in database.runs()):
                return []
            return database.run(RUN).rounds()


@dataclass(frozen=True)
class PostgreSQL:
    """A database server that a test stops and starts again.

    Attributes:
        folder: Of its data and its socket.
    """

    folder: Path
    _control: Path
    _user: str | None

    @classmethod
    def make(cls, folder: Path) -> "PostgreSQL | None":
        """Return a server in ``folder``, not started; ``None``: there are no binaries."""
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
        control = found[-1] if found else shutil.which("pg_ctl")
        if control is None:
            return None
        user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
        if user is not None:
            shutil.chown(folder, user)
        server = cls(folder, Path(control), user)
        server._run("initdb", "--options=--username=postgres --auth=trust --encoding=UTF8 -N")
        return server

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@/postgres?host={self.folder}"

    def start(self) -> None:
        """Start the server, and return when it takes connections."""
        options = f"-c listen_addresses= -c unix_socket_directories={self.folder} -c fsync=off"
        self._run("start", "--wait", f"--log={self.folder}/log", f"--options={options}")

    def stop(self) -> None:
        """End the server and all connections at once, as a crash would."""
        self._run("stop", "--mode=immediate", "--wait")

    def _run(self, action: str, *options: str) -> None:
        subprocess.run(
            [self._control, action, f"--pgdata={self.folder}/data", *options],
            user=self._user,
            cwd=self.folder,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


class Miscounted(AssertionError):
    """The account does not add up."""


def audit(site: Site) -> None:
    """Check that the run is done, and that every report is in the model exactly once.

    Raises:
        Miscounted: A round is missing or there twice, a report is not in the model or is in it
            twice, or a client was told that a reply counts which does not.
    """
    with site.places.database() as database:
        run = database.run(RUN)
        status, records, checkpoint = run.record.status, run.rounds(), run.load()
    if status is not RunStatus.DONE:
        raise Miscounted(f"the run is {status}")
    if [record.round_num for record in records] != list(range(site.config.num_rounds)):
        raise Miscounted(f"rounds {[record.round_num for record in records]} are on record")
    assert checkpoint is not None
    votes = checkpoint.tensors["params/votes"]
    for record in records:
        reported = reporters(record)
        expected = torch.zeros(ballots.MAX_CLIENTS)
        expected[reported] = torch.ones(()) / len(reported)
        found = votes[record.round_num]
        if not torch.equal(found, expected):
            raise Miscounted(f"round {record.round_num} of {reported}: the model has {found}")
        for number in range(site.config.cohort.num_wanted):
            if record.round_num in site.told(number, "accepted") and number not in reported:
                raise Miscounted(f"round {record.round_num}: {number} was told that it counts")


def reporters(record: RoundRecord) -> list[int]:
    """Return the clients in a round's model, by number."""
    return sorted(
        each.client_id for each in record.participations if each.status is Status.REPORTED
    )
