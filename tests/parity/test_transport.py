"""The engine computes the same bits as real client sessions over the wire format."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.collector import CollectedRound, Collector
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.recipes import Algorithm, FedAdam, FedAvg, FedAvgM, FedProx
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.cluster import Alone
from fedlearn.core.features import require_single_input
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, ServerState, run_round
from fedlearn.simulation.behavior import (
    Behavior,
    LognormalBandwidth,
)
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.simulation.sessions import SimulatedSessions, trainers_on
from fedlearn.training.resident import Precision, ResidentModel

NUM_ROUNDS = 4
SIZES = [8, 14, 3, 11, 12, 2, 15, 6, 7, 10, 4, 23]  # no last batch of one example, for BatchNorm
LOCAL = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
KEEPING = replace(LOCAL, momentum=0.9, keep_momentum=True)
POLICY = StragglerPolicy(
    num_wanted=5,
    over_selection=1.6,
    deadline_s=2.5,
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)
BEHAVIOR = Behavior(
    median_ms_per_example=20.0,
    speed_sigma=0.8,
    bandwidth=LognormalBandwidth(median_mbit_per_s=0.1, sigma=0.5),
    dropout_rate=0.2,
    round_jitter_sigma=0.3,
)


class Functional(nn.Module):
    """Functional dropout, a frozen layer and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), 0.2, training=self.training)
        outputs: Tensor = self.frozen(torch.tanh(self.second(hidden)))
        return outputs


