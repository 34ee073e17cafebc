"""Federated data sets: from arrays, datasets and files to clients and a test set."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import TensorDataset

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.federated_data import (
    Bootstrap,
    Division,
    FederatedData,
    Natural,
    from_arrays,
    from_dataset,
    from_npz,
    from_parquet,
    partitioned,
)
from fedlearn.simulation.partition import ByIds, Dirichlet, Iid, Shards
from fedlearn.simulation.population import ArrayPopulation, ClientRows
from fedlearn.simulation.sources import Examples

_LABELS = np.arange(60) % 3
_FEATURES = np.arange(120.0).reshape(60, 2)


def _from_arrays(
    *,
    features: ArrayLike = _FEATURES,
    labels: ArrayLike = _LABELS,
    partition: Division = Iid(4),  # noqa: B008  frozen
    groups: ArrayLike | None = None,
    seed: int = 0,
) -> FederatedData:
    return from_arrays(
        features, labels, partition=partition, test_fraction=0.2, seed=seed, groups=groups
    )


def _rows(data: FederatedData) -> list[list[float]]:
    """Return the first feature of each client's examples."""
    result = []
    for client in range(data.population.num_clients):
        loaded = data.population.load(np.array([client]))
        result.append(sorted(loaded.features[torch.from_numpy(loaded.rows), 0].tolist()))
    return result


def test_arrays_are_divided_into_clients_and_a_test_set() -> None:
    """Every example is with one client or in the test, which has a fifth of each class."""
    data = _from_arrays()
    clients = _rows(data)
    everything = sorted(sum(clients, data.test.features[:, 0].tolist()))
    assert everything == _FEATURES[:, 0].tolist()
    assert torch.bincount(data.test.labels).tolist() == [4, 4, 4]
    assert data.test.features.dtype == torch.float32
    assert data.feature_shape == (2,)
    assert data.test.num_classes == 3


@pytest.mark.parametrize(
    "partition",
    [
        Iid(4),
        Dirichlet(num_clients=4, alpha=1.0, min_examples=2),
        Shards(num_clients=4, shards_per_client=2),
        Bootstrap(num_clients=4, examples_per_client=9),
    ],
)
def test_the_seed_decides_the_division(partition: Division) -> None:
    """The same seed gives the same clients, another one others."""
    first, again, other = (_rows(_from_arrays(partition=partition, seed=s)) for s in (0, 0, 1))
    assert len(first) == 4
    assert first == again
    assert first != other


