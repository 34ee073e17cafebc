"""How much does a round cost beyond the work that a bare loop would do too?

    python simulations/bench/overhead.py

The work is fetching a block's examples, training it and adding up its deltas. The overhead is the
round loop, sampling, the devices' behavior, validation, the server's step, the store and progress.
Stopwatches time the work for a small MLP with 50 of 1,000 clients a round, once with ideal devices
and once with stragglers. There is one worker, so that no overhead hides behind another process.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from harness import Row, options, parse, report
from numpy.typing import NDArray
from parts.rounds import LOCAL, MODELS, Stopwatch, federated
from torch import Tensor

import fedlearn as fl
from fedlearn.algorithms.aggregations import LaneSums, WeightedMean
from fedlearn.algorithms.lanes import Aggregate, LaneSpec, Updates
from fedlearn.algorithms.recipes import Algorithm
from fedlearn.assembly import Experiment, Simulation, build_experiment
from fedlearn.assembly.choices import resolve
from fedlearn.assembly.own_code import AfterRound
from fedlearn.assembly.simulated_plan import assemble
from fedlearn.core.clock import SystemClock
from fedlearn.core.cluster import Alone
from fedlearn.core.params import Layout
from fedlearn.core.randomness import Seed
from fedlearn.experiment.simulate import build_config, new_record
from fedlearn.rounds.run import train
from fedlearn.simulation.cluster import limit_to_one_thread
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.base import Executor, TrainedBlock, Work
from fedlearn.simulation.population import ClientRows, Population
from fedlearn.store.runs import Database, sqlite_url


@dataclass
class Stopwatches:
    """Wraps population, executor and aggregation to time the work on each block.

    Attributes:
        population: Loads the examples.
        executor: Trains.
        aggregation: Adds up the deltas.
        clock: Real time.
        work_s: Seconds of work so far.
    """

    population: Population
    executor: Executor
    aggregation: WeightedMean
    clock: SystemClock
    work_s: float = 0.0
    _started_s: float = 0.0

    @property
    def num_clients(self) -> int:
        """Number of clients in the population."""
        return self.population.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Delegate to the population."""
        return self.population.num_examples(client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Fetch a block's examples and start the watch."""
        self._started_s = self.clock.now_s()
        return self.population.load(client_ids)

    def train(self, work: Work) -> TrainedBlock:
        """Train the block and stop the watch."""
        trained = self.executor.train(work)
        self.work_s += self.clock.now_s() - self._started_s
        return trained

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        """Delegate to the aggregation."""
        return self.aggregation.weigh(num_examples_B)

    def init(self, lanes: Sequence[LaneSpec], layout: Layout, *, device: torch.device) -> LaneSums:
        """Delegate to the aggregation."""
        return self.aggregation.init(lanes, layout, device=device)

    def accumulate(self, state: LaneSums, updates: Updates) -> LaneSums:
        """Delegate to the aggregation, and time it."""
        started_s = self.clock.now_s()
        state = self.aggregation.accumulate(state, updates)
        self.work_s += self.clock.now_s() - started_s
        return state

    def finalize(self, state: LaneSums) -> Aggregate:
        """Delegate to the aggregation."""
        return self.aggregation.finalize(state)


_COHORT = 50
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


def components(num_rounds: int, devices: str) -> Simulation:
    """Build a simulation of the small MLP on 1,000 clients with 50 examples each."""
    make_model, shape = MODELS["mlp"]
    settings = {
        "num_rounds": num_rounds,
        "cohort": {"num_wanted": _COHORT},
        **DEVICES[devices],
        "evaluation": {"every_rounds": 0, "clients": 0},
        "engine": {"num_workers": 1},
    }
    experiment = Experiment(
        make_model=make_model,
        objective=fl.CrossEntropy(),
        data=federated(1000, shape=shape),
        algorithm=fl.FedAvg(LOCAL),
    )
    config = build_config(settings, source="the benchmark")
    return build_experiment(config, experiment, data_dir=Path())


def measure(num_rounds: int, devices: str) -> Iterator[Row]:
    """Run once, and yield how much of a round is overhead."""
    clock, progress = SystemClock(), Stopwatch()
    with tempfile.TemporaryDirectory() as folder, limit_to_one_thread():
        runs_dir = Path(folder)
        resolved = resolve(
            components(num_rounds, devices),
            clock=clock,
            environ=os.environ,
            cache_dir=runs_dir / "cache",
        )
        plan, params = assemble(resolved, Alone(), device=torch.device("cpu"), clock=clock)
        engine, strategy = plan.round.collector, plan.round.strategy
        assert isinstance(engine, Engine)
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
            started_s = clock.now_s()
            train(plan, params, checkpoint=None, store=stored, after_round=after_round)
            seconds = clock.now_s() - started_s
    rest_s = seconds - timed.work_s
    yield Row(devices, "clients/s", num_rounds * _COHORT / seconds)
    yield Row(devices, "overhead, % of a round", 100 * rest_s / seconds)
    yield Row(devices, "overhead, microseconds a round", 1e6 * rest_s / num_rounds)


def main() -> None:
    """Run with ideal devices, and with stragglers."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=600)
    arguments = parse(parser, check={"rounds": 20})
    report((row for each in DEVICES for row in measure(arguments.rounds, each)), arguments)


if __name__ == "__main__":
    main()
