"""What single clients measured is in the record of a run, by name."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fedlearn as fl
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.run import Run

RNG = np.random.default_rng(0)
#: Not in the order of the clients, which is that of the names.
NAMES = ["Ünna, <b>", "ada", "zoe", "bob"]
WHO = np.asarray(NAMES)[RNG.integers(0, 4, 160)]
FEATURES = RNG.normal(size=(160, 5)).astype("float32")
LABELS = (FEATURES[:, 0] * np.where(WHO == "zoe", -1, 1) > 0).astype(np.int64)
TRAIN, TEST = slice(0, 100), slice(100, 160)
#: Test examples of each client.
SIZES = [int(np.count_nonzero(WHO[TEST] == name)) for name in sorted(NAMES)]
SGD = fl.LocalSgd(epochs=2, batch_size=8, learning_rate=0.3)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


def measure(run: Run, vector: torch.Tensor | None = None, *, of: str = "*") -> list[float]:
    """Measure each client's accuracy with a run's last model, by plain torch.

    With ``vector``, the parameters whose names match ``of`` have these values instead.
    """
    model = run.load_model(make_model, best=False)
    if vector is not None:
        names = [name for name, _ in model.named_parameters() if fnmatch(name, of)]
        vector_to_parameters(vector, [model.get_parameter(name) for name in names])
    right = model(torch.from_numpy(FEATURES[TEST])).argmax(1).numpy() == LABELS[TEST]
    return [float(right[WHO[TEST] == name].mean()) for name in sorted(NAMES)]


@pytest.mark.parametrize(
    ("algorithm", "kept", "of"),
    [
        (fl.FedAvg(SGD), None, "*"),
        (fl.KeepLocal(fl.FedAvg(SGD), ["2.*"]), "local", "2.*"),
        (fl.Ditto(SGD, personal_learning_rate=0.1, personal_pull=0.1), "personal", "*"),
    ],
    ids=["global", "keep local", "Ditto"],
)
def test_the_values_are_those_of_the_released_model(
    algorithm: fl.Strategy, kept: str | None, of: str
) -> None:
    """Of the model after the last round, and of each client's own after it, by name."""
    run = simulate(algorithm, evaluation={"clients": 4, "every_rounds": 0})
    assert run.clients.measured_after == 3
    assert [each["name"] for each in run.clients] == sorted(NAMES)
    assert list(run.clients.num_examples) == SIZES
    assert run.clients.metrics["accuracy"] == pytest.approx(measure(run), abs=1e-6)
    for client_id, name in enumerate(sorted(NAMES) if kept else ()):
        state = run.client_state(client_id)
        expected = measure(run, state[kept or ""] if state else None, of=of)[client_id]
        assert run.clients[name]["personal_accuracy"] == pytest.approx(expected, abs=1e-6)
    metrics = run.history[-1].metrics
    assert run.clients.mean("accuracy") == metrics["clients/accuracy_mean"]
    assert run.clients.quantile("accuracy", 0.1) == metrics["clients/accuracy_p10"]


@pytest.mark.parametrize("transport", ["engine", "memory"])
def test_a_centralized_run_is_evaluated_by_client(transport: str) -> None:
    """Of the pooled model: there is no other, whatever the algorithm keeps on its one client."""
    ditto = fl.Ditto(SGD, personal_learning_rate=0.1, personal_pull=0.1)
    run = simulate(ditto, centralized=True, cohort={}, engine={"transport": transport})
    assert [each["name"] for each in run.clients] == sorted(NAMES)
    assert list(run.clients.metrics) == ["accuracy", "loss"]
    assert run.clients.metrics["accuracy"] == pytest.approx(measure(run), abs=1e-6)
    assert len(set(measure(run))) > 1  # the control
    with pytest.raises(ConfigError, match="5 clients evaluate, but the data have 4"):
        simulate(centralized=True, cohort={}, evaluation={"clients": 5})


def test_clients_fine_tune_the_pooled_model_on_their_own_examples() -> None:
    """With whole batches, as plain gradient descent on each client's examples does."""
    whole = fl.LocalSgd(epochs=3, batch_size=100, learning_rate=0.5)
    evaluation = {"clients": 4, "fine_tune_epochs": 3}
    run = simulate(fl.FedAvg(whole), centralized=True, cohort={}, evaluation=evaluation)
    for client_id, name in enumerate(sorted(NAMES)):
        model = run.load_model(make_model, best=False).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        mine = WHO[TRAIN] == name
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(torch.from_numpy(FEATURES[TRAIN][mine]))
            nn.functional.cross_entropy(outputs, torch.from_numpy(LABELS[TRAIN][mine])).backward()
            optimizer.step()
        tuned = parameters_to_vector(model.parameters()).detach()
        row = run.clients[name]
        assert row["personal_accuracy"] == pytest.approx(measure(run, tuned)[client_id], abs=1e-6)
    assert any(each["personal_accuracy"] != each["accuracy"] for each in run.clients)


def test_what_clients_hold_out_is_not_pooled() -> None:
    """A pooled run trains on what the clients train on, and not on what they are evaluated on."""
    data = fl.from_arrays(
        FEATURES, LABELS, groups=WHO, partition=fl.Natural(), test=(FEATURES, LABELS), seed=0
    )
    run = fl.simulate(
        make_model,
        data,
        fl.FedAvg(SGD),
        num_rounds=1,
        centralized=True,
        evaluation={"clients": 4, "client_test_fraction": 0.25},
    )
    (pooled,) = run.history[0].participations
    assert pooled.num_examples + sum(run.clients.num_examples) == len(LABELS)


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
    if len(labels) == min(SIZES):
        raise ValueError("no value")
    return 1.0


def test_a_client_that_cannot_be_evaluated_is_left_out() -> None:
    """As it is in a deployment, where it does not answer."""
    failing = SIZES.index(min(SIZES))
    run = simulate(metrics={"own": fl.Metric(fail_for_one, direction="max")}, num_rounds=1)
    assert failing not in run.clients
    assert sorted(NAMES)[failing] not in run.clients
    assert run.clients.client_ids == [each for each in range(4) if each != failing]
