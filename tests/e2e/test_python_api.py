"""What a researcher does from Python: run, inspect, load, interrupt and resume."""

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
from fedlearn.core.participations import Status
from fedlearn.errors import ConfigError, CorruptCheckpoint, RoundError, RunHeld, StoreError
from fedlearn.experiment.simulate import resume, run_config
from fedlearn.experiment.site import Site
from fedlearn.experiment.summary import Summary
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunRecord, RunStatus
from fedlearn.store.runs import Database, sqlite_url
from tests import records

ALGORITHM = fl.FedAvg(
    fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1, momentum=0.5, keep_momentum=True)
)


def data(num_clients: int = 12) -> fl.FederatedData:
    """Make two Gaussian classes that a linear model separates."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 600)
    features = rng.normal(size=(600, 6)) + 2.0 * labels[:, None]
    partition = fl.Dirichlet(num_clients=num_clients, alpha=1.0, min_examples=2)
    return fl.from_arrays(features, labels, partition=partition, test_fraction=0.25, seed=0)


def make_model() -> nn.Module:
    """Build a small network."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class Quiet:
    """A progress display that shows nothing, and may interrupt the run after some rounds."""

    def __init__(self, break_after: int | None = None) -> None:
        self.break_after, self.num_rounds, self.ended = break_after, 0, False
        self.notes: Sequence[str] = ()

    def start(self, record: RunRecord, path: Path, notes: Sequence[str]) -> None:
        """Keep the notes."""
        self.notes = notes

    def round(self, record: RoundRecord) -> None:
        """Count the round, and interrupt the run if it is time."""
        self.num_rounds += 1
        if self.num_rounds == self.break_after:
            raise KeyboardInterrupt

    def end(self, summary: Summary) -> None:
        """Note that the end was reported."""
        self.ended = True


@pytest.fixture(autouse=True)
def _runs_in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(progress: Quiet | None = None, **settings: Any) -> fl.Run:  # Any: keys and objects
    """Run eight rounds with a checkpoint after each."""
    everything: dict[str, Any] = {
        "make_model": make_model,
        "data": settings.get("data") or data(),
        "algorithm": ALGORITHM,
        "num_rounds": 8,
        "cohort": {"num_wanted": 4},
        "store": {"checkpoint_every_s": 0.0},
        "engine": {"num_workers": 1},
        **settings,
    }
    return fl.simulate(progress=progress or Quiet(), **everything)


def test_a_run_learns_and_leaves_its_history() -> None:
    """Eight rounds separate the classes, and each is recorded."""
    finished = run()
    assert [record.round_num for record in finished.history] == list(range(8))
    assert finished.history[-1].metrics["accuracy"] > 0.95
    assert finished.record.status is RunStatus.DONE
    assert all(record.outcome is Outcome.AGGREGATED for record in finished.history)


@pytest.mark.parametrize("num_clients", [1, 3, 12])
def test_a_first_script_on_data_of_its_own_waits_for_everybody(num_clients: int) -> None:
    """With few or many clients of 600 examples, none is late; the run notes and records why."""
    owners = np.repeat(np.arange(num_clients), 600)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, len(owners))
    features = rng.normal(size=(len(owners), 6)) + 2.0 * labels[:, None]
    mine = fl.from_arrays(
        features, labels, groups=owners, partition=fl.Natural(), test_fraction=0.2, seed=0
    )
    local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
    progress = Quiet()
    finished = fl.simulate(make_model, mine, fl.FedAvg(local), progress=progress, num_rounds=2)
    cohort_size = min(10, num_clients)
    for record in finished.history:
        assert (
            len(record.participations) == record.participations.num(Status.REPORTED) == cohort_size
        )
    assert progress.notes[0].startswith(
        f"cohort {cohort_size} of {num_clients} clients, no deadline, ideal devices: "
    )
    assert finished.record.config["cohort"] == {"sampling": "uniform", "num_wanted": cohort_size}
    assert finished.record.config["devices"] == {"kind": "ideal"}


def test_stragglers_are_there_where_they_are_asked_for() -> None:
    """The control: with simulated devices and a short deadline, clients are late."""
    asked: dict[str, Any] = {"stragglers": {"deadline_s": 0.5}, "devices": {"kind": "lognormal"}}
    progress = Quiet()
    with pytest.raises(RoundError, match=r"4 late"):
        run(progress, **asked)
    assert progress.notes[0].startswith("cohort 4 of 12 clients, deadline 0.5 s, lognormal devices")


