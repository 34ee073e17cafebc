"""Time whole rounds of small models on synthetic clients, with store and progress."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedlearn as fl
from fedlearn.core.clock import SystemClock
from fedlearn.core.randomness import Seed
from fedlearn.experiment.progress import PlainProgress
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.simulation.federated_data import FederatedData
from fedlearn.simulation.population import BootstrapPopulation

#: Warm-up rounds, which are slower because they touch memory for the first time.
WARMUP = 5
EXAMPLES, CLASSES = 50, 10
LOCAL = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.05)


def mlp() -> nn.Module:
    """Build an MLP for digits of 8 x 8 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def cnn() -> nn.Module:
    """Build a CNN with 215,000 parameters for images of 28 x 28 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    )


#: Models by name, each with the shape of its examples.
MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (1, 8, 8)),
    "cnn": (cnn, (1, 28, 28)),
}


class Stopwatch:
    """A progress display that notes when each round ended, and formats log lines as usual."""

    def __init__(self) -> None:
        self._now_s = SystemClock().now_s
        self.ends_s, self.notes = [self._now_s()], tuple[str, ...]()
        self._lines = PlainProgress(Path(os.devnull).open("w"))  # noqa: SIM115 - open until exit

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Note the start."""
        self._lines.start(record, path, notes)
        self.notes = tuple(notes)
        self.ends_s = [self._now_s()]

    def round(self, record: RoundRecord) -> None:
        """Note the end of a round."""
        self._lines.round(record)
        self.ends_s.append(self._now_s())

    def end(self, summary: Summary) -> None:
        """Write the last lines."""
        self._lines.end(summary)


def federated(num_clients: int, *, shape: tuple[int, ...]) -> FederatedData:
    """Build clients of 50 examples each, drawn from a pool, so that no table of rows is needed."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(10_000, *shape, generator=generator)
    labels = torch.randint(0, CLASSES, (10_000,), generator=generator)
    population = BootstrapPopulation(
        features=features,
        labels=labels,
        num_classes=CLASSES,
        num_clients=num_clients,
        examples_per_client=EXAMPLES,
        seed=Seed(0),
    )
    test = fl.Examples(
        features=features[:100], labels=labels[:100], groups=None, num_classes=CLASSES
    )
    return FederatedData(population=population, test=test)


def round_seconds(
    algorithm: fl.Strategy | fl.Buffered,
    *,
    model: str = "mlp",
    num_clients: int = 1000,
    num_rounds: int,
    **settings: Any,  # Any: tables of a configuration
) -> list[float]:
    """Run a simulation and return the seconds of each round after the warm-up."""
    make_model, shape = MODELS[model]
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        fl.simulate(
            make_model,
            federated(num_clients, shape=shape),
            algorithm,
            progress=watch,
            num_rounds=WARMUP + num_rounds,
            evaluation={"every_rounds": 0, "clients": 0},
            # Checkpoints are saved by real time, so some runs would have more of them than others.
            store={"runs_dir": folder, "checkpoint_every_s": 3600.0},
            **settings,
        )
    return [float(each) for each in np.diff(watch.ends_s)[WARMUP:]]
