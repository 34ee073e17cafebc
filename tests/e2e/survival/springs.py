"""A model that is a point, and clients that each pull it towards their own place.

Client k moves the point from x to x - RATE (x - c_k), a step of gradient descent on its own
quadratic. Each step shrinks earlier errors, so errors of rounds at most add up: two runs with the
same clients in each sum end no further apart than that.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext

#: Size of the point. As weights it also classifies ten digits of 64 pixels, for the evaluation.
SIZE = 640
RATE = 0.1
#: Largest norm of an update, since the coordinates of point and places are in [-1, 1].
LONGEST_PULL = RATE * 2.0 * SIZE**0.5
MAX_EXAMPLES = 40


class Point(nn.Module):
    """A point that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(SIZE))

    def forward(self, features: Tensor) -> Tensor:
        return features.flatten(1) @ self.place.reshape(64, 10)


class Spring:
    """A trainer that pulls the point towards its client's place."""

    device = "cpu"

    honors = ("epochs", "batch_size", "learning_rate")

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        place, me = tensors["place"], context.client_id
        own = place_of(me)
        moved = place - RATE * (place - own)
        loss = float((place - own).square().mean())
        return LocalResult(
            tensors={"place": moved}, num_examples=examples(me), metrics={"loss": loss}, state={}
        )

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=1, metrics={})


def place_of(client_id: int) -> Tensor:
    """Return the place towards which a client pulls, with coordinates in [-1, 1]."""
    return 2.0 * torch.rand(SIZE, generator=torch.Generator().manual_seed(client_id)) - 1.0


def examples(client_id: int) -> int:
    """Return a client's number of examples, its weight in the mean; no two clients share one."""
    return 1 + (7 * client_id) % MAX_EXAMPLES
