"""What noise has done to a model."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed


def moved(run: fl.Run, make_model: Callable[[], nn.Module]) -> Tensor:
    """Return how far the model of a run with the seed 0 is from where it began."""
    torch.manual_seed(Seed(0).derive("model").value)
    before = Params.of(make_model()).vector
    return Params.of(run.load_model(make_model, best=False)).vector - before


def has_scale(values: Tensor, sigma: float) -> bool:
    """Tell whether the variance of normal values is that of ``sigma``: 5 deviations."""
    excess = float((values.double() ** 2).mean()) / sigma**2 - 1.0
    return abs(excess) < 5.0 * math.sqrt(2.0 / len(values))
