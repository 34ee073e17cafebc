"""FEMNIST by writer at a quarter of the resolution, so that many algorithms run in minutes."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import fedlearn as fl

_NUM_CLASSES, _SIDE = 62, 14


def make_data() -> fl.FederatedData:
    """Return a client for each writer, which is evaluated on its own test characters."""
    train, test = _load("train"), _load("test")
    assert test.groups is not None
    data = fl.from_examples(fl.TrainTest.of(train, test), partition=fl.Natural(), seed=0)
    return data.with_test_groups(test.groups)


def _load(part: str) -> fl.Examples:
    """Load one part as dark ink from 0 to 1, shape [N, 196]; all writers are in both parts."""
    folder = Path(os.environ.get("FEDLEARN_DATA_DIR", "../shared/data"))
    with np.load(folder / "femnist_leaf05.npz", allow_pickle=False) as arrays:
        ink = 1.0 - torch.from_numpy(arrays[f"x_{part}"]).to(torch.float32) / 255.0
        labels = torch.from_numpy(arrays[f"y_{part}"]).to(torch.int64)
        writers = arrays[f"writer_{part}"]
    pooled = avg_pool2d(ink.unsqueeze(1), 2).flatten(1)
    return fl.Examples.of(features=pooled, labels=labels, groups=writers)


class Network(nn.Module):
    """One hidden layer of 64, with BatchNorm after it if asked."""

    def __init__(self, *, has_batch_norm: bool) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(64)] if has_batch_norm else []
        self.body = nn.Sequential(nn.Linear(_SIDE * _SIDE, 64), *norm, nn.ReLU())
        self.head = nn.Linear(64, _NUM_CLASSES)

    def forward(self, ink: Tensor) -> Tensor:
        """Return the scores of images, shape [B, 196]."""
        scores: Tensor = self.head(self.body(ink))
        return scores


def make_model(*, has_batch_norm: bool = False) -> nn.Module:
    """Build the network: 16,638 parameters without BatchNorm."""
    return Network(has_batch_norm=has_batch_norm)
