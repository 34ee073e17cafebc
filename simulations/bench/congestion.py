"""What it does that fewer clients are in flight where a coordinator falls behind.

A coordinator as a process of the command line, over mutual TLS, with a large model and a small
buffer: to commit a round takes longer than to receive its updates. This process is its clients,
which fetch the model, sleep instead of training, and upload. At first they take ``--busy-s``, more
than the coordinator can take; then ``--calm-s``, and the limit grows back. Runs with the limit and
without it take turns; each prints one JSON line. Needs Linux (it reads /proc).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import urlopen

import torch
from door_clients import Call, Client, connected
from overlap import free_addresses
from prometheus_client.parser import text_string_to_metric_families

from fedlearn.cli.app import main as command_line
from fedlearn.config import load
from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import encode
from fedlearn.core.collecting import Status
from fedlearn.core.messages import TrainReply
from fedlearn.deployment import coordinator
from fedlearn.deployment.operator import Operator
from fedlearn.deployment.places import Places
from fedlearn.identity.identity import Identity
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.transport import wire_pb2
from fedlearn.transport.content import digest_of
from fedlearn.transport.grpc_client import Credentials, enrol

_HERE = Path(__file__).parent
_NAME = "congestion"
_LOOK_S = 0.2
_STOP_S = 20.0
#: Parameters of the model beside its ballast.
_CLASSIFIER = 65 * 10


class Unlimited(InFlightLimit):
    """Lets all be in flight, whatever waits."""

    def landed(self, *, num_in_flight: int) -> int:
        """Return the concurrency."""
        return self.limit


@dataclass
class Crowd:
    """The clients: each does what it is asked, one thing after the other.

    Attributes:
        folder: For what they fetch and send.
        num_parameters: Of the model.
        training_s: What a training takes in the mean; a client is always as fast as it is.
        accepted: By client how many of its updates it was told count.
        verdicts: How often each was told.
        upload_s: Seconds of each upload until its receipt.
    """

    folder: Path
    num_parameters: int
    training_s: float
    accepted: Counter[int] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    upload_s: list[float] = field(default_factory=list)
    _free: dict[int, asyncio.Lock] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _digests: dict[Path, bytes] = field(default_factory=dict)

    async def __call__(self, call: Call) -> None:
        """Begin, and go on listening."""
        self._tasks.append(asyncio.create_task(self._work(call)))

    async def stop(self) -> None:
        """End what is still being done, or has ended with the coordinator."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, call: Call) -> None:
        task, client_id, clock = call.task, call.client.client_id, SystemClock()
        async with self._free.setdefault(client_id, asyncio.Lock()):
            path = self.folder / f"model-{client_id}"
            await call.connection.download(task.digest, num_bytes=task.num_bytes, path=path)
            path.unlink()
            await asyncio.sleep(self.training_s * (0.5 + client_id * 0.618 % 1.0))
            update, digest = self._encoded(task.key.round_num)
            num_bytes, began_s = update.stat().st_size, clock.now_s()
            envelope = call.client.envelope(task.key, digest=digest, num_bytes=num_bytes)
            receipt = await call.connection.upload(envelope, update)
            self.upload_s.append(clock.now_s() - began_s)
            verdict = wire_pb2.Receipt.Verdict.Name(receipt.verdict).lower()
            self.verdicts[verdict] += 1
            self.accepted[client_id] += verdict == "accepted"

    def _encoded(self, round_num: int) -> tuple[Path, bytes]:
        """Return the file of an update that is based on a round's model, and its digest."""
        path = self.folder / f"update-{round_num}"
        if path not in self._digests:
            lanes = {"delta": torch.full((self.num_parameters,), 1e-9)}
            reply = TrainReply(round_num=round_num, lanes=lanes, num_examples=1, metrics={})
            path.write_bytes(data := encode(reply))
            self._digests[path] = digest_of(data)
        return path, self._digests[path]


