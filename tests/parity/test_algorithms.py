"""Every algorithm gives the same model in the engine, on workers, in memory, by gRPC and Flower."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.client_state import to_tensors
from fedlearn.algorithms.geometric_median import CenteredClipping
from fedlearn.algorithms.gradient_clipping import ClippedGradients
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.rate_schedules import ScheduledRate
from fedlearn.algorithms.recipes import EASGD, FedAvg, FedMedian, Scaffold
from fedlearn.algorithms.strategy import Strategy
from fedlearn.algorithms.transforms import ClippedUpdates
from fedlearn.core.cluster import Alone, Cluster
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import EngineError
from fedlearn.simulation.choice import ExecutorKind, TrainingJob, make_executor
from fedlearn.simulation.cluster import launch
from fedlearn.simulation.engine import Engine
from fedlearn.training.resident import Precision
from tests.parity import test_flower as flower
from tests.parity import test_grpc as grpc
from tests.processes import Launcher

SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)
ADAM = LocalAdam(
    epochs=2,
    batch_size=4,
    learning_rate=0.01,
    beta_1=0.9,
    beta_2=0.99,
    epsilon=1e-3,  # so that no step is the sign of a gradient that is only a rounding error
    decoupled=False,
    keep_moments=False,
)
KEEPING_ADAMW = replace(ADAM, decoupled=True, weight_decay=0.1, keep_moments=True)
CLIPPED = ScheduledRate(
    inner=ClippedGradients(inner=SGD, gradient_clip_norm=0.5), rate_decay=0.5, warmup_steps=3
)
#: So little noise that it rounds to zero, which leaves only the clip of each example.
BY_EXAMPLE = NoisedGradients(
    inner=replace(SGD, momentum=0.9), example_clip_norm=0.5, example_noise_multiplier=1e-9
)
#: Variants without a part of the algorithm, such as the clip or the kept moments.
CONTROLS: Mapping[str, Strategy] = {
    "adamw, moments kept": FedAvg(replace(KEEPING_ADAMW, keep_moments=False)),
    "clipped and scheduled": FedAvg(SGD),
    "scaffold": FedAvg(SGD, weight_by_examples=False),
    "scaffold, momentum": FedAvg(
        replace(SGD, momentum=0.9, weight_decay=0.1), weight_by_examples=False
    ),
    "easgd": EASGD(SGD, elasticity=0.0, cohort_size=len(flower.SIZES)),
    "median": FedAvg(SGD, weight_by_examples=False),
    "centered clipping": FedAvg(SGD, weight_by_examples=False),
    "clipped updates": FedAvg(SGD),
    "clipped by example": FedAvg(
        ClippedGradients(inner=BY_EXAMPLE.inner, gradient_clip_norm=0.5), weight_by_examples=False
    ),
}
ALGORITHMS: Mapping[str, Strategy] = {
    "adam": FedAvg(ADAM),
    "adamw, moments kept": FedAvg(KEEPING_ADAMW),
    "clipped and scheduled": FedAvg(CLIPPED),
    "scaffold": Scaffold(SGD, num_clients=len(flower.SIZES), server_learning_rate=1.0),
    "scaffold, momentum": Scaffold(
        replace(SGD, momentum=0.9, weight_decay=0.1),
        num_clients=len(flower.SIZES),
        server_learning_rate=1.0,
    ),
    "easgd": EASGD(SGD, elasticity=1.0, cohort_size=len(flower.SIZES)),
    "median": FedMedian(SGD),
    "centered clipping": replace(
        FedAvg(SGD), aggregation=CenteredClipping(clip_radius=0.1, num_iterations=2)
    ),
    "clipped updates": replace(FedAvg(SGD), transforms=[ClippedUpdates(update_clip_norm=0.05)]),
    "clipped by example": FedAvg(BY_EXAMPLE, weight_by_examples=False),
}
WORKERS = (1, 2, 4)
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def without_dropout() -> nn.Module:
    """The same parameters, in a chain of layers that can be fused."""
    return nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.ReLU(), nn.Linear(8, 3))


def engine(
    strategy: Strategy, kind: ExecutorKind, *, cluster: Cluster, block_size: int = 100
) -> Engine:
    population, params = flower.population(), Params.of(without_dropout())
    job = TrainingJob(
        make_model=without_dropout,
        objective=flower.OBJECTIVE,
        metrics={},
        local=strategy.local,
        population=population,
        broadcast=strategy.broadcast(strategy.init(params)),
        params=params,
        precision=Precision.FLOAT32,
        num_clients=len(flower.SIZES),
        num_together=len(flower.SIZES),
        seed=Seed(5),
    )
    return Engine(
        population=population,
        behavior=flower.Spread(),
        executor=make_executor(job, kind),
        policy=flower.POLICY,
        cluster=cluster,
        block_size=block_size,
    )


@pytest.mark.slow
@every_algorithm
def test_the_engine_and_flower_equal_sessions_in_memory_bit_for_bit(name: str) -> None:
    """One client after another, with dropout, and with client state in Flower's context."""
    strategy = ALGORITHMS[name]
    expected, order = flower.run(strategy, flower.in_memory(strategy))
    for other in (flower.by_the_engine, flower.over_flower):
        found, found_order = flower.run(strategy, other(strategy))
        assert found_order == order
        assert torch.equal(found.vector, expected.vector), other.__name__


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("kind", [ExecutorKind.SEQUENTIAL, ExecutorKind.VMAP, ExecutorKind.FUSED])
def test_blocks_of_clients_give_the_same_model(name: str, kind: ExecutorKind) -> None:
    """To 1e-6, on each executor; the fused one has no per-example gradients."""
    strategy = ALGORITHMS[name]
    if kind is ExecutorKind.FUSED and isinstance(strategy.local, NoisedGradients):
        with pytest.raises(EngineError, match="each example's gradient is clipped"):
            engine(strategy, kind, cluster=Alone())
        return
    one_by_one = engine(strategy, ExecutorKind.SEQUENTIAL, cluster=Alone(), block_size=1)
    expected, _ = flower.run(strategy, one_by_one)
    found, _ = flower.run(strategy, engine(strategy, kind, cluster=Alone()))
    torch.testing.assert_close(found.vector, expected.vector, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", CONTROLS)
def test_what_an_algorithm_does_can_be_seen(name: str) -> None:
    """The control: without that part of the algorithm, the model differs."""
    found, _ = flower.run(ALGORITHMS[name], flower.in_memory(ALGORITHMS[name]))
    other, _ = flower.run(CONTROLS[name], flower.in_memory(CONTROLS[name]))
    assert float((found.vector - other.vector).abs().max()) > 1e-4


@pytest.mark.slow
@every_algorithm
def test_the_gateway_gives_the_same_model_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Real sessions: broadcasts, lanes and client state pass through them.

    Without over-selection, since a client that is late over a network has trained, and keeps its
    new state.
    """
    strategy, policy = ALGORITHMS[name], replace(grpc.POLICY, over_selection=1.0)
    with grpc.over_grpc(tmp_path) as (channel, _):
        found, orders, _ = grpc.run(strategy, channel, policy=policy)
    expected, replayed, _ = grpc.run(strategy, grpc.in_memory(orders), policy=policy)
    assert replayed == orders
    assert torch.equal(found.vector, expected.vector)


@dataclass(frozen=True)
class Runs:
    """Runs every algorithm, on each worker."""

    def __call__(self, cluster: Cluster) -> dict[str, Tensor]:
        found = {}
        for name, strategy in ALGORITHMS.items():
            collector = engine(strategy, ExecutorKind.SEQUENTIAL, cluster=cluster)
            state, _ = flower.ran(strategy, collector)
            found[name] = state.params.vector
            found |= {
                f"{name}: {kept}": value for kept, value in to_tensors(state.client_states).items()
            }
        return found


@pytest.fixture(scope="module")
def by_workers(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Mapping[str, Tensor]]:
    """The results for each number of workers, computed in a process with a time limit."""
    folder = tmp_path_factory.mktemp("workers")
    launcher.run(Path(__file__), str(folder)).check_returncode()
    return {path.name: load_file(path) for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.xdist_group("algorithms by workers")  # they share a fixture that takes seconds
@pytest.mark.parametrize("num_workers", ["2", "4"])
def test_the_number_of_workers_changes_nothing_but_rounding(
    by_workers: Mapping[str, Mapping[str, Tensor]], num_workers: str
) -> None:
    """To 1e-6: models and client state. The median needs the updates of all workers."""
    one, many = by_workers["1"], by_workers[num_workers]
    assert one.keys() == many.keys() > ALGORITHMS.keys()
    for name, expected in one.items():
        torch.testing.assert_close(many[name], expected, rtol=0.0, atol=1e-6, msg=name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    from tests.parity.test_algorithms import Runs as Imported  # so that workers can import it

    for number in WORKERS:
        results = launch(Imported(), num_workers=number, environment={})
        save_file(results, Path(sys.argv[1]) / str(number))
