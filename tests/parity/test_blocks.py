"""Whole rounds depend neither on the division of clients into blocks nor on the executor."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.cluster import Alone
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.round import RoundPlan, ServerState, run_round
from fedlearn.simulation.behavior import Instant
from fedlearn.simulation.choice import ExecutorKind, TrainingJob, make_executor
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.base import Executor, TrainedBlock, Work
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.resident import Precision

SIZES = [9, 14, 3, 11, 12, 1, 15, 6, 8, 10, 5, 23]
NUM_CLIENTS = len(SIZES)
KEEPING = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.9, keep_momentum=True)
POLICY = StragglerPolicy(
    num_wanted=9,
    over_selection=1.0,
    deadline_s=1.0,
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


@dataclass
class Counting:
    """An executor that records the height of each block."""

    executor: Executor
    heights: list[int] = field(default_factory=list)

    def train(self, work: Work) -> TrainedBlock:
        self.heights.append(len(work.client_ids))
        return self.executor.train(work)


def run(
    kind: ExecutorKind,
    block_size: int,
    *,
    make_model: Callable[[], nn.Module] = make_model,
    local: LocalUpdate = KEEPING,
) -> tuple[ServerState, list[int]]:
    """Run three rounds and return the state and the heights of the blocks."""
    generator, num_examples = torch.Generator().manual_seed(1), sum(SIZES)
    population = ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *SIZES])),
        num_classes=3,
    )
    torch.manual_seed(0)
    params = Params.of(make_model())
    job = TrainingJob(
        make_model=make_model,
        objective=CrossEntropy(),
        metrics={},
        local=local,
        broadcast={},
        population=population,
        params=params,
        precision=Precision.FLOAT32,
        num_clients=30,
        num_together=30,
        seed=Seed(5),
    )
    executor = Counting(make_executor(job, kind))
    collector = Engine(
        population=population,
        behavior=Instant(),
        executor=executor,
        policy=POLICY,
        cluster=Alone(),
        block_size=block_size,
    )
    plan = RoundPlan(
        draw=SampledOpening(
            sampler=UniformSampler(), available=collector.available, seed=Seed(5)
        ).draw_cohort,
        policy=POLICY,
        collector=collector,
        strategy=FedAvg(local),
        seed=Seed(5),
    )
    state = plan.init(params)
    for _ in range(3):
        state = run_round(state, plan, attempt=0).state
    return state, executor.heights


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP, ExecutorKind.FUSED])
@pytest.mark.parametrize("block_size", [1, 2, 4, 100])
def test_any_block_size_gives_the_same_model(kind: ExecutorKind, block_size: int) -> None:
    """To 1e-6, after rounds of ragged clients with kept momentum; no block is too large."""
    expected, _ = run(ExecutorKind.SEQUENTIAL, 1)
    found, heights = run(kind, block_size)
    torch.testing.assert_close(found.params.vector, expected.params.vector, rtol=0.0, atol=1e-6)
    assert max(heights) == min(block_size, POLICY.num_wanted)
    assert sum(heights) == 3 * POLICY.num_wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP, ExecutorKind.FUSED])
def test_a_repeated_run_is_the_same_to_the_last_bit(kind: ExecutorKind) -> None:
    """With the same executor and blocks."""
    first, again = run(kind, 4)[0], run(kind, 4)[0]
    assert torch.equal(first.params.vector, again.params.vector)


@pytest.mark.slow
def test_dropout_masks_do_not_depend_on_the_block() -> None:
    """They are keyed by client and step, so a stack drops the same units as a client alone."""

    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 3))

    expected, _ = run(ExecutorKind.SEQUENTIAL, 1, make_model=dropping)
    for kind, block_size in [(ExecutorKind.SEQUENTIAL, 4), (ExecutorKind.VMAP, 5)]:
        found, _ = run(kind, block_size, make_model=dropping)
        torch.testing.assert_close(found.params.vector, expected.params.vector, rtol=0.0, atol=1e-6)


@pytest.mark.slow
def test_forgotten_momentum_would_be_noticed() -> None:
    """The control: a lost velocity changes far more than the tolerance."""
    expected, _ = run(ExecutorKind.SEQUENTIAL, 1)
    found, _ = run(ExecutorKind.SEQUENTIAL, 1, local=replace(KEEPING, keep_momentum=False))
    assert (found.params.vector - expected.params.vector).abs().max() > 1e-3
