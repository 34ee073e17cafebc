"""A run over gRPC equals one in memory, for the same order of arrival."""

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.collector import Collector
from fedlearn.algorithms.knn_per import NearestNeighbors
from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.recipes import FedAdam, FedAvg
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.client.events import AgentEvent, EventKind
from fedlearn.client.home import Home
from fedlearn.client.options import RuntimeOptions
from fedlearn.client.runtime import Runtime
from fedlearn.core.clock import SystemClock, utc
from fedlearn.core.codec import decode, encode
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.gateway.authority import Authority
from fedlearn.gateway.channel import GatewayChannel
from fedlearn.gateway.eligibility import Requirements
from fedlearn.gateway.server import Gateway, GatewaySettings, RunTerms
from fedlearn.identity.identity import Invitation
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.session.session import ClientSession
from fedlearn.simulation.behavior import DeviceRound
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.simulation.sessions import SimulatedSessions, trainers_on
from fedlearn.testing.registry import FreshRegistry
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext
from fedlearn.transport.base import Channel, ask_once

SIZES = [8, 14, 3, 11]
NUM_ROUNDS = 3
LONG_S = 60.0
LOCAL = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
KEEPING = replace(LOCAL, momentum=0.9, keep_momentum=True)
POLICY = StragglerPolicy(
    num_wanted=3,
    over_selection=1.3,
    deadline_s=LONG_S,
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)
#: torch's generator belongs to the process, so clients of one process take turns.
_TURN = threading.Lock()


def make_model() -> nn.Module:
    """A model so large that replies are uploaded, instead of sent in a session's stream."""
    return nn.Sequential(nn.Linear(5, 12_000), nn.Dropout(0.3), nn.ReLU(), nn.Linear(12_000, 3))


def population() -> ArrayPopulation:
    generator, num_examples = torch.Generator().manual_seed(1), sum(SIZES)
    return ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *SIZES])),
        num_classes=3,
    )


class OneAtATime:
    """A trainer that takes turns with the other clients of its process."""

    def __init__(
        self,
        client: int,
        make_model: Callable[[], nn.Module],
        local_updates: Collection[type[LocalUpdate]] = (),
    ) -> None:
        rows = population().load(np.asarray([client]))
        index = torch.from_numpy(rows.rows)
        features, labels = require_single_input(rows.features)[index], rows.labels[index]
        self._trainer = TorchTrainer.of(
            make_model, features, labels, device="cpu", local_updates=local_updates
        )
        self.honors, self.own_updates = self._trainer.honors, self._trainer.own_updates

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        with _TURN:
            result = self._trainer.train(tensors, context=context)
        return replace(result, metrics={**result.metrics, "half": result.metrics["loss"] / 2})

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        with _TURN:
            return self._trainer.evaluate(tensors, control=control)

    def evaluate_with_neighbors(
        self, tensors: Mapping[str, Tensor], neighbors: NearestNeighbors, *, control: TaskControl
    ) -> LocalEvaluation:
        with _TURN:
            return self._trainer.evaluate_with_neighbors(tensors, neighbors, control=control)


@dataclass(frozen=True)
class Replayed:
    """Devices whose replies arrive in a recorded order; those of other clients never arrive."""

    orders: Sequence[Sequence[int]]

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        place = {client: 1.0 + at for at, client in enumerate(self.orders[work.round_num])}
        return np.asarray([place.get(client, 1e9) for client in work.client_ids.tolist()])

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.zeros(len(work.client_ids), bool)


@contextmanager
def gateway(folder: Path) -> Iterator[tuple[Gateway, FreshRegistry, Authority]]:
    clock = SystemClock()
    registry = FreshRegistry(clock)
    authority = Authority(folder / "authority", host_names=())
    opened = Gateway(
        GatewaySettings(address="127.0.0.1:0", enrolment_address="127.0.0.1:0"),
        registry=registry,
        runs=[
            RunTerms(
                run_id="parity",
                uploads_dir=folder / "spool",
                eligible=Requirements().admits,
                is_leader=lambda: True,
            )
        ],
        authority=authority,
        is_leader=lambda: True,
        clock=clock,
    )
    opened.start()
    try:
        yield opened, registry, authority
    finally:
        opened.stop(grace_s=0.5)


