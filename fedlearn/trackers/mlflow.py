"""Logs runs to MLflow."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.trackers.tracker import (
    RunStart,
    Tracker,
    Values,
    require_no_password,
    require_package,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TAG = "fedlearn.run"
_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 1000, 100, 6000  # of MLflow
_STATUS = {
    RunStatus.DONE: "FINISHED",
    RunStatus.FAILED: "FAILED",
    RunStatus.INTERRUPTED: "KILLED",
    RunStatus.RUNNING: "SCHEDULED",
}


@dataclass(eq=False)
class MLflowTracker(Tracker):
    """Logs each run to an MLflow server or database.

    Attributes:
        uri: Tracking URI without a password, such as ``http://localhost:5000`` or
            ``sqlite:///mlflow.db``; ``None``: as ``MLFLOW_TRACKING_URI`` says.
        experiment: Name of the experiment, which is created if it is missing.

    Example:
        >>> import fedlearn as fl
        >>> fl.MLflowTracker("http://localhost:5000", experiment="digits").experiment
        'digits'
    """

    uri: str | None = None
    experiment: str = "fedlearn"

    def __post_init__(self) -> None:
        require_package("mlflow", tracker="MLflowTracker", extra="mlflow")
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI"
        require_no_password(self.uri or "", what="MLflowTracker: uri", remedy=f"{remedy}, instead")

    def open(self, start: RunStart) -> "_MLflowRun":
        """Create the run, or find the one that an earlier process has created."""
        # Rounds wait for a server that is down: not for MLflow's usual seven retries, some minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient  # noqa: PLC0415 (slow to import)
        from mlflow.entities import Param  # noqa: PLC0415 (likewise)

        client = MlflowClient(tracking_uri=self.uri)
        experiment = client.get_experiment_by_name(self.experiment)
        place = (
            experiment.experiment_id if experiment else client.create_experiment(self.experiment)
        )
        if found := client.search_runs([place], f"tags.`{_TAG}` = '{start.key}'"):
            run_id = found[0].info.run_id
            client.update_run(run_id, status="RUNNING")
            logged = client.get_metric_history(run_id, "seconds")
            return _MLflowRun(client, run_id, 1 + max((each.step for each in logged), default=-1))
        run_id = client.create_run(place, run_name=start.name, tags={_TAG: start.key}).info.run_id
        params = [
            Param(key, str(value)[:_MOST_CHARACTERS]) for key, value in start.settings.items()
        ]
        for begin in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run_id, params=params[begin : begin + _MOST_PARAMS])
        return _MLflowRun(client, run_id, 0)


@dataclass(eq=False)
class _MLflowRun:
    client: "MlflowClient"
    run_id: str
    first_round: int

    def log(self, rounds: Sequence[Values]) -> None:
        """Write the values; MLflow ignores those that it has already, with the same time."""
        from mlflow.entities import Metric  # noqa: PLC0415 (slow to import)

        metrics = [
            Metric(_escape(name), value, round(1000 * each.unix_s), each.round_num)
            for each in rounds
            for name, value in each.by_name.items()
        ]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[begin : begin + _MOST_METRICS])

    def close(self, run: RunRecord, model_path: str | None) -> None:
        """Record the status, and the error as a tag."""
        tags = {"error": run.error, "model_path": model_path or ""}
        for key, value in tags.items():
            if value:
                self.client.set_tag(self.run_id, f"fedlearn.{key}", value)
        self.client.set_terminated(self.run_id, _STATUS[run.status])


def _escape(name: str) -> str:
    """Replace characters that MLflow refuses in names by their codes.

    Example:
        >>> _escape("clients/Größe <1>")
        'clients/Größe -3c-1-3e-'
    """
    return re.sub(r"[^\w.\- :/]", lambda found: f"-{ord(found[0]):x}-", name)
