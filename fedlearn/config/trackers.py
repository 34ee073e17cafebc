"""Configuration of experiment trackers."""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

from pydantic import Field

from fedlearn.config.section import PathText, Problem, Section
from fedlearn.core.redaction import remove_password
from fedlearn.trackers import MLflowTracker, TensorBoardTracker, Tracker, WandbTracker

_Name: TypeAlias = Annotated[str, Field(min_length=1)]


class TrackersSection(Section):
    """Experiment trackers that the run is logged to."""

    tensorboard: PathText | None = Field(
        None, description="Folder for TensorBoard; each run has a folder in it. Without it: none."
    )
    mlflow: _Name | None = Field(
        None,
        description="MLflow tracking URI without a password, such as http://localhost:5000 or "
        "sqlite:///mlflow.db; without it: none.",
    )
    mlflow_experiment: _Name = Field(
        MLflowTracker.experiment, description="Name of the MLflow experiment."
    )
    wandb: _Name | None = Field(
        None,
        description='Project of Weights & Biases, or "entity/project"; the key comes from '
        "WANDB_API_KEY. Without it: none.",
    )
    log_model_path: bool = Field(
        False, description="Log the path of the last checkpoint when the run ends."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse a password, which would be stored, and keys without effect."""
        if self.mlflow is not None and remove_password(self.mlflow) != self.mlflow:
            text = "has a password, which would be stored with the run; set "
            remedy = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
            yield Problem(("mlflow",), text + remedy)
        if self.mlflow is None and self.mlflow_experiment != MLflowTracker.experiment:
            yield Problem(("mlflow_experiment", "mlflow"), "is without effect; set trackers.mlflow")
        if self.log_model_path and not any((self.tensorboard, self.mlflow, self.wandb)):
            yield Problem(("log_model_path",), "is without effect; set a tracker, or remove it")

    def build(self) -> Iterator[Tracker]:
        """Build the trackers.

        Raises:
            ConfigError: The package of one is not installed.
        """
        path = self.log_model_path
        if self.tensorboard is not None:
            yield TensorBoardTracker(self.tensorboard, log_model_path=path)
        if self.mlflow is not None:
            experiment = self.mlflow_experiment
            yield MLflowTracker(self.mlflow, experiment=experiment, log_model_path=path)
        if self.wandb is not None:
            yield WandbTracker(self.wandb, log_model_path=path)