@dataclass(frozen=True)
class Look:
    """What was seen of a coordinator at one time.

    Attributes:
        now_s: When.
        round_num: Rounds that are done.
        limit: Clients that may be in flight.
        spool_mb: Megabytes of replies on the disk, whole or on their way.
        memory_mb: Of its own, without files.
    """

    now_s: float
    round_num: int
    limit: int
    spool_mb: float
    memory_mb: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """One deployment; see the options of the command."""

    clients: int
    concurrency: int
    buffer_size: int
    parameters: int
    busy_s: float
    calm_s: float
    rounds: int
    calm_rounds: int

    @property
    def warmup(self) -> int:
        """Rounds that are not measured: what was in flight at first lands twice."""
        return 2 * self.concurrency // self.buffer_size

    @property
    def num_busy(self) -> int:
        """Rounds until clients take their time."""
        return self.warmup + self.rounds

    async def run(self, folder: Path, *, is_limited: bool) -> dict[str, Any]:
        """Return the figures of a run.

        Raises:
            SystemExit: The coordinator has failed.
        """
        door, enrolment, http = free_addresses(3)
        file = folder / "coordinator.toml"
        file.write_text(self._config(folder, door, enrolment, http))
        crowd = Crowd(folder, self.parameters + _CLASSIFIER, self.busy_s)
        with started(file, is_limited=is_limited) as process:
            places = Places.of(load(file, overrides=()), environ=os.environ)
            clients = await enrolled(places, self.clients)
            async with connected(clients, door, crowd):
                looks = [look async for look in self._looks(process, places, crowd)]
                await crowd.stop()
        if process.returncode:
            raise SystemExit(file.with_suffix(".err").read_text()[-2000:])
        return self._figures(looks, crowd) | self._books(places, crowd)

    async def _looks(
        self, process: "subprocess.Popen[bytes]", places: Places, crowd: Crowd
    ) -> AsyncIterator[Look]:
        """Look at the coordinator until its run is done; clients take their time in the end."""
        while process.poll() is None:
            with suppress(OSError):  # it is ending
                yield (look := await asyncio.to_thread(looked, process.pid, places))
                if look.round_num >= self.num_busy:
                    crowd.training_s = self.calm_s
            await asyncio.sleep(_LOOK_S)

    def _figures(self, looks: Sequence[Look], crowd: Crowd) -> dict[str, Any]:
        busy = [each for each in looks if self.warmup <= each.round_num < self.num_busy]
        calm = [each for each in looks if each.round_num >= self.num_busy]
        back = [each.now_s for each in calm if each.limit == self.concurrency]
        num_rounds, seconds = (
            busy[-1].round_num - busy[0].round_num,
            busy[-1].now_s - busy[0].now_s,
        )
        return {
            "updates_per_s": round(self.buffer_size * num_rounds / seconds, 2),
            "limit": round(statistics.mean(each.limit for each in busy), 1),
            "lowest_limit": min(each.limit for each in busy),
            "spool_mb": round(statistics.mean(each.spool_mb for each in busy)),
            "memory_mb": round(busy[-1].memory_mb),
            "upload_s": round(statistics.median(crowd.upload_s), 2),
            "back_after_s": round(back[0] - calm[0].now_s, 1) if back else None,
        }

    def _books(self, places: Places, crowd: Crowd) -> dict[str, Any]:
        """Return how stale updates were, and whether those that count are on record, once each."""
        with places.database() as database:
            records = database.run(places.run_name).rounds()
        ages, reported = Counter[int](), Counter[int]()
        for record in records[self.warmup : self.num_busy]:
            ages.update(record.staleness)
        for record in records:
            rows = (e.client_id for e in record.participations if e.status is Status.REPORTED)
            reported.update(rows)
        return {
            "staleness": round(sum(age * num for age, num in ages.items()) / ages.total(), 1),
            "stalest": max(ages),
            **crowd.verdicts,
            "on_record": reported.total(),
            "accepted_and_not_on_record": (crowd.accepted - reported).total(),
        }

    def _config(self, folder: Path, door: str, enrolment: str, http: str) -> str:
        return f"""
name = "{_NAME}"
num_rounds = {self.num_busy + self.calm_rounds}

[algorithm]
name = "fedbuff"

[asynchronous]
buffer_size = {self.buffer_size}
concurrency = {self.concurrency}

[staleness]
max_staleness = {4 * self.concurrency // self.buffer_size}

[model]
kind = "python"
factory = "{_HERE / "overlap_client.py"}:Ballasted"
args = {{ ballast = {self.parameters} }}

[data.partition]
kind = "iid"
num_clients = {self.clients}

[evaluation]
clients = 0

[store]
runs_dir = "{folder / "runs"}"

[coordinator]
address = "{door}"
enrolment_address = "{enrolment}"
http_address = "{http}"
send_ahead = false
"""


