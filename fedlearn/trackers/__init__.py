"""Logs runs to experiment trackers: TensorBoard, MLflow and Weights & Biases."""

from fedlearn.trackers.mlflow import MLflowTracker
from fedlearn.trackers.tensorboard import TensorBoardTracker
from fedlearn.trackers.tracker import RunStart, Tracker, TrackerRun, Values
from fedlearn.trackers.wandb import WandbTracker

__all__ = [
    "MLflowTracker",
    "RunStart",
    "TensorBoardTracker",
    "Tracker",
    "TrackerRun",
    "Values",
    "WandbTracker",
]
