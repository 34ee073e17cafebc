"""Running statistics are averaged as values, however old the models that clients began with.

The average of variances is between the clients' values. Changes relative to several models would
add up to anything, even to a negative variance.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl

LOCAL = fl.LocalSgd(epochs=3, batch_size=5, learning_rate=0.05)
STALE: Mapping[str, Any] = {"buffer_size": 2, "concurrency": 12, "max_staleness": 20}
#: An algorithm and settings for each kind of round.
ROUNDS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "FedBuff": (fl.FedBuff(LOCAL, **STALE), {}),
    "FedBuff, constant": (
        fl.FedBuff(LOCAL, staleness_weight=fl.StalenessWeight.CONSTANT, **STALE),
        {},
    ),
    "FedBuff, momentum": (
        fl.FedBuff(LOCAL, server_momentum=0.9, server_learning_rate=2.0, **STALE),
        {},
    ),
    "FedAsync": (fl.FedAsync(LOCAL, mixing=0.6, concurrency=8, max_staleness=20), {}),
    "late FedAvg": (
        fl.FedAvg(LOCAL, weight_by_examples=True),
        {"late_updates": {"mode": "keep"}, "stragglers": {"deadline_s": 0.4}},
    ),
    "late median": (
        fl.FedMedian(LOCAL),
        {"late_updates": {"mode": "keep"}, "stragglers": {"deadline_s": 0.4}},
    ),
}
#: Devices in seconds, some much slower than others.
DEVICES = {
    "kind": "lognormal",
    "median_ms_per_example": 10.0,
    "speed_sigma": 1.0,
    "dropout_rate": 0.1,
}


class Network(nn.Module):
    """A BatchNorm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.5)
        self.last = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.relu(self.norm(self.first(inputs))))
        return outputs


def data() -> fl.FederatedData:
    """Build clients whose features differ by two orders of magnitude."""
    generator = np.random.default_rng(0)
    scales = np.logspace(-1, 1, 20).repeat(10)[:, None]
    features = (generator.normal(size=(200, 6)) * scales).astype(np.float32)
    owners = np.arange(20).repeat(10)
    labels = (features[:, 0] > 0).astype(np.int64)
    test = (features, labels)
    return fl.from_arrays(
        features, labels, partition=fl.Natural(), groups=owners, test=test, seed=0
    )


class Watched:
    """Records the statistics after every round, and the staleness of its updates."""

    def __init__(self) -> None:
        self.variances = list[Tensor]()
        self.staleness = set[int]()

    def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
        self.variances.append(model.get_buffer("norm.running_var"))
        self.staleness |= set(record.staleness)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_variances_stay_above_zero_in_the_engine_as_over_sessions(name: str) -> None:
    """For any staleness, server optimizer and devices; engine and sessions agree."""
    algorithm, settings = ROUNDS[name]
    engine, sessions = Watched(), Watched()
    for watched, transport in ((engine, "engine"), (sessions, "memory")):
        fl.simulate(
            Network,
            data(),
            algorithm,
            num_rounds=7,
            seed=0,
            devices=DEVICES,
            engine={"num_workers": 1, "transport": transport, "block_size": 1},
            callbacks=[watched],
            **settings,
        )
    assert max(engine.staleness) >= 2, "the control: updates are stale"
    for one, other in zip(engine.variances, sessions.variances, strict=True):
        assert bool((one > 0.0).all())
        torch.testing.assert_close(one, other)