def test_the_loaded_model_has_the_recorded_accuracy() -> None:
    """The best weights, in a fresh module, have the recorded accuracy on the test set."""
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


def test_weights_are_in_the_order_of_the_network(tmp_path: Path) -> None:
    """Buffers are in their place among parameters, and loading draws no random numbers."""
    layers = nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
    normalized = nn.Sequential(*layers)
    with Database.open(sqlite_url(tmp_path / "a.db"), runs_dir=tmp_path / "runs") as database:
        stored = database.create(records.RUN)
        names = sorted(normalized.state_dict())
        assert names != list(normalized.state_dict())
        tensors = {f"params/{name}": torch.zeros(1) for name in names}
        stored.commit(Checkpoint(round_num=0, tensors=tensors, values={}))
        before = torch.get_rng_state()
        weights = fl.Run(stored, lambda: nn.Sequential(nn.Linear(6, 3), *layers[1:])).weights()
        assert list(weights) == list(normalized.state_dict())
        assert torch.equal(torch.get_rng_state(), before)


def test_another_network_is_refused() -> None:
    """The error names a tensor that differs."""
    with pytest.raises(ValueError, match="differ in"):
        run().load_model(lambda: nn.Linear(6, 2))


@pytest.mark.slow
def test_plot_and_report_are_files_in_the_run_folder() -> None:
    """Both return the path of the file."""
    finished = run()
    assert finished.plot().read_bytes().startswith(b"\x89PNG")
    assert "<html" in finished.report().read_text()
    assert finished.plot().parent == finished.report().parent == finished.path


def test_an_interrupted_run_goes_on_to_the_same_bits() -> None:
    """Interrupted after three rounds and resumed, it ends with the weights of an unbroken run."""
    whole = run(name="whole")
    with pytest.raises(KeyboardInterrupt):
        run(Quiet(break_after=3), name="broken")
    resumed = run(resume="broken")
    assert resumed.name == "broken"
    assert len(resumed.history) == 8
    for name, tensor in whole.weights(best=False).items():
        assert torch.equal(tensor, resumed.weights(best=False)[name])


#: SGD whose clients keep their momentum from round to round.
KEEPING = fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1, momentum=0.5, keep_momentum=True)
PLAIN = fl.LocalSgd(epochs=1, batch_size=8, learning_rate=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        pytest.param(fl.FedAvg(KEEPING), {}, id="momentum"),
        pytest.param(
            fl.Scaffold(PLAIN, num_clients=12, server_learning_rate=1.0), {}, id="scaffold"
        ),
        pytest.param(
            fl.FedAvg(KEEPING, weight_by_examples=False),
            {"secure_aggregation": {"mode": "complete"}},
            id="secure",
        ),
    ],
)
def test_sessions_over_memory_keep_what_is_theirs_through_a_crash(
    algorithm: fl.Strategy, settings: dict[str, Any]
) -> None:
    """The state of trainers is in the checkpoint, as it is for clients of the engine."""
    same = {"algorithm": algorithm, "engine": {"transport": "memory"}, **settings}
    whole = run(name="whole", **same)
    with pytest.raises(KeyboardInterrupt):
        run(Quiet(break_after=5), name="broken", **same)
    resumed = run(resume="broken", **same).weights(best=False)
    for name, tensor in whole.weights(best=False).items():
        # Secure aggregation rounds at random, which differs after the resume.
        tolerance = 1e-3 if settings else 0.0
        torch.testing.assert_close(resumed[name], tensor, rtol=0.0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_rounds": 9}, "num_rounds is 9, but broken was started with 8"),
        ({"seed": 3}, "seed is 3, but"),
        ({"cohort": {"num_wanted": 5}}, r"cohort\.num_wanted is 5, but"),
        ({"devices": {"kind": "lognormal"}}, r"devices\.kind is lognormal, but"),
        ({"algorithm": fl.FedProx(ALGORITHM.local, proximal=1.0)}, "algorithm is .*proximal"),
        ({"data": data(num_clients=11)}, "data is 11 clients"),
        ({"make_model": lambda: nn.Linear(6, 2)}, "model is Linear"),
        ({"objective": fl.MeanSquaredError()}, "objective is MeanSquaredError"),
        ({"metrics": {"f1": fl.Metric(fl.BinaryF1(), direction="max")}}, "metrics is .*f1"),
    ],
)
def test_a_run_does_not_go_on_with_other_arguments(settings: dict[str, Any], told: str) -> None:
    """They would be ignored, or mix two configurations in one run. The run is not changed."""
    with pytest.raises(KeyboardInterrupt):
        run(Quiet(break_after=3), name="broken")
    with pytest.raises(ConfigError, match=told):
        run(resume="broken", **settings)
    assert len(run(resume="broken").history) == 8


