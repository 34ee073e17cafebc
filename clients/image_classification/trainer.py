"""A client that classifies images: a share of scikit-learn's digits, or a file of your own.

Environment:
    FEDLEARN_DATA: An npz file with ``x``, gray images [n, height, width] (uint8, or floats in
        [0, 1]), and ``y``, their classes [n]. Without it, the digits inside scikit-learn.
    FEDLEARN_PART: This client's share of the digits, such as 0/3 for the first of three.
"""

import os
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedlearn.client import TorchTrainer
from fedlearn.errors import DataError

NUM_CLASSES = 10


def make_model() -> nn.Module:
    """Build a convolutional network for images [batch, 1, height, width] of any size."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, NUM_CLASSES),
    )


def make_trainer() -> TorchTrainer:
    """Build a trainer that trains on four fifths of the images and evaluates on every fifth.

    Raises:
        DataError: The file or the share is not set, or not valid.
    """
    path = os.environ.get("FEDLEARN_DATA")
    images, labels = _load_file(Path(path)) if path else _load_digits()
    held_out = torch.arange(len(labels)) % 5 == 0
    return TorchTrainer.of(
        make_model,
        images[~held_out],
        labels[~held_out],
        test=(images[held_out], labels[held_out]),
    )


def _load_digits() -> tuple[Tensor, Tensor]:
    """Return this client's share: consecutive digits, so mostly of the same writers."""
    part = os.environ.get("FEDLEARN_PART", "")
    place, _, num_parts = part.partition("/")
    if not (place.isdecimal() and num_parts.isdecimal() and int(place) < int(num_parts)):
        raise DataError(
            f"FEDLEARN_PART is {part!r}; say which share of the digits is this client's, such as "
            "0/3 for the first of three, or name a file of images in FEDLEARN_DATA"
        )
    digits = load_digits()
    rows = np.array_split(np.arange(len(digits.target)), int(num_parts))[int(place)]
    images = torch.tensor(digits.images[rows] / 16.0, dtype=torch.float32)
    return images.unsqueeze(1), torch.tensor(digits.target[rows], dtype=torch.int64)


def _load_file(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels = arrays["x"], arrays["y"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"FEDLEARN_DATA: {path} is not an npz file with arrays x and y: {error}"
        ) from error
    is_shaped = images.ndim == 3 and labels.shape == images.shape[:1] and labels.size  # noqa: PLR2004
    if not is_shaped or not 0 <= labels.min() <= labels.max() < NUM_CLASSES:
        raise DataError(
            f"FEDLEARN_DATA: {path} has x of shape {list(images.shape)} and y of shape "
            f"{list(labels.shape)}; give gray images [n, height, width] and their classes, "
            f"0 to {NUM_CLASSES - 1}"
        )
    scale = 255.0 if images.dtype == np.uint8 else 1.0
    features = torch.tensor(images / scale, dtype=torch.float32)
    return features.unsqueeze(1), torch.tensor(labels, dtype=torch.int64)
