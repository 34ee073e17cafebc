"""Synchronous rounds are a special case of asynchronous ones, bit for bit.

It has a buffer as large as the cohort, as many clients in flight, and no staleness. This holds for
any clients, on each executor, and for any number of workers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.collector import CollectedRound, Collector, GlobalModel
from fedlearn.algorithms.download_compression import CompressedDownload
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.median import CoordinateMedian
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.quantization import Quantized
from fedlearn.algorithms.recipes import FedAdam, FedAvg, FedAvgM
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.staleness import StalenessWeight
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.client_metrics import EvaluationOutcome
from fedlearn.core.clock import VirtualClock
from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStatus
from fedlearn.rounds.round import (
    RoundPlan,
    ServerState,
    run_round,
)
from fedlearn.rounds.run import EarlyStopping, RunPlan, RunState, train
from fedlearn.simulation.behavior import Behavior, LognormalBandwidth
from fedlearn.simulation.choice import ExecutorKind, TrainingJob, make_executor
from fedlearn.simulation.cluster import launch
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.simulation.sessions import SimulatedSessions, trainers_on
from fedlearn.training.resident import Precision, ResidentModel
from tests.processes import Launcher

NUM_ROUNDS = 4
COHORT = 5
SIZES = [8, 14, 3, 11, 12, 1, 15, 6, 9, 10, 5, 23]
LOCAL = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.9, keep_momentum=True)
STRATEGIES: dict[str, Strategy] = {
    "fedavg": FedAvg(LOCAL),
    "fedadam": FedAdam(LOCAL, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
    "median": replace(FedAvg(LOCAL), aggregation=CoordinateMedian()),
}
KINDS = (ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP, ExecutorKind.FUSED)
POLICY = StragglerPolicy(
    num_wanted=COHORT,
    over_selection=1.0,
    deadline_s=math.inf,
    min_reports=COHORT,
    below_minimum=BelowMinimum.FAIL,
    max_retries=3,
)
AS_SYNCHRONOUS = Asynchrony(
    buffer_size=COHORT,
    concurrency=COHORT,
    max_staleness=0,
    staleness_weight=StalenessWeight.POLYNOMIAL,
    staleness_exponent=0.5,
    staleness_hinge=0,
)


STALE = Asynchrony(
    buffer_size=3,
    concurrency=7,
    max_staleness=4,
    staleness_weight=StalenessWeight.POLYNOMIAL,
    staleness_exponent=0.5,
    staleness_hinge=0,
)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def population() -> ArrayPopulation:
    generator, num_examples = torch.Generator().manual_seed(1), sum(SIZES)
    return ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *SIZES])),
        num_classes=3,
    )


def initial() -> Params:
    torch.manual_seed(0)
    return Params.of(make_model())


@dataclass(frozen=True)
class Simulation:
    """Some rounds, synchronous or asynchronous, as every worker runs them."""

    strategy: Strategy
    kind: ExecutorKind
    asynchrony: Asynchrony | None = None
    block_size: int = 3
    dropout_rate: float = 0.0
    policy: StragglerPolicy = POLICY
    over_memory: bool = False

    def plan(self, cluster: Cluster) -> RoundPlan:
        clients = population()
        job = TrainingJob(
            make_model=make_model,
            objective=CrossEntropy(),
            metrics={},
            local=LOCAL,
            broadcast={},
            population=clients,
            params=initial(),
            precision=Precision.FLOAT32,
            num_clients=30,
            num_together=30,
            seed=Seed(5),
        )
        engine = Engine(
            population=clients,
            behavior=Behavior(
                median_ms_per_example=15.0,
                speed_sigma=0.8,
                bandwidth=LognormalBandwidth(median_mbit_per_s=1.0, sigma=0.5),
                dropout_rate=self.dropout_rate,
                round_jitter_sigma=0.2,
            ),
            executor=make_executor(job, self.kind),
            policy=self.policy,
            cluster=cluster,
            block_size=self.block_size,
        )
        opening = SampledOpening(sampler=UniformSampler(), available=engine.available, seed=Seed(5))
        channel = SimulatedSessions(
            clients,
            engine.behavior,
            trainers_on(
                ResidentModel(
                    make_model,
                    CrossEntropy(),
                    device=torch.device("cpu"),
                    precision=Precision.FLOAT32,
                )
            ),
            work=LOCAL,
        ).channel()
        collector: Collector = engine
        if self.over_memory:
            collector = PlainCollector(channel=channel, policy=self.policy, slab_bytes=0)
        if self.asynchrony is not None:
            collector = replace(engine, round_mode=self.asynchrony)
            if self.over_memory:
                collector = PlainCollector(
                    channel=channel,
                    policy=self.policy,
                    round_mode=self.asynchrony,
                    slab_bytes=0,
                )
        return RoundPlan(
            draw=opening.draw_cohort if self.asynchrony is None else opening.draw,
            policy=self.policy,
            collector=collector,
            strategy=self.strategy,
            seed=Seed(5),
            is_retried=self.asynchrony is None,
        )

    def run(
        self, cluster: Cluster, *, num_rounds: int = NUM_ROUNDS
    ) -> tuple[ServerState, list[CollectedRound]]:
        plan, rounds = self.plan(cluster), list[CollectedRound]()
        state = plan.init(initial())
        for _ in range(num_rounds):
            state, collected, _ = run_round(state, plan, attempt=0)
            rounds.append(collected)
        return state, rounds

    def __call__(self, cluster: Cluster) -> dict[str, Tensor]:
        state, rounds = self.run(cluster)
        columns = ("client_ids", "codes", "durations_s", "num_examples", "losses")
        found = {
            f"{name} {number}": torch.from_numpy(np.array(getattr(each.participations, name)))
            for number, each in enumerate(rounds)
            for name in columns
        }
        durations_s = torch.tensor([each.duration_s for each in rounds], dtype=torch.float64)
        return {"params": state.params.vector, "durations": durations_s, **found}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name].nan_to_num(), value.nan_to_num())
        assert same, f"{name}: {found[name].tolist()}, not {value.tolist()}"


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_a_cohort_is_a_synchronous_round(
    kind: ExecutorKind, strategy: str, block_size: int
) -> None:
    """The same model and records, whatever state clients and server have."""
    synchronous = Simulation(STRATEGIES[strategy], kind, block_size=block_size)
    buffered = replace(synchronous, asynchrony=AS_SYNCHRONOUS)
    assert_same(buffered(Alone()), synchronous(Alone()))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_buffer_of_a_cohort_is_a_synchronous_round_over_sessions(strategy: str) -> None:
    """Real sessions through the wire format give the bits of the engine, synchronous or not."""
    engine = Simulation(STRATEGIES[strategy], ExecutorKind.SEQUENTIAL, block_size=1)
    sessions = replace(engine, over_memory=True)
    buffered = replace(sessions, asynchrony=AS_SYNCHRONOUS)
    assert_same(buffered(Alone()), sessions(Alone()))
    assert_same(buffered(Alone()), engine(Alone()))


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [math.inf, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_engine_equals_sessions_bit_for_bit(strategy: str, deadline_s: float) -> None:
    """Including stale updates, and clients that drop out, are late, or are given up."""
    engine = Simulation(
        STRATEGIES[strategy],
        ExecutorKind.SEQUENTIAL,
        replace(STALE, max_staleness=2),
        block_size=1,
        dropout_rate=0.2,
        policy=replace(POLICY, num_wanted=3, min_reports=3, deadline_s=deadline_s),
    )
    (expected, rounds), (found, others) = (
        each.run(Alone(), num_rounds=12) for each in (engine, replace(engine, over_memory=True))
    )
    assert torch.equal(found.params.vector, expected.params.vector)
    for one, other in zip(others, rounds, strict=True):
        assert one.staleness == other.staleness
        assert one.duration_s == pytest.approx(other.duration_s)
        left, right = one.participations, other.participations
        assert left.client_ids.tolist() == right.client_ids.tolist()
        assert left.codes.tolist() == right.codes.tolist()
        assert left.reasons == right.reasons
    told = {each.status for one in rounds for each in one.participations}
    given_up = Status.STALE if math.isinf(deadline_s) else Status.LATE
    assert told >= {Status.REPORTED, Status.FAILED, given_up}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_engine_equals_sessions_where_nobody_is_left_to_fill_a_buffer(strategy: str) -> None:
    """Some of all clients are late: in both, a buffer closes with the others."""
    num_clients, deadline_s = len(SIZES), 1.0
    everybody = replace(AS_SYNCHRONOUS, buffer_size=num_clients, concurrency=num_clients)
    policy = replace(POLICY, num_wanted=num_clients, min_reports=num_clients, deadline_s=deadline_s)
    engine = Simulation(
        STRATEGIES[strategy], ExecutorKind.SEQUENTIAL, everybody, block_size=1, policy=policy
    )
    (expected, rounds), (found, others) = (
        each.run(Alone()) for each in (engine, replace(engine, over_memory=True))
    )
    assert expected.round_num == NUM_ROUNDS
    assert torch.equal(found.params.vector, expected.params.vector)
    for one, other in zip(others, rounds, strict=True):
        assert 0 < one.count(Status.LATE) < num_clients
        assert one.staleness == other.staleness
        assert one.duration_s == pytest.approx(other.duration_s)
        assert one.participations.codes.tolist() == other.participations.codes.tolist()


def test_staleness_makes_another_run() -> None:
    """The control of the tests above: they would notice."""
    synchronous = Simulation(STRATEGIES["fedavg"], ExecutorKind.SEQUENTIAL)
    stale = replace(synchronous, asynchrony=replace(AS_SYNCHRONOUS, max_staleness=1))
    assert not torch.equal(stale(Alone())["params"], synchronous(Alone())["params"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [ExecutorKind.VMAP, ExecutorKind.FUSED])
def test_executors_agree_where_clients_train_different_models(
    kind: ExecutorKind, strategy: str
) -> None:
    """To 1e-6, with the same records, which include clients that drop out."""
    one = Simulation(
        STRATEGIES[strategy], ExecutorKind.SEQUENTIAL, STALE, block_size=1, dropout_rate=0.2
    )
    (expected, rounds), (found, others) = (
        one.run(Alone(), num_rounds=8),
        replace(one, kind=kind, block_size=3).run(Alone(), num_rounds=8),
    )
    torch.testing.assert_close(found.params.vector, expected.params.vector, rtol=0.0, atol=1e-6)
    assert found.pending == expected.pending
    assert [each.staleness for each in others] == [each.staleness for each in rounds]
    assert max(age for each in rounds for age in each.staleness) >= 2
    assert any(each.count(Status.FAILED) for each in rounds)


@dataclass
class Commits:
    """A store that keeps a copy of every commit, as it would be found after a crash."""

    records: list[RoundRecord] = field(default_factory=list)
    commits: list[tuple[Checkpoint, tuple[RoundRecord, ...]]] = field(default_factory=list)

    def append(self, record: RoundRecord) -> None:
        self.records.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
        self.commits.append((replace(checkpoint, tensors=tensors), tuple(self.records)))

    def finish(self, status: RunStatus, *, error: str) -> None:
        assert status is RunStatus.DONE, error


@dataclass(frozen=True)
class Length:
    """Evaluates a model by its norm."""

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        assert model.round_num > 0
        return EvaluationOutcome(metrics={"accuracy": float(model.params.vector.norm())})


MOMENTUM = FedAvgM(LOCAL, server_learning_rate=0.7, server_momentum=0.5)


def trained(
    checkpoint: Checkpoint | None, store: Commits, strategy: Strategy = MOMENTUM
) -> RunState:
    """Train, or resume, an asynchronous run of eight rounds."""
    body = Simulation(strategy, ExecutorKind.FUSED, STALE, dropout_rate=0.1)
    plan = RunPlan(
        round=body.plan(Alone()),
        evaluator=Length(),
        evaluate_every=1,
        early_stopping=EarlyStopping(
            metric="accuracy",
            direction="max",
            patience_rounds=None,
            min_improvement=0.0,
            target=None,
        ),
        num_rounds=8,
        checkpoint_every_s=0.0,
        clock=VirtualClock(),
    )
    return train(plan, initial(), checkpoint=checkpoint, store=store, after_round=lambda *_: False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [MOMENTUM, CompressedDownload(MOMENTUM, Quantized())], ids=["whole", "compressed"]
)
def test_a_run_killed_after_any_commit_ends_in_the_same_model(strategy: Strategy) -> None:
    """Bit for bit, with the same records: the state includes pending tasks and their models.

    If these are sent compressed, it includes what was sent, to be sent again.
    """
    whole = Commits()
    expected = trained(None, whole, strategy)
    parts = [each for each in whole.commits[-1][0].tensors if "/parts/" in each]
    assert bool(parts) == (strategy is not MOMENTUM)
    assert len(whole.commits) == 9
    assert expected.server.versions, "earlier models are still being trained"
    for checkpoint, records in whole.commits[:-1]:
        store = Commits(list(records))
        found = trained(checkpoint, store, strategy)
        assert torch.equal(found.server.params.vector, expected.server.params.vector)
        assert found.server.pending == expected.server.pending
        assert store.records == whole.records
        last, other = store.commits[-1][0], whole.commits[-1][0]
        assert last.values == other.values
        assert_same(last.tensors, other.tensors)


def test_a_checkpoint_without_who_is_in_flight_would_be_noticed() -> None:
    """The control: the resumed run ends with another model."""
    whole = Commits()
    expected = trained(None, whole)
    checkpoint, records = whole.commits[4]
    kept = {n: t for n, t in checkpoint.tensors.items() if not n.startswith("flight/")}
    assert len(kept) < len(checkpoint.tensors)
    found = trained(replace(checkpoint, tensors=kept), Commits(list(records)))
    assert not torch.equal(found.server.params.vector, expected.server.params.vector)


def main(folder: Path) -> None:
    """Run synchronous and buffered rounds with two workers."""
    for kind in KINDS:
        for name, asynchrony in (("synchronous", None), ("buffered", AS_SYNCHRONOUS)):
            body = Simulation(STRATEGIES["fedadam"], kind, asynchrony)
            save_file(launch(body, num_workers=2, environment={}), folder / f"{kind.value} {name}")


@pytest.mark.slow
def test_a_buffer_of_a_cohort_is_a_synchronous_round_on_two_workers(
    launcher: Launcher, tmp_path: Path
) -> None:
    """On every executor."""
    launcher.run(Path(__file__), str(tmp_path)).check_returncode()
    for kind in KINDS:
        found, expected = (
            load_file(tmp_path / f"{kind.value} {name}") for name in ("buffered", "synchronous")
        )
        assert_same(found, expected)


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]))
