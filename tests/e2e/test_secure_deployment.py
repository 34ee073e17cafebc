"""Secure aggregation between processes: a coordinator and clients over gRPC, with certificates."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from torch import Tensor

from fedlearn.client.home import Home
from fedlearn.config import Config, IdealDevices, load, render
from fedlearn.coordinator.records import RoundRecord, RunStatus
from fedlearn.coordinator.store import Database, sqlite_url
from fedlearn.core.clock import SystemClock
from fedlearn.core.collecting import Status
from fedlearn.deployment import demo_client
from fedlearn.deployment.starter import starter
from fedlearn.experiment.run import Run
from fedlearn.transport import wire

NUM_CLIENTS, NUM_ROUNDS = 5, 2
LONG_S = 120.0
#: A trainer whose process is killed when it has the model, once.
DYING = """
import os
import signal
from pathlib import Path

from fedlearn.deployment import demo_client

MARK = Path(__file__).with_name("killed")


class Dying:
    def __init__(self):
        self.trainer = demo_client.trainer()
        self.evaluate = self.trainer.evaluate

    def train(self, tensors, *, context):
        if not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.trainer.train(tensors, context=context)
"""
#: Rounding in the first round moves what the second trains on.
ATOL = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


@dataclass
class Site:
    """A folder with a configuration, and the processes that were started in it."""

    folder: Path
    running: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "coordinator.toml"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

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

    def type(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "fedlearn", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def coordinator(self) -> "subprocess.Popen[str]":
        process = self.start("coordinator", str(self.file), "--json")
        address, clock = load(self.file, overrides=()).coordinator.http_address, SystemClock()
        ends_s = clock.now_s() + LONG_S
        while process.poll() is None and not is_ready(address):
            assert clock.now_s() < ends_s, self.log[-3000:]
            clock.sleep(0.05)
        return process

    def join(
        self, number: int, *options: str, task: str = f"{demo_client.__name__}:trainer"
    ) -> "subprocess.Popen[str]":
        """Start a client; it holds part ``number`` of the data, and so must have that number."""
        self.type("invite", f"client-{number}")
        process = self.start_client(number, *options, task=task)
        home, clock = Home(self.folder / f"client-{number}"), SystemClock()
        ends_s = clock.now_s() + LONG_S
        while home.enrolment() is None:
            assert clock.now_s() < ends_s, self.log[-3000:]
            clock.sleep(0.05)
        return process

    def start_client(self, number: int, *options: str, task: str) -> "subprocess.Popen[str]":
        return self.start(
            *("join", f"client-{number}.invitation", "--home", f"client-{number}"),
            *("--task", task, *options),
            **{demo_client.CONFIG: str(self.file), demo_client.CLIENT: str(number)},
        )

    def finished(self, name: str) -> tuple[RunStatus, list[RoundRecord], dict[str, Tensor]]:
        runs_dir = self.folder / "runs"
        with Database.open(sqlite_url(runs_dir / "fedlearn.db"), runs_dir=runs_dir) as database:
            stored = database.run(name)
            weights = Run(stored, None).weights(best=False)
            return stored.record.status, list(stored.rounds()), weights


def is_ready(address: str) -> bool:
    try:
        with urlopen(f"http://{address}/readyz", timeout=5) as response:
            return bool(response.status)
    except (URLError, ConnectionError):
        return False


def until_round(process: "subprocess.Popen[str]", number: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("round", 0) >= number:
            return
    raise AssertionError(f"it ended before round {number}")


def configuration() -> Config:
    """Five of five are asked, four must be left; a clip that does not bind."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket())) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        door, enrolment, http = (f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    config = starter()
    changes = {
        "num_rounds": NUM_ROUNDS,
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
    return config.model_copy(update=changes)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    found.file.write_text(render(configuration()))
    yield found
    for process in found.running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_secure_deployment_ends_in_the_model_of_plain_aggregation(site: Site) -> None:
    """But for fixed point; the simulation of it in the clear has the same clients and data."""
    coordinator = site.coordinator()
    for number in range(NUM_CLIENTS):
        site.join(number)
    coordinator.communicate(timeout=LONG_S)
    assert coordinator.returncode == 0, site.log[-3000:]
    status, rounds, secure = site.finished("federation")
    assert status is RunStatus.DONE
    assert [len(r.participations) for r in rounds] == [NUM_CLIENTS] * NUM_ROUNDS
    assert all(len({p.num_examples for p in r.participations}) == 1 for r in rounds)
    plain = ("secure_aggregation.mode=off", "engine.transport=memory")
    options = [part for each in (*plain, "name=plain") for part in ("--set", each)]
    site.type("simulate", str(site.file), *options)
    _, _, expected = site.finished("plain")
    assert all(torch.allclose(secure[name], expected[name], atol=ATOL) for name in expected)


def test_a_coordinator_that_is_killed_begins_a_session_of_its_own(site: Site) -> None:
    """What clients remember of the one before neither hinders them nor is answered from again."""
    changed = load(site.file, overrides=["num_rounds=6"])
    site.file.write_text(render(changed))
    first = site.coordinator()
    for number in range(NUM_CLIENTS):
        site.join(number)
    until_round(first, 2)
    first.kill()
    first.communicate()
    second = site.coordinator()
    second.communicate(timeout=LONG_S)
    assert second.returncode == 0, site.log[-3000:]
    status, rounds, _ = site.finished("federation")
    assert (status, [r.round_num for r in rounds]) == (RunStatus.DONE, list(range(6)))


def test_a_client_that_is_gone_is_left_out_of_the_sum(site: Site) -> None:
    """One of five is killed: rounds wait for it as long as they have to, and go on with four."""
    short = [
        "secure_aggregation.stage_deadline_s=5",
        "stragglers.deadline_s=10",
        "coordinator.patience_s=20",  # as long as the next client may take to start
        "evaluation.every_rounds=0",
        "evaluation.deadline_s=10",
    ]
    site.file.write_text(render(load(site.file, overrides=["num_rounds=3", *short])))
    coordinator = site.coordinator()
    for number in range(NUM_CLIENTS):
        site.join(number)
    until_round(coordinator, 1)
    site.running[-1].kill()
    coordinator.communicate(timeout=LONG_S)
    assert coordinator.returncode == 0, site.log[-3000:]
    status, rounds, _ = site.finished("federation")
    assert (status, len(rounds)) == (RunStatus.DONE, 3)
    reported = [r.participations.num(Status.REPORTED) for r in rounds]
    assert min(reported) == reported[-1] == NUM_CLIENTS - 1


def test_a_client_that_is_killed_between_download_and_reply_goes_on(site: Site) -> None:
    """It is asked again when it is back, has the model already, and is in the sum of that round."""
    changes = ["model.hidden=[4096]", f"stragglers.deadline_s={LONG_S}"]
    site.file.write_text(render(load(site.file, overrides=changes)))
    task = site.folder / "dying.py"
    task.write_text(DYING)
    coordinator = site.coordinator()
    dying = site.join(0, task=f"{task}:Dying")
    for number in range(1, NUM_CLIENTS):
        site.join(number)
    dying.wait(LONG_S)
    request = site.folder / "client-0" / "task" / "request"
    assert request.stat().st_size > wire.MAX_INLINE_BYTES
    site.start_client(0, task=f"{task}:Dying")
    coordinator.communicate(timeout=LONG_S)
    assert coordinator.returncode == 0, site.log[-3000:]
    status, rounds, _ = site.finished("federation")
    assert (status, [r.attempt for r in rounds]) == (RunStatus.DONE, [0] * NUM_ROUNDS)
    first = rounds[0].participations
    assert first.num(Status.REPORTED) == len(first)
    assert 0 in [row.client_id for row in first]
    assert "masks_were_ready" in site.log


def test_a_client_whose_policy_forbids_the_training_says_so_before_secrets_are_shared(
    site: Site,
) -> None:
    """It costs the session one advert, and no stage has to wait for it; the others go on."""
    (site.folder / "client.toml").write_text("[policy]\nmax_epochs = 0\n")
    all_there = "coordinator.patience_s=600"  # however long the last takes to start
    site.file.write_text(render(load(site.file, overrides=["num_rounds=1", all_there])))
    coordinator = site.coordinator()
    for number in range(NUM_CLIENTS - 1):
        site.join(number, "--require-secure-aggregation")
    site.join(NUM_CLIENTS - 1, "--config", "client.toml")
    coordinator.communicate(timeout=LONG_S)
    assert coordinator.returncode == 0, site.log[-3000:]
    status, (record,), _ = site.finished("federation")
    assert status is RunStatus.DONE
    assert record.participations.num(Status.REPORTED) == NUM_CLIENTS - 1
    (refused,) = [p for p in record.participations if p.status is Status.FAILED]
    assert refused.client_id == NUM_CLIENTS - 1
    assert refused.reason.startswith("at the stage `advertise`: this client's policy, `max_epochs`")
    (line,) = [each for each in site.log.splitlines() if "refused_by_policy" in each]
    assert json.loads(line)["asked"] == f"epochs = {configuration().client.epochs}"
