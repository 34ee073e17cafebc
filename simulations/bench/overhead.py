"""What a round costs beside the work that a bare loop does too.

That is the round loop, sampling, the devices' behaviour, validation, the server's step, the
store and progress, beside fetching a block's examples, training it and adding up its deltas.

    python simulations/bench/overhead.py

Runs the small MLP (64-200-10, 50 of 1,000 clients a round, 50 examples, batch 10, E = 1) with
a stopwatch around the executor, and prints the share of the rounds' time that is not spent
training. One worker, so that nothing hides behind another process.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from ours import Stopwatch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.aggregations import LaneSums, WeightedMean
from fedlearn.algorithms.lanes import Aggregate, LaneSpec, Updates
from fedlearn.algorithms.recipes import Algorithm
from fedlearn.assembly import Simulation, around
from fedlearn.assembly.choices import resolve
from fedlearn.assembly.simulated_plan import assemble
from fedlearn.assembly.user_code import AfterRound
from fedlearn.core.clock import SystemClock
from fedlearn.core.cluster import Alone
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.experiment.simulate import config_around, new_record
from fedlearn.rounds.run import train
from fedlearn.simulation.cluster import one_thread
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.base import Executor, Trained, Work
from fedlearn.simulation.population import ClientRows, Population
from fedlearn.store.runs import Database, sqlite_url


@dataclass
class Stopwatches:
    """Times each block from the fetching of its examples to its deltas, and their sum.

    Attributes:
        population: Who has the examples.
        executor: What trains.
        aggregation: What adds up.
        clock: Real time.
        work_s: The sum so far.
    """

    population: Population
    executor: Executor
    aggregation: WeightedMean
    clock: SystemClock
    work_s: float = 0.0
    _started_s: float = 0.0

    @property
    def num_clients(self) -> int:
        """The population's."""
        return self.population.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The population's."""
        return self.population.num_examples(client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Fetch a block's examples and start the watch."""
        self._started_s = self.clock.now_s()
        return self.population.load(client_ids)

    def train(self, work: Work) -> Trained:
        """Train the block and stop the watch."""
        trained = self.executor.train(work)
        self.work_s += self.clock.now_s() - self._started_s
        return trained

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """The aggregation's."""
        return self.aggregation.weigh(num_examples_B)

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> LaneSums:
        """The aggregation's."""
        return self.aggregation.init(lanes, layout, device=device)

    def accumulate(self, state: LaneSums, updates: Updates) -> LaneSums:
        """The aggregation's, under the watch."""
        started_s = self.clock.now_s()
        state = self.aggregation.accumulate(state, updates)
        self.work_s += self.clock.now_s() - started_s
        return state

    def finalize(self, state: LaneSums) -> Aggregate:
        """The aggregation's."""
        return self.aggregation.finalize(state)


DEVICES: Mapping[str, Mapping[str, object]] = {
    "ideal": {
        "stragglers": {"over_selection": 1.0, "deadline_s": "none"},
        "devices": {"kind": "ideal"},
    },
    "lognormal": {
        "stragglers": {"over_selection": 1.3, "deadline_s": 60.0},
        "devices": {"kind": "lognormal"},
    },
}


def pieces(num_rounds: int, devices: str) -> Simulation:
    """Return the small MLP on 1,000 clients of 50 examples."""
    torch.manual_seed(0)
    features, labels = torch.randn(50_000, 64), torch.randint(0, 10, (50_000,))
    data = fl.from_arrays(
        features, labels, partition=fl.Iid(num_clients=1000), test_fraction=0.001, seed=0
    )
    settings = {
        "num_rounds": num_rounds,
        "cohort": {"num_wanted": 50},
        **DEVICES[devices],
        "evaluation": {"every_rounds": 0, "clients": 0},
        "engine": {"num_workers": 1},
    }
    local = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.05)
    return around(
        config_around(settings, source="the benchmark"),
        make_model=lambda: nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10)),
        objective=fl.CrossEntropy(),
        data=data,
        algorithm=fl.FedAvg(local),
        data_dir=Path(),
    )


def main() -> None:
    """Run with ideal devices, and with stragglers, and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=600)
    arguments = parser.parse_args()
    for devices in DEVICES:
        measure(arguments.rounds, devices)


def measure(rounds: int, devices: str) -> None:
    """Run once and print the share."""
    clock = SystemClock()
    progress = Stopwatch(clock)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        runs_dir = Path(folder)
        resolved = resolve(
            pieces(rounds, devices), clock=clock, environ=os.environ, cache_dir=runs_dir / "cache"
        )
        plan, params = assemble(resolved, Alone(), device=torch.device("cpu"), clock=clock)
        engine = plan.round.collector
        assert isinstance(engine, Engine)
        strategy = plan.round.strategy
        assert isinstance(strategy, Algorithm)
        assert isinstance(strategy.aggregation, WeightedMean)
        timed = Stopwatches(engine.population, engine.executor, strategy.aggregation, clock)
        engine = replace(engine, population=timed, executor=timed)
        strategy = replace(strategy, aggregation=timed)
        plan = replace(plan, round=replace(plan.round, strategy=strategy, collector=engine))
        with Database.open(sqlite_url(runs_dir / "runs.db"), runs_dir=runs_dir) as database:
            stored = database.create_named(new_record(resolved, extra={}), seed=Seed(0))
            progress.start(stored.record, stored.path, resolved.notes)
            after_round = AfterRound(Alone(), progress.round, (), resolved.make_model)
            started = clock.now_s()
            train(plan, params, checkpoint=None, store=stored, after_round=after_round)
            seconds = clock.now_s() - started
    work = timed.work_s
    print(
        f"{devices} devices: {rounds} rounds in {seconds:.2f} s, "
        f"{rounds * 50 / seconds:.0f} clients/s; fetching, training and adding up "
        f"{work:.2f} s; the rest is "
        f"{100 * (seconds - work) / seconds:.1f} % of a round, "
        f"{1e6 * (seconds - work) / rounds:.0f} us"
    )


if __name__ == "__main__":
    main()
