"""A trainer for the configurations in this folder: a share of the digits inside scikit-learn.

It is there to see a deployment run: put your own data in the place of the digits. The network is
the one that the coordinator builds where its configuration names no ``[model]``.

Environment:
    PART: Which share is this client's, such as 0/5: the first of five.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

from fedlearn.client import TorchTrainer
from fedlearn.errors import DataError


def make_model() -> nn.Module:
    """Return the network of ``kind = "mlp"`` for images of 64 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def make_trainer() -> TorchTrainer:
    """Return what trains on this client's share.

    Raises:
        DataError: It is not said which share.
    """
    place, _, num_parts = os.environ.get("PART", "").partition("/")
    if not (place.isdecimal() and num_parts.isdecimal() and int(place) < int(num_parts)):
        raise DataError("PART is not set: say which share is this client's, such as PART=0/5")
    digits = load_digits()
    mine = slice(int(place), None, int(num_parts))
    features = torch.tensor(digits.data[mine] / 16, dtype=torch.float32)
    return TorchTrainer.of(make_model, features, torch.tensor(digits.target[mine]))
