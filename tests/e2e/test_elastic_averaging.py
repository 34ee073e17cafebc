"""EASGD as a user runs it: over sessions, under masks, with noise, and after a crash."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.errors import EngineError
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TrainContext
from tests.e2e.test_python_api import Quiet, data, make_model

NUM_CLIENTS = 12
SGD = fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)
ALGORITHM = fl.EASGD(SGD, elasticity=0.5, cohort_size=NUM_CLIENTS)


@pytest.fixture(autouse=True)
def _runs_in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(algorithm: fl.Strategy = ALGORITHM, **settings: Any) -> fl.Run:  # Any: keys and objects
    """Run four rounds of all clients, unless ``settings`` say otherwise."""
    everything: dict[str, Any] = {
        "num_rounds": 4,
        "cohort": {"num_wanted": NUM_CLIENTS},
        "engine": {"num_workers": 1},
        **settings,
    }
    return fl.simulate(make_model, data(NUM_CLIENTS), algorithm, **everything)


def weights(found: fl.Run) -> torch.Tensor:
    return torch.cat([value.flatten() for value in found.weights().values()])


@pytest.mark.slow
def test_the_model_is_the_same_over_sessions_and_under_masks() -> None:
    """It also learns. The control: with elasticity 0 the global model does not change."""
    engine, sessions = run(num_rounds=12), run(num_rounds=12, engine={"transport": "memory"})
    torch.testing.assert_close(weights(sessions), weights(engine), rtol=0.0, atol=1e-6)
    masked = run(
        num_rounds=12,
        engine={"transport": "memory"},
        secure_aggregation={"mode": "complete", "clip_norm": 2.0},
    )
    torch.testing.assert_close(weights(masked), weights(engine), rtol=0.0, atol=1e-4)
    accuracy = [record.metrics["accuracy"] for record in engine.history]
    assert accuracy[-1] > 0.85 > accuracy[0]
    alone = run(algorithm=fl.EASGD(SGD, elasticity=0.0, cohort_size=NUM_CLIENTS))
    assert torch.equal(weights(alone), weights(run(algorithm=alone_at_first(), num_rounds=1)))


def alone_at_first() -> fl.Strategy:
    """Return a strategy whose first round sends nothing, as clients start at the global model."""
    return fl.EASGD(SGD, elasticity=0.9, cohort_size=NUM_CLIENTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"privacy": {"mode": "central"}},
        {"privacy": {"mode": "local"}},
        {"privacy": {"mode": "example"}},
        {"privacy": {"mode": "distributed"}, "secure_aggregation": {"mode": "complete"}},
    ],
    ids=["central", "local", "example", "distributed"],
)
def test_noise_hides_what_is_sent(settings: dict[str, Any]) -> None:
    """Each mode bounds the elastic force like an update; the noise moves the model."""
    private = {"clip_norm": 0.5, "noise_multiplier": 1.0, "target_delta": 1e-3}
    if settings["privacy"]["mode"] == "distributed":
        settings = settings | {"engine": {"transport": "memory"}}
    settings = settings | {"privacy": private | settings["privacy"], "num_rounds": 2}
    plain, noised = run(num_rounds=2), run(**settings)
    assert float((weights(noised) - weights(plain)).abs().max()) > 1e-3


@pytest.mark.slow
def test_a_run_goes_on_with_what_clients_have_of_their_own() -> None:
    """To the bit. A checkpoint without the clients' models would restart them at the global one."""
    store = {"checkpoint_every_s": 0.0}
    with pytest.raises(KeyboardInterrupt):
        run(name="broken", progress=Quiet(break_after=2), store=store)
    again = run(resume="broken", store=store)
    assert len(again.history) == 4
    assert torch.equal(weights(again), weights(run()))


class Mine:
    """A user's trainer that supports only SGD."""

    honors = ("epochs", "batch_size", "learning_rate", "shuffle")

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.num_examples = len(labels)

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        return LocalResult(
            tensors=tensors, num_examples=self.num_examples, metrics={"loss": 0.0}, state={}
        )

    def evaluate(self, tensors: Mapping[str, Tensor]) -> LocalEvaluation:
        return LocalEvaluation(num_examples=self.num_examples, metrics={"loss": 0.0})


def test_a_trainer_that_knows_no_force_is_refused() -> None:
    """It would train from the global model and send its whole update."""
    assert run(trainer=Mine, algorithm=fl.FedAvg(SGD), num_rounds=1).history
    with pytest.raises(EngineError, match="elasticity"):
        run(trainer=Mine, num_rounds=1)


def kernels() -> nn.Module:
    """Build a network whose kernels the fused executor copies for each client."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def images() -> fl.FederatedData:
    """Make images, labeled by whether their upper half is bright."""
    features = torch.randn(240, 1, 4, 4, generator=torch.Generator().manual_seed(0)).numpy()
    labels = (features[:, 0, :2].sum((1, 2)) > 0).astype("int64")
    clients = fl.Iid(num_clients=NUM_CLIENTS)
    return fl.from_arrays(features, labels, partition=clients, test_fraction=0.2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["vmap", "fused"])
def test_kernels_begin_and_are_sent_as_they_shall(executor: str) -> None:
    """Equal to training one client after another, each with its own model and force."""
    found, expected = (
        fl.simulate(
            kernels,
            images(),
            ALGORITHM,
            num_rounds=4,
            cohort={"num_wanted": NUM_CLIENTS},
            engine={"executor": each},
        )
        for each in (executor, "sequential")
    )
    torch.testing.assert_close(weights(found), weights(expected), rtol=0.0, atol=1e-6)
