"""A hospital that predicts heart disease from 13 clinical values.

Environment:
    FEDLEARN_DATA: The file fed_heart_disease.npz, or one with the same arrays: ``x`` [n, 13],
        ``y`` [n] (0 healthy, 1 ill), ``is_test`` [n], ``hospital`` [n], ``hospital_names``.
    FEDLEARN_PART: The hospital: cleveland, hungarian, switzerland or va.
"""

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.client import TorchTrainer
from fedlearn.errors import DataError

NUM_FEATURES = 13


def make_model() -> nn.Module:
    """Build a logistic regression: two logits from 13 standardized values."""
    return nn.Linear(NUM_FEATURES, 2)


def make_trainer() -> TorchTrainer:
    """Build a trainer for the hospital: training patients to train on, test patients to evaluate.

    Raises:
        DataError: The file or the hospital is not set, or not valid.
    """
    x, y, is_test = _load_patients(
        Path(_require_variable("FEDLEARN_DATA", "name the file fed_heart_disease.npz")),
        _require_variable(
            "FEDLEARN_PART", "name the hospital: cleveland, hungarian, switzerland or va"
        ),
    )
    features = _standardize(x, is_test)
    labels, test = torch.tensor(y, dtype=torch.int64), torch.tensor(is_test)
    return TorchTrainer.of(
        make_model, features[~test], labels[~test], test=(features[test], labels[test])
    )


def _require_variable(name: str, remedy: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise DataError(f"{name} is not set; {remedy}")
    return value


def _load_patients(
    path: Path, hospital: str
) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.bool_]]:
    """Load one hospital's features [n, 13], labels [n] and mask of test patients [n]."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = [name.decode() for name in arrays["hospital_names"]]
            if hospital not in names:
                raise DataError(f"FEDLEARN_PART is {hospital!r}; {path} has {', '.join(names)}")
            rows = arrays["hospital"] == names.index(hospital)
            return arrays["x"][rows], arrays["y"][rows], arrays["is_test"][rows]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"FEDLEARN_DATA: {path} is not the heart disease file: {error}") from error


def _standardize(x: NDArray[np.float32], is_test: NDArray[np.bool_]) -> Tensor:
    """Scale the values to mean 0 and deviation 1 over this hospital's training patients.

    Each hospital uses its own statistics, so that none of them leave it. A constant column, such
    as cholesterol in Switzerland (never measured), becomes 0.
    """
    mean, deviation = x[~is_test].mean(0), x[~is_test].std(0)
    return torch.tensor((x - mean) / np.where(deviation > 0, deviation, 1.0), dtype=torch.float32)
