"""The network for FEMNIST, and the writers' test examples."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedlearn as fl

_DATA_DIR = Path(__file__).resolve().parents[3] / "shared" / "data"
_NUM_CLASSES = 62


class Network(nn.Module):
    """One hidden layer on gray images, dark on white; with BatchNorm after it if asked."""

    def __init__(self, *, width: int, has_batch_norm: bool) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(width)] if has_batch_norm else []
        self.body = nn.Sequential(nn.Linear(28 * 28, width), *norm, nn.ReLU())
        self.head = nn.Linear(width, _NUM_CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scores of uint8 images, shape [B, height, width]."""
        ink = 1.0 - pixels.flatten(1).to(torch.float32) / 255.0
        scores: Tensor = self.head(self.body(ink))
        return scores


def make_model(*, width: int = 200, has_batch_norm: bool = False) -> nn.Module:
    """Build the network: 169,462 parameters without BatchNorm."""
    return Network(width=width, has_batch_norm=has_batch_norm)


def client_tests() -> list[fl.Examples]:
    """Return each writer's own test examples, in the order of the clients."""
    data_dir = Path(os.environ.get("FEDLEARN_DATA_DIR", _DATA_DIR))
    with np.load(data_dir / "femnist_leaf05.npz") as arrays:
        x, y, writer = (torch.from_numpy(arrays[f"{key}_test"]) for key in ("x", "y", "writer"))
        writers = np.unique(arrays["writer_train"]).tolist()
    return [
        fl.Examples.of(features=x[writer == each], labels=y[writer == each].to(torch.int64))
        for each in writers
    ]
