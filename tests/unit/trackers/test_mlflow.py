"""Runs in MLflow, read back with its own client from an SQLite database."""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
import structlog

import fedlearn as fl
from fedlearn.rounds.records import RunStatus
from tests.addresses import free_addresses
from tests.records import RUN
from tests.tracking import Time, track

pytestmark = [
    pytest.mark.slow,  # MLflow takes 3 s to import and 10 s to create a database
    pytest.mark.skipif(find_spec("mlflow") is None, reason="the extra mlflow is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's own, of its libraries
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variable that the tracker sets."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def test_runs_are_logged_resumed_and_closed_as_they_ended(tmp_path: Path) -> None:
    """In one test, because a database takes long to create."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"

    def tracker() -> fl.MLflowTracker:
        return fl.MLflowTracker(uri, experiment="Größen", clock=Time())

    config = {"seed": 3, "data": {"args": {"password": "hidden", "long": "x" * 10_000}}}
    killed = replace(RUN, config=config)
    # It logged eight rounds and committed five.
    track(tracker(), range(8), tmp_path, run=killed, ends=None)
    track(tracker(), range(5, 12), tmp_path, run=killed)
    failed = replace(RUN, name="failed")
    track(tracker(), range(2), tmp_path, run=failed, ends=RunStatus.FAILED)
    interrupted = replace(RUN, name="interrupted")
    track(tracker(), range(2), tmp_path, run=interrupted, ends=RunStatus.INTERRUPTED)

    client = import_module("mlflow").MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("Größen")
    runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {
        RUN.name: "FINISHED",
        "failed": "FAILED",
        "interrupted": "KILLED",
    }
    run = runs[RUN.name]
    found = client.get_metric_history(run.info.run_id, "accuracy")
    history = sorted(found, key=lambda each: each.step)  # it has them by time
    assert [each.step for each in history] == list(range(12))
    assert [each.value for each in history] == [0.9 + number / 1000 for number in range(12)]
    assert run.data.metrics["Größe -3c-1-3e-"] == 1.0
    assert run.data.params["seed"] == "3"
    assert run.data.params["data.args.password"] == "***"
    assert len(run.data.params["data.args.long"]) == 6000
    assert runs["failed"].data.tags["fedlearn.error"] == "no memory"


def track_in(uri: str, folder: Path, name: str) -> list[str]:
    """Track a run, and return what was logged."""
    with structlog.testing.capture_logs() as logs:
        track(fl.MLflowTracker(uri, clock=Time()), range(3), folder, run=replace(RUN, name=name))
    return [each["event"] for each in logs]


def test_processes_that_create_one_database_together_all_log_to_it(tmp_path: Path) -> None:
    """As those of a sweep. MLflow alone would damage the database, and log nothing at all."""
    uri, names = f"sqlite:///{tmp_path / 'mlflow.db'}", ["one", "two", "three"]
    folders = [tmp_path / name for name in names]
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        assert [*pool.map(track_in, [uri] * 3, folders, names)] == [[], [], []]
    client = import_module("mlflow").MlflowClient(tracking_uri=uri)
    place = client.get_experiment_by_name("fedlearn").experiment_id
    runs = {each.info.run_name: each.info.run_id for each in client.search_runs([place])}
    assert runs.keys() == set(names)
    assert all(len(client.get_metric_history(each, "accuracy")) == 3 for each in runs.values())


def test_a_server_that_is_down_is_only_a_warning(tmp_path: Path) -> None:
    (address,) = free_addresses(1)
    with structlog.testing.capture_logs() as logs:
        track(fl.MLflowTracker(f"http://{address}", clock=Time()), range(3), tmp_path)
    assert [each["event"] for each in logs] == ["tracker_failed", "tracker_lacks_rounds"]
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" in os.environ
