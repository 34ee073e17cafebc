"""``drop_last`` means the same in the engine, in sessions and in virtual time."""

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fedlearn as fl
from fedlearn.simulation.behavior import DeviceRound

SIZES = [9, 8, 7, 3]
LOCAL = fl.LocalSgd(epochs=2, batch_size=4, learning_rate=0.1, drop_last=True)


@dataclass(frozen=True)
class Seen:
    """Equally fast devices, which record the number of examples that each has to process."""

    processed: list[list[int]] = field(default_factory=list)

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        self.processed.append(np.asarray(work.num_examples_processed).tolist())
        return np.ones(len(work.client_ids))

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.zeros(len(work.client_ids), np.bool_)


def test_it_is_the_same_in_the_engine_and_in_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    owners = np.repeat(np.arange(4), SIZES)
    x = np.random.default_rng(0).normal(size=(len(owners), 3))
    data = fl.from_arrays(
        x,
        (x[:, 0] > 0).astype(int),
        groups=owners,
        partition=fl.Natural(),
        test=(x[:4], [0, 1, 0, 1]),
        seed=0,
    )
    found = []
    for engine in ({"executor": "fused"}, {"executor": "sequential"}, {"transport": "memory"}):
        seen = Seen()
        run = fl.simulate(
            lambda: nn.Sequential(nn.Linear(3, 2)),
            data,
            fl.FedAvg(LOCAL),
            num_rounds=2,
            seed=0,
            engine=engine,
            devices=seen,
        )
        rows = sorted(run.history[0].participations)
        # 8 of 9 examples, 8 of 8, 4 of 7, and 3 of 3, since they are fewer than a batch.
        assert [row.num_examples for row in rows] == [8, 8, 4, 3]
        first = seen.processed[: 1 if len(seen.processed[0]) == len(SIZES) else len(SIZES)]
        assert sorted(chain.from_iterable(first)) == [6, 8, 16, 16]
        found.append(run.weights(best=False))
    for other in found[1:]:
        assert all(
            torch.allclose(other[name], value, atol=1e-6) for name, value in found[0].items()
        )
