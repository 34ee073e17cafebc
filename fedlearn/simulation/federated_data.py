"""A federated data set: who holds which examples, and the test set that nobody holds."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.partition import Partitioner
from fedlearn.simulation.population import ArrayPopulation, Population
from fedlearn.simulation.sources import Examples, TrainTest, held_out


@dataclass(frozen=True, eq=False, kw_only=True)
class FederatedData:
    """What a simulation runs on.

    Attributes:
        population: The clients and their examples.
        test: Examples of the central test set.
    """

    population: Population
    test: Examples = field(repr=False)

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one example's features."""
        return tuple(self.test.features.shape[1:])


def partitioned(data: TrainTest, partition: Partitioner, *, seed: Seed) -> FederatedData:
    """Divide the training examples among clients.

    Raises:
        DataError: They cannot be divided as asked, or a client would have none.
    """
    train = data.train
    split = partition.split(train.labels.flatten(1)[:, 0].numpy() if train.labels.dim() > 1
                            else train.labels.numpy(), seed=seed)
    population = ArrayPopulation(
        features=train.features,
        labels=train.labels,
        partition=split,
        num_classes=train.num_classes,
    )
    return FederatedData(population=population, test=data.test)


def from_arrays(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    partition: Partitioner,
    test_fraction: float,
    seed: int,
) -> FederatedData:
    """Return a federated data set of arrays in memory.

    Args:
        features: Real numbers, [N, ...]; floats become float32.
        labels: Integers for classes, floats to regress on: [N, ...].
        partition: How the training examples are divided among clients.
        test_fraction: Share of the examples held out for the central test, in (0, 1).
        seed: Chooses the test examples and the partition.

    Raises:
        DataError: Lengths differ, a value is not finite, or the division is impossible.

    Example:
        >>> from fedlearn.simulation.partition import Iid
        >>> data = from_arrays(np.eye(8), np.arange(8) % 2, partition=Iid(num_clients=3),
        ...                    test_fraction=0.25, seed=0)
        >>> data.population.num_clients, len(data.test.labels)
        (3, 2)
    """
    x, y = _tensor(features), _tensor(labels)
    if len(x) != len(y):
        raise DataError(f"{len(x)} rows of features for {len(y)} labels; give one label each")
    num_classes = None if y.is_floating_point() else int(y.max()) + 1
    classes = np.zeros(len(y), np.int64) if num_classes is None else y.numpy().reshape(len(y), -1)[:, 0]
    is_test = torch.from_numpy(
        held_out(classes, fraction=test_fraction, seed=Seed(seed).derive("data"))
    )
    train, test = (
        Examples(features=x[part], labels=y[part], groups=None, num_classes=num_classes)
        for part in (~is_test, is_test)
    )
    return partitioned(
        TrainTest(train=train, test=test), partition, seed=Seed(seed).derive("partition")
    )


def _tensor(values: Any) -> Tensor:  # whatever numpy takes
    tensor = torch.as_tensor(np.asarray(values))
    return tensor.float() if tensor.is_floating_point() else tensor.long()
