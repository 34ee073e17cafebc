"""Buffers that a model does not save are not sent, and are reset for each training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl

GROUPS = np.repeat([0, 1, 2], 4)
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(12, 3)).astype("float32")
LABELS = RNG.integers(0, 2, 12)


class Fading(nn.Module):
    """Halves the scale of its outputs in each training step; the scale is not saved."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.5)
        outputs: Tensor = self.layer(x) * self.scale.clone()
        return outputs


def by_hand() -> dict[str, Tensor]:
    """Compute the mean after one round with two steps per client."""
    models = list[Mapping[str, Tensor]]()
    for client in range(3):
        model = Fading()
        own = np.flatnonzero(client == GROUPS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            scores = model(torch.from_numpy(FEATURES[own]))
            nn.functional.cross_entropy(scores, torch.from_numpy(LABELS[own])).backward()
            optimizer.step()
        models.append(model.state_dict())
    return {name: torch.stack([each[name] for each in models]).mean(0) for name in models[0]}


@pytest.mark.parametrize(
    "engine",
    [{"executor": "sequential", "block_size": 1}, {"transport": "memory"}],
    ids=["in the engine", "in sessions"],
)
def test_buffers_that_are_not_saved_stay_with_each_client(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next client does not get them, and a session does not need them from the coordinator."""
    monkeypatch.chdir(tmp_path)
    data = fl.from_arrays(
        FEATURES, LABELS, groups=GROUPS, partition=fl.Natural(), test=(FEATURES, LABELS), seed=0
    )
    run = fl.simulate(
        Fading,
        data,
        fl.FedAvg(fl.LocalSgd(epochs=2, batch_size=None, learning_rate=0.5)),
        num_rounds=1,
        engine={**engine, "num_workers": 1},
        cohort={"num_wanted": 3},
    )
    torch.testing.assert_close(run.weights(best=False), by_hand(), rtol=1e-5, atol=1e-6)
