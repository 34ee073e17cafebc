"""Each executor on a GPU gives the same results as the sequential one on the CPU."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.core.clock import SystemClock
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.simulation.choice import (
    ExecutorKind,
    TrainingJob,
    choose,
    make_executor,
    use_configured,
)
from fedlearn.simulation.executors.base import TrainedBlock
from fedlearn.simulation.executors.stacked import explain_not_compiled
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.resident import Precision

SIZES = [9, 14, 3, 1, 12]
SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.9, keep_momentum=True)
BY_EXAMPLE = NoisedGradients(inner=SGD, example_clip_norm=0.3, example_noise_multiplier=1e-9)
#: Tolerance for rounding in float64.
SAME = 1e-10


def chain() -> nn.Module:
    """Return a model that the fused executor can train."""
    layers = (nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(12, 3)).double()


def dropping() -> nn.Module:
    """Return a model with dropout and a normalization, which cannot be fused."""
    layers = (nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Dropout(0.4), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def batch_norm() -> nn.Module:
    """Return a model that mixes the examples of a batch, so padding would change it."""
    layers = (nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8, track_running_stats=True))
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 3)).double()


def job_of(
    make_model: Callable[[], nn.Module],
    device: torch.device | str,
    *,
    local: LocalUpdate = SGD,
    sizes: list[int] = SIZES,
) -> TrainingJob:
    """Return the training of a few clients of different sizes on a device."""
    generator, count = torch.Generator().manual_seed(1), sum(sizes)
    population = ArrayPopulation(
        features=torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64),
        labels=torch.randint(0, 3, (count,), generator=generator),
        partition=Partition(np.arange(count), np.cumsum([0, *sizes])),
        num_classes=3,
    )
    torch.manual_seed(0)
    params = Params.of(make_model())
    constants = {name: value.to(device) for name, value in params.constants.items()}
    return TrainingJob(
        make_model=make_model,
        objective=CrossEntropy(),
        metrics={},
        local=local,
        broadcast={},
        population=population,
        params=Params(params.layout, params.vector.to(device), constants),
        precision=Precision.FLOAT32,
        num_clients=30,
        num_together=30,
        seed=Seed(5),
    )


def trained(job: TrainingJob, kind: ExecutorKind) -> TrainedBlock:
    """Train one block of all clients."""
    return make_executor(job, kind).train(job.work(np.arange(len(SIZES))))


def apart(one: TrainedBlock, other: TrainedBlock) -> float:
    """Return the largest difference of deltas, client states and metrics."""
    assert one.client_state.keys() == other.client_state.keys()
    pairs = [(one.deltas_KP, other.deltas_KP)]
    pairs += [(value, other.client_state[name]) for name, value in one.client_state.items()]
    differences = [float((a.cpu() - b.cpu()).abs().max()) for a, b in pairs]
    return max(*differences, float(np.abs(one.losses_K - other.losses_K).max()))


CASES = [
    (chain, ExecutorKind.SEQUENTIAL),
    (chain, ExecutorKind.FUSED),
    (chain, ExecutorKind.VMAP),
    (dropping, ExecutorKind.SEQUENTIAL),
    (dropping, ExecutorKind.VMAP),
]


@pytest.mark.parametrize(("make_model", "kind"), CASES)
def test_an_executor_trains_as_the_sequential_one_on_the_cpu(
    make_model: Callable[[], nn.Module], kind: ExecutorKind, gpu: torch.device
) -> None:
    """Up to rounding in float64, including dropout masks and momentum from earlier rounds."""
    expected = trained(job_of(make_model, "cpu"), ExecutorKind.SEQUENTIAL)
    found = trained(job_of(make_model, gpu), kind)
    assert found.deltas_KP.device == gpu
    assert apart(found, expected) < SAME
    assert float(expected.deltas_KP.abs().max()) > 1e-2  # the control: the model moves


@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP])
def test_batches_that_must_not_be_padded_are_those_of_the_cpu(
    kind: ExecutorKind, gpu: torch.device
) -> None:
    """Clients whose batches have equal sizes train together."""
    sizes = [8, 6, 10, 2, 6]
    expected = trained(job_of(batch_norm, "cpu", sizes=sizes), ExecutorKind.SEQUENTIAL)
    assert apart(trained(job_of(batch_norm, gpu, sizes=sizes), kind), expected) < SAME


@pytest.mark.parametrize("make_model", [chain, dropping])
@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP])
def test_examples_clipped_one_by_one_are_those_of_the_cpu(
    make_model: Callable[[], nn.Module], kind: ExecutorKind, gpu: torch.device
) -> None:
    """With negligible noise: sums are rounded to levels, 2**20 of them up to the clip."""
    cpu = job_of(make_model, "cpu", local=BY_EXAMPLE)
    expected = trained(cpu, ExecutorKind.SEQUENTIAL)
    found = trained(job_of(make_model, gpu, local=BY_EXAMPLE), kind)
    assert apart(found, expected) < 1e-4
    unclipped = trained(job_of(make_model, gpu), kind)
    assert apart(unclipped, expected) > 1e-3  # the control


@pytest.mark.slow
def test_a_compiled_step_trains_as_the_sequential_one_on_the_cpu(gpu: torch.device) -> None:
    """Skipped without a compiler."""
    if (reason := explain_not_compiled()) is not None:
        pytest.skip(reason)
    expected = trained(job_of(dropping, "cpu"), ExecutorKind.SEQUENTIAL)
    found = trained(job_of(dropping, gpu), ExecutorKind.COMPILED)
    assert apart(found, expected) < SAME


@pytest.mark.parametrize(
    ("make_model", "kind"), [(chain, ExecutorKind.FUSED), (dropping, ExecutorKind.VMAP)]
)
def test_the_trial_of_an_executor_finds_nothing_against_it(
    make_model: Callable[[], nn.Module], kind: ExecutorKind, gpu: torch.device
) -> None:
    """It compares trainings, Python's state and generators, all with the model on the GPU."""
    assert use_configured(job_of(make_model, gpu), kind).kind is kind


class Drawing(nn.Module):
    """A model that draws from its device's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = dropping()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add noise to the features."""
        found: torch.Tensor = self.layer(x + 0.1 * torch.randn_like(x))
        return found


def test_draws_from_the_gpus_generator_are_noticed(gpu: torch.device, tmp_path: Path) -> None:
    """Such a model trains clients one by one, and the generator keeps its state."""
    job, before = job_of(Drawing, gpu), torch.cuda.get_rng_state()
    choice = choose(job, clock=SystemClock(), cache_dir=tmp_path)
    assert choice.kind is ExecutorKind.SEQUENTIAL
    assert "random numbers" in choice.reason
    first, again = (trained(job, choice.kind) for _ in range(2))
    assert apart(first, again) < SAME
    assert torch.equal(torch.cuda.get_rng_state(), before)
