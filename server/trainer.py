"""A trainer for the configurations in this folder, on a share of scikit-learn's digits.

Use it to see a deployment run, then replace the digits by your own data. The network is the one
that the coordinator builds if its configuration has no ``[model]``.

Environment:
    PART: This client's share, such as 0/5 for the first of five.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

from fedlearn.client import TorchTrainer
from fedlearn.errors import DataError


def make_model() -> nn.Module:
    """Build the network of ``kind = "mlp"`` for images of 64 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def make_trainer() -> TorchTrainer:
    """Build the trainer of this client's share.

    Raises:
        DataError: PART is not set, or not valid.
    """
    place, _, num_parts = os.environ.get("PART", "").partition("/")
    if not (place.isdecimal() and num_parts.isdecimal() and int(place) < int(num_parts)):
        raise DataError("PART is not set: say which share is this client's, such as PART=0/5")
    digits = load_digits()
    mine = slice(int(place), None, int(num_parts))
    features = torch.tensor(digits.data[mine] / 16, dtype=torch.float32)
    return TorchTrainer.of(make_model, features, torch.tensor(digits.target[mine]))
