"""Fed-Heart-Disease: one client per hospital, with features standardized as FLamby does."""

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import fedlearn as fl


def make_data(*, is_scaled_as_one: bool = False) -> fl.FederatedData:
    """Return a client for each hospital, which is evaluated on its own test examples.

    Args:
        is_scaled_as_one: Standardize the training examples by the statistics of all hospitals, as
            FLamby does for pooled training; otherwise of each hospital. Test examples are always
            standardized by the training statistics of their hospital.
    """
    features, labels, hospitals, is_test = _load(is_scaled_as_one=is_scaled_as_one)
    train, test = (
        fl.Examples.of(
            features=torch.from_numpy(features[part]),
            labels=torch.from_numpy(labels[part]),
            groups=hospitals[part],
        )
        for part in (~is_test, is_test)
    )
    data = fl.from_examples(fl.TrainTest.of(train, test), partition=fl.Natural(), seed=0)
    return data.with_test_groups(hospitals[is_test])


def _load(
    *, is_scaled_as_one: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8], NDArray[np.bool_]]:
    folder = Path(os.environ.get("FEDLEARN_DATA_DIR", "../shared/data"))
    with np.load(folder / "fed_heart_disease.npz", allow_pickle=False) as data:
        features, hospitals, is_test = data["x"].copy(), data["hospital"], data["is_test"]
        labels = data["y"].astype(np.float32)[:, None]
    raw = features.copy()
    for hospital in np.unique(hospitals):
        rows = hospitals == hospital
        features[rows] = _standardize(raw[rows], like=raw[rows & ~is_test])
    if is_scaled_as_one:
        features[~is_test] = _standardize(raw[~is_test], like=raw[~is_test])
    return features, labels, hospitals, is_test


def _standardize(values: NDArray[np.float32], *, like: NDArray[np.float32]) -> NDArray[np.float32]:
    # Hospitals have constant features, which become zero.
    spread = like.std(axis=0, ddof=1) + 1e-9
    scaled: NDArray[np.float32] = (values - like.mean(axis=0)) / spread
    return scaled
