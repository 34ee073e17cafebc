"""IFCA and clustered FL: special cases, and what they are for."""

from dataclasses import replace
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
        evaluation={"clients": 8},
        engine={"num_workers": 1, "executor": "sequential"},  # parity tests compare the others
        **{"num_rounds": 6, "cohort": {"num_wanted": 8}, **settings},
    )


def test_ifca_separates_clients_whose_labels_contradict_each_other() -> None:
    """Their personal models are right. Control: one model for all guesses."""
    found = run(fl.IFCA(SGD, num_clusters=2))
    last = found.history[-1].metrics
    assert last["clients/personal_accuracy_mean"] > 0.95
    assert last["cluster_0_share"] == last["cluster_1_share"] == 0.5
    clusters = [float(found.client_state(client)["cluster"]) for client in range(8)]
    assert clusters in ([0.0, 1.0] * 4, [1.0, 0.0] * 4)
    one = run(fl.IFCA(SGD, num_clusters=1))
    assert one.history[-1].metrics["clients/accuracy_mean"] < 0.7


def test_ifca_of_one_model_is_fedavg() -> None:
    """Itself, without further lanes."""
    assert fl.IFCA(SGD, num_clusters=1) == fl.FedAvg(SGD)


CLUSTERED = fl.ClusteredFL(SGD, max_clusters=2, largest_mean=0.25, least_update=0.3)


def test_clusters_are_split_where_labels_contradict_each_other() -> None:
    """Not in the first round, whose mean is large. Control: thresholds that are not reached."""
    found = run(CLUSTERED)
    assert [each.metrics["num_clusters"] for each in found.history] == [1, 2, 2, 2, 2, 2]
    assert found.history[-1].metrics["clients/personal_accuracy_mean"] > 0.95
    clusters = [float(found.client_state(client)["cluster"]) for client in range(8)]
    assert clusters in ([0.0, 1.0] * 4, [1.0, 0.0] * 4)
    for never in (replace(CLUSTERED, largest_mean=1e-3), replace(CLUSTERED, least_update=9.0)):
        whole = run(never)
        assert whole.history[-1].metrics["num_clusters"] == 1


def test_clients_that_missed_the_split_join_the_half_that_is_like_them() -> None:
    """Four of eight take part in a round, so some come only after it."""
    found = run(CLUSTERED, cohort={"num_wanted": 4}, num_rounds=12)
    clusters = [float(found.client_state(client)["cluster"]) for client in range(8)]
    assert clusters in ([0.0, 1.0] * 4, [1.0, 0.0] * 4)


def test_clustered_fl_of_one_cluster_is_fedavg() -> None:
    """After each round."""
    one = fl.ClusteredFL(shelf.SGD, max_clusters=1, largest_mean=9.0, least_update=0.0)
    found, expected = (
        shelf.run(each, shelf.over(shelf.sessions(each))) for each in (one, fl.FedAvg(shelf.SGD))
    )
    assert shelf.largest_difference(found, expected) < 1e-6


def test_clusters_are_in_the_checkpoint() -> None:
    """A run that was cut right after a split continues with both halves."""

    class Cut:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> bool:
            if record.round_num == 2:
                raise KeyError(record.round_num, model)
            return False

    whole = run(CLUSTERED)
    with pytest.raises(KeyError):
        run(CLUSTERED, name="cut", callbacks=[Cut()])
    resumed = run(CLUSTERED, resume="cut")
    for name, value in whole.weights(best=False).items():
        assert torch.equal(value, resumed.weights(best=False)[name])
    for client in range(8):
        states = (each.client_state(client)["personal"] for each in (whole, resumed))
        assert torch.equal(*states)


def test_an_update_of_several_lanes_cannot_be_clustered() -> None:
    """The others would be lost."""
    several = fl.FedNova(SGD).local
    with pytest.raises(ValueError, match="sends 'effective_steps' besides the delta"):
        fl.ClusteredFL(several, max_clusters=2, largest_mean=1.0, least_update=0.0)


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
