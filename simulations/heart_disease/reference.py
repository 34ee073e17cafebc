"""Train Fed-Heart-Disease with a plain NumPy loop, as a check of fedlearn and of FLamby's figures.

    python simulations/heart_disease/reference.py

It starts from FLamby's initial weights and prints the accuracy with each algorithm's settings in
FLamby, once with its 100 steps a round on each client and once with 2 epochs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from heart import make_data
from numpy.typing import NDArray

from fedlearn.core.features import require_single_input
from fedlearn.simulation.population import Population

Vector = NDArray[np.float64]
_BATCH = 4
_ROUNDS = 15


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An algorithm with its settings in FLamby.

    Attributes:
        server: What the server does with the mean update: nothing, or a second moment's name.
        by_examples: Whether clients weigh by their examples.
    """

    rate: float
    server: str = "mean"
    server_rate: float = 1.0
    is_scaffold: bool = False
    by_examples: bool = True


SETTINGS = {
    "FedAvg": Setting(rate=0.001),
    "FedAdam": Setting(rate=0.01, server="adam", server_rate=0.01),
    "FedYogi": Setting(rate=0.003162, server="yogi", server_rate=0.01),
    "FedAdagrad": Setting(rate=0.003162, server="adagrad", server_rate=0.316228),
    "SCAFFOLD": Setting(rate=0.001, is_scaffold=True, by_examples=False),
    "SCAFFOLD by examples": Setting(rate=0.001, is_scaffold=True),
}


def load(hospitals: Population | None) -> list[tuple[Vector, Vector]]:
    """Return each hospital's features with a column of ones, and its labels."""
    assert hospitals is not None
    found = []
    for each in range(hospitals.num_clients):
        features, labels = hospitals.load(np.array([each])).gather()
        x = require_single_input(features).double().numpy()
        found.append((np.hstack([x, np.ones((len(x), 1))]), labels.numpy()[:, 0]))
    return found


def initial_weights(seed: int) -> Vector:
    """Return the weights that torch draws for FLamby's model."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(13, 1)
    return torch.cat([layer.weight[0], layer.bias]).detach().double().numpy()


def draw_batches(size: int, generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield batches of one shuffled epoch after another, without end."""
    while True:
        order = generator.permutation(size)
        yield from (order[start : start + _BATCH] for start in range(0, size, _BATCH))


def train(setting: Setting, seed: int, *, num_steps: int | None) -> Vector:
    """Train and return the weights; ``num_steps`` is that of each client, ``None``: two epochs."""
    hospitals = load(make_data().population)
    generator = np.random.default_rng(seed)
    batches = [draw_batches(len(labels), generator) for _, labels in hospitals]
    sizes = np.array([len(labels) if setting.by_examples else 1 for _, labels in hospitals])
    shares = sizes / sizes.sum()
    weights = initial_weights(seed)
    first, second, control = (np.zeros_like(weights) for _ in range(3))
    controls = [np.zeros_like(weights) for _ in hospitals]
    for _ in range(_ROUNDS):
        delta, change = np.zeros_like(weights), np.zeros_like(weights)
        for k, (features, labels) in enumerate(hospitals):
            steps = num_steps or 2 * -(-len(labels) // _BATCH)
            local = weights.copy()
            for _ in range(steps):
                batch = next(batches[k])
                error = 1 / (1 + np.exp(-features[batch] @ local)) - labels[batch]
                gradient = features[batch].T @ error / len(batch)
                local -= setting.rate * (gradient + control - controls[k])
            delta += shares[k] * (local - weights)
            if setting.is_scaffold:  # option II
                new = controls[k] - control + (weights - local) / (steps * setting.rate)
                change += shares[k] * (new - controls[k])
                controls[k] = new
        control = control + change
        if setting.server == "mean":
            weights = weights + delta
            continue
        first, square = 0.9 * first + 0.1 * delta, delta**2
        second = {
            "adam": 0.999 * second + 0.001 * square,
            "yogi": second - 0.001 * square * np.sign(second - square),
            "adagrad": second + square,
        }[setting.server]
        weights = weights + setting.server_rate * first / (np.sqrt(second) + 1e-8)
    return weights


def main() -> None:
    """Print a row for each algorithm and number of steps: seeds 42 to 46, as in FLamby."""
    tests = load(make_data().client_tests)
    print("| | all | Cleveland | Hungary | Switzerland | Long Beach |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, setting in SETTINGS.items():
        for num_steps in (100, None):
            right_SK = np.array(
                [
                    [np.sum((x @ weights > 0) == y) for x, y in tests]
                    for weights in (
                        train(setting, each, num_steps=num_steps) for each in range(42, 47)
                    )
                ]
            )
            sizes = np.array([len(y) for _, y in tests])
            all_S = right_SK.sum(1) / sizes.sum()
            cells = [f"{each:.3f}" for each in (right_SK / sizes).mean(0)]
            first = f"{name}, {'100 steps' if num_steps else '2 epochs'}"
            print(f"| {first} | {all_S.mean():.3f} ± {all_S.std():.3f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
