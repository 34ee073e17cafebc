"""The training metrics of a user's trainer are recorded, wherever it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import RoundRecord, RunRecord
from fedlearn.training.torch_trainer import TorchTrainer
from fedlearn.training.trainer import LocalResult, TrainContext

LOCAL = fl.LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def make_model() -> nn.Module:
    return nn.Linear(3, 2)


class Telling(TorchTrainer):
    """Reports its number of examples, and for every third client a metric that only it has."""

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Add metrics to the result of training."""
        result = super().train(tensors, context=context)
        told = {"examples": float(result.num_examples), "half": result.metrics["loss"] / 2}
        if context.client_id % 3 == 0:
            told[f"only of {context.client_id}"] = 1.0
        return replace(result, metrics={**result.metrics, **told})


def make_client_trainer(features: Tensor, labels: Tensor) -> Telling:
    return Telling.of(make_model, features, labels, device="cpu")


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


def run(trainer: Any = make_client_trainer, **engine: Any) -> fl.Run:
    rng = np.random.default_rng(1)
    data = fl.from_arrays(
        rng.normal(size=(200, 3)),
        rng.integers(0, 2, 200),
        partition=fl.Dirichlet(num_clients=9, alpha=0.5, min_examples=2),
        test_fraction=0.1,
        seed=0,
    )
    return fl.simulate(
        make_model,
        data,
        fl.FedAvg(LOCAL),
        trainer=trainer,
        progress=Silent(),
        num_rounds=3,
        cohort={"num_wanted": 6},
        engine=engine,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [{"num_workers": 1}, {"num_workers": 2}, {"transport": "memory"}],
    ids=["engine", "two workers", "sessions"],
)
def test_training_metrics_are_means_over_the_reports(engine: Mapping[str, Any]) -> None:
    """They are weighted by examples; a metric that only few clients report is left out."""
    for record in run(**engine).history:
        sizes = np.asarray([p.num_examples for p in record.participations], float)
        assert len(sizes) == 6
        assert record.train_metrics == {
            "examples": pytest.approx((sizes * sizes).sum() / sizes.sum()),
            "half": pytest.approx(record.train_loss / 2),
        }


def test_the_trainer_of_fedlearn_tells_its_loss_alone() -> None:
    """The control; the loss is recorded as always."""
    (*_, last) = run(None, num_workers=1).history
    assert last.train_metrics == {}
    assert last.train_loss > 0.0
