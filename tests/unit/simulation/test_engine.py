"""The engine as a collector: which clients are trained, in which blocks, and the aggregate."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import dedent
from typing import TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedlearn
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds
from fedlearn.algorithms.client_state import ClientStates
from fedlearn.algorithms.collector import CollectedRound, RoundRequest, collect_from
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Bounded
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.core.soundness import describe_unsound, is_sound
from fedlearn.simulation.behavior import DeviceRound
from fedlearn.simulation.engine import Engine, deal, share_client_states
from fedlearn.simulation.executors.base import TrainedBlock, Work
from fedlearn.simulation.population import BootstrapPopulation

ResultT = TypeVar("ResultT")
PARAMS = Params.of(nn.Linear(2, 1, bias=False))
LOCAL = LocalSgd(epochs=2, batch_size=2, learning_rate=0.1)
NUM_CLIENTS = 20


@dataclass(frozen=True)
class Table:
    """Devices whose durations and failures are listed in a table."""

    duration_s: Mapping[int, float] = field(default_factory=dict)
    failing: frozenset[int] = frozenset()
    calls: list[tuple[int, int, int]] = field(default_factory=list)

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        most = int(work.num_examples_processed.max(initial=0))
        self.calls.append((work.download_bytes, work.upload_bytes, most))
        return np.array([self.duration_s.get(c, float(c)) for c in work.client_ids.tolist()])

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.isin(work.client_ids, list(self.failing))


@dataclass
class Recording:
    """An executor whose delta is the client's id; some clients diverge."""

    diverging: frozenset[int] = frozenset()
    value: float = math.nan
    keeps: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    client_states: list[dict[int, float]] = field(default_factory=list)

    def train(self, work: Work) -> TrainedBlock:
        ids = work.client_ids.tolist()
        self.blocks.append(ids)
        values = [self.value if c in self.diverging else float(c) for c in ids]
        deltas_KP = torch.tensor(values)[:, None].expand(-1, 2).contiguous()
        if self.keeps:
            self.client_states.append(
                dict(zip(ids, work.client_state["velocity"][:, 0].tolist(), strict=True))
            )
        return TrainedBlock(
            deltas_KP=deltas_KP,
            lanes={},
            losses_K=np.asarray(ids) / 10.0,
            num_examples_K=work.num_examples(),
            client_state={"velocity": deltas_KP.clone()} if self.keeps else {},
        )


def population() -> BootstrapPopulation:
    return BootstrapPopulation(
        features=torch.zeros(5, 2),
        labels=torch.zeros(5, dtype=torch.int64),
        num_classes=1,
        num_clients=NUM_CLIENTS,
        examples_per_client=3,
        seed=Seed(0),
    )


def collect(
    executor: Recording,
    cohort: list[int],
    *,
    behavior: Table | None = None,
    block_size: int = 4,
    num_wanted: int = 6,
    deadline_s: float = 100.0,
    client_states: ClientStates | None = None,
    bounds: UpdateBounds = GENEROUS,
) -> CollectedRound:
    policy = StragglerPolicy(
        num_wanted=num_wanted,
        over_selection=1.0,
        deadline_s=deadline_s,
        min_reports=1,
        below_minimum=BelowMinimum.SKIP,
        max_retries=0,
    )
    engine = Engine(
        population=population(),
        behavior=behavior or Table(),
        executor=executor,
        policy=policy,
        cluster=Alone(),
        block_size=block_size,
    )
    request = RoundRequest(
        round_num=0,
        attempt=0,
        params=PARAMS,
        strategy=Bounded(FedAvg(KEEPING if executor.keeps else LOCAL), bounds),
        broadcast={},
        seed=0,
        client_states=client_states or {},
    )
    return collect_from(engine, [ClientId(c) for c in cohort], request)


def mean_of(collected: CollectedRound) -> Tensor:
    assert collected.aggregate is not None
    return collected.aggregate.lanes["delta"]


def with_status(collected: CollectedRound, status: Status) -> list[int]:
    return [p.client_id for p in collected.participations if p.status is status]


