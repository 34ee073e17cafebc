"""A run over Flower's messages equals one in memory and in the engine, bit for bit.

With secure aggregation it does so within the error of fixed point, whose rounding is random.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from flwr.app import Message
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.algorithms.collector import Collector, RoundRequest, collect_from
from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.recipes import FedAdam, FedAvg, FedBuff
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.client.flower import Node, client_app
from fedlearn.client.policy import Policy, SecureAggregationPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.cluster import Alone
from fedlearn.core.codec import decode
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId, SecureRequest
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.identity.identity import Identity
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import (
    RoundPlan,
    ServerState,
    run_round,
)
from fedlearn.rounds.secure import SecureCollector
from fedlearn.secagg import messages
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import Adversary, Assumptions, derive
from fedlearn.secagg.plan import SecurePlan
from fedlearn.simulation.behavior import DeviceRound
from fedlearn.simulation.choice import TrainingJob
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.simulation.secure import SimulatedIdentities
from fedlearn.simulation.sessions import SimulatedSessions, trainers_on
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import (
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)
from fedlearn.transport.base import Channel
from fedlearn.transport.flower import FlowerChannel
from tests.grid import LocalGrid

SIZES = [8, 14, 3, 11, 12, 7]
NUM_ROUNDS = 3
LOCAL = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
KEEPING = replace(LOCAL, momentum=0.9, keep_momentum=True)
POLICY = StragglerPolicy(
    num_wanted=4,
    over_selection=1.0,
    deadline_s=100.0,
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)
OBJECTIVE = CrossEntropy()
COHORT = POLICY.num_wanted
SECURE = SecurePlan(
    parameters=derive(
        COHORT,
        assumptions=Assumptions(
            adversary=Adversary.ACTIVE_SERVER,
            topology=Topology.COMPLETE,
            corruption=0.1,
            dropout=0.3,
            sigma_bits=40,
            eta_bits=30,
        ),
    ),
    min_survivors=3,
    clip_norm=100.0,
    statistics_norm=100.0,
    max_loss=100.0,
    max_examples=20,
    by_examples=True,
    modulus_bits=40,
)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


@dataclass(frozen=True)
class Spread:
    """Devices whose replies are a second apart, in an order that changes each round."""

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        places = (work.client_ids * 5 + work.round_num * 7) % len(SIZES)
        return 1.0 + places.astype(np.float64)

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.zeros(len(work.client_ids), bool)


@dataclass
class MortalGrid(LocalGrid):
    """Nodes that take as long as their devices, and may die.

    Attributes:
        dies_at: By client, the type of message at which its node dies: it no longer answers.
        forgets: Whether nodes lose the state that sessions keep between messages.
        dead: Clients whose nodes have died.
    """

    dies_at: Mapping[int, type] = field(default_factory=dict)
    forgets: bool = False
    dead: set[int] = field(default_factory=set)

    def answered(self, client: int, message: Message) -> tuple[float, Message]:
        if self._dies(client, message):
            return math.inf, message
        _, reply = super().answered(client, message)
        if self.forgets:
            kept = self.context(message.metadata.dst_node_id).state
            kept.config_records["fedlearn.state"].pop("state", None)
        header = message.content.config_records["fedlearn"]
        trains = header["kind"] == "TrainRequest"
        return self._latency_s(client, header["round_num"]) if trains else 0.0, reply

    def _dies(self, client: int, message: Message) -> bool:
        payload = message.content.array_records["fedlearn.payload"]["message"].data
        if client in self.dies_at and payload[:1] and message.metadata.message_type == "train":
            request, kind = decode(payload), self.dies_at[client]
            assert isinstance(request, SecureRequest)
            personal = message.content.config_records["fedlearn"]["personal"]
            assert isinstance(personal, bytes)
            if isinstance(messages.decode(request.message or personal), kind):
                self.dead.add(client)
        return client in self.dead

    def _latency_s(self, client: int, round_num: object) -> float:
        assert isinstance(round_num, int)
        work = DeviceRound(
            client_ids=np.asarray([client]),
            round_num=round_num,
            attempt=0,
            num_examples_processed=np.zeros(1, np.int64),
            download_bytes=0,
            upload_bytes=0,
            seed=Seed(0),
        )
        return float(Spread().durations_s(work)[0])


def population() -> ArrayPopulation:
    generator, num_examples = torch.Generator().manual_seed(1), sum(SIZES)
    return ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *SIZES])),
        num_classes=3,
    )


def resident(make: Callable[[], nn.Module] = make_model) -> ResidentModel:
    cpu = torch.device("cpu")
    return ResidentModel(make, OBJECTIVE, device=cpu, precision=Precision.FLOAT32)


def job(local: LocalUpdate, make: Callable[[], nn.Module]) -> TrainingJob:
    """Build the job of an executor, with the clients here and the test's model."""
    return TrainingJob(
        make_model=make,
        objective=OBJECTIVE,
        metrics={},
        local=local,
        population=population(),
        broadcast={},
        params=Params.of(make()),
        precision=Precision.FLOAT32,
        num_clients=len(SIZES),
        num_together=len(SIZES),
        seed=Seed(5),
    )