def test_natural_clients_are_the_groups_that_are_left_after_the_test() -> None:
    """Groups are divided with their examples; without groups there are no natural clients."""
    owners = np.array(["ada", "kim", "zoe"]).repeat(20)
    data = _from_arrays(partition=Natural(), groups=owners)
    first = [owners[int(rows[0]) // 2] for rows in _rows(data)]
    assert first == ["ada", "kim", "zoe"]
    with pytest.raises(DataError, match="do not say whose they are"):
        _from_arrays(partition=Natural())


@pytest.mark.parametrize("labels", [np.linspace(0.0, 1.0, 60), np.zeros((60, 2), int)])
def test_labels_that_are_no_class_numbers_are_not_split_by(labels: NDArray[np.generic]) -> None:
    """Numbers to regress on, and sequences, are divided at random only."""
    assert _from_arrays(labels=labels).population.num_clients == 4
    by_label: list[Division] = [
        Dirichlet(num_clients=4, alpha=1.0, min_examples=1),
        Shards(num_clients=4, shards_per_client=2),
    ]
    for partition in by_label:
        with pytest.raises(DataError, match="splitting by label needs one class number"):
            _from_arrays(labels=labels, partition=partition)


def test_whole_numbers_stay_integers() -> None:
    """Tokens are integers, whatever their width; lists do as well as arrays."""
    data = _from_arrays(features=_FEATURES.astype(np.uint8), labels=_LABELS.tolist())
    assert data.test.features.dtype == torch.int64
    assert data.test.labels.dtype == torch.int64


def test_arrays_that_cannot_be_trained_on_are_refused() -> None:
    """Lengths, types, values, emptiness."""
    with pytest.raises(DataError, match="counts examples in both"):
        _from_arrays(labels=_LABELS[:50])
    with pytest.raises(DataError, match=r"features are <U1 of shape \(60,\)"):
        _from_arrays(features=["x"] * 60)
    with pytest.raises(DataError, match=r"labels are int64 of shape \(\)"):
        _from_arrays(labels=3)
    with pytest.raises(DataError, match="NaN"):
        _from_arrays(features=np.full((60, 2), np.nan))
    with pytest.raises(DataError, match="there are no examples"):
        _from_arrays(features=np.zeros((0, 2)), labels=np.zeros(0, int))
    with pytest.raises(DataError, match="outside 0"):
        _from_arrays(labels=_LABELS - 1)


@dataclass(frozen=True)
class _Hollow:
    """A population of the user's own in which one client has nothing."""

    whole: ArrayPopulation

    @property
    def num_clients(self) -> int:
        return self.whole.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(client_ids == 2, 0, self.whole.num_examples(client_ids))

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        return self.whole.load(client_ids)


def test_an_empty_client_is_named() -> None:
    """Whoever made the population; the whole one is accepted."""
    data = _from_arrays()
    assert isinstance(data.population, ArrayPopulation)
    with pytest.raises(DataError, match="client 2 has no examples"):
        FederatedData(population=_Hollow(data.population), test=data.test)


def _test_set(*, features: torch.Tensor, labels: torch.Tensor) -> Examples:
    return Examples(features=features, labels=labels, groups=None, num_classes=None)


def test_an_empty_or_different_test_set_is_refused() -> None:
    """A model fits one shape and one dtype."""
    population = _from_arrays().population
    zeros = torch.zeros(3).long()
    wrong = {
        "the test set has no examples": (torch.zeros(0, 2), zeros[:0]),
        r"features of client 0 are torch.float32 of shape \(2,\)": (torch.zeros(3, 5), zeros),
        "features of client 0 are .* torch.float64": (torch.zeros(3, 2).double(), zeros),
        "labels of client 0 are torch.int64": (torch.zeros(3, 2), torch.zeros(3)),
    }
    for message, (features, labels) in wrong.items():
        with pytest.raises(DataError, match=message):
            FederatedData(population=population, test=_test_set(features=features, labels=labels))


def _dataset(num_rows: int, *, classes: int = 3) -> TensorDataset:
    features = torch.arange(num_rows).float()[:, None]
    return TensorDataset(features, torch.arange(num_rows) % classes)


def test_a_torch_dataset_is_divided_by_the_labels_given() -> None:
    """The rows of a client have the labels of its part; classes count over the test as well."""
    data = from_dataset(
        _dataset(12),
        labels=[row % 3 for row in range(12)],
        partition=ByIds(np.arange(12) // 4),
        test=_dataset(5, classes=5),
        seed=0,
    )
    assert _rows(data) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    assert data.test.num_classes == 5
    assert data.test.features[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_torch_dataset_that_does_not_fit_is_refused() -> None:
    """One label a row, a test set, and the same kind of labels in both."""
    labels = np.arange(12) % 3
    with pytest.raises(DataError, match="11 labels for a dataset of 12"):
        from_dataset(_dataset(12), labels=labels[:11], partition=Iid(2), test=_dataset(2), seed=0)
    with pytest.raises(DataError, match="the test set has no examples"):
        from_dataset(_dataset(12), labels=labels, partition=Iid(2), test=_dataset(0), seed=0)
    with pytest.raises(DataError, match="the test labels are integers, the training labels floats"):
        from_dataset(_dataset(12), labels=labels + 0.5, partition=Iid(2), test=_dataset(2), seed=0)


def test_an_npz_equals_its_arrays(tmp_path: Path) -> None:
    """The same seed gives the same clients by either road."""
    np.savez(tmp_path / "d.npz", allow_pickle=False, x=_FEATURES, y=_LABELS, who=_LABELS * 10)
    read = from_npz(
        tmp_path / "d.npz",
        features="x",
        labels="y",
        groups="who",
        test=0.2,
        partition=Natural(),
        seed=3,
    )
    made = _from_arrays(partition=Natural(), groups=_LABELS * 10, seed=3)
    assert _rows(read) == _rows(made)
    assert torch.equal(read.test.features, made.test.features)


def _written(path: Path, *, labels: ArrayLike) -> Path:
    clients = np.arange(np.size(labels)) // 2
    table = pa.table({"user": clients, "a": clients + 0.5, "b": clients, "digit": labels})
    pq.write_table(table, path)
    return path


def _from_parquet(folder: Path, *, train: ArrayLike, test: ArrayLike) -> FederatedData:
    return from_parquet(
        _written(folder / "train.parquet", labels=train),
        test_path=_written(folder / "test.parquet", labels=test),
        client="user",
        label="digit",
        features=None,
    )


@pytest.mark.parametrize(("train", "test"), [([0, 1, 0, 4], [0, 1]), ([0, 1, 0, 1], [0, 4])])
def test_classes_of_parquet_count_over_training_and_test(
    tmp_path: Path, train: list[int], test: list[int]
) -> None:
    """A label that only one of the two has is no mistake."""
    data = _from_parquet(tmp_path, train=train, test=test)
    assert data.test.num_classes == 5
    assert data.feature_shape == (2,)
    assert _rows(data) == [[0.5, 0.5], [1.5, 1.5]]


def test_classes_here_and_numbers_there_are_refused(tmp_path: Path) -> None:
    """They cannot be one task."""
    with pytest.raises(DataError, match="the training labels are integers, the test labels floats"):
        _from_parquet(tmp_path, train=[0, 1], test=[0.5, 1.0])
    assert _from_parquet(tmp_path, train=[0.1, 1], test=[0.5, 1]).test.num_classes is None


def test_a_million_virtual_clients_are_checked_without_a_table() -> None:
    """The check for empty clients looks at all of them, a part at a time."""
    data = _from_arrays(partition=Bootstrap(num_clients=3_000_000, examples_per_client=2))
    assert data.population.num_clients == 3_000_000


def test_a_division_is_refused_before_anything_is_divided() -> None:
    """Numbers out of range are the caller's mistake."""
    examples = _from_arrays().test.split(fraction=0.5, seed=Seed(0))
    with pytest.raises(ValueError, match="num_clients is 0"):
        partitioned(examples, Bootstrap(num_clients=0, examples_per_client=2), seed=Seed(0))