def test_only_the_clients_that_the_round_needs_are_trained() -> None:
    """Six of nine, in blocks of at most four."""
    executor = Recording()
    collected = collect(executor, [8, 7, 6, 5, 4, 3, 2, 1, 0])
    assert executor.blocks == [[0, 1, 2, 3], [4, 5]]
    assert with_status(collected, Status.REPORTED) == [0, 1, 2, 3, 4, 5]
    assert with_status(collected, Status.LATE) == [6, 7, 8]
    assert mean_of(collected).tolist() == [2.5, 2.5]
    assert collected.duration_s == 5.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block_size", [1, 4, 100])
def test_diverged_clients_are_quarantined_and_replaced(value: float, block_size: int) -> None:
    """The record names each of them; the next clients to arrive are trained in further waves."""
    executor = Recording(diverging=frozenset({1, 4, 6}), value=value)
    collected = collect(executor, list(range(12)), block_size=block_size)
    assert with_status(collected, Status.REPORTED) == [0, 2, 3, 5, 7, 8]
    assert with_status(collected, Status.FAILED) == [1, 4, 6]
    assert with_status(collected, Status.LATE) == [9, 10, 11]
    reasons = {p.reason for p in collected.participations if p.status is Status.FAILED}
    assert reasons == {describe_unsound("delta")}
    assert mean_of(collected).tolist() == pytest.approx([25 / 6] * 2)
    assert [c for block in executor.blocks for c in block] == list(range(9))


def test_an_update_counts_up_to_the_bound_of_its_norm() -> None:
    """With two numbers each: 7e7 is within 1e8 and 8e7 is not, whatever the block sums to."""
    for value, statuses in (7e7, [2, 0]), (8e7, [1, 1]):
        collected = collect(Recording(diverging=frozenset({1}), value=value), [0, 1])
        assert [collected.count(each) for each in (Status.REPORTED, Status.FAILED)] == statuses
    mean = mean_of(collect(Recording(diverging=frozenset({1}), value=7e7), [0, 1]))
    assert mean.tolist() == pytest.approx([3.5e7, 3.5e7])


@pytest.mark.parametrize("block_size", [1, 4, 100])
def test_bounds_of_ones_own_hold_in_blocks_of_any_size(block_size: int) -> None:
    """Client 3's delta has the norm sqrt(18); every client trains on 3 examples."""
    longest = UpdateBounds(max_norm=4.3, max_examples=3)
    collected = collect(Recording(), list(range(6)), block_size=block_size, bounds=longest)
    assert with_status(collected, Status.REPORTED) == [0, 1, 2, 3]
    reasons = {p.reason for p in collected.participations if p.status is Status.FAILED}
    assert reasons == {longest.too_long("delta")}
    assert mean_of(collected).tolist() == [1.5, 1.5]
    light = UpdateBounds(max_norm=4.3, max_examples=2)
    collected = collect(Recording(), list(range(6)), block_size=block_size, bounds=light)
    assert collected.count(Status.FAILED) == 6
    assert {p.reason for p in collected.participations} == {light.too_heavy(3)}


def test_without_a_bound_large_finite_updates_are_not_taken_for_infinite() -> None:
    """1e19 is accepted where a clip bounds it, although its square overflows float32."""
    assert is_sound(torch.full((2,), 1e19))
    assert not is_sound(torch.full((2,), 1e21))
    assert not is_sound(torch.full((2,), 1e19), max_norm=1e18)


@pytest.mark.parametrize("value", [1e21, 3e38, -3e38])
def test_absurdly_large_updates_are_quarantined(value: float) -> None:
    """A finite delta whose weighted sum could overflow never reaches the aggregate."""
    collected = collect(Recording(diverging=frozenset({1}), value=value), [0, 1])
    assert with_status(collected, Status.FAILED) == [1]
    assert mean_of(collected).abs().max() < 10.0


def test_when_all_diverge_nothing_is_aggregated() -> None:
    """The round has no aggregate, and the record names the clients."""
    collected = collect(Recording(diverging=frozenset(range(4))), [0, 1, 2, 3])
    assert collected.count(Status.FAILED) == 4
    assert collected.aggregate is None


