"""Secure aggregation over gRPC: all clients share one stored model, and masks are ready in time."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import structlog
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from fedlearn.algorithms.collector import CollectedRound, RoundRequest, collect_from
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.runtime import Runtime
from fedlearn.core.clock import SystemClock
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.deployment.hosted_run import load_identity_keys
from fedlearn.rounds.secure import SecureCollector
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan
from fedlearn.store.patience import Patience
from fedlearn.testing.local_gateway import LocalGateway
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport import wire

NUM_CLIENTS = 4
#: Too large to be sent inside a task.
PARAMS = Params.of(nn.Linear(3, 40_000))
LONG_S = 60.0
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
    """What each client saw when all had downloaded the model and none had answered."""

    folder: Path
    everyone: threading.Barrier = field(default_factory=lambda: threading.Barrier(NUM_CLIENTS))
    models: list[list[str]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)


@dataclass
class Watching:
    """Inspects the folders of client and coordinator, then adds (number + 1) / 10 to the model."""

    number: int
    home: Home
    spool: Spool
    before: Callable[[], None]

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        self.before()
        context.control.check()
        self.spool.everyone.wait(LONG_S)
        (file,) = self.home.folder.glob("tasks/*/task.json")
        task = json.loads(file.read_bytes())
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
    """A client's folder, and the runtime that works in it, on its own thread."""

    number: int
    home: Home
    invitation: Path
    spool: Spool
    is_connected: threading.Event = field(default_factory=threading.Event)
    is_cancelled: threading.Event = field(default_factory=threading.Event)
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
        """Stop this client's runtime, as its user would, while the trainer has the model."""
        self.ask_to_stop()
        assert self.is_cancelled.wait(LONG_S)

    def stop(self) -> None:
        self.ask_to_stop()
        assert self.thread is not None
        self.thread.join(LONG_S)

    async def _run(self, before: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.runtime = Runtime(
            RuntimeOptions(home=self.home.folder, trainer="", invitation=self.invitation),
            Watching(self.number, self.home, self.spool, before),
            on_event=self._on_event,
        )
        await self.runtime.run()

    def _on_event(self, event: AgentEvent) -> None:
        if event.kind is EventKind.CONNECTED:
            self.is_connected.set()
        elif event.kind is EventKind.CANCELLED:
            self.is_cancelled.set()


@dataclass
class Cohort:
    """A gRPC server, the clients that were invited, and a collector of their sums."""

    local: LocalGateway
    members: list[Member]
    spool: Spool
    collector: SecureCollector

    def collect(self) -> CollectedRound:
        self.local.wait_for(NUM_CLIENTS)
        request = RoundRequest(
            round_num=0,
            attempt=0,
            params=PARAMS,
            strategy=FedAvg(OwnTraining()),
            broadcast={},
            seed=0,
        )
        return collect_from(self.collector, self.local.gateway.channel().available(), request)


@contextmanager
def open_cohort(folder: Path) -> Iterator[Cohort]:
    with LocalGateway(folder) as local:
        spool = Spool(folder / "spool" / local.run_id)
        members = []
        for number in range(NUM_CLIENTS):
            path = folder / f"{number}.invitation"
            local.create_invitation(f"client-{number}").save(path)
            home = Home(folder / f"home-{number}")
            home.set_consent(granted=True)
            members.append(Member(number, home, path, spool))
        patiently = Patience(clock=SystemClock(), give_up_s=LONG_S, log=structlog.get_logger())
        collector = SecureCollector(
            channel=local.gateway.channel(),
            policy=POLICY,
            plan=PLAN,
            run_id=bytes(16),
            signer=local.authority.signer,
            directory=partial(load_identity_keys, local.registry, patiently=patiently),
            sends_directory=True,
            stage_deadline_s=LONG_S,
            num_threads=2,
        )
        yield Cohort(local, members, spool, collector)


@pytest.fixture
def cohort(tmp_path: Path) -> Iterator[Cohort]:
    with open_cohort(tmp_path) as found:
        yield found
        for member in found.members:
            member.stop()


def mean_of(collected: CollectedRound) -> Tensor:
    assert collected.aggregate is not None
    return collected.aggregate.lanes["delta"]


EXPECTED = torch.tensor(sum((i + 1) / 10 for i in range(NUM_CLIENTS)) / NUM_CLIENTS)


@pytest.mark.slow
def test_a_cohort_has_one_model_on_the_coordinators_disk_and_downloads_that(cohort: Cohort) -> None:
    """Every client has expanded its masks before the model arrives."""
    for member in cohort.members:
        member.start()
    with capture_logs() as logs:
        collected = cohort.collect()
    assert collected.count(Status.REPORTED) == NUM_CLIENTS
    assert torch.allclose(mean_of(collected), EXPECTED, atol=1e-3)
    assert len(set(cohort.spool.hashes)) == 1
    assert cohort.spool.models == [[cohort.spool.hashes[0]]] * NUM_CLIENTS
    assert 4 * PARAMS.layout.size > wire.MAX_INLINE_BYTES
    assert cohort.local.gateway.counters.downloads == NUM_CLIENTS
    assert [log["event"] for log in logs].count("masks_were_ready") == NUM_CLIENTS


@pytest.mark.slow
def test_a_client_that_restarts_between_download_and_reply_goes_on(cohort: Cohort) -> None:
    """It is sent its packets again, has the model on disk, and expands its masks again."""
    last, others = cohort.members[-1], cohort.members[:-1]
    for member in others:
        member.start()
    last.start(before=last.end_in_training)
    collecting: list[CollectedRound] = []
    with capture_logs() as logs:
        thread = threading.Thread(target=lambda: collecting.append(cohort.collect()))
        thread.start()
        assert last.thread is not None
        last.thread.join(LONG_S)
        last.start()
        thread.join(LONG_S)
    (collected,) = collecting
    assert collected.count(Status.REPORTED) == NUM_CLIENTS
    assert torch.allclose(mean_of(collected), EXPECTED, atol=1e-3)
    assert cohort.local.gateway.counters.downloads == NUM_CLIENTS
    assert [log["event"] for log in logs].count("masks_were_ready") == NUM_CLIENTS - 1
