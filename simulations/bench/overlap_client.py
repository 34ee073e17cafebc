"""What the clients of the benchmark of overlap do: nothing, for as long as a training takes."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedlearn.core.clock import SystemClock
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext

#: Environment variables: seconds of a training, and the file to which each is noted.
TRAINING_S, NOTES = "OVERLAP_TRAINING_S", "OVERLAP_NOTES"

_STEP_S = 0.02


class Ballasted(nn.Module):
    """A classifier of digits that is larger than it must be."""

    def __init__(self, ballast: int) -> None:
        super().__init__()
        self.classify = nn.Linear(64, 10)
        self.ballast = nn.Parameter(torch.zeros(ballast))

    def forward(self, features: Tensor) -> Tensor:
        """Return ten numbers for each example."""
        logits: Tensor = self.classify(features.flatten(1))
        return logits


class Sleeper:
    """Sleeps instead of training: what is measured is when it may, not how fast it is."""

    num_examples = 1
    device = "cpu"

    honours = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        """Sleep, and note from when until when."""
        clock, training_s = SystemClock(), float(os.environ[TRAINING_S])
        begin_s = clock.now_s()
        while (elapsed_s := clock.now_s() - begin_s) < training_s:
            context.control.check()
            context.control.report(fraction=elapsed_s / training_s, loss=0.0)
            clock.sleep(_STEP_S)
        with Path(os.environ[NOTES]).open("a") as stream:
            stream.write(json.dumps([begin_s, clock.now_s(), context.round_num]) + "\n")
        local = {name: each + torch.ones_like(each) for name, each in tensors.items()}
        return LocalResult(tensors=local, num_examples=1, metrics={"loss": 0.0}, state={})

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        """Say that there is one example."""
        return LocalEvaluation(num_examples=1, metrics={"loss": 0.0})
