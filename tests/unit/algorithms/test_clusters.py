"""IFCA: special cases, and what it is for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.algorithms.ifca import ClusterAveraging
from fedlearn.algorithms.lanes import Aggregate
from tests.parity import shelf

SGD = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.5)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def two_groups() -> Any:  # Any: as from_arrays returns it
    """Eight clients; the labels of every second one are the other way round."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(240, 3)).astype("float32")
    owners = np.arange(240) % 8
    labels = (features[:, 0] > 0).astype(int) ^ (owners % 2)
    return fl.from_arrays(
        features, labels, partition=fl.Natural(), groups=owners, test=(features, labels), seed=0
    )


def run(strategy: Any, **settings: Any) -> fl.Run:
    return fl.simulate(
        lambda: nn.Linear(3, 2),
        two_groups(),
        strategy,
        num_rounds=6,
        cohort={"num_wanted": 8},
        evaluation={"clients": 8},
        **settings,
    )


@pytest.mark.parametrize("executor", ["vmap", "sequential"])
def test_ifca_separates_clients_whose_labels_contradict_each_other(executor: str) -> None:
    """Their personal models are right. Control: one model for all guesses."""
    engine = {"num_workers": 1, "executor": executor}
    found = run(fl.IFCA(SGD, num_clusters=2), engine=engine)
    last = found.history[-1].metrics
    assert last["clients/personal_accuracy_mean"] > 0.95
    assert last["cluster_0_share"] == last["cluster_1_share"] == 0.5
    clusters = [float(found.client_state(client)["cluster"]) for client in range(8)]
    assert clusters in ([0.0, 1.0] * 4, [1.0, 0.0] * 4)
    one = run(fl.IFCA(SGD, num_clusters=1), engine=engine)
    assert one.history[-1].metrics["clients/accuracy_mean"] < 0.7


def test_ifca_of_one_model_is_fedavg() -> None:
    """Itself, without further lanes."""
    assert fl.IFCA(SGD, num_clusters=1) == fl.FedAvg(SGD)


def test_a_model_that_nobody_chose_stays_and_noise_moves_none_beyond_the_bound() -> None:
    """A share that noise makes tiny does not make a step huge."""
    strategy = fl.IFCA(shelf.SGD, num_clusters=3, update_bound=2.0)
    assert isinstance(strategy, ClusterAveraging)
    params = shelf.initial()
    state, zero = strategy.init(params), torch.zeros_like(params.vector)
    lanes = {
        "delta": zero,
        "cluster_1": zero + 1e-3,
        "cluster_2": zero + 1e-3,
        "chosen": torch.tensor([1.0, -1e-6, 1e-6]),
    }
    stepped = strategy.step(params, Aggregate(lanes, 3), state)
    assert torch.equal(stepped.state["cluster_1"], state["cluster_1"])
    moved = stepped.state["cluster_2"] - state["cluster_2"]
    assert float(moved.norm()) == pytest.approx(2.0)


def test_numbers_out_of_range_are_refused() -> None:
    """By name."""
    with pytest.raises(ValueError, match=r"initial_spread is 0\.0"):
        fl.IFCA(SGD, num_clusters=2, initial_spread=0.0)
    with pytest.raises(ValueError, match="num_clusters is 0"):
        fl.IFCA(SGD, num_clusters=0)
    with pytest.raises(ValueError, match=r"update_bound is -1\.0"):
        fl.IFCA(SGD, num_clusters=2, update_bound=-1.0)