def grid_of_nodes(
    around: Callable[[TorchTrainer], LocalTrainer] = lambda trainer: trainer,
) -> MortalGrid:
    data = population()

    def make_trainer(node: Node) -> LocalTrainer:
        rows = data.load(np.asarray([node.client_id]))
        index = torch.from_numpy(rows.rows)
        features, labels = require_single_input(rows.features)[index], rows.labels[index]
        trainer = TorchTrainer.of(make_model, features, labels, objective=OBJECTIVE, device="cpu")
        return around(trainer)

    policy = Policy(secure_aggregation=SecureAggregationPolicy(min_cohort=SECURE.min_survivors))
    return MortalGrid(
        VirtualClock(),
        client_app(make_trainer, policy_of=lambda _: policy),
        nodes={1000 + client: client for client in range(len(SIZES))},
    )


def channel_over(grid: LocalGrid, *, coordinator_key: bytes = b"") -> FlowerChannel:
    return FlowerChannel(
        grid=grid,
        run_id="flower-7",
        clock=grid.clock,
        patience_s=60.0,
        coordinator_key=coordinator_key,
        start=lambda work: work(),
    )


def over_flower(algorithm: Strategy, grid: LocalGrid | None = None) -> Collector:
    channel = channel_over(grid or grid_of_nodes())
    return PlainCollector(channel=channel, policy=POLICY, slab_bytes=0)


def securely_over_flower(algorithm: Strategy, grid: LocalGrid | None = None) -> SecureCollector:
    signer = Identity.create()
    channel = channel_over(grid or grid_of_nodes(), coordinator_key=signer.public_key)
    return SecureCollector(
        channel=channel,
        policy=POLICY,
        plan=SECURE,
        run_id=bytes(16),
        signer=signer,
        directory=lambda: channel.identity_keys,
        sends_directory=True,
        stage_deadline_s=50.0,
        num_threads=1,
    )


def securely_in_memory(algorithm: Strategy) -> Collector:
    identities = SimulatedIdentities(len(SIZES), SECURE)
    return SecureCollector(
        channel=SimulatedSessions(
            population(),
            Spread(),
            trainers_on(resident()),
            work=algorithm.local.work,
            identities=identities,
        ).channel(),
        policy=POLICY,
        plan=SECURE,
        run_id=bytes(16),
        signer=identities.coordinator[0],
        directory=lambda: identities,
        sends_directory=False,
        stage_deadline_s=50.0,
        num_threads=1,
    )


def in_memory(algorithm: Strategy, make: Callable[[], nn.Module] = make_model) -> PlainCollector:
    return PlainCollector(
        channel=SimulatedSessions(
            population(), Spread(), trainers_on(resident(make)), work=algorithm.local.work
        ).channel(),
        policy=POLICY,
        slab_bytes=0,
    )


