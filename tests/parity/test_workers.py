"""1, 2 and 4 workers agree, and one worker gives the same bits twice.

The simulations run in a separate process with a time limit, so that a worker that hangs fails
these tests instead of hanging all of them.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlearn.algorithms.client_state import to_tensors
from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.recipes import FedAvgM
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.cluster import Cluster
from fedlearn.core.features import require_single_input
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.simulation.behavior import (
    Behavior,
    LognormalBandwidth,
)
from fedlearn.simulation.cluster import launch
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.evaluation import CentralEvaluator, ClientEvaluator
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.resident import Precision, ResidentModel
from tests.processes import Launcher

NUM_ROUNDS = 4
SIZES = [8, 14, 3, 11, 12, 1, 15, 6, 9, 10, 5, 23]
WORKERS = (1, 2, 4)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def population() -> ArrayPopulation:
    """Build clients of many sizes, one of which diverges."""
    generator, num_examples = torch.Generator().manual_seed(1), sum(SIZES)
    features = torch.randn(num_examples, 5, generator=generator)
    features[8:22] = 3e38
    return ArrayPopulation(
        features=features,
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *SIZES])),
        num_classes=3,
    )


@dataclass(frozen=True)
class Simulation:
    """A run of a few rounds, as every worker executes it."""

    clients: ArrayPopulation

    def __call__(self, cluster: Cluster) -> dict[str, Tensor]:
        algorithm = FedAvgM(
            LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.9, keep_momentum=True),
            server_learning_rate=0.8,
            server_momentum=0.5,
        )
        policy = StragglerPolicy(
            num_wanted=6,
            over_selection=1.5,
            deadline_s=2.5,
            min_reports=1,
            below_minimum=BelowMinimum.FAIL,
            max_retries=0,
        )
        model = ResidentModel(
            make_model,
            CrossEntropy(),
            device=torch.device("cpu"),
            precision=Precision.FLOAT32,
        )
        collector = Engine(
            population=self.clients,
            behavior=Behavior(
                median_ms_per_example=15.0,
                speed_sigma=0.5,
                bandwidth=LognormalBandwidth(median_mbit_per_s=1.0, sigma=0.5),
                dropout_rate=0.1,
                round_jitter_sigma=0.2,
            ),
            executor=SequentialExecutor(model),
            policy=policy,
            cluster=cluster,
            block_size=2,
        )
        plan = RoundPlan(
            draw=SampledOpening(
                sampler=UniformSampler(), available=collector.available, seed=Seed(5)
            ).draw_cohort,
            policy=policy,
            collector=collector,
            strategy=algorithm,
            seed=Seed(5),
        )
        torch.manual_seed(0)
        state, rows, durations_s = plan.init(Params.of(make_model())), [], []
        for _ in range(NUM_ROUNDS):
            state, collected, _ = run_round(state, plan, attempt=0)
            durations_s.append(collected.duration_s)
            rows += [
                [p.client_id, list(Status).index(p.status), p.duration_s, p.num_examples, p.loss]
                for p in collected.participations
            ]
        every = torch.arange(len(self.clients.labels))
        sound = every[(every < 8) | (every >= 22)]
        evaluators = (
            CentralEvaluator(
                model=model,
                features=require_single_input(self.clients.features)[sound],
                labels=self.clients.labels[sound],
                batch_size=16,
                cluster=cluster,
            ),
            ClientEvaluator(
                model=model,
                population=self.clients,
                client_ids=np.array([0, 2, 3, 6, 8, 10, 11]),
                batch_size=16,
                cluster=cluster,
                strategy=algorithm,
            ),
        )
        metrics = [
            e.evaluate(GlobalModel(params=state.params, round_num=NUM_ROUNDS)).metrics
            for e in evaluators
        ]
        kept = to_tensors(state.client_states)
        return {
            "params": state.params.vector,
            "rows": torch.tensor(rows, dtype=torch.float64),
            "durations_s": torch.tensor(durations_s),
            "metrics": torch.tensor([v for m in metrics for _, v in sorted(m.items())]),
            "kept": kept["velocity"],
            "kept_ids": kept["velocity.ids"],
        }


def main(folder: Path) -> None:
    """Run the simulation with each number of workers, and once more with one."""
    simulation = Simulation(population())
    for name, num_workers in [("again", 1), *[(str(n), n) for n in WORKERS]]:
        found = launch(simulation, num_workers=num_workers, environment={})
        save_file(found, folder / name)


@pytest.fixture(scope="module")
def results(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Mapping[str, Tensor]]:
    """The results of each number of workers, by name."""
    folder = tmp_path_factory.mktemp("workers")
    launcher.run(Path(__file__), str(folder)).check_returncode()
    return {path.name: load_file(path) for path in folder.iterdir()}


Results = Mapping[str, Mapping[str, Tensor]]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]  # they share a slow fixture


def test_one_worker_twice_is_the_same_to_the_last_bit(results: Results) -> None:
    """Model, records, metrics and client state."""
    for name, tensor in results["1"].items():
        assert tensor.numpy().tobytes() == results["again"][name].numpy().tobytes(), name


@pytest.mark.parametrize("num_workers", ["2", "4"])
def test_the_number_of_workers_changes_nothing_but_rounding(
    results: Results, num_workers: str
) -> None:
    """To 1e-6 after a few rounds: the model, client states, losses and metrics."""
    one, many = results["1"], results[num_workers]
    assert torch.equal(many["kept_ids"], one["kept_ids"])
    assert torch.equal(many["durations_s"], one["durations_s"])
    assert torch.equal(many["rows"][:, :4], one["rows"][:, :4]), "who, how, when, how many"
    for name in ("params", "kept", "rows", "metrics"):
        torch.testing.assert_close(
            many[name], one[name], rtol=1e-6, atol=1e-6, equal_nan=True, msg=name
        )


def test_the_simulation_has_everything_that_workers_must_agree_on(results: Results) -> None:
    """The control: the model moves, and there are reports, late clients and failed clients."""
    one = results["1"]
    torch.manual_seed(0)
    assert (one["params"] - Params.of(make_model()).vector).abs().max() > 1e-2
    assert set(one["rows"][:, 1].tolist()) == {0.0, 1.0, 2.0}
    assert bool(torch.isfinite(one["params"]).all())
    assert one["kept_ids"].numel() > 6


if __name__ == "__main__":
    main(Path(sys.argv[1]))