@contextmanager
def client(
    number: int,
    folder: Path,
    opened: Gateway,
    registry: FreshRegistry,
    authority: Authority,
    *,
    make_model: Callable[[], nn.Module],
    local_updates: Collection[type[LocalUpdate]],
) -> Iterator[None]:
    """Run one client, connected, on a thread with its own event loop."""
    path = folder / f"{number}.invitation"
    Invitation(
        name=f"client-{number}",
        addresses=(opened.address,),
        enrolment_addresses=(opened.enrolment_address,),
        ca_pem=authority.ca_pem,
        token=registry.invite(f"client-{number}", tags=(), valid_s=600.0),
        expires_utc=utc(SystemClock().unix_s() + 600.0),
    ).save(path)
    home, is_connected = Home(folder / f"home-{number}"), threading.Event()
    home.set_consent(granted=True)

    def on_event(event: AgentEvent) -> None:
        if event.kind is EventKind.CONNECTED:
            is_connected.set()

    running: dict[str, tuple[Runtime, asyncio.AbstractEventLoop]] = {}

    async def run() -> None:
        runtime = Runtime(
            RuntimeOptions(home=home.folder, trainer="", invitation=path),
            OneAtATime(number, make_model, local_updates),
            on_event=on_event,
        )
        running["it"] = runtime, asyncio.get_running_loop()
        await runtime.run()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert is_connected.wait(LONG_S)
        yield
    finally:
        runtime, loop = running["it"]
        loop.call_soon_threadsafe(runtime.stop)
        thread.join(LONG_S)


@contextmanager
def over_grpc(
    folder: Path,
    make_model: Callable[[], nn.Module] = make_model,
    *,
    local_updates: Collection[type[LocalUpdate]] = (),
) -> Iterator[tuple[GatewayChannel, Gateway]]:
    """Open a channel to one real client per part of the population, in the order of their ids."""
    with ExitStack() as stack:
        opened, registry, authority = stack.enter_context(gateway(folder))
        for number in range(len(SIZES)):
            stack.enter_context(
                client(
                    number,
                    folder,
                    opened,
                    registry,
                    authority,
                    make_model=make_model,
                    local_updates=local_updates,
                )
            )
        channel = opened.channel()
        channel.wait_for(len(SIZES), lambda: None)
        yield channel, opened


def in_memory(orders: Sequence[Sequence[int]]) -> Channel:
    model = ResidentModel(
        make_model, CrossEntropy(), device=torch.device("cpu"), precision=Precision.FLOAT32
    )
    return SimulatedSessions(
        population(), Replayed(orders), trainers_on(model), work=LOCAL
    ).channel()


def run(
    algorithm: Strategy, channel: Channel, *, policy: StragglerPolicy = POLICY
) -> tuple[Params, list[list[int]], list[list[str]]]:
    """Return the model after some rounds, and the reports of each in order, with metric names."""
    collector: Collector = PlainCollector(channel=channel, policy=policy, slab_bytes=0)
    plan: RoundPlan = RoundPlan(
        draw=SampledOpening(
            sampler=UniformSampler(), available=collector.available, seed=Seed(5)
        ).draw_cohort,
        policy=policy,
        collector=collector,
        strategy=algorithm,
        seed=Seed(5),
    )
    torch.manual_seed(0)
    state, orders = plan.init(Params.of(make_model())), list[list[int]]()
    told = list[list[str]]()
    for _ in range(NUM_ROUNDS):
        state, collected, _ = run_round(state, plan, attempt=0)
        rows = collected.participations
        for half in collected.train_metrics.values():  # the trainers report half their loss as well
            assert half == pytest.approx(rows.mean_loss() / 2)
        told.append(list(collected.train_metrics))
        orders.append([row.client_id for row in rows if row.status is Status.REPORTED])
    return state.params, orders, told


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(LOCAL),
        FedAdam(LOCAL, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
    ],
    ids=["fedavg", "fedadam"],
)
def test_the_gateway_gives_the_same_model_bit_for_bit(tmp_path: Path, algorithm: Strategy) -> None:
    """With dropout layers and over-selection: real sessions, TLS, signatures and uploads."""
    with over_grpc(tmp_path) as (channel, _):
        found, orders, told = run(algorithm, channel)
    assert [len(order) for order in orders] == [3, 3, 3]
    assert told == [["half"]] * 3, "metrics of any name travel"
    expected, replayed, _ = run(algorithm, in_memory(orders))
    assert replayed == orders
    assert torch.equal(found.vector, expected.vector)


@pytest.mark.slow
def test_another_order_of_arrival_would_be_noticed(tmp_path: Path) -> None:
    """The control: sums of floats depend on their order, and on the clients in them."""
    orders = [[0, 1, 2], [1, 2, 3], [3, 0, 1]]
    found, _, _ = run(FedAvg(LOCAL), in_memory(orders))
    other, _, _ = run(FedAvg(LOCAL), in_memory([orders[0], orders[1], [1, 0, 3]]))
    assert not torch.equal(found.vector, other.vector)


