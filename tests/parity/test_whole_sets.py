"""An external program: a Cox model over clinics, with its partial likelihood and c-index.

Both are defined on a whole set. However they are computed, the recorded values equal those that
numpy computes by hand: per clinic over all its patients, and centrally over the whole test set.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.algorithms.settings import settings_of
from fedlearn.config import load, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.core.features import require_single_input
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.experiment.simulate import run_config
from fedlearn.experiment.site import Site
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import TrainContext

SIZES = (31, 9, 24, 5, 14, 40)
LOCAL = fl.LocalSgd(epochs=2, batch_size=8, learning_rate=0.3)
Array = NDArray[np.float64]


# ---- The external program -----------------------------------------------------------------


def make_model() -> nn.Module:
    """Build a model of the log hazard."""
    return nn.Linear(4, 1, bias=False)


def cox(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the negative partial log likelihood per event; labels are (time, event)."""
    order = labels[:, 0].argsort(descending=True)
    hazard, event = outputs.flatten()[order], labels[order, 1]
    return ((hazard.logcumsumexp(0) - hazard) * event).sum() / event.sum().clamp(min=1.0)


def concordance(outputs: Tensor, labels: Tensor) -> float:
    """Compute the share of comparable pairs whose earlier event has the higher hazard."""
    hazard, (time, event) = outputs.flatten(), labels.T
    comparable = (time[:, None] < time[None, :]) & (event[:, None] > 0)
    right = (hazard[:, None] > hazard[None, :]) & comparable
    return float(right.sum() / comparable.sum())


OBJECTIVE = fl.CustomLoss(cox, per_example=False)
METRICS = {"c_index": fl.Metric(concordance, direction="max")}


def clinics() -> fl.FederatedData:
    """Build patients of six clinics, whose hazards depend on their features."""
    rng = np.random.default_rng(3)
    num_train, num_test = sum(SIZES), 37
    features = rng.normal(size=(num_train + num_test, 4))
    hazard = np.exp(features @ np.array([1.0, -0.7, 0.4, 0.0]))
    time, censored = rng.exponential(1 / hazard), rng.exponential(2.0, len(hazard))
    labels = np.stack([np.minimum(time, censored), time <= censored], axis=1)
    x, y = (torch.from_numpy(each).float() for each in (features, labels))
    train = fl.Examples(
        features=x[:num_train],
        labels=y[:num_train],
        groups=np.repeat(np.arange(len(SIZES)), SIZES),
        num_classes=None,
    )
    test = fl.Examples(features=x[num_train:], labels=y[num_train:], groups=None, num_classes=None)
    return fl.from_examples(fl.TrainTest(train=train, test=test), partition=fl.Natural(), seed=0)


# ---- By hand ------------------------------------------------------------------------------


def by_hand(weights: Array, features: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute both metrics of one set, patient by patient and pair by pair."""
    hazard = features.double().numpy() @ weights
    time, event = labels.double().numpy().T
    happened = np.flatnonzero(event)
    losses = [np.log(np.exp(hazard[time >= time[i]]).sum()) - hazard[i] for i in happened]
    pairs = [(i, j) for i, j in itertools.product(happened, range(len(time))) if time[i] < time[j]]
    right = np.mean([hazard[i] > hazard[j] for i, j in pairs])
    return {"loss": float(np.sum(losses) / max(1, len(happened))), "c_index": float(right)}


def compute_expected_metrics(weights: Array) -> dict[str, float]:
    """Compute everything that an evaluation of these weights records."""
    data, offsets = clinics(), np.cumsum([0, *SIZES])
    everything = by_hand(weights, require_single_input(data.test.features), data.test.labels)
    rows = data.population.load(np.arange(len(SIZES)))
    index = torch.from_numpy(rows.rows)
    x, y = require_single_input(rows.features)[index], rows.labels[index]
    parts = [slice(a, b) for a, b in itertools.pairwise(offsets.tolist())]
    of_clinics = [by_hand(weights, x[part], y[part]) for part in parts]
    for name, worst in (("loss", max), ("c_index", min)):
        values = [each[name] for each in of_clinics]
        everything[f"clients/{name}_mean"] = float(np.mean(values))
        for part in (10, 50, 90):
            everything[f"clients/{name}_p{part}"] = float(np.quantile(values, part / 100))
        everything[f"clients/{name}_worst_decile"] = worst(values)
        everything[f"clients/{name}_num_clients"] = float(len(values))
    return everything


# ---- Runs ---------------------------------------------------------------------------------


class Silent:
    """A progress display that shows nothing."""

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Show nothing."""

    def round(self, record: RoundRecord) -> None:
        """Show nothing."""

    def end(self, summary: Summary) -> None:
        """Show nothing."""


@pytest.fixture(autouse=True)
def _runs_in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(**settings: Any) -> fl.Run:  # Any: keys and tables
    everything: dict[str, Any] = {
        "num_rounds": 3,
        "cohort": {"num_wanted": 4},
        "devices": {"kind": "ideal"},
        "stragglers": {"deadline_s": "none"},
        "engine": {"num_workers": 1, "executor": "sequential"},
        **settings,
    }
    clients = {"clients": clinics().population.num_clients}
    everything["evaluation"] = {**clients, **everything.get("evaluation", {})}
    return fl.simulate(
        make_model,
        clinics(),
        fl.FedAvg(LOCAL),
        objective=OBJECTIVE,
        metrics=METRICS,
        progress=Silent(),
        **everything,
    )


def weights_of(finished: fl.Run) -> Array:
    return finished.weights(best=False)["weight"].double().flatten().numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"evaluation": {"batch_size": 7}},
        {"evaluation": {"batch_size": 1024}},
        {"engine": {"num_workers": 2}},
        {"engine": {"num_workers": 1, "executor": "vmap"}},
        {"engine": {"transport": "memory"}},
        {"centralized": True},
    ],
    ids=["small batches", "one batch", "two workers", "stacked", "sessions", "pooled"],
)
def test_what_is_recorded_is_what_numpy_computes(settings: Mapping[str, Any]) -> None:
    """Per client and over the whole test set, however and in whatever batches it is computed."""
    finished = run(**settings)
    expected = compute_expected_metrics(weights_of(finished))
    assert finished.history[-1].metrics == pytest.approx(expected, rel=1e-5)