@pytest.mark.slow
def test_a_run_that_is_alive_is_not_resumed() -> None:
    """Otherwise the second process would mark it failed while it continues."""

    class Meddling(Quiet):
        def round(self, record: RoundRecord) -> None:
            with pytest.raises(RunHeld, match="run 'alive' is alive"):
                run(resume="alive")

    alive = run(Meddling(), name="alive")
    assert (alive.record.status, alive.record.error) == (RunStatus.DONE, "")


def test_a_done_run_stays_done_whatever_its_checkpoint() -> None:
    """Damage is reported, but must not change the recorded status."""
    done = run()
    done.stored.checkpoints()[-1].path.write_bytes(b"damaged")
    with pytest.raises(CorruptCheckpoint, match="--from-previous"):
        run(resume=done.name)
    assert (done.record.status, done.record.error) == (RunStatus.DONE, "")


def test_a_done_run_is_resumed_without_a_round() -> None:
    """It only reports the end again, and the run does not change."""
    done, quiet = run(), Quiet()
    again = run(quiet, resume=done.name)
    assert (again.record, again.history) == (done.record, done.history)
    assert (quiet.num_rounds, quiet.ended) == (0, True)


def test_a_run_that_no_python_started_is_resumed_from_its_record() -> None:
    """Its model and data are described in the record, so those in the arguments are refused."""
    environ = dict[str, str]()
    site = Site(resolve_addresses(Config(), environ=environ), environ, SystemClock(), Quiet())
    run_config(Config().model_copy(update={"name": "toml", "num_rounds": 1}), site)
    with pytest.raises(ConfigError, match="`fedlearn resume toml`"):
        run(resume="toml")


@pytest.mark.slow
def test_the_same_run_twice_has_the_same_bits() -> None:
    """One worker is bitwise reproducible."""
    first, second = run().weights(best=False), run().weights(best=False)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
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
    """The end is reported even if the run was interrupted."""
    progress = Quiet(break_after=2)
    with pytest.raises(KeyboardInterrupt):
        run(progress)
    assert progress.ended


def test_a_misspelled_setting_names_the_nearest() -> None:
    """Keyword arguments are keys of the configuration and checked in the same way."""
    with pytest.raises(ConfigError, match=r"simulate\(\): .*num_rounds"):
        fl.simulate(make_model, data(), ALGORITHM, num_round=3)


def test_a_table_that_an_argument_replaces_is_refused() -> None:
    """The model is an argument, not a table."""
    with pytest.raises(ConfigError, match="model: the model, the data"):
        run(model={"kind": "mlp"})


def test_a_cohort_above_the_population_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """The error gives both numbers, and no run is created."""
    with pytest.raises(ConfigError, match=r"13 clients are asked .* have 12"):
        run(cohort={"num_wanted": 13})
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_resuming_an_unknown_run_suggests_the_nearest() -> None:
    """For a typo, the error has the nearest name."""
    run(name="amber-fox")
    with pytest.raises(StoreError, match="amber-fox"):
        run(resume="amber-fix")


def test_resume_from_the_record_alone_needs_the_pieces() -> None:
    """The error says to resume a run of Python objects from Python."""
    name = run().name
    site = Site(resolve_addresses(Config(), environ={}), {}, SystemClock(), Quiet())
    with pytest.raises(ConfigError, match="started from Python"):
        resume(name, site, from_previous=False)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["engine", "memory"])
def test_a_model_in_bfloat16_trains_as_such_and_a_note_tells(transport: str) -> None:
    """The control: a model in float32 has no such note."""
    for make, dtype in ((lambda: make_model().bfloat16(), "bfloat16"), (make_model, "float32")):
        told = Quiet()
        run = fl.simulate(
            make,
            data(),
            ALGORITHM,
            num_rounds=2,
            cohort={"num_wanted": 4},
            engine={"transport": transport},
            progress=told,
        )
        assert {str(p.dtype) for p in run.load_model(make).parameters()} == {f"torch.{dtype}"}
        notes = [note for note in told.notes if "dtypes: torch.bfloat16 ('0.weight'" in note]
        assert len(notes) == (dtype == "bfloat16")
