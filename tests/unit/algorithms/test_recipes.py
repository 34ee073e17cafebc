"""Each algorithm satisfies the identities in its paper, over whole rounds."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.recipes import (
    Algorithm,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedSGD,
    FedYogi,
)
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.server_optimizers import SecondMoment, ServerAdaptive
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.cluster import Alone
from fedlearn.core.features import require_single_input
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.simulation.behavior import Instant
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.resident import Precision, ResidentModel

CPU = torch.device("cpu")
LOCAL = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_linear() -> nn.Module:
    return nn.Linear(5, 3).double()


def initial(make_model: Callable[[], nn.Module]) -> Params:
    torch.manual_seed(0)
    return Params.of(make_model())


def population_of(*sizes: int) -> ArrayPopulation:
    """Clients with these numbers of examples, all of them different."""
    num_examples = sum(sizes)
    generator = torch.Generator().manual_seed(1)
    return ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator, dtype=torch.float64),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *sizes])),
        num_classes=3,
    )


def after_rounds(
    algorithm: Algorithm,
    population: ArrayPopulation,
    *,
    num_rounds: int,
    make_model: Callable[[], nn.Module] = make_mlp,
) -> Params:
    """Return the model after rounds in which all clients take part."""
    num_clients = population.num_clients
    policy = StragglerPolicy(
        num_wanted=num_clients,
        over_selection=1.0,
        deadline_s=1.0,
        min_reports=num_clients,
        below_minimum=BelowMinimum.FAIL,
        max_retries=0,
    )
    model = ResidentModel(make_model, CrossEntropy(), device=CPU, precision=Precision.FLOAT32)
    collector = Engine(
        population=population,
        behavior=Instant(),
        executor=SequentialExecutor(model),
        policy=policy,
        cluster=Alone(),
        block_size=4,
    )
    plan = RoundPlan(
        draw=SampledOpening(
            sampler=UniformSampler(), available=collector.available, seed=Seed(3)
        ).draw_cohort,
        policy=policy,
        collector=collector,
        strategy=algorithm,
        seed=Seed(3),
    )
    state = plan.init(initial(make_model))
    for _ in range(num_rounds):
        state = run_round(state, plan, attempt=0).state
    return state.params


def loss_gradient(params: Params, features: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the mean cross-entropy of ``make_mlp``, by autograd alone."""
    model = make_mlp()
    params.load_into(model)
    F.cross_entropy(model(features), labels).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_fedprox_without_proximal_term_is_fedavg_bit_for_bit() -> None:
    """Li et al. 2020, section 3.2: FedAvg is the special case mu = 0."""
    population = population_of(9, 4, 6)
    fedavg = after_rounds(FedAvg(LOCAL), population, num_rounds=3)
    fedprox = after_rounds(FedProx(LOCAL, proximal=0.0), population, num_rounds=3)
    pulled = after_rounds(FedProx(LOCAL, proximal=0.5), population, num_rounds=3)
    assert torch.equal(fedprox.vector, fedavg.vector)
    assert not torch.equal(pulled.vector, fedavg.vector)


def test_a_strong_proximal_term_keeps_clients_close_to_the_global_model() -> None:
    """Li et al. 2020: mu limits how far a local update goes."""
    population, start = population_of(9, 4, 6), initial(make_mlp).vector
    free = after_rounds(FedProx(LOCAL, proximal=0.0), population, num_rounds=1)
    held = after_rounds(FedProx(LOCAL, proximal=8.0), population, num_rounds=1)
    assert (held.vector - start).norm() < 0.6 * (free.vector - start).norm()


def test_fedavgm_without_momentum_at_rate_one_is_fedavg_bit_for_bit() -> None:
    """Hsu et al. 2019: FedAvg is server SGD at rate 1 without momentum."""
    population = population_of(9, 4, 6)
    fedavg = after_rounds(FedAvg(LOCAL), population, num_rounds=3)
    fedavgm = FedAvgM(LOCAL, server_learning_rate=1.0, server_momentum=0.0)
    heavy = FedAvgM(LOCAL, server_learning_rate=1.0, server_momentum=0.5)
    assert torch.equal(after_rounds(fedavgm, population, num_rounds=3).vector, fedavg.vector)
    assert not torch.equal(after_rounds(heavy, population, num_rounds=3).vector, fedavg.vector)


