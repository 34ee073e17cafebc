"""Identity keys between processes: replaced between rounds, and never swapped without a word."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

import pytest

from fedlearn.client.home import Enrolment, Home
from fedlearn.config import IdealDevices, load, render
from fedlearn.coordinator.records import RoundRecord
from fedlearn.coordinator.store import Database, sqlite_url
from fedlearn.coordinator.store_registry import StoredRegistry
from fedlearn.core.clock import SystemClock
from fedlearn.core.collecting import Status
from fedlearn.deployment import demo_client
from fedlearn.deployment.operator import Operator
from fedlearn.deployment.places import Places
from fedlearn.deployment.starter import starter
from fedlearn.transport.identity import Identity

#: More rounds than there is time for.
NUM_CLIENTS, NUM_ROUNDS = 4, 100_000
LONG_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


@dataclass
class Site:
    """A folder with a configuration, and the processes that were started in it."""

    folder: Path
    running: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "coordinator.toml"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def home(self, number: int) -> Home:
        return Home(self.folder / f"client-{number}")

    def enrolment(self, number: int) -> Enrolment:
        found = self.home(number).enrolment()
        assert found is not None
        return found

    def start(self, name: str, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDLEARN_")}
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedlearn", *arguments],
                cwd=self.folder,
                env=kept | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "coordinator" else log,
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

    def coordinator(self) -> "subprocess.Popen[str]":
        return self.start("coordinator", "coordinator", str(self.file), "--json")

    def join(self, number: int, *more: str) -> "subprocess.Popen[str]":
        """Start a client that holds part ``number`` of the data, and so must have that number."""
        name = f"client-{number}"
        if not (self.folder / f"{name}.invitation").exists():
            self.invite(name)
        process = self.start(
            name,
            *("join", f"{name}.invitation", "--home", name, *more),
            *("--task", f"{demo_client.__name__}:trainer"),
            **{demo_client.CONFIG: str(self.file), demo_client.CLIENT: str(number)},
        )
        self.until(name, lambda: self.home(number).enrolment() is not None)
        return process

    def until(self, name: str, holds: Callable[[], bool]) -> None:
        clock = SystemClock()
        ends_s = clock.now_s() + LONG_S
        while not holds():
            assert clock.now_s() < ends_s, self.log(name)[-3000:]
            clock.sleep(0.05)

    def invite(self, name: str) -> None:
        places = Places.of(load(self.file, overrides=()), environ={})
        with self.database() as database:
            path = self.folder / f"{name}.invitation"
            Operator(places, database, SystemClock()).invite(name, tags=(), path=path)

    def database(self) -> Database:
        runs_dir = self.folder / "runs"
        return Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir)

    def rounds(self) -> list[RoundRecord]:
        with self.database() as database:
            return list(database.run("federation").rounds())

    def swap_key(self, number: int) -> bytes:
        """Do what an active server would: name a key of one's own in the place of a client's."""
        key = Identity.create().public_key
        with self.database() as database:
            registry = StoredRegistry(database, SystemClock())
            client = registry.clients()[number]
            token = registry.invite(client.name, tags=client.tags, valid_s=60.0)
            registry.redeem(
                client.name,
                token,
                identity_key=key,
                certify=lambda _: (b"", client.fingerprint, client.certificate_expires_utc),
            )
        return key


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Four of four are asked, three must be left."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket())) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        door, enrolment, http = (f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    config = starter()
    changes = {
        "num_rounds": NUM_ROUNDS,
        "evaluation": config.evaluation.model_copy(update={"every_rounds": 0}),
        "cohort": config.cohort.model_copy(update={"num_wanted": NUM_CLIENTS}),
        "stragglers": config.stragglers.model_copy(
            update={"over_selection": 1.0, "deadline_s": 60.0}
        ),
        "devices": IdealDevices(),  # of the simulation
        "secure_aggregation": config.secure_aggregation.model_copy(
            update={"mode": "complete", "clip_norm": 100.0, "modulus_bits": 40}
        ),
        "coordinator": config.coordinator.model_copy(
            update={"address": door, "enrolment_address": enrolment, "http_address": http}
        ),
    }
    found = Site(tmp_path)
    found.file.write_text(render(config.model_copy(update=changes)))
    yield found
    for process in found.running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def is_full(record: RoundRecord) -> bool:
    return record.participations.num(Status.REPORTED) == NUM_CLIENTS


def until_round(process: "subprocess.Popen[str]", number: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("round", 0) >= number:
            return


def test_a_running_client_replaces_its_keys_and_the_others_go_on_with_it(site: Site) -> None:
    """Between two rounds: it stays the same client, and the others have followed its chain."""
    coordinator = site.coordinator()
    for number in range(NUM_CLIENTS):
        site.join(number)
    until_round(coordinator, 1)
    before = site.enrolment(1)
    assert "will be replaced" in site.type("rotate", "client-1")
    reading = threading.Thread(target=until_round, args=(coordinator, NUM_ROUNDS), daemon=True)
    reading.start()  # or its pipe would fill
    site.until("client-1", lambda: site.enrolment(1).lineage.num_rotations == 1)
    after, num_before = site.enrolment(1), len(site.rounds())
    assert after.client_id == before.client_id
    assert after.lineage.first_key == before.identity.public_key
    site.until("coordinator", lambda: any(map(is_full, site.rounds()[num_before + 1 :])))
    pin = site.home(0).pin_file(site.enrolment(0)).read().clients[after.client_id]
    assert (pin.key, pin.num_rotations) == (after.identity.public_key, 1)
    coordinator.kill()
    reading.join(LONG_S)
    listed = [json.loads(line) for line in site.type("pins", "client-0", "--json").splitlines()]
    assert [each["client_id"] for each in listed] == list(range(NUM_CLIENTS))


def test_a_swapped_key_and_a_stranger_are_refused_and_named_in_the_log(site: Site) -> None:
    """In a later run, after a restart: pins outlive both. Control: the run before ends well."""
    site.file.write_text(render(load(site.file, overrides=["num_rounds=1"])))
    coordinator = site.coordinator()
    clients = [site.join(number) for number in range(NUM_CLIENTS)]
    coordinator.communicate(timeout=LONG_S)
    assert coordinator.returncode == 0, site.log("coordinator")[-3000:]
    for client in clients:
        client.terminate()
        client.wait(LONG_S)
    said = site.type("roster", "-o", "all.roster")
    assert all(f"client-{number}" in said for number in range(NUM_CLIENTS))
    values = json.loads((site.folder / "all.roster").read_text())
    values["clients"] = [each for each in values["clients"] if each["client_id"] != 2]
    (site.folder / "without-2.roster").write_text(json.dumps(values))
    site.swap_key(2)
    site.file.write_text(render(load(site.file, overrides=["name=again"])))
    site.coordinator()
    site.join(0)
    site.join(1, "--roster", "without-2.roster")
    site.join(2)
    site.join(3)
    site.until("client-0", lambda: "pinned identity keys" in site.log("client-0"))
    assert "another key of client 2" in site.log("client-0")
    site.until("client-1", lambda: "pinned identity keys" in site.log("client-1"))
    assert "client 2, who is not in the roster" in site.log("client-1")