def test_who_fails_or_is_late_is_not_trained() -> None:
    """Their examples are not even loaded."""
    executor = Recording()
    behavior = Table(failing=frozenset({0, 2}), duration_s={5: math.inf})
    collected = collect(executor, list(range(8)), behavior=behavior, deadline_s=4.0)
    assert [c for block in executor.blocks for c in block] == [1, 3, 4]
    assert with_status(collected, Status.FAILED) == [0, 2]
    assert with_status(collected, Status.LATE) == [6, 7, 5]
    assert collected.duration_s == 4.0


def test_an_empty_cohort_trains_nobody() -> None:
    """Poisson sampling may choose no clients."""
    executor = Recording()
    collected = collect(executor, [])
    assert executor.blocks == []
    assert len(collected.participations) == 0
    assert collected.duration_s == 0.0


def test_devices_are_told_what_they_transfer_and_compute() -> None:
    """The model's size both ways, and the number of examples times the number of epochs."""
    behavior = Table()
    collect(Recording(), [0, 1], behavior=behavior)
    assert behavior.calls == [(PARAMS.num_bytes, PARAMS.num_bytes, 3 * LOCAL.epochs)]


def test_reports_have_their_losses_and_examples() -> None:
    """Also clients in later blocks."""
    collected = collect(Recording(), list(range(6)), block_size=2)
    assert [p.loss for p in collected.participations] == [c / 10 for c in range(6)]
    assert {p.num_examples for p in collected.participations} == {3}


def test_the_population_is_available_without_a_table() -> None:
    """The ids of a million clients are a range."""
    engine = Engine(
        population=population(),
        behavior=Table(),
        executor=Recording(),
        policy=StragglerPolicy(
            num_wanted=1,
            over_selection=1.0,
            deadline_s=1.0,
            min_reports=1,
            below_minimum=BelowMinimum.SKIP,
            max_retries=0,
        ),
        cluster=Alone(),
        block_size=1,
    )
    everyone = engine.available()
    assert len(everyone) == NUM_CLIENTS
    assert (everyone[0], everyone[-1]) == (0, NUM_CLIENTS - 1)


KEEPING = replace(LOCAL, momentum=0.9, keep_momentum=True)


def test_what_clients_keep_passes_through_a_round_as_a_value() -> None:
    """Trained clients have a new state; diverged clients and those not asked keep the old one."""
    before = {c: {"velocity": torch.full((2,), -1.0)} for c in (0, 1, 15)}
    recording = Recording(diverging=frozenset({1}), keeps=True)
    after = collect(recording, [0, 1, 2], client_states=before).client_states
    assert {c: own["velocity"].tolist() for c, own in after.items()} == {
        0: [0.0, 0.0],
        1: [-1.0, -1.0],
        15: [-1.0, -1.0],
        2: [2.0, 2.0],
    }
    assert recording.client_states == [{0: -1.0, 1: -1.0, 2: 0.0}]
    assert all(own["velocity"].tolist() == [-1.0, -1.0] for own in before.values())


@dataclass(frozen=True)
class TwoWorkers:
    """The first of two workers: a sum adds the other worker's tensors."""

    others: Tensor
    rank: int = 0
    world_size: int = 2

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.add_(self.others)

    def broadcast(self, value: ResultT | None) -> ResultT:
        raise NotImplementedError


def test_workers_share_what_their_clients_kept() -> None:
    """Another worker may train the same client later."""
    mine, sizes = {4: {"velocity": torch.full((2,), 2.0)}}, {"velocity": 2}
    cluster = TwoWorkers(torch.tensor([[0.0, 0.0], [5.0, 5.0]]))
    found = share_client_states(mine, [4, 8], sizes=sizes, like=PARAMS.vector, cluster=cluster)
    assert {c: own["velocity"].tolist() for c, own in found.items()} == {4: [2.0] * 2, 8: [5.0] * 2}
    assert share_client_states({}, [4, 8], sizes={}, like=PARAMS.vector, cluster=cluster) == {}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_clients_are_dealt_to_workers_by_size(world_size: int) -> None:
    """Each client goes to one worker, largest first, so that the load is balanced."""
    steps = np.random.default_rng(0).lognormal(2.0, 1.0, 40).astype(np.int64) + 1
    shares = [deal(steps, Alone(rank, world_size)) for rank in range(world_size)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(40))
    loads = [int(steps[share].sum()) for share in shares]
    assert max(loads) - min(loads) <= int(steps.max())
    for share in shares:
        assert (np.diff(steps[share]) <= 0).all()


