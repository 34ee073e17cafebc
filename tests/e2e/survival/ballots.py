"""A model that counts participation, and clients that vote with it instead of training.

Client k of round r adds 1 to ``votes[r, k]`` and changes nothing else. The mean of n reports has
exactly 1/n there, so the model after a round shows which clients were counted, and how often.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedlearn.core.clock import SystemClock
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext

MAX_ROUNDS, MAX_CLIENTS = 64, 8

#: Environment variable: folder in which a test holds clients back, and clients leave notes.
STAGE = "SURVIVAL_STAGE"
#: Environment variable: seconds of each training; not set: 0.
TRAINING_S = "SURVIVAL_TRAINING_S"

_LOOK_S = 0.02


class Ballots(nn.Module):
    """A model of zeros, so that sums of integers stay exact. ``ballast`` is its size in floats."""

    def __init__(self, ballast: int) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.zeros(MAX_ROUNDS, MAX_CLIENTS))
        self.weight = nn.Parameter(torch.zeros(64, 10))
        self.ballast = nn.Parameter(torch.zeros(ballast))

    def forward(self, features: Tensor) -> Tensor:
        return features.flatten(1) @ self.weight


class Voter:
    """A trainer that votes; it keeps training while ``hold``, ``hold-K`` or ``hold-K-R`` exists.

    The last holds only client K in round R.
    """

    num_examples = 1
    device = "cpu"

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        stage, me, clock = Path(os.environ[STAGE]), context.client_id, SystemClock()
        with (stage / f"trained-{me}").open("a") as stream:
            stream.write(f"{context.round_num}\n")
        ends_s = clock.now_s() + float(os.environ.get(TRAINING_S, "0"))
        names = ("hold", f"hold-{me}", f"hold-{me}-{context.round_num}")
        holds = [stage / name for name in names]
        while clock.now_s() < ends_s or any(each.exists() for each in holds):
            context.control.check()
            clock.sleep(_LOOK_S)
        votes = tensors["votes"].clone()
        votes[context.round_num, me] += 1.0
        return LocalResult(
            tensors={**tensors, "votes": votes},
            num_examples=1,
            metrics={"loss": 0.0},
            state={},
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={"votes": float(tensors["votes"].sum())})