def test_pooling_the_clinics_would_be_noticed() -> None:
    """The control: the pooled loss is far from the clinics' mean, and their c-indices differ."""
    weights, data = np.array([1.0, -0.7, 0.4, 0.0]), clinics()
    rows = data.population.load(np.arange(len(SIZES)))
    index = torch.from_numpy(rows.rows)
    pooled = by_hand(weights, require_single_input(rows.features)[index], rows.labels[index])
    expected = compute_expected_metrics(weights)
    assert abs(pooled["loss"] - expected["clients/loss_mean"]) > 0.5
    spread = expected["clients/c_index_p90"] - expected["clients/c_index_p10"]
    assert spread > 0.1


@pytest.mark.slow
def test_every_way_to_train_takes_the_same_steps() -> None:
    """One clinic at a time, stacked, on two workers and in sessions, always with whole batches."""
    engines: list[dict[str, Any]] = [
        {"num_workers": 1, "executor": "sequential"},
        {"num_workers": 1, "executor": "vmap"},
        {"num_workers": 1, "executor": "auto"},
        {"num_workers": 2, "executor": "sequential"},
        {"transport": "memory"},
    ]
    first, *others = (weights_of(run(engine=engine)) for engine in engines)
    for weights in others:
        np.testing.assert_allclose(weights, first, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_step_is_that_of_the_whole_batch() -> None:
    """One full batch: the gradient of the clinic's partial likelihood, computed by hand."""
    finished = fl.simulate(
        make_model,
        clinics(),
        fl.FedSGD(learning_rate=0.1),
        objective=OBJECTIVE,
        progress=Silent(),
        num_rounds=1,
        cohort={"num_wanted": 1},
        devices={"kind": "ideal"},
        stragglers={"deadline_s": "none", "over_selection": 1.0},
        engine={"num_workers": 1},
        seed=4,
    )
    (client,) = finished.history[0].participations
    rows = clinics().population.load(np.array([client.client_id]))
    torch.manual_seed(Seed(4).derive("model").value)
    before = make_model()
    loss = cox(before(require_single_input(rows.features)[rows.rows]), rows.labels[rows.rows])
    assert client.loss == pytest.approx(loss.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, list(before.parameters()))
    after = Params.of(before).vector - 0.1 * gradient.flatten()
    np.testing.assert_allclose(weights_of(finished), after.detach().numpy(), atol=1e-6)


@pytest.mark.slow
def test_the_best_model_is_that_with_the_highest_c_index() -> None:
    """A custom metric, for which higher is better, stops the run and selects the model."""
    finished = run(num_rounds=12, early_stopping={"metric": "c_index", "patience_rounds": 2})
    values = [record.metrics["c_index"] for record in finished.history]
    best = finished.load_model()
    test = clinics().test
    assert len(values) < 12
    with torch.no_grad():
        assert concordance(best(test.features), test.labels) == pytest.approx(max(values))


def test_the_worst_clinic_can_be_watched() -> None:
    """Each statistic over clients is a metric, with the direction of the underlying one."""
    finished = run(early_stopping={"metric": "clients/c_index_worst_decile", "target": 0.0})
    assert len(finished.history) == 1, "more is better: a target of 0 is reached at once"


def test_a_name_that_nobody_measures_is_refused() -> None:
    """Before the first round; the error lists the metrics that exist."""
    with pytest.raises(ConfigError, match=r'"c-index", which is not measured.*loss, c_index'):
        run(early_stopping={"metric": "c-index"})


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.parity.test_whole_sets import clinics, concordance, cox, make_model

def loss():
    return cox

def c_index():
    return concordance
"""

FILE = """
num_rounds = 3
[data]
source = "python"
factory = "program.py:clinics"
partition = { kind = "natural" }
[model]
kind = "python"
factory = "program.py:make_model"
[loss]
kind = "python"
factory = "program.py:loss"
per_example = false
[metrics.c_index]
factory = "program.py:c_index"
direction = "max"
[early_stopping]
metric = "c_index"
[client]
batch_size = 8
[cohort]
num_wanted = 4
[devices]
kind = "ideal"
[stragglers]
deadline_s = "none"
[engine]
num_workers = 1
executor = "sequential"
"""


@pytest.mark.slow
def test_a_file_says_the_same_as_the_program(tmp_path: Path) -> None:
    """Loss, metric and direction in TOML give the same weights and the same record."""
    root = str(Path(__file__).parents[2])
    (tmp_path / "program.py").write_text(PROGRAM.format(root=root))
    (tmp_path / "experiment.toml").write_text(FILE)
    config = load(tmp_path / "experiment.toml", overrides=[f"evaluation.clients={len(SIZES)}"])
    addresses = resolve_addresses(config, environ=os.environ)
    found = run_config(config, Site(addresses, os.environ, SystemClock(), Silent()))
    expected = run()
    np.testing.assert_array_equal(weights_of(found), weights_of(expected))
    assert found.history[-1].metrics == expected.history[-1].metrics


# ---- A device ------------------------------------------------------------------------------


def trainer(*, gradient_accumulation: int) -> TorchTrainer:
    test = clinics().test
    return TorchTrainer.of(
        make_model,
        test.features,
        test.labels,
        objective=OBJECTIVE,
        metrics=METRICS,
        device="cpu",
        gradient_accumulation=gradient_accumulation,
    )


def test_a_device_measures_all_its_examples_at_once() -> None:
    """Also more than it reads at a time, from tensors or from a dataset."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(600, 4))).float()
    y = torch.from_numpy(np.stack([rng.exponential(size=600), rng.random(600) < 0.6], 1)).float()
    weights = np.array([0.5, -0.5, 0.25, 0.0])
    tensors = {"weight": torch.from_numpy(weights).float()[None]}
    expected = by_hand(weights, x, y)
    for examples in ((x, y), (torch.utils.data.TensorDataset(x, y),)):
        made = TorchTrainer.of(
            make_model, *examples, objective=OBJECTIVE, metrics=METRICS, device="cpu"
        )
        assert made.evaluate(tensors).metrics == pytest.approx(expected, rel=1e-5)


def test_a_device_does_not_cut_a_batch_whose_loss_couples_examples() -> None:
    """The parts would have another loss; the whole batch trains."""
    with pytest.raises(ValueError, match="gradient_accumulation is 2, but the loss couples"):
        trainer(gradient_accumulation=2)
    context = TrainContext(
        client_id=ClientId(0), round_num=0, settings=settings_of(LOCAL), seed=Seed(0), state={}
    )
    result = trainer(gradient_accumulation=1).train(make_model().state_dict(), context=context)
    assert np.isfinite(result.metrics["loss"])


@pytest.mark.slow
def test_a_loss_that_hides_its_coupling_ends_the_run() -> None:
    """A likelihood per example that depends on the other examples, but is declared as a mean."""

    def by_example(outputs: Tensor, labels: Tensor) -> Tensor:
        earlier = labels[None, :, 0] >= labels[:, None, 0]
        at_risk = outputs.flatten().expand_as(earlier).masked_fill(~earlier, -torch.inf)
        return (at_risk.logsumexp(1) - outputs.flatten()) * labels[:, 1]

    for transport in ("engine", "memory"):
        with pytest.raises(fl.FedlearnError, match=r"depends on the others|ValueError"):
            fl.simulate(
                make_model,
                clinics(),
                fl.FedAvg(LOCAL),
                objective=fl.CustomLoss(by_example),
                progress=Silent(),
                num_rounds=1,
                cohort={"num_wanted": 4},
                devices={"kind": "ideal"},
                stragglers={"deadline_s": "none"},
                engine={"num_workers": 1, "transport": transport},
            )