@pytest.mark.slow
def test_a_protocol_of_several_messages_keeps_state_at_the_clients(tmp_path: Path) -> None:
    """One round asks the same clients three times, and their momentum persists in between."""
    params = Params.of(make_model())

    def ask(channel: Channel) -> list[dict[int, Tensor]]:
        first = []
        for _ in range(2):
            request = TrainRequest(
                round_num=0,
                attempt=0,
                tensors=params.to_tensors(),
                order=tuple(params.layout.by_name),
                settings=settings_of(KEEPING),
                seed=3,
            )
            requests = dict.fromkeys(channel.available(), request)
            deltas = {}
            for arrival in ask_once(channel, requests, deadline_s=LONG_S):
                assert isinstance(arrival.reply, TrainReply)
                deltas[int(arrival.client_id)] = arrival.reply.lanes["delta"].clone()
            first.append(deltas)
        evaluation = EvaluateRequest(round_num=0, tensors=params.to_tensors())
        cohort = dict.fromkeys(channel.available(), evaluation)
        arrivals = ask_once(channel, cohort, deadline_s=LONG_S)
        replies = [arrival.reply for arrival in arrivals]
        assert all(isinstance(reply, EvaluateReply) for reply in replies)
        assert len(replies) == len(SIZES)
        return first

    with over_grpc(tmp_path) as (channel, _):
        found = ask(channel)
    expected = ask(in_memory([range(len(SIZES))]))
    for number in range(len(SIZES)):
        assert torch.equal(found[0][number], expected[0][number])
        assert torch.equal(found[1][number], expected[1][number])
        assert not torch.equal(found[0][number], found[1][number])  # the second has momentum


class WithTable(nn.Module):
    """A trainable head on a table and a frozen layer, which differ in each new network."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(0, 100, (5, 20_000)))
        self.base = nn.Linear(5, 20_000).requires_grad_(False)
        self.head = nn.Linear(20_000, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x @ (self.table / 100) + self.base(x))
        return out


@pytest.mark.slow
def test_what_stays_the_same_in_a_run_is_downloaded_once(tmp_path: Path) -> None:
    """Later rounds send only trainable tensors; clients use the coordinator's values.

    The same holds for what a strategy sends once. An evaluation in between changes nothing.
    """
    params = Params.of(WithTable())
    once = {"anchor": torch.ones(params.layout.num_trainable)}
    per_round, received, deltas = list[int](), list[int](), list[dict[int, Tensor]]()
    with over_grpc(tmp_path, WithTable) as (channel, opened):
        for round_num in range(3):
            request = TrainRequest(
                round_num=round_num,
                attempt=0,
                tensors=params.to_tensors(),
                order=tuple(params.layout.by_name),
                settings=settings_of(LOCAL),
                seed=3,
                broadcast=once,
                sent_once=("anchor",),
            )
            before, before_in = opened.counters.bytes_out, opened.counters.bytes_in
            requests = dict.fromkeys(channel.available(), request)
            found = {}
            for arrival in ask_once(channel, requests, deadline_s=LONG_S):
                assert isinstance(arrival.reply, TrainReply)
                found[int(arrival.client_id)] = arrival.reply.lanes["delta"].clone()
            deltas.append(found)
            per_round.append(opened.counters.bytes_out - before)
            received.append(opened.counters.bytes_in - before_in)
            evaluation = EvaluateRequest(
                round_num=round_num + 1,
                tensors=request.tensors,
                order=request.order,
                sent_once=once,
            )
            before = opened.counters.bytes_out
            list(ask_once(channel, dict.fromkeys(requests, evaluation), deadline_s=LONG_S))
            per_round.append(opened.counters.bytes_out - before)
    trains = params.layout.size * 4 * len(SIZES)
    assert params.constants.keys() == {"table", "base.weight", "base.bias"}
    apart = [*params.constants.values(), *once.values()]
    assert per_round[0] > sum(each.nbytes for each in apart) * len(SIZES)
    assert max(per_round[1:]) < 1.1 * trains
    assert max(received) < 1.1 * trains
    session = ClientSession(ClientId(0), OneAtATime(0, WithTable))
    reply = decode(session.handle(encode(request), b"")[0])
    assert isinstance(reply, TrainReply)
    assert torch.equal(reply.lanes["delta"], deltas[2][0])
