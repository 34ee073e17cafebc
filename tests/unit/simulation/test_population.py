"""Populations: which client has which examples, and which examples are refused."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedlearn.core.features import Features, require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.partition import Iid, Partition
from fedlearn.simulation.population import (
    ArrayPopulation,
    BootstrapPopulation,
    ClientRows,
    DatasetPopulation,
    PooledPopulation,
    Population,
)

# Client k holds examples whose features are k and whose label is k % 3.
_OWNERS = np.array([0, 2, 1, 1, 0, 2, 2, 3])
_PARTITION = Partition.of_owners(_OWNERS, num_clients=4)


def _features() -> Tensor:
    return torch.from_numpy(_OWNERS).float()[:, None].repeat(1, 2)


def _labels() -> Tensor:
    return torch.from_numpy(_OWNERS % 3)


def _arrays(
    *,
    features: Tensor | None = None,
    labels: Tensor | None = None,
    partition: Partition = _PARTITION,
    num_classes: int | None = 3,
) -> ArrayPopulation:
    return ArrayPopulation(
        features=_features() if features is None else features,
        labels=_labels() if labels is None else labels,
        partition=partition,
        num_classes=num_classes,
    )


def _clients(loaded: ClientRows) -> Iterator[tuple[Tensor, Tensor]]:
    for start, end in zip(loaded.offsets[:-1], loaded.offsets[1:], strict=True):
        rows = torch.from_numpy(loaded.rows[start:end])
        yield require_single_input(loaded.features)[rows], loaded.labels[rows]


def _assert_owners(population: Population, *, asked: list[int]) -> None:
    """Assert that each client gets its own examples, all of them and in order."""
    ids = np.array(asked, np.int64)
    loaded = population.load(ids)
    sizes = np.bincount(_OWNERS)[ids]
    assert population.num_examples(ids).tolist() == sizes.tolist()
    assert np.diff(loaded.offsets).tolist() == sizes.tolist()
    for client, (features, labels) in zip(asked, _clients(loaded), strict=True):
        assert (features == client).all()
        assert (labels == client % 3).all()


def test_an_array_population_gives_each_client_its_rows_without_copying() -> None:
    """Rows may be in any order; the returned tensors are the original ones."""
    features = _features()
    population = _arrays(features=features)
    assert population.num_clients == 4
    assert population.load(np.array([1])).features is features
    _assert_owners(population, asked=[2, 0, 3, 1])
    _assert_owners(population, asked=[])


def test_rows_grouped_by_client_need_no_lookup() -> None:
    """Whether its rows are grouped or scattered, a population gives the same clients."""
    order = np.argsort(_OWNERS, kind="stable")
    population = _arrays(
        features=_features()[order],
        labels=_labels()[order],
        partition=Partition.of_owners(_OWNERS[order], num_clients=4),
    )
    _assert_owners(population, asked=[3, 1, 2])


def test_a_nan_is_found_with_its_row_and_client() -> None:
    """Row 5 belongs to client 2."""
    for value in (float("nan"), float("inf")):
        features = _features()
        features[5, 1] = value
        with pytest.raises(DataError, match=r"row 5 of client 2 has a feature that is NaN"):
            _arrays(features=features)


def test_large_but_finite_features_are_accepted() -> None:
    """Each value is checked, not a sum that could overflow."""
    assert _arrays(features=torch.full((8, 2), 3e38)).num_clients == 4


@pytest.mark.parametrize(("wrong", "row"), [(3, 6), (-1, 3)])
def test_a_label_out_of_range_is_found(wrong: int, row: int) -> None:
    """Labels are in 0..num_classes - 1; without classes any integer is accepted."""
    labels = _labels()
    labels[row] = wrong
    match = rf"row {row} of client {_OWNERS[row]} has the label {wrong}, outside 0\.\.2"
    with pytest.raises(DataError, match=match):
        _arrays(labels=labels)
    assert _arrays(labels=labels, num_classes=None).num_clients == 4


def test_malformed_arrays_are_refused() -> None:
    """Lengths, dtypes, values and rows are checked at construction."""
    with pytest.raises(DataError, match="of both must count examples"):
        _arrays(labels=_labels()[:7])
    with pytest.raises(DataError, match=r"convert class labels with `\.long\(\)`"):
        _arrays(labels=_labels().int())
    with pytest.raises(DataError, match=r"labels are torch\.float32"):
        _arrays(labels=_labels().float())
    with pytest.raises(DataError, match=r"features of torch\.bool"):
        _arrays(features=_features().bool())
    with pytest.raises(DataError, match=r"features of torch\.complex64"):
        _arrays(features=_features().to(torch.complex64))
    with pytest.raises(DataError, match="has a label that is NaN"):
        _arrays(labels=torch.full((8,), float("nan")), num_classes=None)
    with pytest.raises(DataError, match=r"rows 0\.\.7, but there are 7 examples"):
        _arrays(features=_features()[:7], labels=_labels()[:7])


def test_integer_features_and_float_targets_are_accepted() -> None:
    """Tokens, bytes and regression targets can be trained on as well."""
    assert _arrays(features=_features().to(torch.uint8)).num_clients == 4
    assert _arrays(labels=torch.rand(8, 2), num_classes=None).num_clients == 4


def _bootstrap(
    num_clients: int, *, examples_per_client: int = 50, num_examples: int = 100
) -> BootstrapPopulation:
    return BootstrapPopulation(
        features=torch.arange(num_examples).float()[:, None],
        labels=torch.arange(num_examples) % 10,
        num_classes=10,
        num_clients=num_clients,
        examples_per_client=examples_per_client,
        seed=Seed(0),
    )


def test_a_million_virtual_clients_need_no_table() -> None:
    """Creating them and loading 1,000 takes memory for those 1,000 only."""
    cohort = np.random.default_rng(0).choice(1_000_000, 1000, replace=False)
    tracemalloc.start()
    population = _bootstrap(1_000_000)
    loaded = population.load(cohort)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4_000_000
    assert loaded.rows.size == population.num_examples(cohort).sum() == 50_000


def test_a_virtual_client_draws_the_same_rows_whoever_else_is_asked() -> None:
    """The draw depends neither on the order nor on the other clients, and clients differ."""
    population = _bootstrap(1_000_000)
    alone = population.load(np.array([999_999])).rows
    together = population.load(np.array([5, 999_999])).rows
    assert np.array_equal(alone, together[50:])
    assert not np.array_equal(together[:50], together[50:])


def test_virtual_clients_draw_uniformly() -> None:
    """A chi-squared statistic with 99 degrees of freedom is in its expected range."""
    counts = np.bincount(_bootstrap(20_000).load(np.arange(20_000)).rows, minlength=100)
    statistic = ((counts - 10_000.0) ** 2 / 10_000.0).sum()
    assert 50.0 < statistic < 170.0


def test_a_bootstrap_without_examples_is_refused() -> None:
    """Its examples are checked as well."""
    with pytest.raises(DataError, match="no examples to draw from"):
        _bootstrap(1, num_examples=0)
    with pytest.raises(DataError, match="row 1 has a feature that is NaN"):
        BootstrapPopulation(
            features=torch.tensor([0.0, float("nan")]),
            labels=torch.zeros(2).long(),
            num_classes=2,
            num_clients=3,
            examples_per_client=4,
            seed=Seed(0),
        )


class _Pairs:
    """A dataset of given pairs that records which ones were fetched."""

    def __init__(self, pairs: list[object]) -> None:
        self._pairs = pairs
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int, /) -> object:
        self.fetched.append(index)
        return self._pairs[index]


def _dataset(pairs: list[object]) -> DatasetPopulation:
    partition = Iid(1).split(np.zeros(len(pairs)), seed=Seed(0))
    return DatasetPopulation(dataset=_Pairs(pairs), partition=partition, num_classes=3)


def test_a_torch_dataset_gives_each_client_its_rows() -> None:
    """TensorDataset is a map-style dataset of pairs."""
    population = DatasetPopulation(
        dataset=TensorDataset(_features(), _labels()), partition=_PARTITION, num_classes=3
    )
    assert population.num_clients == 4
    _assert_owners(population, asked=[2, 0, 3])


def test_only_the_rows_of_the_clients_asked_are_fetched() -> None:
    """Fetching can be slow, so nothing is fetched ahead of time."""
    dataset = _Pairs([(np.full(2, owner, np.float32), int(owner) % 3) for owner in _OWNERS])
    population = DatasetPopulation(dataset=dataset, partition=_PARTITION, num_classes=3)
    _assert_owners(population, asked=[1])
    assert dataset.fetched == [2, 3]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([([0.0], 0), ([0.0, 1.0], 0)], r"dataset\[1\] has features of shape \(2,\)"),
        ([([0.0], 0), ([0.0], [0, 1])], r"dataset\[1\] has a label of shape \(2,\)"),
        ([([0.0], 0), ("text", 0)], r"dataset\[1\] is not a pair of numbers"),
        ([([0.0], 0, 1)], r"dataset\[0\] is not a pair"),
        ([([0.0], 0), ([float("nan")], 0)], "row 1 of client 0 has a feature that is NaN"),
        ([([0.0], 0), ([0.0], 3)], r"row 1 of client 0 has the label 3, outside 0\.\.2"),
    ],
)
def test_bad_examples_of_a_dataset_are_refused_when_loaded(
    pairs: list[object], message: str
) -> None:
    """They are known only once they are fetched."""
    with pytest.raises(DataError, match=message):
        _dataset(pairs).load(np.array([0]))


def test_a_partition_beyond_the_dataset_is_refused() -> None:
    """It has eight rows, but the dataset has seven."""
    with pytest.raises(DataError, match="there are 7 examples"):
        DatasetPopulation(
            dataset=TensorDataset(_features()[:7], _labels()[:7]),
            partition=_PARTITION,
            num_classes=3,
        )


def test_a_pooled_population_is_one_client_with_everybody_s_examples() -> None:
    """Each example once, for centralised training."""
    pooled = PooledPopulation(_arrays())
    only = np.array([0])
    assert pooled.num_clients == 1
    assert pooled.num_examples(only).tolist() == [8]
    loaded = pooled.load(only)
    assert sorted(loaded.rows.tolist()) == list(range(8))
    assert loaded.offsets.tolist() == [0, 8]


def _inputs() -> dict[str, Tensor]:
    return {"ids": torch.from_numpy(_OWNERS)[:, None], "mask": _features() > 0}


def test_several_inputs_are_divided_and_drawn_alike() -> None:
    """The rows of a client match in every input: in memory, with replacement, and in a dataset."""
    inputs, labels = _inputs(), _labels()
    pairs: list[object] = [
        ({name: each[row] for name, each in inputs.items()}, labels[row]) for row in range(8)
    ]
    populations: tuple[Population, ...] = (
        ArrayPopulation(features=inputs, labels=labels, partition=_PARTITION, num_classes=3),
        DatasetPopulation(dataset=_Pairs(pairs), partition=_PARTITION, num_classes=3),
        BootstrapPopulation(
            features=inputs,
            labels=labels,
            num_classes=3,
            num_clients=9,
            examples_per_client=4,
            seed=Seed(0),
        ),
    )
    for population in populations:
        features, classes = population.load(np.array([2, 1])).gather()
        assert isinstance(features, dict)
        assert (features["ids"].dtype, features["mask"].dtype) == (torch.int64, torch.bool)
        assert torch.equal(features["ids"][:, 0] % 3, classes)
        assert torch.equal(features["mask"][:, 0], features["ids"][:, 0] > 0)


def test_an_input_that_cannot_be_trained_on_is_named() -> None:
    """By its length, its dtype, or the row of a value that is not finite."""
    spoilt = _features()
    spoilt[5, 1] = float("nan")
    wrong: dict[str, Features] = {
        r"input 1 of shape \(7, 2\) and labels of shape \(8,\)": (_features(), _features()[:7]),
        "input 'x' of torch.complex64": {"x": _features().to(torch.complex64)},
        "row 5 of client 2 has a value of input 'x' that": {"ids": _labels(), "x": spoilt},
        "features are a tuple of": (),
    }
    for message, features in wrong.items():
        with pytest.raises(DataError, match=message):
            ArrayPopulation(
                features=features, labels=_labels(), partition=_PARTITION, num_classes=3
            )


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (((np.zeros(2), np.zeros(4)), 0), r"dataset\[1\] has input 1 of shape \(4,\)"),
        (((np.zeros(2),), 0), r"dataset\[1\] has input 0, dataset\[0\] input 0 and input 1"),
        ((np.zeros(2), 0), r"dataset\[1\] has features, dataset\[0\] input 0 and input 1"),
        (((np.zeros(2), "text"), 0), r"dataset\[1\] is not a pair of numbers"),
    ],
)
def test_inputs_that_differ_from_row_to_row_are_refused(second: object, message: str) -> None:
    """Ragged lengths, a missing input, a tensor where several are expected, or text."""
    with pytest.raises(DataError, match=message):
        _dataset([((np.zeros(2), np.zeros(3)), 0), second]).load(np.array([0]))
