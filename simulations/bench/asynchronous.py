"""How many clients a second FedBuff trains beside synchronous FedAvg, and what a million take.

The same small MLP and clients of the same size for both, whole rounds with store and progress, one
process. Runs take turns, so that a machine whose speed changes changes it for both, and the medians
of several are compared.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedlearn as fl
from fedlearn.core.clock import SystemClock
from fedlearn.core.randomness import Seed
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.population import BootstrapPopulation

#: FedBuff trains at least so many clients a second of what synchronous rounds do.
TARGET = 0.5
#: A simulation of a million clients takes less, in bytes.
MOST_BYTES = 2 << 30

WARMUP = 5
EXAMPLES, FEATURES, CLASSES = 50, 64, 10
LOCAL = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.05)


class Stopwatch:
    """A progress that notes when each round ended."""

    def __init__(self) -> None:
        self.ends_s, self._clock = list[float](), SystemClock()

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Say nothing."""

    def round(self, record: RoundRecord) -> None:
        """Note the end of a round."""
        self.ends_s.append(self._clock.now_s())

    def end(self, summary: Summary) -> None:
        """Say nothing."""


def make_model() -> nn.Module:
    """Return the small MLP of the other benchmarks."""
    return nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def federated(num_clients: int) -> FederatedData:
    """Return clients of 50 examples each, drawn from a pool: they need no table."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(10_000, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (10_000,), generator=generator)
    population = BootstrapPopulation(
        features=features,
        labels=labels,
        num_classes=CLASSES,
        num_clients=num_clients,
        examples_per_client=EXAMPLES,
        seed=Seed(0),
    )
    test = fl.Examples(features=features[:100], labels=labels[:100], groups=None, num_classes=10)
    return FederatedData(population=population, test=test)


@dataclass(frozen=True)
class Job:
    """A run whose speed is measured."""

    num_clients: int
    cohort: int
    num_rounds: int

    def clients_a_second(self, *, is_asynchronous: bool) -> float:
        """Return how many clients a second are trained, after some rounds to warm up."""
        algorithm: fl.Strategy | fl.Buffered = fl.FedAvg(LOCAL)
        settings: dict[str, Any] = {"cohort": {"num_wanted": self.cohort}}
        if is_asynchronous:
            algorithm = fl.FedBuff(
                LOCAL, buffer_size=self.cohort, concurrency=2 * self.cohort, max_staleness=20
            )
            settings = {}
        watch = Stopwatch()
        with tempfile.TemporaryDirectory() as folder:
            fl.simulate(
                make_model,
                federated(self.num_clients),
                algorithm,
                progress=watch,
                num_rounds=WARMUP + self.num_rounds,
                devices={"kind": "lognormal", "dropout_rate": 0.0},
                evaluation={"every_rounds": 0, "clients": 0},
                engine={"num_workers": 1, "executor": "fused", "device": "cpu"},
                store={"runs_dir": folder},
                **settings,
            )
        return self.num_rounds * self.cohort / (watch.ends_s[-1] - watch.ends_s[WARMUP - 1])


def beside(job: Job, turns: int) -> dict[str, float]:
    """Return clients a second of both, in turn, and how the asynchronous one compares."""
    pairs = [
        [job.clients_a_second(is_asynchronous=each) for each in (False, True)] for _ in range(turns)
    ]
    synchronous, asynchronous = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return {
        "synchronous_clients_per_s": synchronous,
        "fedbuff_clients_per_s": asynchronous,
        "ratio": ratio,
        "target": TARGET,
    }


def million(job: Job) -> dict[str, float]:
    """Return what an asynchronous run of a million clients takes, in a process of its own."""
    command = [sys.executable, __file__, "--alone", "--rounds", str(job.num_rounds)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and print one JSON line a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of a run")
    parser.add_argument("--turns", type=int, default=5, help="runs of each")
    parser.add_argument("--cohort", type=int, default=50, help="clients of a round")
    parser.add_argument("--alone", action="store_true", help="the million, in this process")
    arguments = parser.parse_args()
    if arguments.alone:
        job = Job(num_clients=1_000_000, cohort=arguments.cohort, num_rounds=arguments.rounds)
        speed = job.clients_a_second(is_asynchronous=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"clients_per_s": speed, "peak_bytes": peak, "target": MOST_BYTES}))
        return
    job = Job(num_clients=1000, cohort=arguments.cohort, num_rounds=arguments.rounds)
    print(json.dumps({"part": "throughput"} | beside(job, arguments.turns)), flush=True)
    print(json.dumps({"part": "a million clients"} | million(job)))


if __name__ == "__main__":
    main()
