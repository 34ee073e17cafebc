"""WISDM: activities from a phone's accelerometer, one client per user."""

import os
from pathlib import Path

import numpy as np
import torch

import fedlearn as fl
from fedlearn.simulation.sources import TrainTest


def make_data() -> TrainTest:
    """Return a random 80 % of each user's windows for training, and the rest for the test.

    Features are standardized by the training windows of all users. Peaks that were not found are
    NaN in the data, and 0 here: the mean.
    """
    folder = Path(os.environ.get("FEDLEARN_DATA_DIR", "../shared/data"))
    with np.load(folder / "wisdm_har.npz", allow_pickle=False) as data:
        features, labels, users = data["x"].astype(np.float64), data["y"], data["user"]
    is_test = np.zeros(len(users), dtype=bool)
    # The same split for every seed of a run.
    order = fl.Seed(0).derive("wisdm").numpy().permutation(len(users))
    for user in np.unique(users):
        mine = order[users[order] == user]
        is_test[mine[: len(mine) // 5]] = True
    mean, spread = (f(features[~is_test], axis=0) for f in (np.nanmean, np.nanstd))
    scaled = np.nan_to_num((features - mean) / np.maximum(spread, 1e-9)).astype(np.float32)
    train, test = (
        fl.Examples.of(
            features=torch.from_numpy(scaled[part]),
            labels=torch.from_numpy(labels[part].astype(np.int64)),
            groups=users[part],
        )
        for part in (~is_test, is_test)
    )
    return TrainTest(train=train, test=test)


def client_tests() -> list[fl.Examples]:
    """Return each user's test examples."""
    test = make_data().test
    assert test.groups is not None
    assert isinstance(test.features, torch.Tensor)
    parts = [np.flatnonzero(test.groups == each) for each in np.unique(test.groups)]
    return [
        fl.Examples.of(features=test.features[part], labels=test.labels[part]) for part in parts
    ]
