"""A deployment of real processes that a test kills, freezes, starves and cuts off.

Clients vote (:mod:`tests.e2e.survival.ballots`), so the final model shows which updates counted in
every round. :func:`audit` compares it with the database and with the receipts that clients got.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Self

import torch

from fedlearn.config import from_mapping
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import TrainRequest
from fedlearn.core.participations import Status
from fedlearn.rounds.records import RoundRecord, RunStatus
from tests.e2e.deployed import Site, own_coordinator
from tests.e2e.survival import ballots
from tests.processes import LONG_S, Process, json_lines

HERE = Path(__file__).parent
RUN = "survival"

#: Ballast of 4 MB: a model that is downloaded and uploaded in chunks.
LARGE = 1_000_000

_LOOK_S = 0.02
#: A thread that oversleeps by this much was not scheduled.
_STALL_S = 0.25


@dataclass
class Stalls:
    """How long the machine has stalled, measured by a thread that only sleeps.

    Attributes:
        seconds: Total of all stalls so far; short ones do not count.
    """

    seconds: float = 0.0


@contextmanager
def stalls() -> Iterator[Stalls]:
    """Measure stalls of the machine, by which a test extends its time limits."""
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


@dataclass
class VotingSite(Site):
    """A deployment whose clients vote, unless they are given another task."""

    task: str = f"{HERE / 'ballots.py'}:Voter"
    hurries: bool = True

    def __enter__(self) -> Self:
        self.stage.mkdir()
        return self

    @property
    def stage(self) -> Path:
        return self.folder / "stage"

    @property
    def environ(self) -> dict[str, str]:
        return super().environ | {ballots.STAGE: str(self.stage)}

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

        ``sections`` replace tables that are written otherwise.
        """
        section: dict[str, object] = {
            **own_coordinator(),
            "lease_ttl_s": 0.6,
            "recovery_grace_s": LONG_S,
            "shutdown_grace_s": 2.0,
        }
        values = {
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
        }
        self.write(from_mapping(values, source="the survival tests"))

    def reconfigure(self, **coordinator: object) -> None:
        """Write ``coordinator.toml`` again with other settings of the table ``coordinator``."""
        section = self.config.coordinator.model_copy(update=coordinator)
        self.write(self.config.model_copy(update={"coordinator": section}))

    def populate(self) -> list[Process]:
        """Enrol all clients, which needs a coordinator that serves, and start them.

        They enrol one after another, so that their ids are in order.
        """
        numbers = range(self.config.straggler_policy().num_wanted)
        for number in numbers:
            self.enrol(number)
        return [self.join(number) for number in numbers]

    # The stage

    @contextmanager
    def holding(self, *numbers: int, round_num: int | None = None) -> Iterator[None]:
        """Let these clients, or all if none are given, train until the block ends.

        With ``round_num``, they are held in that round only.
        """
        end = "" if round_num is None else f"-{round_num}"
        holds = [self.stage / f"hold-{number}{end}" for number in numbers] or [self.stage / "hold"]
        for hold in holds:
            hold.touch()
        try:
            yield
        finally:
            for hold in holds:
                hold.unlink(missing_ok=True)

    def trained(self, number: int) -> list[int]:
        """Return the rounds that a client has started to train, in order, with repetitions."""
        path = self.stage / f"trained-{number}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def told(self, number: int, verdict: str) -> set[int]:
        """Return the rounds for whose update a client got ``verdict``, over all its processes.

        Failed trainings are also reported and settled; they are left out, having no update.
        """
        found, failed = set[int](), set[int]()
        for path in sorted(self.folder.glob(f"client-{number}.*.err")):
            for line in json_lines(path.read_text()):
                if line["message"] == "task_failed":
                    failed.add(line["round_num"])
                elif line["message"] == "reply_settled" and line["kind"] == TrainRequest.__name__:
                    if line["round_num"] in failed:
                        failed.remove(line["round_num"])
                    elif line["verdict"] == verdict:
                        found.add(line["round_num"])
        return found

    def begun_ahead(self, number: int) -> dict[int, int]:
        """Return, by the round of a task, the round of the model that its client had prefetched."""
        return {
            line["round_num"]: line["based_on"]
            for path in self.folder.glob(f"client-{number}.*.err")
            for line in json_lines(path.read_text())
            if line["message"] == "answered_with_work_ahead"
        }


@dataclass(frozen=True)
class PostgreSQL:
    """A database server that a test stops and starts again.

    Attributes:
        folder: Folder of its data and its socket.
    """

    folder: Path
    _control: Path
    _user: str | None

    @classmethod
    def make(cls, folder: Path) -> "PostgreSQL | None":
        """Create a server in ``folder`` without starting it; ``None`` if there are no binaries."""
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
        """End the server and all connections at once, like a crash."""
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
    """The model, the database and the clients' receipts do not agree."""


def audit(site: VotingSite) -> None:
    """Check that the run is done, and that every report is in the model exactly once.

    Raises:
        Miscounted: A round is missing or recorded twice, a report is not in the model or is in it
            twice, or a client's reply was acknowledged but does not count.
    """
    with site.places.open_database() as database:
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
        for number in range(site.config.straggler_policy().num_wanted):
            if record.round_num in site.told(number, "accepted") and number not in reported:
                raise Miscounted(f"round {record.round_num}: {number} was told that it counts")


def check_durations(records: Sequence[RoundRecord]) -> None:
    """Check that no client has a negative duration.

    Raises:
        Miscounted: One has.
    """
    for record in records:
        if any(each.duration_s < 0.0 for each in record.participations):
            raise Miscounted(f"round {record.round_num}: {record.participations}")


def reporters(record: RoundRecord) -> list[int]:
    """Return the ids of the clients that reported in a round, in order."""
    return sorted(
        each.client_id for each in record.participations if each.status is Status.REPORTED
    )