def by_the_engine(algorithm: Strategy) -> Collector:
    return Engine(
        population=population(),
        behavior=Spread(),
        executor=SequentialExecutor(resident()),
        policy=POLICY,
        cluster=Alone(),
        block_size=1,
    )


def run(
    algorithm: Strategy,
    collector: Collector,
    *,
    policy: StragglerPolicy = POLICY,
    make: Callable[[], nn.Module] = make_model,
) -> tuple[Params, list[int]]:
    """Return the model after some rounds, and the clients that reported, in order."""
    state, reported = ran(algorithm, collector, policy=policy, make=make)
    return state.params, reported


def ran(
    algorithm: Strategy,
    collector: Collector,
    *,
    policy: StragglerPolicy = POLICY,
    make: Callable[[], nn.Module] = make_model,
) -> tuple[ServerState, list[int]]:
    """Return the state after some rounds, and the clients that reported, in order."""
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
    state, reported = plan.init(Params.of(make())), list[int]()
    for _ in range(NUM_ROUNDS):
        state, collected, _ = run_round(state, plan, attempt=0)
        reported += [ClientId(p.client_id) for p in collected.participations]
    return state, reported


@pytest.mark.parametrize("other", [in_memory, by_the_engine])
@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(KEEPING),
        FedAdam(LOCAL, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
    ],
    ids=["kept momentum", "fedadam"],
)
def test_flower_gives_the_same_model_bit_for_bit(
    algorithm: Strategy, other: Callable[[Strategy], Collector]
) -> None:
    """With dropout layers, shuffling, and momentum in Context.state between rounds."""
    expected, order = run(algorithm, other(algorithm))
    found, found_order = run(algorithm, over_flower(algorithm))
    assert found_order == order
    assert torch.equal(found.vector, expected.vector)


def run_buffered(channel: Channel) -> list[tuple[Params, dict[int, int], list[int]]]:
    """Return the model, the staleness and the reporting clients of each asynchronous round."""
    limits = FedBuff(KEEPING, buffer_size=2, concurrency=4, max_staleness=2).asynchrony
    policy = replace(POLICY, num_wanted=2)
    collector = PlainCollector(channel=channel, policy=policy, round_mode=limits, slab_bytes=0)
    opening = SampledOpening(sampler=UniformSampler(), available=collector.available, seed=Seed(5))
    plan = RoundPlan(
        draw=opening.draw,
        policy=policy,
        collector=collector,
        strategy=FedAvg(KEEPING),
        seed=Seed(5),
        is_retried=False,
    )
    torch.manual_seed(0)
    state, rounds = plan.init(Params.of(make_model())), []
    for _ in range(6):
        state, collected, _ = run_round(state, plan, attempt=0)
        reported = [
            int(each.client_id)
            for each in collected.participations
            if each.status is Status.REPORTED
        ]
        rounds.append((state.params, dict(collected.staleness), reported))
    collector.close()
    return rounds


@pytest.mark.slow
def test_asynchronous_rounds_over_flower_give_the_same_model_bit_for_bit() -> None:
    """One exchange for many requests, stale updates, and clients that are given up."""
    sessions = SimulatedSessions(
        population(), Spread(), trainers_on(resident()), work=KEEPING
    ).channel()
    expected, found = run_buffered(sessions), run_buffered(channel_over(grid_of_nodes()))
    for (model, staleness, reported), (other, others, order) in zip(found, expected, strict=True):
        assert (staleness, reported) == (others, order)
        assert torch.equal(model.vector, other.vector)
    assert max(age for _, staleness, _ in found for age in staleness) >= 1


