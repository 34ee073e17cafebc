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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from ours import Stopwatch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.aggregators import WeightedMean, WeightedSum
from fedlearn.build import Simulation, around
from fedlearn.core.clock import SystemClock
from fedlearn.core.collecting import Block
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.experiment.assemble import assemble, resolve
from fedlearn.experiment.simulate import config_around, new_record
from fedlearn.rounds.run import train
from fedlearn.simulation.cluster import Alone, one_thread
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
        aggregator: What adds up.
        clock: Real time.
        work_s: The sum so far.
    """

    population: Population
    executor: Executor
    aggregator: WeightedMean
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
        """The aggregator's."""
        return self.aggregator.weigh(num_examples_B)

    def init(self, layout: Layout, *, device: torch.device) -> WeightedSum:
        """The aggregator's."""
        return self.aggregator.init(layout, device=device)

    def accumulate(self, state: WeightedSum, block: Block) -> WeightedSum:
        """The aggregator's, under the watch."""
        started_s = self.clock.now_s()
        state = self.aggregator.accumulate(state, block)
        self.work_s += self.clock.now_s() - started_s
        return state

    def merge(self, left: WeightedSum, right: WeightedSum) -> WeightedSum:
        """The aggregator's."""
        return self.aggregator.merge(left, right)

    def finalize(self, state: WeightedSum) -> Tensor:
        """The aggregator's."""
        return self.aggregator.finalize(state)


DEVICES: Mapping[str, Mapping[str, object]] = {
    "ideal": {
        "stragglers": {"over_selection": 1.0, "deadline_s": "none"},
        "devices": {"kind": "ideal"},
    },
    "lognormal": {"stragglers": {"over_selection": 1.3, "deadline_s": 60.0}},
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
        plan, params = assemble(
            resolved.simulation, Alone(), device=torch.device("cpu"), clock=clock
        )
        engine = plan.round.collector
        assert isinstance(engine, Engine)
        aggregator = resolved.simulation.algorithm.aggregator
        timed = Stopwatches(engine.population, engine.executor, aggregator, clock)
        engine = replace(engine, population=timed, executor=timed, aggregator=timed)
        plan = replace(plan, round=replace(plan.round, collector=engine))
        with Database.open(sqlite_url(runs_dir / "runs.db"), runs_dir=runs_dir) as database:
            stored = database.create_named(new_record(resolved.simulation, extra={}), seed=Seed(0))
            progress.start(stored.record, stored.path, resolved.notes)
            started = clock.now_s()
            train(plan, params, checkpoint=None, store=stored, progress=progress.round)
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