def test_fedsgd_is_one_gradient_step_on_the_pooled_data() -> None:
    """McMahan et al. 2017, section 2: E = 1 and B = infinity give w - eta * grad f(w)."""
    population, start = population_of(11, 2, 5, 1), initial(make_mlp)
    gradient = loss_gradient(start, require_single_input(population.features), population.labels)
    pooled = start.vector - 0.3 * gradient
    found = after_rounds(FedSGD(learning_rate=0.3), population, num_rounds=1)
    torch.testing.assert_close(found.vector, pooled, rtol=0.0, atol=1e-15)
    alike = FedSGD(learning_rate=0.3, weight_by_examples=False)
    unweighted = after_rounds(alike, population, num_rounds=1)
    assert (unweighted.vector - pooled).abs().max() > 1e-3, "weights matter on unequal clients"


def test_fedavg_is_the_mean_of_local_models_weighted_by_examples() -> None:
    """McMahan et al. 2017, algorithm 1: w = sum of n_k / n * w_k."""
    sizes = (9, 4, 6)
    population = population_of(*sizes)
    expected, start = torch.zeros_like(initial(make_mlp).vector), 0
    for size in sizes:
        alone = train_alone(population, slice(start, start + size))
        expected += alone * size / sum(sizes)
        start += size
    found = after_rounds(FedAvg(replace(LOCAL, shuffle=False)), population, num_rounds=1)
    torch.testing.assert_close(found.vector, expected, rtol=0.0, atol=1e-14)


def train_alone(population: ArrayPopulation, rows: slice) -> Tensor:
    """Train ``make_mlp`` by torch's own SGD, with the examples in order, and return its vector."""
    model = make_mlp()
    initial(make_mlp).load_into(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LOCAL.learning_rate)
    features, labels = require_single_input(population.features)[rows], population.labels[rows]
    for _ in range(LOCAL.epochs):
        for x, y in zip(features.split(4), labels.split(4), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return Params.of(model).vector


def test_fedavg_with_one_client_is_local_sgd() -> None:
    """McMahan et al. 2017: with K = 1 the average is the local model."""
    population = population_of(10)
    found = after_rounds(FedAvg(replace(LOCAL, shuffle=False)), population, num_rounds=1)
    expected = train_alone(population, slice(0, 10))
    torch.testing.assert_close(found.vector, expected, rtol=0.0, atol=1e-14)


def test_equal_clients_make_the_weighted_and_the_plain_mean_the_same() -> None:
    """If all clients have the same number of examples, the weights n_k / n are 1 / K."""
    population = population_of(6, 6, 6)
    weighted = after_rounds(FedAvg(LOCAL), population, num_rounds=2)
    plain = after_rounds(FedAvg(LOCAL, weight_by_examples=False), population, num_rounds=2)
    torch.testing.assert_close(weighted.vector, plain.vector, rtol=0.0, atol=1e-14)


def test_fedsgd_over_rounds_is_gradient_descent_for_a_linear_model() -> None:
    """Ten rounds of FedSGD equal ten steps of gradient descent on the pooled data."""
    population = population_of(11, 2, 5, 1)
    model = make_linear()
    initial(make_linear).load_into(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(population.features), population.labels).backward()
        optimizer.step()
    found = after_rounds(
        FedSGD(learning_rate=0.3), population, num_rounds=10, make_model=make_linear
    )
    torch.testing.assert_close(found.vector, Params.of(model).vector, rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("keep_momentum", [True, False])
def test_kept_momentum_goes_on_where_the_last_round_stopped(*, keep_momentum: bool) -> None:
    """Yu et al. 2019: two rounds with kept momentum equal one uninterrupted local training."""
    population = population_of(8)
    local = LocalSgd(
        epochs=3,
        batch_size=None,
        learning_rate=0.1,
        momentum=0.9,
        shuffle=False,
        keep_momentum=keep_momentum,
    )
    twice = after_rounds(FedAvg(local), population, num_rounds=2)
    once = after_rounds(FedAvg(replace(local, epochs=6)), population, num_rounds=1)
    is_same = torch.allclose(twice.vector, once.vector, rtol=0.0, atol=1e-14)
    assert is_same is keep_momentum


def test_the_adaptive_recipes_differ_in_the_second_moment_alone() -> None:
    """Reddi et al. 2021, algorithm 2, has one line for each."""
    pieces = [
        FedAdagrad(LOCAL, server_learning_rate=0.1, beta_1=0.9, tau=1e-3),
        FedAdam(LOCAL, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
        FedYogi(LOCAL, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
    ]
    moments = []
    for algorithm in pieces:
        assert isinstance(algorithm.server_optimizer, ServerAdaptive)
        moments.append(algorithm.server_optimizer.second_moment)
    assert moments == [SecondMoment.ADAGRAD, SecondMoment.ADAM, SecondMoment.YOGI]
    assert {algorithm.local for algorithm in pieces} == {LOCAL}
