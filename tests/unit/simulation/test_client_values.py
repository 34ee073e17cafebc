"""What single clients measured is in the record of a run, by name."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.config import Config, load, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.errors import StoreError
from fedlearn.experiment.progress import choose_printer
from fedlearn.experiment.run import Run
from fedlearn.experiment.simulate import run_config
from fedlearn.experiment.site import Site

ROOT = Path(__file__).resolve().parents[3]
RNG = np.random.default_rng(0)
#: Not in the order of the clients, which is that of the names.
NAMES = ["Ünna, <b>", "ada", "zoe", "bob"]
WHO = np.asarray(NAMES)[RNG.integers(0, 4, 160)]
FEATURES = RNG.normal(size=(160, 5)).astype("float32")
LABELS = (FEATURES[:, 0] * np.where(WHO == "zoe", -1, 1) > 0).astype(np.int64)
TRAIN, TEST = slice(0, 100), slice(100, 160)
SGD = fl.LocalSgd(epochs=2, batch_size=8, learning_rate=0.3)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def published() -> ModuleType:
    """The script that measures published figures, by code of its own."""
    spec = importlib.util.spec_from_file_location("published", ROOT / "simulations/published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def make_data() -> fl.FederatedData:
    return fl.from_arrays(
        FEATURES[TRAIN],
        LABELS[TRAIN],
        groups=WHO[TRAIN],
        partition=fl.Natural(),
        test=(FEATURES[TEST], LABELS[TEST]),
        test_groups=WHO[TEST],
        seed=0,
    )


def simulate(algorithm: fl.Strategy | None = None, **settings: Any) -> Run:
    usual: dict[str, Any] = {
        "num_rounds": 3,
        "cohort": {"num_wanted": 3},
        "evaluation": {"clients": 4},
        "engine": {"executor": "sequential", "num_workers": 1},
    }
    merged = {**usual, **settings}
    return fl.simulate(make_model, make_data(), algorithm or fl.FedAvg(SGD), **merged)


def list_tests() -> list[fl.Examples]:
    places = [np.flatnonzero(WHO[TEST] == name) for name in sorted(NAMES)]
    x, y = torch.from_numpy(FEATURES[TEST]), torch.from_numpy(LABELS[TEST])
    return [fl.Examples.of(features=x[place], labels=y[place]) for place in places]


def configure(*overrides: str) -> Config:
    np.savez(
        "clients.npz",
        x=FEATURES[TRAIN],
        y=LABELS[TRAIN],
        who=WHO[TRAIN],
        tx=FEATURES[TEST],
        ty=LABELS[TEST],
        u=WHO[TEST],
    )
    usual = (
        "data={source='npz',path='clients.npz',groups='who',partition={kind='natural'}}",
        "data.test_features='tx'",
        "data.test_labels='ty'",
        "data.test_groups='u'",
        "model={kind='mlp',hidden=[8]}",
        "client={learning_rate=0.3,epochs=2,batch_size=8}",
        "num_rounds=3",
        "cohort.num_wanted=3",
        "evaluation={clients=4,every_rounds=0}",
        "engine={executor='sequential',num_workers=1}",
    )
    return load(None, overrides=(*usual, *overrides))


PERSONAL_LAYERS = "algorithm={name='fedper',personal_layers=['3.*']}"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (PERSONAL_LAYERS, "evaluation.fine_tune_epochs=2"),
        ("algorithm={name='ditto',personal_learning_rate=0.1,personal_pull=0.1}",),
    ],
)
def test_the_values_are_those_of_the_released_model(
    published: ModuleType, overrides: tuple[str, ...]
) -> None:
    """Of the model after the last round, and of each client's own after it, as measured anew."""
    config = configure(*overrides)
    addresses = resolve_addresses(config, environ=os.environ)
    with Path(os.devnull).open("w") as nowhere:
        printer = choose_printer(nowhere, as_json=True)
        run = run_config(config, Site(addresses, os.environ, SystemClock(), printer))
    expected = published.measure_clients(run, config, list_tests())
    assert run.clients.measured_after == 3
    assert [each["name"] for each in run.clients] == sorted(NAMES)
    for client_id, name in enumerate(sorted(NAMES)):
        found = run.clients[name]
        assert found["client_id"] == client_id
        assert found["num_examples"] == np.count_nonzero(WHO[TEST] == name)
        assert found["accuracy"] == pytest.approx(expected[f"client_{client_id}"], abs=1e-6)
        own = found["personal_accuracy" if overrides else "accuracy"]
        assert own == pytest.approx(expected[f"personal_{client_id}"], abs=1e-6)
    metrics = run.history[-1].metrics
    assert run.clients.mean("accuracy") == metrics["clients/accuracy_mean"]
    assert run.clients.quantile("accuracy", 0.1) == metrics["clients/accuracy_p10"]