class Telling:
    """A trainer that reports another metric besides the loss."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer, self.honors = trainer, trainer.honors

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        result = self._trainer.train(tensors, context=context)
        return replace(result, metrics={**result.metrics, "half": result.metrics["loss"] / 2})

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return self._trainer.evaluate(tensors, control=control)


def test_training_metrics_of_any_name_travel_over_flower() -> None:
    """They are weighted by examples over the reports, like the loss."""
    algorithm = FedAvg(LOCAL)
    collector = over_flower(algorithm, grid_of_nodes(Telling))
    cohort = list(collector.available())[:COHORT]
    collected = collect_from(collector, cohort, request_of(algorithm))
    half = collected.participations.mean_loss() / 2
    assert collected.train_metrics == {"half": pytest.approx(half)}


def test_state_that_is_lost_would_be_noticed() -> None:
    """The control: clients that forget their momentum end with another model."""
    expected, _ = run(FedAvg(KEEPING), in_memory(FedAvg(KEEPING)))
    forgetting = FedAvg(replace(KEEPING, keep_momentum=False))
    found, _ = run(forgetting, over_flower(forgetting))
    assert not torch.equal(found.vector, expected.vector)


# ---- Secure aggregation -------------------------------------------------------------------


def rounding_error() -> float:
    """Return the largest change of a round's mean by fixed point."""
    lane = SECURE.lanes(Params.of(make_model()).layout)[0]
    total = lane.largest_error(COHORT)
    return total * SECURE.max_examples / (SECURE.min_survivors * min(SIZES))


def request_of(algorithm: Strategy) -> RoundRequest:
    """Build the request of a first round."""
    torch.manual_seed(0)
    return RoundRequest(
        round_num=0,
        attempt=0,
        params=Params.of(make_model()),
        strategy=algorithm,
        broadcast={},
        seed=3,
    )


@pytest.mark.slow
@pytest.mark.parametrize("other", [in_memory, securely_in_memory])
def test_a_secure_run_over_flower_is_that_of_memory(
    other: Callable[[Strategy], Collector],
) -> None:
    """Both the plain and the secure one, with momentum next to the session in Context.state.

    Rounding in one round changes the model that the next one trains, hence the factor.
    """
    algorithm = FedAvg(KEEPING)
    expected, order = run(algorithm, other(algorithm))
    found, found_order = run(algorithm, securely_over_flower(algorithm))
    assert sorted(found_order) == sorted(order)
    assert 0.0 < rounding_error() < 1e-5
    assert float((found.vector - expected.vector).abs().max()) <= 20 * rounding_error() + 1e-6


@pytest.mark.parametrize(
    "stage", [messages.SignedTerms, messages.Roster, messages.Packets, messages.Survivors]
)
def test_a_node_that_dies_in_a_session_drops_out_of_the_sum(stage: type) -> None:
    """At each stage, with or without its vector in the sum, the round continues with the others."""
    algorithm, dead = FedAvg(LOCAL), ClientId(1)
    cohort = [ClientId(client) for client in range(COHORT)]
    grid = grid_of_nodes()
    grid.dies_at = {dead: stage}
    collector = securely_over_flower(algorithm, grid)
    plain = in_memory(algorithm)
    assert set(cohort) <= set(collector.available())
    collected = collect_from(collector, cohort, asked := request_of(algorithm))
    is_in_the_sum = stage is messages.Survivors
    counted = cohort if is_in_the_sum else [each for each in cohort if each != dead]
    assert grid.dead == {dead}
    reported = [p.client_id for p in collected.participations if p.status is Status.REPORTED]
    assert sorted(reported) == counted
    expected = collect_from(plain, counted, asked).aggregate
    assert expected is not None
    assert collected.aggregate is not None
    found, wanted = (each.lanes["delta"] for each in (collected.aggregate, expected))
    assert torch.allclose(found, wanted, atol=2 * rounding_error() + 1e-6, rtol=0.0)


def test_a_session_that_is_lost_between_messages_ends() -> None:
    """The control: each message of a session needs the state stored in Context.state."""
    algorithm, cohort = FedAvg(LOCAL), [ClientId(client) for client in range(COHORT)]
    grid = grid_of_nodes()
    grid.forgets = True
    collector = securely_over_flower(algorithm, grid)
    collector.available()
    collected = collect_from(collector, cohort, request_of(algorithm))
    assert collected.count(Status.REPORTED) == 0
