"""A BatchNorm in evaluation mode does not couple examples, so mode "example" accepts it."""

from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.errors import ConfigError

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(12, 3)).astype("float32")
LABELS = RNG.integers(0, 2, 12)


class OnFrozenBase(nn.Module):
    """A head on a base with BatchNorm, which follows the mode of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.base(x))
        return scores


class OnEvaluatedBase(OnFrozenBase):
    """The same, but the base stays in evaluation mode."""

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's signature
        """Set the mode of the head only."""
        super().train(mode)
        self.base.eval()
        return self


def run_of(make_model: type[nn.Module]) -> fl.Run:
    data = fl.from_arrays(FEATURES, LABELS, partition=fl.Iid(3), test=(FEATURES, LABELS), seed=0)
    privacy = {"mode": "example", "noise_multiplier": 1.0, "clip_norm": 1.0, "target_delta": 1e-3}
    return fl.simulate(
        make_model,
        data,
        fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1), weight_by_examples=False),
        num_rounds=1,
        engine={"num_workers": 1},
        cohort={"num_wanted": 3, "sampling": "uniform"},
        privacy=privacy,
    )


@pytest.mark.slow
def test_a_layer_that_stays_in_evaluation_mode_is_trained_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are unchanged, bit for bit. Control: in training mode the layer is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights, start = run_of(OnEvaluatedBase).weights(best=False), OnEvaluatedBase().state_dict()
    moved = {name for name, value in weights.items() if not torch.equal(value, start[name])}
    assert moved == {"head.weight", "head.bias"}
    with pytest.raises(ConfigError, match=r"base\.1 \(BatchNorm1d\) computes with all examples"):
        run_of(OnFrozenBase)
