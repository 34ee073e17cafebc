"""Small data sets for the apps, generated or built in, and the same in every process."""

from typing import NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray


class Split(NamedTuple):
    """The rows of a node: four fifths to train on, the rest to test."""

    x_train: NDArray[np.float64]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float64]
    y_test: NDArray[np.int64]


def split_of(x: NDArray[np.float64], y: NDArray[np.int64], context: Context) -> Split:
    """Return the rows of a node."""
    order = np.random.default_rng(0).permutation(len(y))
    partition, num_partitions = (
        int(context.node_config[name]) for name in ("partition-id", "num-partitions")
    )
    rows = order[partition::num_partitions]
    cut = len(rows) * 4 // 5
    return Split(x[rows[:cut]], y[rows[:cut]], x[rows[cut:]], y[rows[cut:]])


def blobs(num_features: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return 300 rows, each labeled by the side of a plane on which it lies."""
    generator = np.random.default_rng(7)
    x = generator.normal(size=(300, num_features))
    return x, (x @ generator.normal(size=num_features) > 0).astype(np.int64)
