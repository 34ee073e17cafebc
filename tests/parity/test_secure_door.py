"""Secure aggregation through the gRPC door: one model for all, and masks that are ready in time."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from fedlearn.algorithms.aggregators import WeightedMean, WeightedSum
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.client.conditions import Conditions
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.policy import Policy
from fedlearn.client.runtime import Runtime
from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.collecting import Collected, RoundRequest, Status
from fedlearn.core.params import Params
from fedlearn.deployment.identities import EnrolledKeys
from fedlearn.door.authority import Authority
from fedlearn.door.server import Door, DoorSettings
from fedlearn.identity.registry import MemoryRegistry
from fedlearn.rounds.secure import SecureCollector
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport import wire
from fedlearn.transport.identity import Invitation

NUM_CLIENTS = 4
#: Too large to travel with a task.
PARAMS = Params.of(nn.Linear(3, 40_000))
LONG_S, VALID_S = 60.0, 600.0
POLICY = StragglerPolicy(
    num_wanted=NUM_CLIENTS,
    over_selection=1.0,
    deadline_s=LONG_S,
    min_reports=NUM_CLIENTS,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)
PLAN = SecurePlan(
    parameters=derive(
        NUM_CLIENTS,
        assumptions=Assumptions(
            adversary=Adversary.ACTIVE_SERVER,
            topology=Topology.COMPLETE,
            corruption=0.1,
            dropout=0.0,
            sigma_bits=40,
            eta_bits=30,
        ),
    ),
    min_survivors=NUM_CLIENTS,
    clip_norm=900.0,
    statistics_norm=1.0,
    max_loss=1.0,
    max_examples=10,
    by_examples=True,
    modulus_bits=40,
)


@dataclass
class Spool:
    """What each client saw when all of them had the model and none had answered."""

    folder: Path
    everyone: threading.Barrier = field(default_factory=lambda: threading.Barrier(NUM_CLIENTS))
    models: list[list[str]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)


@dataclass
class Watching:
    """A trainer that looks around before it trains: adds (number + 1) / 10 to the model."""

    number: int
    home: Home
    spool: Spool
    before: Callable[[], None]

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        self.before()
        context.control.check()
        self.spool.everyone.wait(LONG_S)
        task = json.loads((self.home.folder / "task" / "task.json").read_bytes())
        self.spool.hashes.append(task["digest"])
        requests = self.spool.folder.glob("passing/*/requests/*")
        self.spool.models.append([path.name for path in requests])
        self.spool.everyone.wait(LONG_S)
        moved = {name: value + (self.number + 1) / 10 for name, value in tensors.items()}
        return LocalResult(tensors=moved, num_examples=1, metrics={}, state={})

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={})


@dataclass
class Member:
    """A client's folder, and the runtime that works in it on a thread of its own."""

    number: int
    home: Home
    invitation: Path
    spool: Spool
    is_connected: threading.Event = field(default_factory=threading.Event)
    is_called_off: threading.Event = field(default_factory=threading.Event)
    runtime: Runtime | None = None
    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None

    def start(self, before: Callable[[], None] = lambda: None) -> None:
        self.is_connected.clear()
        self.thread = threading.Thread(target=asyncio.run, args=(self._run(before),))
        self.thread.start()
        assert self.is_connected.wait(LONG_S)

    def ask_to_stop(self) -> None:
        assert self.loop is not None
        assert self.runtime is not None
        self.loop.call_soon_threadsafe(self.runtime.stop)

    def end_in_training(self) -> None:
        """End this process as its user would, while the trainer has the model."""
        self.ask_to_stop()
        assert self.is_called_off.wait(LONG_S)

    def stop(self) -> None:
        self.ask_to_stop()
        assert self.thread is not None
        self.thread.join(LONG_S)

    async def _run(self, before: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.runtime = Runtime(
            self.home,
            Watching(self.number, self.home, self.spool, before),
            invitation=self.invitation,
            conditions=Conditions(),
            policy=Policy(),
            on_event=self._on_event,
        )
        await self.runtime.run()

    def _on_event(self, event: AgentEvent) -> None:
        if event.kind is EventKind.CONNECTED:
            self.is_connected.set()
        elif event.kind is EventKind.CANCELLED:
            self.is_called_off.set()


@dataclass
class Site:
    """A door with certificates, its clients, and a collector of sums."""

    door: Door
    members: list[Member]
    spool: Spool
    collector: SecureCollector

    def collect(self) -> Collected[WeightedSum]:
        request = RoundRequest(round_num=0, attempt=0, params=PARAMS, settings={}, seed=0)
        channel = self.door.channel()
        channel.wait_for(NUM_CLIENTS, lambda: None)
        return self.collector.collect(channel.available(), request)


@contextmanager
def opened(folder: Path) -> Iterator[Site]:
    clock = SystemClock()
    registry = MemoryRegistry(clock)
    authority = Authority.open(folder / "authority", host_names=())
    door = Door(
        DoorSettings(address="127.0.0.1:0", enrolment_address="127.0.0.1:0"),
        registry=registry,
        run_id="parity",
        spool_dir=folder / "spool",
        authority=authority,
        eligible=lambda _client, _told: True,
        is_leader=lambda: True,
        clock=clock,
    )
    door.start()
    with ExitStack() as stack:
        stack.callback(door.stop, grace_s=0.5)
        spool = Spool(folder / "spool")
        members = []
        for number in range(NUM_CLIENTS):
            token = registry.invite(f"client-{number}", tags=(), valid_s=VALID_S)
            home = Home(folder / f"home-{number}")
            path = invitation(number, folder, door, authority, token)
            home.set_consent(granted=True)
            members.append(Member(number, home, path, spool))
        collector = SecureCollector(
            channel=door.channel(),
            aggregator=WeightedMean(by_examples=True),
            policy=POLICY,
            plan=PLAN,
            run_id=bytes(16),
            signer=authority.signer,
            directory=EnrolledKeys(
                registry=registry,
                clock=SystemClock(),
                give_up_s=LONG_S,
                log=structlog.get_logger(),
            ),
            sends_directory=True,
            stage_deadline_s=LONG_S,
            num_threads=2,
        )
        yield Site(door, members, spool, collector)


def invitation(number: int, folder: Path, door: Door, authority: Authority, token: bytes) -> Path:
    path = folder / f"{number}.invitation"
    Invitation(
        name=f"client-{number}",
        addresses=(door.address,),
        enrolment_addresses=(door.enrolment_address,),
        ca_pem=authority.ca_pem,
        token=token,
        expires_utc=utc(SystemClock().unix_s() + VALID_S),
        coordinator_key=authority.coordinator_key,
    ).save(path)
    return path


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with opened(tmp_path) as found:
        yield found
        for member in found.members:
            member.stop()


def mean_of(collected: Collected[WeightedSum]) -> Tensor:
    return WeightedMean(by_examples=True).finalize(collected.aggregate)


EXPECTED = torch.tensor(sum((i + 1) / 10 for i in range(NUM_CLIENTS)) / NUM_CLIENTS)


def test_a_cohort_has_one_model_on_the_coordinators_disk_and_downloads_that(site: Site) -> None:
    """And every client has expanded its masks before the model came."""
    for member in site.members:
        member.start()
    with capture_logs() as logs:
        collected = site.collect()
    assert collected.count(Status.REPORTED) == NUM_CLIENTS
    assert torch.allclose(mean_of(collected), EXPECTED, atol=1e-3)
    assert len(set(site.spool.hashes)) == 1
    assert site.spool.models == [[site.spool.hashes[0]]] * NUM_CLIENTS
    assert 4 * PARAMS.layout.size > wire.MAX_INLINE_BYTES
    assert site.door.counters.downloads == NUM_CLIENTS
    assert [log["event"] for log in logs].count("masks_were_ready") == NUM_CLIENTS


def test_a_client_that_restarts_between_download_and_reply_goes_on(site: Site) -> None:
    """Its packets come again with the task, its model is on its disk, its masks it expands anew."""
    last, others = site.members[-1], site.members[:-1]
    for member in others:
        member.start()
    last.start(before=last.end_in_training)
    collecting: list[Collected[WeightedSum]] = []
    with capture_logs() as logs:
        thread = threading.Thread(target=lambda: collecting.append(site.collect()))
        thread.start()
        assert last.thread is not None
        last.thread.join(LONG_S)
        last.start()
        thread.join(LONG_S)
    (collected,) = collecting
    assert collected.count(Status.REPORTED) == NUM_CLIENTS
    assert torch.allclose(mean_of(collected), EXPECTED, atol=1e-3)
    assert site.door.counters.downloads == NUM_CLIENTS
    assert [log["event"] for log in logs].count("masks_were_ready") == NUM_CLIENTS - 1
