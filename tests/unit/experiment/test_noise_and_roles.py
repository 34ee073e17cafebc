"""Noise is only added to trained tensors: frozen ones are kept, running statistics refused."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.errors import ConfigError

PRIVACY: Mapping[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 1.0, "target_delta": 1e-3}
#: Settings for each way to add noise.
MODES: Mapping[str, Mapping[str, Any]] = {
    "central": {"privacy": {"mode": "central", "population": "central", **PRIVACY}},
    "banded": {"privacy": {"mode": "central", "population": "banded", "bands": 2, **PRIVACY}},
    "local": {"privacy": {"mode": "local", "population": "local", **PRIVACY}},
    "distributed": {
        "privacy": {"mode": "distributed", "population": "distributed", **PRIVACY},
        "secure_aggregation": {"mode": "complete", "simulate_as": "modular_sum"},
    },
    "sum": {"secure_aggregation": {"mode": "complete", "simulate_as": "modular_sum"}},
}


class FrozenBatchNorm(nn.Module):
    """A normalization with constant buffers, like torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.full((8,), 0.25))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - self.mean


class RunningMean(FrozenBatchNorm):
    """A normalization that updates its buffer in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs - self.mean


class AlwaysEvaluating(nn.BatchNorm1d):
    """A batch normalization that stays in evaluation mode."""

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - as torch has it
        return super().train(False)


KEPT: Mapping[str, Callable[[], nn.Module]] = {
    "momentum 0": lambda: nn.BatchNorm1d(8, momentum=0.0),
    "evaluation mode": lambda: AlwaysEvaluating(8),
    "constant buffers": FrozenBatchNorm,
    "no statistics": lambda: nn.GroupNorm(2, 8),
}
UPDATED: Mapping[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(8),
    "a user's own": RunningMean,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
}


def network(make_layer: Callable[[], nn.Module]) -> nn.Module:
    """Build a frozen base, a layer, and a trainable head."""
    torch.manual_seed(1)
    base = nn.Linear(6, 8).requires_grad_(False)
    return nn.Sequential(base, make_layer(), nn.Tanh(), nn.Linear(8, 2))


def run(make_layer: Callable[[], nn.Module], mode: str) -> dict[str, Tensor]:
    """Run two rounds and return the weights."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(200, 6)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(np.int64)
    data = fl.from_arrays(features, labels, partition=fl.Iid(20), test=(features, labels), seed=0)
    done = fl.simulate(
        lambda: network(make_layer),
        data,
        fl.FedAvg(
            fl.LocalSgd(epochs=1, batch_size=5, learning_rate=0.1),
            weight_by_examples=mode == "sum",
        ),
        num_rounds=2,
        seed=0,
        engine={"num_workers": 1},
        cohort={"num_wanted": 10},
        **MODES[mode],
    )
    return done.weights(best=False)


def assert_kept(weights: Mapping[str, Tensor], make_layer: Callable[[], nn.Module]) -> None:
    start = network(make_layer)
    trained = {name for name, each in start.named_parameters() if each.requires_grad}
    for name, value in start.state_dict().items():
        is_counter = name.endswith("num_batches_tracked")
        assert torch.equal(weights[name], value) == (name not in trained) or is_counter, name


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_base_keeps_its_bits_under_noise_and_in_a_secure_sum(mode: str) -> None:
    """The control: the head changes."""
    assert_kept(run(nn.Identity, mode), nn.Identity)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_buffers_that_training_does_not_change_keep_their_bits_under_noise(name: str) -> None:
    """They count as frozen, by their layer or because a trial step does not change them."""
    assert_kept(run(KEPT[name], "central"), KEPT[name])


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *((mode, "batch") for mode in MODES if mode != "sum"),
        *(("central", name) for name in UPDATED),
    ],
)
def test_noise_on_running_statistics_is_refused_with_the_remedy(mode: str, name: str) -> None:
    """Before the first round: noise would make a variance negative."""
    with pytest.raises(ConfigError, match=r"running statistics with noise: '1\..*Use GroupNorm"):
        run(UPDATED[name], mode)
