"""What a researcher does from Python: run, look, load, break off and go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlearn as fl
from fedlearn.config import Config, resolve_addresses
from fedlearn.core.clock import SystemClock
from fedlearn.errors import ConfigError, StoreError
from fedlearn.experiment.comparison import Summary
from fedlearn.experiment.simulate import Site, resume
from fedlearn.rounds.records import Outcome, RoundRecord, RunRecord, RunStatus

ALGORITHM = fl.FedAvg(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1, momentum=0.5, keep_momentum=True)
)


def data(num_clients: int = 12) -> fl.FederatedData:
    """Two Gaussian classes that a linear model separates."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 600)
    features = rng.normal(size=(600, 6)) + 2.0 * labels[:, None]
    partition = fl.Dirichlet(num_clients=num_clients, alpha=1.0, min_examples=2)
    return fl.from_arrays(features, labels, partition=partition, test_fraction=0.25, seed=0)


def make_model() -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class Quiet:
    """A progress that says nothing, and may break off after some rounds."""

    def __init__(self, break_after: int | None = None) -> None:
        self.break_after, self.num_rounds, self.ended = break_after, 0, False

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Say nothing."""

    def round(self, record: RoundRecord) -> None:
        """Count the round; interrupt the run where that is due."""
        self.num_rounds += 1
        if self.num_rounds == self.break_after:
            raise KeyboardInterrupt

    def end(self, summary: Summary) -> None:
        """Note that the end was told."""
        self.ended = True


@pytest.fixture(autouse=True)
def _runs_in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(progress: Quiet | None = None, **settings: Any) -> fl.Run:  # Any: keys and tables
    """Run eight rounds with every round durable."""
    everything: dict[str, Any] = {
        "num_rounds": 8,
        "cohort": {"num_wanted": 4},
        "store": {"checkpoint_every_s": 0.0},
        "engine": {"num_workers": 1},
        **settings,
    }
    return fl.simulate(make_model, data(), ALGORITHM, progress=progress or Quiet(), **everything)


def test_a_run_learns_and_leaves_its_history() -> None:
    """Eight rounds separate the classes, and each is recorded."""
    finished = run()
    assert [record.round_num for record in finished.history] == list(range(8))
    assert finished.history[-1].metrics["accuracy"] > 0.95
    assert finished.record.status is RunStatus.DONE
    assert all(record.outcome is Outcome.AGGREGATED for record in finished.history)


def test_the_loaded_model_has_the_recorded_accuracy() -> None:
    """The best weights, in a fresh module, do on the test set what the history says."""
    finished, test = run(), data().test
    model = finished.load_model()
    assert not model.training
    accuracy = (model(test.features).argmax(1) == test.labels).double().mean().item()
    best = max(record.metrics["accuracy"] for record in finished.history)
    assert accuracy == pytest.approx(best, abs=1e-9)


def test_the_last_model_can_be_loaded_instead_of_the_best() -> None:
    """With best=False the weights are those of the last round."""
    finished, test = run(), data().test
    model = finished.load_model(best=False)
    loss = nn.functional.cross_entropy(model(test.features), test.labels).item()
    assert loss == pytest.approx(finished.history[-1].metrics["loss"], abs=1e-6)


def test_another_network_is_refused() -> None:
    """The error names a tensor that differs."""
    with pytest.raises(ValueError, match="differ in"):
        run().load_model(lambda: nn.Linear(6, 2))


def test_plot_and_report_are_files_in_the_run_folder() -> None:
    """Both return where they lie."""
    finished = run()
    assert finished.plot().read_bytes().startswith(b"\x89PNG")
    assert "<html" in finished.report().read_text()
    assert finished.plot().parent == finished.report().parent == finished.path


def test_an_interrupted_run_goes_on_to_the_same_bits() -> None:
    """Broken off after three rounds and resumed, it ends in the weights of the whole run."""
    whole = run(name="whole")
    with pytest.raises(KeyboardInterrupt):
        run(Quiet(break_after=3), name="broken")
    resumed = run(resume="broken")
    assert resumed.name == "broken"
    assert len(resumed.history) == 8
    for name, tensor in whole.weights(best=False).items():
        assert torch.equal(tensor, resumed.weights(best=False)[name])


def test_the_same_run_twice_has_the_same_bits() -> None:
    """One worker is bitwise reproducible."""
    first, second = run().weights(best=False), run().weights(best=False)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_workers_agree_with_one_to_rounding() -> None:
    """Only the order of additions differs."""
    one = run(num_rounds=2).weights(best=False)
    two = run(num_rounds=2, engine={"num_workers": 2}).weights(best=False)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)


def test_sessions_and_the_engine_agree_bit_for_bit() -> None:
    """Real client sessions through the wire codec compute what the engine computes."""
    by_engine = run(engine={"num_workers": 1, "block_size": 1, "executor": "sequential"})
    by_sessions = run(engine={"transport": "memory"})
    for name, tensor in by_engine.weights(best=False).items():
        assert torch.equal(tensor, by_sessions.weights(best=False)[name])
    measured = [record.metrics for record in by_sessions.history]
    for mine, theirs in zip([r.metrics for r in by_engine.history], measured, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


def test_the_progress_hears_of_an_interruption() -> None:
    """The end is told even when the run did not reach it."""
    progress = Quiet(break_after=2)
    with pytest.raises(KeyboardInterrupt):
        run(progress)
    assert progress.ended


def test_a_misspelt_setting_names_the_nearest() -> None:
    """Keyword arguments are the keys of the configuration, checked alike."""
    with pytest.raises(ConfigError, match=r"simulate\(\): .*num_rounds"):
        fl.simulate(make_model, data(), ALGORITHM, num_round=3)


def test_a_table_that_an_argument_replaces_is_refused() -> None:
    """The model is an argument, not a table."""
    with pytest.raises(ConfigError, match="model: the model, the data"):
        run(model={"kind": "mlp"})


def test_a_cohort_above_the_population_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """The error gives both numbers; no run is left behind."""
    with pytest.raises(ConfigError, match=r"13 clients are asked .* have 12"):
        run(cohort={"num_wanted": 10})
    assert not (tmp_path / "runs").exists()


def test_resuming_an_unknown_run_suggests_the_nearest() -> None:
    """A typo is met with the name that was meant."""
    run(name="amber-fox")
    with pytest.raises(StoreError, match="amber-fox"):
        run(resume="amber-fix")


def test_resume_from_the_record_alone_needs_the_pieces() -> None:
    """A run of Python objects is told to be resumed from Python."""
    name = run().name
    site = Site(resolve_addresses(Config(), environ={}), {}, SystemClock(), Quiet())
    with pytest.raises(ConfigError, match="started from Python"):
        resume(name, site, from_previous=False)