@pytest.mark.parametrize(
    "algorithm",
    [
        fl.KeepLocal(fl.FedAvg(SGD), ["2.*"]),
        fl.KnnPer(SGD, representation="1", num_neighbors=5, neighbor_weight=0.5),
    ],
    ids=["keep local", "neighbors"],
)
def test_sessions_measure_the_same_of_each_client(algorithm: fl.Strategy) -> None:
    engine = simulate(algorithm).clients.to_rows()
    sessions = simulate(algorithm, engine={"transport": "memory"}).clients.to_rows()
    assert "personal_loss" in engine[0]
    for one, other in zip(engine, sessions, strict=True):
        assert list(one) == list(other)
        assert one.pop("name") == other.pop("name")
        assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.slow
def test_two_workers_know_all_clients() -> None:
    one, two = (simulate(engine={"num_workers": num}).clients for num in (1, 2))
    assert two.client_ids == one.client_ids == [0, 1, 2, 3]
    assert two.metrics["loss"] == pytest.approx(one.metrics["loss"], abs=1e-6)


def test_the_evaluated_clients_are_those_asked_for() -> None:
    found = simulate(evaluation={"clients": 2}).clients
    assert len(found) == 2
    assert all(each["name"] == sorted(NAMES)[each["client_id"]] for each in found)


PRIVACY = {"mode": "central", "epsilon": 50.0, "target_delta": 0.01, "clip_norm": 1.0}


def test_a_private_run_keeps_no_values_of_single_clients() -> None:
    """Neither in its record nor for its callbacks, and it says why. Control: without privacy."""
    seen = list[Any]()

    class Watch:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
            seen.append(record.clients)

    private = {"privacy": PRIVACY, "cohort": {"num_wanted": 3, "sampling": "poisson"}}
    algorithm = fl.FedAvg(SGD, weight_by_examples=False)
    run = simulate(algorithm, callbacks=[Watch()], **private)
    with pytest.raises(StoreError, match=r'privacy\.mode is "central", and they have no noise'):
        _ = run.clients
    assert "privacy.mode is &#34;central&#34;, and they have no noise" in run.report().read_text()
    assert seen == [None] * 3
    assert not (run.path / "clients").exists()
    assert "clients/accuracy_mean" in run.history[-1].metrics
    open_run = simulate(callbacks=[Watch()])
    assert [len(each) for each in seen[3:]] == [4] * 3
    assert len(open_run.clients) == 4


def test_why_there_are_no_values_is_said() -> None:
    with pytest.raises(StoreError, match=r"evaluation\.clients is 0; raise it"):
        _ = simulate(evaluation={"clients": 0}).clients
    with pytest.raises(StoreError, match="centralized is true"):
        _ = simulate(centralized=True, cohort={}, evaluation={}).clients
    old = simulate()
    for path in (old.path / "clients").iterdir():
        path.unlink()
    with pytest.raises(StoreError, match="an earlier version of fedlearn"):
        _ = old.clients
    assert "All clients" not in old.report().read_text()


class Interrupt(Exception):
    """Ends a run in the middle."""


def test_a_resumed_run_keeps_the_values_of_its_last_evaluation() -> None:
    """Those of an evaluation that no commit has made durable are evaluated again."""

    class Fail:
        def after_round(self, record: fl.RoundRecord, model: nn.Module) -> None:
            if record.round_num == 3:
                raise Interrupt

    settings: dict[str, Any] = {
        "num_rounds": 5,
        "evaluation": {"clients": 4, "every_rounds": 2},
        "store": {"checkpoint_every_s": 1e-9},
        "name": "first",
    }
    with pytest.raises(Interrupt):
        simulate(callbacks=[Fail()], **settings)
    stored = simulate(name="other").stored.database.run("first")
    assert Run(stored).clients.measured_after == 2
    resumed = simulate(resume="first", **settings)
    whole = simulate(**{**settings, "name": "whole"})
    assert resumed.clients.measured_after == 5
    assert resumed.clients.to_rows() == whole.clients.to_rows()


def fail_for_one(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Fail for the client with the fewest test examples."""
    if len(labels) == min(len(each.labels) for each in list_tests()):
        raise ValueError("no value")
    return 1.0


def test_a_client_that_cannot_be_evaluated_is_left_out() -> None:
    """As it is in a deployment, where it does not answer."""
    sizes = [len(each.labels) for each in list_tests()]
    failing = sizes.index(min(sizes))
    run = simulate(metrics={"own": fl.Metric(fail_for_one, direction="max")}, num_rounds=1)
    assert failing not in run.clients
    assert sorted(NAMES)[failing] not in run.clients
    assert run.clients.client_ids == [each for each in range(4) if each != failing]