class Mixed(nn.Module):
    """Parameters and statistics of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7).bfloat16()
        self.head = nn.Linear(7, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.body(x.float())).bfloat16())
        outputs: Tensor = self.head(hidden.double())
        return outputs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(
        nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    "functional": Functional,
    "double": lambda: nn.Sequential(
        nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
    ).double(),
    "bfloat16": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16(),
    "mixed": Mixed,
}
ALGORITHMS = {
    "fedavg": FedAvg(LOCAL),
    "fedprox": FedProx(replace(LOCAL, weight_decay=0.01), proximal=0.5),
    "kept momentum": FedAvg(KEEPING),
    "fedavgm": FedAvgM(replace(LOCAL, momentum=0.9), server_learning_rate=0.5, server_momentum=0.5),
    "fedadam": FedAdam(KEEPING, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
}


@dataclass(frozen=True)
class Case:
    """A simulation that any collector can run."""

    make_model: Callable[[], nn.Module]
    algorithm: Algorithm
    population: ArrayPopulation
    policy: StragglerPolicy = POLICY
    behavior: Behavior = BEHAVIOR

    def model(self) -> ResidentModel:
        return ResidentModel(
            self.make_model,
            CrossEntropy(),
            device=torch.device("cpu"),
            precision=Precision.FLOAT32,
        )

    def engine(self, block_size: int = 1) -> Collector:
        return Engine(
            population=self.population,
            behavior=self.behavior,
            executor=SequentialExecutor(self.model()),
            policy=self.policy,
            cluster=Alone(),
            block_size=block_size,
        )

    def sessions(self, *, slab_bytes: int = 0) -> Collector:
        return PlainCollector(
            channel=SimulatedSessions(
                self.population,
                self.behavior,
                trainers_on(self.model()),
                work=self.algorithm.local.work,
            ).channel(),
            policy=self.policy,
            slab_bytes=slab_bytes,
        )

    def run(self, collector: Collector) -> tuple[ServerState, list[CollectedRound]]:
        plan: RoundPlan = RoundPlan(
            draw=SampledOpening(
                sampler=UniformSampler(), available=collector.available, seed=Seed(5)
            ).draw_cohort,
            policy=self.policy,
            collector=collector,
            strategy=self.algorithm,
            seed=Seed(5),
        )
        torch.manual_seed(0)
        state, rounds = plan.init(Params.of(self.make_model())), []
        for _ in range(NUM_ROUNDS):
            state, collected, _ = run_round(state, plan, attempt=0)
            rounds.append(collected)
        return state, rounds


def case(model: str, algorithm: str) -> Case:
    generator, num_examples = torch.Generator().manual_seed(1), sum(SIZES)
    dtype = Params.of(MODELS[model]()).vector.dtype
    population = ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator).to(dtype),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *SIZES])),
        num_classes=3,
    )
    return Case(MODELS[model], ALGORITHMS[algorithm], population)


def assert_same_rounds(left: list[CollectedRound], right: list[CollectedRound]) -> None:
    """Compare reports and failures in order, late clients, and times."""
    for one, other in zip(left, right, strict=True):
        assert describe_rows(one) == describe_rows(other)
        assert late(one) == late(other)
        assert one.duration_s == other.duration_s


def describe_rows(collected: CollectedRound) -> list[str]:
    return [repr(p) for p in collected.participations if p.status is not Status.LATE]


def late(collected: CollectedRound) -> set[int]:
    return {p.client_id for p in collected.participations if p.status is Status.LATE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        *[(model, "kept momentum") for model in MODELS],
        *[("dropout", algorithm) for algorithm in ALGORITHMS if algorithm != "kept momentum"],
        ("batch norm", "fedadam"),
        ("double", "fedadam"),
        ("bfloat16", "fedprox"),
        ("mixed", "fedprox"),
    ],
)
def test_the_engine_equals_sessions_bit_for_bit(model: str, algorithm: str) -> None:
    """Over rounds with late and failing clients, whatever state client and server have."""
    simulated = case(model, algorithm)
    expected, sessions = simulated.run(simulated.sessions())
    found, engine = simulated.run(simulated.engine())
    assert torch.equal(found.params.vector, expected.params.vector)
    assert found.params.constants.keys() == expected.params.constants.keys()
    for name, value in expected.strategy_state.items():
        assert torch.equal(found.strategy_state[name], value)
    assert_same_rounds(engine, sessions)
    statuses = {p.status for collected in engine for p in collected.participations}
    assert statuses == set(Status) - {Status.STALE}, "the case has reports, late and failed clients"


@pytest.mark.parametrize("block_size", [2, 3, 100])
def test_larger_blocks_differ_by_rounding_alone(block_size: int) -> None:
    """To 1e-6 after several rounds; the same clients report."""
    simulated = case("dropout", "kept momentum")
    expected, sessions = simulated.run(simulated.sessions())
    found, engine = simulated.run(simulated.engine(block_size))
    torch.testing.assert_close(found.params.vector, expected.params.vector, rtol=0.0, atol=1e-6)
    for one, other in zip(engine, sessions, strict=True):
        assert [p.client_id for p in one.participations if p.status is Status.REPORTED] == [
            p.client_id for p in other.participations if p.status is Status.REPORTED
        ]


@pytest.mark.parametrize("num_rows", [2, 3, 100])
def test_a_slab_of_replies_differs_by_rounding_alone(num_rows: int) -> None:
    """To 1e-6 after several rounds; the same clients report."""
    simulated = case("dropout", "kept momentum")
    expected, engine = simulated.run(simulated.engine())
    slab_bytes = num_rows * expected.params.vector.nbytes
    found, sessions = simulated.run(simulated.sessions(slab_bytes=slab_bytes))
    torch.testing.assert_close(found.params.vector, expected.params.vector, rtol=0.0, atol=1e-6)
    for one, other in zip(engine, sessions, strict=True):
        assert [p.client_id for p in one.participations if p.status is Status.REPORTED] == [
            p.client_id for p in other.participations if p.status is Status.REPORTED
        ]


@pytest.mark.parametrize("diverging", [1, 3])
def test_diverging_clients_are_quarantined_alike(diverging: int) -> None:
    """Examples of 1e30 overflow in training; both collectors name the same clients."""
    simulated = case("mlp", "fedavg")
    features = require_single_input(simulated.population.features).clone()
    offsets = np.cumsum([0, *SIZES])
    for client in range(diverging):
        features[offsets[client] : offsets[client + 1]] *= 1e30
    wild = replace(
        simulated,
        population=replace(simulated.population, features=features),
        behavior=replace(BEHAVIOR, dropout_rate=0.0),
        policy=replace(POLICY, over_selection=2.4, deadline_s=100.0),
    )
    expected, sessions = wild.run(wild.sessions())
    found, engine = wild.run(wild.engine())
    assert_same_rounds(engine, sessions)
    assert sum(collected.count(Status.FAILED) for collected in engine) > 0
    assert bool(torch.isfinite(found.params.vector).all())
    torch.testing.assert_close(found.params.vector, expected.params.vector, rtol=0.0, atol=1e-6)


def test_clients_that_arrive_together_are_recorded_alike() -> None:
    """Equal devices with equal work, so that all replies are ties, some of them failures."""
    simulated = case("mlp", "fedavg")
    partition = Partition(np.arange(108), np.arange(0, 109, 9))
    tied = replace(
        simulated,
        population=replace(simulated.population, partition=partition),
        behavior=Behavior(
            median_ms_per_example=10.0,
            speed_sigma=0.0,
            bandwidth=LognormalBandwidth(median_mbit_per_s=1.0, sigma=0.0),
            dropout_rate=0.4,
            round_jitter_sigma=0.0,
        ),
        policy=replace(POLICY, num_wanted=3, over_selection=3.0),
    )
    expected, sessions = tied.run(tied.sessions())
    found, engine = tied.run(tied.engine())
    assert torch.equal(found.params.vector, expected.params.vector)
    assert_same_rounds(engine, sessions)


def test_another_seed_would_be_noticed() -> None:
    """The control: another shuffle alone changes the bits of the model."""
    simulated = case("mlp", "fedavg")
    expected, _ = simulated.run(simulated.sessions())
    other = replace(simulated, algorithm=FedAvg(replace(LOCAL, shuffle=False)))
    found, _ = other.run(other.engine())
    assert not torch.equal(found.params.vector, expected.params.vector)
