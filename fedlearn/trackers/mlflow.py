"""Logs runs to MLflow."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from fedlearn.rounds.records import RunRecord
from fedlearn.trackers.tracker import (
    RunStart,
    Tracker,
    Values,
    list_points,
    lock_files,
    split_batches,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 1000, 100, 6000  # of MLflow
_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "SCHEDULED"}
# Characters that MLflow refuses in names become their codes: "Größe <1>" is "Größe -3c-1-3e-".
_escape = partial(re.compile(r"[^\w.\- :/]").sub, lambda found: f"-{ord(found[0]):x}-")


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

    package: ClassVar = "mlflow"
    login_remedy: ClassVar = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
    uri: str | None = None
    experiment: str = "fedlearn"

    def open(self, start: RunStart) -> "_MLflowRun":
        """Create the run, or find the one that an earlier process has created.

        Rounds wait for a server that is down: not for MLflow's usual seven retries, some minutes.
        """
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        import mlflow  # noqa: PLC0415 (slow)

        with lock_files(self.uri or mlflow.get_tracking_uri(), start.folder):
            client = mlflow.MlflowClient(tracking_uri=self.uri)
            found = client.get_experiment_by_name(self.experiment)
            place = found.experiment_id if found else client.create_experiment(self.experiment)
        if runs := client.search_runs([place], f"tags.`fedlearn.run` = '{start.key}'"):
            client.update_run(run_id := runs[0].info.run_id, status="RUNNING")
            logged = client.get_metric_history(run_id, "seconds")
            return _MLflowRun(client, run_id, 1 + max((each.step for each in logged), default=-1))
        created = client.create_run(place, run_name=start.name, tags={"fedlearn.run": start.key})
        for batch in split_batches(start.settings.items(), _MOST_PARAMS):
            params = [mlflow.entities.Param(key, str(it)[:_MOST_CHARACTERS]) for key, it in batch]
            client.log_batch(created.info.run_id, params=params)
        return _MLflowRun(client, created.info.run_id, 0)


class _MLflowRun(NamedTuple):
    client: "MlflowClient"
    run_id: str
    first_round: int

    def log(self, rounds: Sequence[Values]) -> None:
        """Write the values; MLflow ignores those that it has already, with the same time."""
        from mlflow.entities import Metric  # noqa: PLC0415 (slow to import)

        for batch in split_batches(list_points(rounds), _MOST_METRICS):
            metrics = [
                Metric(_escape(p.name), p.value, round(1000 * p.unix_s), p.round_num) for p in batch
            ]
            self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, run: RunRecord, notes: Mapping[str, str]) -> None:
        """Record the status, and the notes as tags."""
        for key, text in notes.items():
            self.client.set_tag(self.run_id, f"fedlearn.{key}", text)
        self.client.set_terminated(self.run_id, _STATUS[run.status])
