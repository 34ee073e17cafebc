"""Run a round with noise, and measure the noise in its model."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed

POPULATION, COHORT = 24, 8


def simulated(
    make_model: Callable[[], nn.Module],
    algorithm: fl.Strategy,
    **settings: Any,  # Any: keys and objects
) -> fl.Run:
    """Run a round with 8 of 24 clients, each with twenty examples of 400 numbers."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 20 * POPULATION + 80)
    features = rng.normal(size=(len(labels), 400)) + 0.5 * labels[:, None]
    partition = fl.Iid(num_clients=POPULATION)
    data = fl.from_arrays(features, labels, partition=partition, test_fraction=1 / 7, seed=0)
    usual = {"num_rounds": 1, "cohort": {"num_wanted": COHORT}, "engine": {"num_workers": 1}}
    return fl.simulate(make_model, data, algorithm, **{**usual, **settings})


def moved(run: fl.Run, make_model: Callable[[], nn.Module]) -> Tensor:
    """Return the difference between the final and the initial model of a run with seed 0."""
    torch.manual_seed(Seed(0).derive("model").value)
    before = Params.of(make_model()).vector
    return Params.of(run.load_model(make_model, best=False)).vector - before


def has_scale(values: Tensor, sigma: float) -> bool:
    """Return whether normal values have the variance of ``sigma``, within 5 deviations."""
    excess = float((values.double() ** 2).mean()) / sigma**2 - 1.0
    return abs(excess) < 5.0 * math.sqrt(2.0 / len(values))