def looked(pid: int, places: Places) -> Look:
    """Return what is seen of a coordinator now."""
    with urlopen(f"http://{places.config.coordinator.http_address}/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found = {each.name: each.value for family in families for each in family.samples}
    status = Path(f"/proc/{pid}/status").read_text()
    return Look(
        now_s=SystemClock().now_s(),
        round_num=int(found["fedlearn_round"]),
        limit=int(found["fedlearn_in_flight_limit"]),
        spool_mb=sum(map(_num_bytes, places.folder.glob("spool/*/replies/*/*"))) / 1e6,
        memory_mb=int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6,
    )


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it is part of a commit now
        return 0


async def enrolled(places: Places, num: int) -> list[Client]:
    """Return so many clients, enrolled at a coordinator that serves."""
    clients, clock = list[Client](), SystemClock()
    with places.database() as database:
        operator = Operator(places, database, clock)
        for number in range(num):
            path = places.folder / f"{number}.invitation"
            invitation = operator.invite(f"client-{number}", tags=(), path=path)
            identity = Identity.create()
            certificate_pem, client_id = await enrol(
                invitation.enrolment_addresses[0], invitation, identity
            )
            credentials = Credentials(
                ca_pem=invitation.ca_pem,
                certificate_pem=certificate_pem,
                tls_key_pem=identity.tls_key_pem,
            )
            clients.append(
                Client(
                    client_id=client_id,
                    name=invitation.name,
                    identity=identity,
                    credentials=credentials,
                )
            )
    return clients


@contextmanager
def started(file: Path, *, is_limited: bool) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a coordinator while the block runs, which begins when its door is open."""
    command = [sys.executable, __file__, "--coordinate", str(file)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
    with file.with_suffix(".out").open("wb") as out, file.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            [*command, *([] if is_limited else ["--unlimited"])],
            env=environ | {"OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=err,
        )
        try:
            while b'"serving"' not in file.with_suffix(".err").read_bytes():
                SystemClock().sleep(_LOOK_S)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def coordinate(file: str, *, is_limited: bool) -> int:
    """Be the coordinator, and return its exit code."""
    limit = InFlightLimit if is_limited else Unlimited
    with mock.patch.object(coordinator, "InFlightLimit", limit):
        return command_line(["coordinator", file, "--json"])


def main() -> None:
    """Measure, and print one JSON line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32, help="clients")
    parser.add_argument("--concurrency", type=int, default=24, help="at most in flight")
    parser.add_argument("--buffer-size", type=int, default=2, help="updates of a round")
    parser.add_argument("--parameters", type=int, default=4_000_000, help="of the model")
    parser.add_argument("--busy-s", type=float, default=2.0, help="seconds of a training at first")
    parser.add_argument("--calm-s", type=float, default=30.0, help="and in the end")
    parser.add_argument("--rounds", type=int, default=40, help="rounds that are measured")
    parser.add_argument("--calm-rounds", type=int, default=24, help="rounds in the end")
    parser.add_argument("--turns", type=int, default=1, help="runs of each kind")
    parser.add_argument("--coordinate", help=argparse.SUPPRESS)
    parser.add_argument("--unlimited", action="store_true", help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args())
    file, unlimited, turns = (arguments.pop(e) for e in ("coordinate", "unlimited", "turns"))
    if file is not None:
        sys.exit(coordinate(file, is_limited=not unlimited))
    torch.set_num_threads(1)
    for is_limited in [False, True] * turns:
        with tempfile.TemporaryDirectory(prefix="congestion-") as folder:
            figures = asyncio.run(Job(**arguments).run(Path(folder), is_limited=is_limited))
        kind = "limited" if is_limited else "unlimited"
        print(json.dumps({"kind": kind, **figures}), flush=True)


if __name__ == "__main__":
    main()