def test_clients_of_one_size_keep_their_order() -> None:
    """At block size 1 this is the order of arrival, as over a channel."""
    assert deal(np.ones(5, np.int64), Alone()).tolist() == [0, 1, 2, 3, 4]


A_MILLION_CLIENTS = """
    from pathlib import Path

    import torch
    from torch import nn

    from fedlearn.algorithms.local import LocalSgd
    from fedlearn.algorithms.objectives import CrossEntropy
    from fedlearn.algorithms.recipes import FedAvg
    from fedlearn.algorithms.sampling import UniformSampler
    from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
    from fedlearn.training.resident import Precision, ResidentModel
    from fedlearn.rounds.opening import SampledOpening
    from fedlearn.rounds.round import RoundPlan, run_round
    from fedlearn.core.participations import Status
    from fedlearn.core.params import Params
    from fedlearn.core.randomness import Seed
    from fedlearn.simulation import behavior
    from fedlearn.simulation.cluster import launch
    from fedlearn.simulation.engine import Engine
    from fedlearn.simulation.executors.sequential import SequentialExecutor
    from fedlearn.simulation.population import BootstrapPopulation

    def make_model():
        return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))

    def body(cluster):
        algorithm = FedAvg(LocalSgd(epochs=1, batch_size=10, learning_rate=0.1))
        policy = StragglerPolicy(
            num_wanted=1000, over_selection=1.3, deadline_s=1e9, min_reports=1000,
            below_minimum=BelowMinimum.FAIL, max_retries=0,
        )
        population = BootstrapPopulation(
            features=torch.randn(10_000, 64), labels=torch.randint(0, 10, (10_000,)),
            num_classes=10, num_clients=1_000_000, examples_per_client=20, seed=Seed(0),
        )
        devices = behavior.Behavior(
            median_ms_per_example=1.0, speed_sigma=1.0,
            bandwidth=behavior.LognormalBandwidth(median_mbit_per_s=5.0, sigma=1.0),
            dropout_rate=0.05, round_jitter_sigma=0.1,
        )
        cpu = torch.device("cpu")
        model = ResidentModel(
            make_model, CrossEntropy(), device=cpu, precision=Precision.FLOAT32
        )
        engine = Engine(
            population=population, behavior=devices, executor=SequentialExecutor(model),
            policy=policy, cluster=cluster, block_size=50,
        )
        plan = RoundPlan(
            draw=SampledOpening(
                sampler=UniformSampler(), available=engine.available, seed=Seed(0)
            ).draw_cohort,
            policy=policy, collector=engine, strategy=algorithm, seed=Seed(0),
        )
        state, collected, _ = run_round(plan.init(Params.of(make_model())), plan, attempt=0)
        assert state.round_num == 1
        return collected.count(Status.REPORTED)

    reported = launch(body, num_workers=1, environment={})
    status = Path("/proc/self/status").read_text()
    peak_kb = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    print(reported, peak_kb)
"""


@pytest.mark.slow
def test_a_round_of_a_thousand_out_of_a_million_fits_in_two_gigabytes() -> None:
    """Memory grows with the block, not with the cohort or the population."""
    found = subprocess.run(
        [sys.executable, "-c", dedent(A_MILLION_CLIENTS)],
        env={**os.environ, "PYTHONPATH": str(Path(fedlearn.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    reported, peak_kb = map(int, found.stdout.split())
    assert reported == 1000
    assert peak_kb < 2_000_000, "peak resident memory of the process"
