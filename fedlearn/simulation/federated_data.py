"""A federated data set: who holds which examples, and the test set that nobody holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.parquet import Columns, ParquetPopulation, num_classes_in, read_parquet
from fedlearn.simulation.partition import ByIds, Partitioner
from fedlearn.simulation.population import (
    ArrayPopulation,
    BootstrapPopulation,
    DatasetPopulation,
    MapDataset,
    Population,
    stacked_rows,
)
from fedlearn.simulation.sources import Examples, TrainTest, npz_train_test, num_classes_of

_CACHE_BYTES = 256 << 20  # of decoded Parquet row groups
_CLIENTS_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class FederatedData:
    """What a simulation runs on.

    Attributes:
        population: The clients and their examples.
        test: Examples of the central test set.

    Raises:
        DataError: A client or the test set has no examples, or the first client's examples
            differ from the test set's in shape or dtype.
    """

    population: Population
    test: Examples = field(repr=False)

    def __post_init__(self) -> None:
        if not len(self.test.labels):
            raise DataError("the test set has no examples; give at least one")
        _require_examples(self.population)
        _require_alike(self.population, test=self.test)

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one example's features."""
        return tuple(self.test.features.shape[1:])


@dataclass(frozen=True)
class Natural:
    """Clients are the groups of the examples: a writer, a user, a hospital."""


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Virtual clients that draw their examples with replacement: populations of any size.

    Attributes:
        num_clients: >= 1.
        examples_per_client: >= 1.
    """

    num_clients: int
    examples_per_client: int


Division: TypeAlias = Partitioner | Natural | Bootstrap
"""How pooled examples become clients."""


def partitioned(data: TrainTest, division: Division, *, seed: Seed) -> FederatedData:
    """Return the training examples divided among clients.

    Args:
        data: What is divided, and the test set.
        division: How.
        seed: What is drawn, is drawn from it.

    Raises:
        ValueError: A number in ``division`` is out of range.
        DataError: They cannot be divided as asked, or a client would have none.
    """
    train, seed = data.train, seed.derive("partition")
    if isinstance(division, Bootstrap):
        virtual = BootstrapPopulation(
            features=train.features,
            labels=train.labels,
            num_classes=train.num_classes,
            num_clients=division.num_clients,
            examples_per_client=division.examples_per_client,
            seed=seed,
        )
        return FederatedData(population=virtual, test=data.test)
    rule = ByIds(_groups(train)) if isinstance(division, Natural) else division
    population = ArrayPopulation(
        features=train.features,
        labels=train.labels,
        partition=rule.split(train.labels.numpy(), seed=seed),
        num_classes=train.num_classes,
    )
    return FederatedData(population=population, test=data.test)


def from_arrays(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    partition: Division,
    test_fraction: float,
    seed: int,
    groups: ArrayLike | None = None,
) -> FederatedData:
    """Return a federated data set of arrays in memory.

    Args:
        features: Real numbers, [N, ...]; floats become float32, integers int64.
        labels: Integers for classes, floats to regress on: [N, ...].
        partition: How the training examples are divided among clients.
        test_fraction: Share of the examples held out for the central test, in (0, 1).
        seed: Chooses the test examples and the partition.
        groups: Whose each example is, for :class:`Natural`: [N], integers or strings.

    Raises:
        ValueError: ``test_fraction`` is not in (0, 1).
        DataError: Lengths differ, a value is no finite real number, or the division is
            impossible.

    Example:
        >>> from fedlearn.simulation.partition import Iid
        >>> data = from_arrays(np.eye(8), np.arange(8) % 2, partition=Iid(num_clients=3),
        ...                    test_fraction=0.25, seed=0)
        >>> data.population.num_clients, len(data.test.labels)
        (3, 2)
    """
    y, derived = _tensor(labels, what="labels"), Seed(seed).derive("data")
    examples = Examples(
        features=_tensor(features, what="features"),
        labels=y,
        groups=None if groups is None else np.asarray(groups),
        num_classes=num_classes_of(y),
    )
    return partitioned(
        examples.split(fraction=test_fraction, seed=derived), partition, seed=derived
    )


def from_dataset(
    dataset: MapDataset,
    *,
    labels: ArrayLike,
    partition: Partitioner,
    test: MapDataset,
    seed: int,
) -> FederatedData:
    """Return a federated data set over a torch ``Dataset``, whose rows are fetched when needed.

    Args:
        dataset: Pairs (features, label) to divide among clients.
        labels: The label of each of its rows, so that none is fetched to divide them: [N].
        partition: How the rows are divided among clients.
        test: Pairs for the central test; all are fetched now, and kept in memory.
        seed: Chooses the partition.

    Raises:
        DataError: Lengths differ, an example cannot be trained on, or the division is
            impossible.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from fedlearn.simulation.partition import Iid
        >>> pairs = TensorDataset(torch.eye(4), torch.tensor([0, 1, 0, 1]))
        >>> from_dataset(pairs, labels=[0, 1, 0, 1], partition=Iid(2), test=pairs,
        ...              seed=0).population.num_clients
        2
    """
    known = _tensor(labels, what="labels")
    if len(known) != len(dataset):
        raise DataError(f"{len(known)} labels for a dataset of {len(dataset)}; give one a row")
    if not len(test):
        raise DataError("the test set has no examples; give at least one")
    features, test_labels = stacked_rows(test, rows=np.arange(len(test)))
    num_classes = _larger(num_classes_of(known), num_classes_of(test_labels))
    seed_of_partition = Seed(seed).derive("data").derive("partition")
    population = DatasetPopulation(
        dataset=dataset,
        partition=partition.split(known.numpy(), seed=seed_of_partition),
        num_classes=num_classes,
    )
    held_out = Examples(features=features, labels=test_labels, groups=None, num_classes=num_classes)
    return FederatedData(population=population, test=held_out)


def from_npz(
    path: Path | str,
    *,
    features: str,
    labels: str,
    groups: str | None,
    test: tuple[str, str] | float,
    partition: Division,
    seed: int,
) -> FederatedData:
    """Return a federated data set of the arrays in an npz archive.

    Args:
        path: The archive.
        features: Name of the array of features, real numbers [N, ...]; they become float32.
        labels: Name of the array of labels [N, ...]: integers for classes, floats to regress
            on.
        groups: Name of the array that says whose each example is, [N]; ``None`` for none.
        test: Names of the test features and labels, or the share to hold out, in (0, 1).
        partition: How the training examples are divided among clients.
        seed: Chooses the test examples and the partition.

    Raises:
        ValueError: The share to hold out is not in (0, 1).
        DataError: The file or an array is missing or damaged, a value is no finite real
            number, or the division is impossible.
    """
    derived = Seed(seed).derive("data")
    data = npz_train_test(
        Path(path), features=features, labels=labels, groups=groups, test=test, seed=derived
    )
    return partitioned(data, partition, seed=derived)


def from_parquet(
    path: Path | str,
    *,
    test_path: Path | str,
    client: str,
    label: str,
    features: Sequence[str] | None,
) -> FederatedData:
    """Return a federated data set that streams from Parquet files larger than memory.

    Args:
        path: Training file, or a folder of ``*.parquet`` files; rows grouped by client.
        test_path: Test file or folder, read into memory; it needs no client column.
        client: Column that says whose an example is: integers or strings.
        label: Column of labels: integers for classes, floats to regress on.
        features: Columns of features; ``None`` takes all that have no other role.

    Raises:
        DataError: A file or column is missing, damaged or of a wrong type, the rows are not
            grouped by client, or training and test do not fit together.
    """
    columns = Columns.of_file(Path(path), client=client, label=label, features=features)
    test = read_parquet(Path(test_path), columns=columns)
    num_classes = _larger(num_classes_in(Path(path), columns=columns), test.num_classes)
    population = ParquetPopulation(
        Path(path), columns=columns, num_classes=num_classes, cache_bytes=_CACHE_BYTES
    )
    return FederatedData(population=population, test=replace(test, num_classes=num_classes))


def _tensor(values: ArrayLike, *, what: str) -> Tensor:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise DataError(
            f"{what} are {array.dtype} of shape {array.shape}; give real numbers, the first "
            "dimension counting examples"
        )
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _groups(examples: Examples) -> NDArray[np.generic]:
    if examples.groups is None:
        raise DataError(
            "the examples do not say whose they are, as a natural partition needs; give them "
            "groups, or take another partition"
        )
    return examples.groups


def _larger(train: int | None, test: int | None) -> int | None:
    """Return the number of classes of both parts."""
    if train is not None and test is not None:
        return max(train, test)
    if train != test:
        integers, floats = ("test", "training") if train is None else ("training", "test")
        raise DataError(
            f"the {integers} labels are integers, the {floats} labels floats; make both integers "
            "for classes, or both floats to regress on"
        )
    return None


def _require_examples(population: Population) -> None:
    for start in range(0, population.num_clients, _CLIENTS_AT_ONCE):
        client_ids = np.arange(start, min(start + _CLIENTS_AT_ONCE, population.num_clients))
        empty = client_ids[population.num_examples(client_ids) < 1]
        if empty.size:
            raise DataError(
                f"client {empty[0]} has no examples; leave clients without examples out"
            )


def _require_alike(population: Population, *, test: Examples) -> None:
    first = population.load(np.zeros(1, np.int64))
    for what, ours, theirs in (
        ("features", first.features, test.features),
        ("labels", first.labels, test.labels),
    ):
        if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
            raise DataError(
                f"the {what} of client 0 are {ours.dtype} of shape {tuple(ours.shape[1:])} an "
                f"example, those of the test set {theirs.dtype} of shape "
                f"{tuple(theirs.shape[1:])}; make them alike"
            )
