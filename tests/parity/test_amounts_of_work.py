"""``drop_last`` and ``max_steps`` mean the same in the engine, in sessions and in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of, update_from
from fedlearn.simulation.behavior import DeviceRound

SIZES = [9, 8, 7, 3]
SGD = fl.LocalSgd(epochs=2, batch_size=4, learning_rate=0.1)


@dataclass(frozen=True)
class Seen:
    """Equally fast devices, which record the number of examples that each has to process."""

    processed: list[list[int]] = field(default_factory=list)

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        self.processed.append(np.asarray(work.num_examples_processed).tolist())
        return np.ones(len(work.client_ids))

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return np.zeros(len(work.client_ids), np.bool_)


@pytest.mark.parametrize(
    ("local", "used", "processed"),
    [
        # 8 of 9 examples, 8 of 8, 4 of 7, and 3 of 3, since they are fewer than a batch.
        pytest.param(
            replace(SGD, drop_last=True), [8, 8, 4, 3], [6, 8, 16, 16], id="without short batches"
        ),
        pytest.param(replace(SGD, max_steps=1), [4, 4, 4, 3], [3, 4, 4, 4], id="one step"),
        # Batches of 4, 4 and 1; of 4, 4 and 4; of 4, 3 and 4; and of 3, 3 and 3.
        pytest.param(
            replace(SGD, epochs=9, max_steps=3), SIZES, [9, 9, 11, 12], id="three steps each"
        ),
        pytest.param(
            replace(SGD, epochs=9, max_steps=3, drop_last=True),
            [8, 8, 4, 3],
            [9, 12, 12, 12],
            id="three steps of whole batches",
        ),
    ],
)
def test_it_is_the_same_in_the_engine_and_in_sessions(
    local: fl.LocalSgd,
    used: list[int],
    processed: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
            fl.FedAvg(local),
            num_rounds=2,
            seed=0,
            engine=engine,
            devices=seen,
        )
        rows = sorted(run.history[0].participations)
        assert [row.num_examples for row in rows] == used
        first = seen.processed[: 1 if len(seen.processed[0]) == len(SIZES) else len(SIZES)]
        assert sorted(chain.from_iterable(first)) == processed
        found.append(run.weights(best=False))
    for other in found[1:]:
        assert all(
            torch.allclose(other[name], value, atol=1e-6) for name, value in found[0].items()
        )


def test_all_clients_take_the_same_number_of_steps() -> None:
    """With enough epochs for the smallest client; also where a step asks for its place."""
    local = replace(SGD, epochs=100, max_steps=100)
    assert local.num_steps(np.array([1, 9, 1000])).tolist() == [100, 100, 100]
    assert SGD.num_steps(np.array([1, 9, 1000])).tolist() == [2, 6, 500]  # control


@pytest.mark.parametrize(
    "make",
    [
        lambda local: fl.FedRep(local, head_layers=("1.*",), head_epochs=1),
        lambda local: fl.FedALA(local, adaptive_layers=("1.*",), mixing_rate=0.1, mixing_share=0.5),
    ],
    ids=["FedRep", "FedALA"],
)
def test_what_counts_in_epochs_refuses_a_limit_in_steps(
    make: Callable[[fl.LocalUpdate], object],
) -> None:
    make(SGD)  # control
    with pytest.raises(ValueError, match=r"max_steps is 3, but .* leave max_steps out"):
        make(replace(SGD, max_steps=3))


def test_a_limit_is_only_sent_if_there_is_one() -> None:
    """Clients of earlier versions refuse the setting, and without it train as before."""
    assert "max_steps" not in settings_of(SGD)
    limited = settings_of(replace(SGD, max_steps=3))
    assert limited["max_steps"] == 3
    assert update_from(limited) == replace(SGD, max_steps=3)
    assert update_from(settings_of(SGD)) == SGD


def test_epochs_of_different_length_do_not_mix_if_all_take_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client is done with its first epoch while others, which come after it, are not."""
    monkeypatch.chdir(tmp_path)
    owners = np.repeat(np.arange(4), [3, 9, 2, 8])
    x = np.random.default_rng(0).normal(size=(len(owners), 3))
    y = (x[:, 0] > 0).astype(int)
    data = fl.from_arrays(x, y, groups=owners, partition=fl.Natural(), test=(x[:4], y[:4]), seed=0)
    found = [
        fl.simulate(
            lambda: nn.Sequential(nn.Linear(3, 2)),
            data,
            fl.QFedAvg(replace(SGD, epochs=9, max_steps=3), fairness=1.0, step_size=0.1),
            num_rounds=2,
            seed=0,
            engine=engine,
        ).weights(best=False)
        for engine in ({"executor": "sequential"}, {"executor": "vmap"}, {"transport": "memory"})
    ]
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, atol=1e-6, rtol=0)


def test_a_gradient_over_an_epoch_is_one_over_the_steps_that_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q-FedAvg reports the loss at the global model; with one step it is that of one batch."""
    monkeypatch.chdir(tmp_path)
    owners = np.repeat(np.arange(4), SIZES)
    x = np.random.default_rng(0).normal(size=(len(owners), 3))
    y = (x[:, 0] > 0).astype(int)
    data = fl.from_arrays(x, y, groups=owners, partition=fl.Natural(), test=(x[:4], y[:4]), seed=0)
    local = replace(SGD, max_steps=1, shuffle=False)
    # The first batch of each client, as if these were all of its examples.
    first = np.concatenate([np.flatnonzero(owners == each)[:4] for each in range(4)])
    few = fl.from_arrays(
        x[first],
        y[first],
        groups=owners[first],
        partition=fl.Natural(),
        test=(x[:4], y[:4]),
        seed=0,
    )
    found = [
        fl.simulate(
            lambda: nn.Sequential(nn.Linear(3, 2)),
            examples,
            fl.QFedAvg(local, fairness=1.0, step_size=0.1),
            num_rounds=2,
            seed=0,
            engine=engine,
        ).weights(best=False)
        for examples, engine in (
            (few, {"executor": "sequential"}),
            (data, {"executor": "sequential"}),
            (data, {"executor": "vmap"}),
            (data, {"transport": "memory"}),
        )
    ]
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, atol=1e-6, rtol=0)
