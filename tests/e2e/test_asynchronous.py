"""Asynchronous runs from Python, and what their records and reports show."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.core.participations import Status
from fedlearn.errors import ConfigError
from fedlearn.experiment.spending import load_spending

LOCAL = fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
#: Slow and fast devices, some of which drop out.
DEVICES: Mapping[str, object] = {"kind": "lognormal", "speed_sigma": 1.0, "dropout_rate": 0.1}


def data(num_clients: int = 30) -> fl.FederatedData:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 900)
    features = rng.normal(size=(900, 6)) + 2.0 * labels[:, None]
    partition = fl.Dirichlet(num_clients=num_clients, alpha=1.0, min_examples=2)
    return fl.from_arrays(features, labels, partition=partition, test_fraction=0.25, seed=0)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLEARN_RUNS_DIR", str(tmp_path / "runs"))


def fedbuff(*, buffer_size: int = 4, concurrency: int = 12) -> fl.Buffered:
    return fl.FedBuff(LOCAL, buffer_size=buffer_size, concurrency=concurrency, max_staleness=3)


def simulate(
    algorithm: fl.Strategy | fl.Buffered,
    num_clients: int = 30,
    **settings: Any,  # Any: tables of the configuration
) -> fl.Run:
    return fl.simulate(make_model, data(num_clients), algorithm, devices=DEVICES, **settings)


@pytest.mark.slow
def test_fedbuff_learns_and_tells_how_stale_it_was() -> None:
    """Staleness and stale updates are in the record and in the report."""
    run = simulate(fedbuff(), num_rounds=25)
    history = run.history
    assert history[-1].metrics["accuracy"] > 0.9
    assert all(sum(each.staleness.values()) == 4 for each in history)
    assert 1 <= max(age for each in history for age in each.staleness) <= 3
    assert sum(each.count(Status.STALE) for each in history) > 0
    assert all(each.count(Status.REPORTED) == 4 for each in history)
    page = run.report().read_text()
    assert ">Staleness<" in page
    assert "stale" in page


def test_any_strategy_may_be_buffered_by_the_table() -> None:
    """Such as FedAdam; wrapping it in :class:`fl.Buffered` gives the same run."""
    adam = fl.FedAdam(LOCAL, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3)
    limits = fedbuff().asynchrony
    table = {"mode": "buffered", "buffer_size": 4, "concurrency": 12}
    staleness = {"max_staleness": 3, "staleness_hinge": 0}
    same: dict[str, Any] = {"num_rounds": 6, "engine": {"executor": "sequential"}}
    one = simulate(fl.Buffered(adam, limits), **same)
    other = simulate(adam, asynchronous=table, staleness=staleness, **same)
    for name, tensor in one.weights(best=False).items():
        assert torch.equal(tensor, other.weights(best=False)[name])
    assert [each.staleness for each in one.history] == [each.staleness for each in other.history]


@pytest.mark.slow
def test_clients_that_add_noise_are_accounted_for_without_amplification(tmp_path: Path) -> None:
    """A fast client may take part in every round, so ε is that of all clients in each."""
    strategy = fl.FedAvg(LOCAL, weight_by_examples=False)
    privacy = {
        "mode": "local",
        "clip_norm": 1.0,
        "noise_multiplier": 50.0,
        "target_delta": 1e-3,
        "epsilon": 10.0,
    }
    same: dict[str, Any] = {"num_rounds": 3, "privacy": privacy}
    buffered = simulate(fl.Buffered(strategy, fedbuff().asynchrony), **same)
    elsewhere = {"runs_dir": str(tmp_path / "others")}  # ledgers add up over the runs of a store
    cohort = {"num_wanted": 30, "sampling": "uniform"}
    synchronous = simulate(strategy, cohort=cohort, store=elsewhere, **same)
    spent, everybody = (load_spending(each.stored) for each in (buffered, synchronous))
    assert spent is not None
    assert spent.num_own == 3
    assert spent == everybody


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        (
            fl.Scaffold(LOCAL, num_clients=30, server_learning_rate=1.0),
            {"asynchronous": {"mode": "buffered", "concurrency": 12}},
            "asynchronous.mode is on, but ScaffoldAveraging cannot be asynchronous: the server's",
        ),
        (fedbuff(concurrency=16, buffer_size=8), {}, "concurrency: 16 clients are in flight"),
        (fedbuff(), {"asynchronous": {"mode": "off"}}, "asynchronous is given, but the algorithm"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused_before_the_first_round(
    algorithm: fl.Strategy | fl.Buffered, settings: Mapping[str, object], message: str
) -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match=message):
        simulate(algorithm, num_clients=12, num_rounds=2, **settings)
