"""Shakespeare by role: one client per speaking role, which predicts each next character."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedlearn as fl
from fedlearn.simulation.sources import TrainTest

NUM_CHARACTERS = 76
#: Characters of an example; the labels are the same text, one character later.
LENGTH = 80
#: Label of positions that are left out: the end of a short example.
_NONE = -100


def make_data(*, num_test: int) -> TrainTest:
    """Return the first 80 % of each role for training, and examples from the rest of all roles.

    Args:
        num_test: Number of test examples, spread evenly over the roles.
    """
    folder = Path(os.environ.get("FEDLEARN_DATA_DIR", "../shared/data"))
    with np.load(folder / "shakespeare_roles.npz", allow_pickle=False) as data:
        text, offset = data["text"], data["offset"]
    _, codes = np.unique(text, return_inverse=True)
    roles = [codes[begin:end] for begin, end in pairwise(offset)]
    train = [_cut(role[: len(role) * 4 // 5]) for role in roles]
    test = np.concatenate([_cut(role[len(role) * 4 // 5 :]) for role in roles])
    test = test[np.linspace(0, len(test) - 1, num_test).astype(int)]
    owners = np.repeat(np.arange(len(roles)), [len(role) for role in train])
    return TrainTest.of(
        _examples(np.concatenate(train), groups=owners), _examples(test, groups=None)
    )


def _cut(role: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut a text into rows of 81 characters that overlap by one; the last is padded."""
    starts = range(0, max(1, len(role) - 1), LENGTH)
    rows = np.full((len(starts), LENGTH + 1), _NONE)
    for row, start in zip(rows, starts, strict=True):
        part = role[start : start + LENGTH + 1]
        row[: len(part)] = part
    return rows


def _examples(rows: NDArray[np.int64], *, groups: NDArray[np.int64] | None) -> fl.Examples:
    # Padding reads as character 0; its labels do not count.
    features = torch.from_numpy(np.maximum(rows[:, :-1], 0))
    return fl.Examples.of(features=features, labels=torch.from_numpy(rows[:, 1:]), groups=groups)


class CharacterModel(nn.Module):
    """An LSTM over characters; LEAF's has two layers of 256."""

    def __init__(self, *, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CHARACTERS, 8)
        self.lstm = nn.LSTM(8, width, num_layers, batch_first=True)
        self.head = nn.Linear(width, NUM_CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of each next character: [B, characters, T]."""
        states, _ = self.lstm(self.embedding(characters.long()))
        logits: Tensor = self.head(states)
        return logits.transpose(1, 2)


def make_model(*, width: int, num_layers: int) -> nn.Module:
    """Build the model."""
    return CharacterModel(width=width, num_layers=num_layers)
