"""WISDM: activities from a phone's accelerometer, one client per user."""

import os
from pathlib import Path

import numpy as np
import torch

import fedlearn as fl


def make_data() -> fl.FederatedData:
    """Return a client for each user: a random 80 % of the windows for training, 20 % for its test.

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
    data = fl.from_examples(fl.TrainTest.of(train, test), partition=fl.Natural(), seed=0)
    return data.with_test_groups(users[is_test])
