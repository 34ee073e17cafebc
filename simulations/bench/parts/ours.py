"""Run fedlearn on the benchmark's workload: whole rounds, with store, validation and progress.

It takes the same arguments and prints the same JSON line as the peers, so that ``compare.py`` can
run them in turn.
"""

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from parts.rounds import Stopwatch

import fedlearn as fl
from fedlearn.assembly import Experiment, build_experiment
from fedlearn.config import Addresses
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.experiment.simulate import build_config, run_simulation
from fedlearn.experiment.site import Site
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation


@dataclass(frozen=True)
class PeersSampler:
    """Draws cohorts with the peers' sampling function, so that all train the same clients.

    Attributes:
        workload: The peers' common module.
        arguments: Its arguments.
    """

    workload: ModuleType
    arguments: argparse.Namespace

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the peers' cohort of this round."""
        chosen: NDArray[np.int64] = self.workload.sample(self.arguments, round_num)
        return tuple(ClientId(client_id) for client_id in chosen.tolist())


def load_workload(peers_dir: Path) -> ModuleType:
    """Import the peers' common module: data, models, cohorts, report."""
    spec = importlib.util.spec_from_file_location("peer_naive", peers_dir / "peer_naive.py")
    if spec is None or spec.loader is None or not (peers_dir / "peer_naive.py").exists():
        raise SystemExit(f"{peers_dir} has no peer_naive.py; pass --peers-dir")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def federated(workload: ModuleType, arguments: argparse.Namespace) -> FederatedData:
    """Return the workload's examples as a population; its first 100 serve as a test set."""
    features, labels, _, sizes = workload.make_data(arguments)
    partition = Partition(
        rows=np.arange(len(labels)), offsets=np.concatenate([[0], np.cumsum(sizes)])
    )
    x, y = torch.from_numpy(features), torch.from_numpy(labels)
    population = ArrayPopulation(features=x, labels=y, partition=partition, num_classes=10)
    test = fl.Examples(features=x[:100], labels=y[:100], groups=None, num_classes=10)
    return FederatedData(population=population, test=test)


def main() -> None:
    """Run the workload and print one JSON line."""
    peers_dir = Path(os.environ.get("PEERS_DIR", "../shared/peers"))
    workload = load_workload(peers_dir)

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--procs", type=int, default=1)
        parser.add_argument("--executor", default="auto")
        parser.add_argument("--private", action="store_true")

    arguments: Any = workload.parse(extra)  # the peers' own namespace
    settings = {
        "seed": arguments.seed,
        "num_rounds": arguments.warmup + arguments.rounds,
        "cohort": {"num_wanted": arguments.cohort},
        "stragglers": {"over_selection": 1.0, "deadline_s": "none"},
        "devices": {"kind": "ideal"},
        "evaluation": {"every_rounds": 0, "clients": 0},
        "engine": {"executor": arguments.executor, "num_workers": arguments.procs},
    }
    if arguments.private:  # cohorts stay the peers'; this measures clip, noise and ledger
        settings["privacy"] = {
            "mode": "central",
            "clip_norm": 1.0,
            "noise_multiplier": 1.0,
            "target_delta": 1e-6,
        }
    config = build_config(settings, source="the benchmark")
    local = fl.LocalSgd(
        epochs=arguments.epochs,
        batch_size=arguments.batch,
        learning_rate=arguments.lr,
        shuffle=False,
    )
    experiment = Experiment(
        make_model=lambda: workload.make_model(arguments.model, arguments.seed),
        objective=fl.CrossEntropy(),
        data=federated(workload, arguments),
        algorithm=fl.FedAvg(local, weight_by_examples=not arguments.private),
    )
    components = build_experiment(config, experiment, data_dir=peers_dir)
    components = replace(components, sampler=PeersSampler(workload, arguments))
    progress = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        addresses = Addresses(store_url=None, runs_dir=Path(folder), data_dir=peers_dir)
        run = run_simulation(components, Site(addresses, dict(os.environ), SystemClock(), progress))
        trained = run.load_model(best=False)
    seconds = np.diff(progress.ends_s)
    workload.report(
        arguments,
        "fedlearn",
        seconds[arguments.warmup :],
        procs=arguments.procs,
        executor=progress.notes[-1],
        first_round_s=round(float(seconds[0]), 3),
    )
    if arguments.save:
        np.savez(arguments.save, *[value.detach().numpy() for value in trained.parameters()])


if __name__ == "__main__":
    main()
