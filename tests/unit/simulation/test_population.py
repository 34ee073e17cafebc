"""Populations: who has which examples, and which examples are refused."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.partition import ByIds, Iid, Partition
from fedlearn.simulation.population import (
    ArrayPopulation,
    BootstrapPopulation,
    ClientRows,
    Columns,
    DatasetPopulation,
    ParquetPopulation,
    Population,
)

# Client k holds examples whose features are k and whose label is k % 3.
_OWNERS = np.array([0, 2, 1, 1, 0, 2, 2, 3])
_PARTITION = Partition.of_owners(_OWNERS, num_clients=4)
_COLUMNS = Columns(
    client="user",
    features=["pixels"],
    label="digit",
    feature_shape=(2,),
    feature_dtype=torch.float32,
)


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


def _table(owners: NDArray[np.int64] | list[str], *, features: Tensor | None = None) -> pa.Table:
    values = _features()[np.argsort(_OWNERS)] if features is None else features
    flat = pa.array(values.numpy().ravel())
    return pa.table(
        {
            "user": owners,
            "pixels": pa.FixedSizeListArray.from_arrays(flat, values.shape[1]),
            "digit": pa.array(np.sort(_OWNERS) % 3, pa.int32()),
        }
    )


def _written(path: Path, *, table: pa.Table | None = None, row_group_size: int = 3) -> Path:
    table = _table(np.sort(_OWNERS)) if table is None else table
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def _parquet(
    path: Path,
    *,
    columns: Columns = _COLUMNS,
    num_classes: int | None = 3,
    cache_bytes: int = 10**6,
) -> ParquetPopulation:
    return ParquetPopulation(
        path, columns=columns, num_classes=num_classes, cache_bytes=cache_bytes
    )


def _clients(loaded: ClientRows) -> Iterator[tuple[Tensor, Tensor]]:
    for start, end in zip(loaded.offsets[:-1], loaded.offsets[1:], strict=True):
        rows = torch.from_numpy(loaded.rows[start:end])
        yield loaded.features[rows], loaded.labels[rows]


def _assert_owners(population: Population, *, asked: list[int]) -> None:
    """Assert that each client asked gets its own examples, all of them, in order."""
    ids = np.array(asked, np.int64)
    loaded = population.load(ids)
    sizes = np.bincount(_OWNERS)[ids]
    assert population.num_examples(ids).tolist() == sizes.tolist()
    assert np.diff(loaded.offsets).tolist() == sizes.tolist()
    for client, (features, labels) in zip(asked, _clients(loaded), strict=True):
        assert (features == client).all()
        assert (labels == client % 3).all()


def test_an_array_population_gives_each_client_its_rows_without_copying() -> None:
    """Rows may lie scattered; the tensors that come back are the ones that went in."""
    features = _features()
    population = _arrays(features=features)
    assert population.num_clients == 4
    assert population.load(np.array([1])).features is features
    _assert_owners(population, asked=[2, 0, 3, 1])
    _assert_owners(population, asked=[])


def test_rows_grouped_by_client_need_no_lookup() -> None:
    """A grouped population gives the same clients as a scattered one."""
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
    """The check looks at each value, not at a sum that could overflow."""
    assert _arrays(features=torch.full((8, 2), 3e38)).num_clients == 4


@pytest.mark.parametrize(("wrong", "row"), [(3, 6), (-1, 3)])
def test_a_label_out_of_range_is_found(wrong: int, row: int) -> None:
    """Labels lie in 0..num_classes - 1; without classes any integer will do."""
    labels = _labels()
    labels[row] = wrong
    match = rf"row {row} of client {_OWNERS[row]} has the label {wrong}, outside 0\.\.2"
    with pytest.raises(DataError, match=match):
        _arrays(labels=labels)
    assert _arrays(labels=labels, num_classes=None).num_clients == 4


def test_malformed_arrays_are_refused() -> None:
    """Lengths, dtypes, values and rows are checked at construction."""
    with pytest.raises(DataError, match="counts examples in both"):
        _arrays(labels=_labels()[:7])
    with pytest.raises(DataError, match=r"convert class labels with `\.long\(\)`"):
        _arrays(labels=_labels().int())
    with pytest.raises(DataError, match=r"labels are torch\.float32"):
        _arrays(labels=_labels().float())
    with pytest.raises(DataError, match=r"features are torch\.bool"):
        _arrays(features=_features().bool())
    with pytest.raises(DataError, match=r"features are torch\.complex64"):
        _arrays(features=_features().to(torch.complex64))
    with pytest.raises(DataError, match="has a label that is NaN"):
        _arrays(labels=torch.full((8,), float("nan")), num_classes=None)
    with pytest.raises(DataError, match=r"rows 0\.\.7, there are 7 examples"):
        _arrays(features=_features()[:7], labels=_labels()[:7])


def test_integer_features_and_float_targets_are_accepted() -> None:
    """Tokens, bytes and regression are trained on as well."""
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
    """Building them and loading 1,000 takes memory for those 1,000 only."""
    cohort = np.random.default_rng(0).choice(1_000_000, 1000, replace=False)
    tracemalloc.start()
    population = _bootstrap(1_000_000)
    loaded = population.load(cohort)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4_000_000
    assert loaded.rows.size == population.num_examples(cohort).sum() == 50_000


def test_a_virtual_client_draws_the_same_rows_whoever_else_is_asked() -> None:
    """Random access: neither company nor order matters, and clients differ."""
    population = _bootstrap(1_000_000)
    alone = population.load(np.array([999_999])).rows
    together = population.load(np.array([5, 999_999])).rows
    assert np.array_equal(alone, together[50:])
    assert not np.array_equal(together[:50], together[50:])


def test_virtual_clients_draw_uniformly() -> None:
    """A chi-squared statistic of 99 degrees of freedom stays in its range."""
    counts = np.bincount(_bootstrap(20_000).load(np.arange(20_000)).rows, minlength=100)
    statistic = ((counts - 10_000.0) ** 2 / 10_000.0).sum()
    assert 50.0 < statistic < 170.0


def test_a_bootstrap_without_examples_or_clients_is_refused() -> None:
    """Each count is at least one, and the examples are checked."""
    with pytest.raises(ValueError, match="num_clients is 0"):
        _bootstrap(0)
    with pytest.raises(ValueError, match="examples_per_client is 0"):
        _bootstrap(1, examples_per_client=0)
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
    """A dataset of ready pairs that remembers what was fetched."""

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
    """Fetching can be slow, so nothing is fetched in advance."""
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
    """What a dataset returns is known only once it is fetched."""
    with pytest.raises(DataError, match=message):
        _dataset(pairs).load(np.array([0]))


def test_a_partition_beyond_the_dataset_is_refused() -> None:
    """Eight rows are named, seven exist."""
    with pytest.raises(DataError, match="there are 7 examples"):
        DatasetPopulation(
            dataset=TensorDataset(_features()[:7], _labels()[:7]),
            partition=_PARTITION,
            num_classes=3,
        )


@pytest.mark.parametrize("row_group_size", [1, 2, 3, 100])
@pytest.mark.parametrize("cache_bytes", [0, 60, 10**6])
def test_a_parquet_file_gives_each_client_its_rows(
    tmp_path: Path, row_group_size: int, cache_bytes: int
) -> None:
    """However rows are grouped and however little is cached; clients span row groups."""
    path = _written(tmp_path / "train.parquet", row_group_size=row_group_size)
    population = _parquet(path, cache_bytes=cache_bytes)
    assert population.num_clients == 4
    for asked in ([2, 0, 3, 1], [1, 2], [3]):
        _assert_owners(population, asked=asked)


def test_a_folder_is_one_table_and_clients_may_span_its_files(tmp_path: Path) -> None:
    """Files follow each other in the order of their names."""
    table = _table(np.sort(_OWNERS))
    _written(tmp_path / "part-1.parquet", table=table.slice(3))
    _written(tmp_path / "part-0.parquet", table=table.slice(0, 3))
    _assert_owners(_parquet(tmp_path), asked=[1, 3, 0, 2])


def test_clients_may_be_named_by_strings(tmp_path: Path) -> None:
    """Clients are numbered in order of appearance; dictionary-encoded names do as well."""
    names = pa.array(["zoe", "ada", "kim", "bo"]).take(pa.array(np.sort(_OWNERS)))
    for kind, column in (("plain", names), ("dictionary", names.dictionary_encode())):
        path = _written(tmp_path / f"{kind}.parquet", table=_table(column))
        population = _parquet(path)
        assert [population.name_of(client) for client in range(4)] == ["zoe", "ada", "kim", "bo"]
        _assert_owners(population, asked=[1, 0])


def test_several_numeric_columns_make_a_feature_vector(tmp_path: Path) -> None:
    """Columns of other widths are converted and laid side by side."""
    owners = np.sort(_OWNERS)
    table = pa.table(
        {"user": owners, "a": owners.astype(np.float64), "b": owners, "digit": owners % 3}
    )
    columns = Columns(
        client="user",
        features=["a", "b"],
        label="digit",
        feature_shape=(1, 2),
        feature_dtype=torch.float64,
    )
    population = _parquet(_written(tmp_path / "t.parquet", table=table), columns=columns)
    _assert_owners(population, asked=[3, 2])
    loaded = population.load(np.array([2]))
    assert loaded.features.shape == (3, 1, 2)
    assert loaded.features.dtype == torch.float64


def test_the_cache_keeps_the_row_groups_used_last(tmp_path: Path) -> None:
    """A row group in the cache is not read again; one that was pushed out is."""
    path = _written(tmp_path / "t.parquet", row_group_size=2)  # 4 groups of 2 x (8 + 8) bytes
    population = _parquet(path, cache_bytes=64)
    population.load(np.array([0]))
    population.load(np.array([3]))
    path.unlink()
    _assert_owners(population, asked=[0])
    with pytest.raises(FileNotFoundError):
        population.load(np.array([2]))


def test_a_streamed_population_is_not_held_in_memory(tmp_path: Path) -> None:
    """32 MB of features, of which a client of 1,600 bytes and a row group are read."""
    owners = np.repeat(np.arange(20_000), 4)
    features = torch.zeros(80_000, 100)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(features.numpy().ravel()), 100)
    table = pa.table({"user": owners, "pixels": flat, "digit": owners % 3})
    path = _written(tmp_path / "t.parquet", table=table, row_group_size=1000)
    columns = Columns(
        client="user",
        features=["pixels"],
        label="digit",
        feature_shape=(100,),
        feature_dtype=torch.float32,
    )
    del table, flat
    before = pa.total_allocated_bytes()
    population = _parquet(path, columns=columns, cache_bytes=10**6)
    assert pa.total_allocated_bytes() - before < 2_000_000
    for client in range(0, 20_000, 4000):
        assert population.load(np.array([client])).features.shape == (4, 100)
    assert pa.total_allocated_bytes() - before < 2_000_000


def test_rows_not_grouped_by_client_are_refused(tmp_path: Path) -> None:
    """Within a file and over files; the message says how to sort."""
    scattered = _written(tmp_path / "t.parquet", table=_table(_OWNERS))
    with pytest.raises(DataError, match=r"'user' 0 appears in several places; sort first"):
        _parquet(scattered)
    folder = tmp_path / "folder"
    folder.mkdir()
    for part in range(2):
        _written(folder / f"{part}.parquet")
    with pytest.raises(DataError, match="not grouped by client"):
        _parquet(folder)


def test_bad_values_in_parquet_are_refused_when_loaded(tmp_path: Path) -> None:
    """The row and the client, by number and by name, are in the message."""
    features = _features()[np.argsort(_OWNERS)]
    features[4] = float("nan")
    names = pa.array(["zoe", "ada", "kim", "bo"]).take(pa.array(np.sort(_OWNERS)))
    population = _parquet(_written(tmp_path / "t.parquet", table=_table(names, features=features)))
    _assert_owners(population, asked=[0, 1])
    with pytest.raises(DataError, match=r"row 4 of client 2 \(user 'kim'\) has a feature"):
        population.load(np.array([1, 2]))
    with pytest.raises(DataError, match=r"row 4 of client 2 \(user 2\) has the label 2"):
        _parquet(_written(tmp_path / "u.parquet"), num_classes=2).load(np.array([2]))


@pytest.mark.parametrize("column", ["user", "pixels", "digit"])
def test_missing_values_in_parquet_are_refused(tmp_path: Path, column: str) -> None:
    """A null is neither a client, a feature nor a label."""
    table = _table(np.sort(_OWNERS))
    array = table[column].combine_chunks()
    holed = pa.concat_arrays([array.slice(0, 7), pa.nulls(1, array.type)])
    table = table.set_column(table.schema.get_field_index(column), column, holed)
    path = _written(tmp_path / "t.parquet", table=table)
    with pytest.raises(DataError, match=f"column '{column}' .*missing"):
        _parquet(path).load(np.array([3]))


def test_a_table_of_another_form_is_refused(tmp_path: Path) -> None:
    """Missing columns list those present; types and widths are named."""
    table = _table(np.sort(_OWNERS))
    lists = pa.array([[1.0, 2.0]] * 8)
    other = {
        r"no column 'digit'; it has \['user', 'pixels'\]": table.drop_columns(["digit"]),
        "cast it to numbers or to fixed-size lists": table.set_column(1, "pixels", lists),
        "label column 'digit' is string": table.set_column(2, "digit", pa.array(["x"] * 8)),
        "client column 'user' is double": table.set_column(0, "user", pa.array([0.5] * 8)),
        "have no rows": table.slice(0, 0),
    }
    for number, (message, malformed) in enumerate(other.items()):
        path = _written(tmp_path / f"{number}.parquet", table=malformed)
        with pytest.raises(DataError, match=message):
            _parquet(path)
    wide = Columns(
        client="user",
        features=["pixels"],
        label="digit",
        feature_shape=(28, 28),
        feature_dtype=torch.float32,
    )
    with pytest.raises(DataError, match="hold 2 numbers an example"):
        _parquet(_written(tmp_path / "wide.parquet"), columns=wide)


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    """The message says what was looked for and where."""
    with pytest.raises(DataError, match=r"no file or folder .*nowhere"):
        _parquet(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no \*\.parquet file in the folder"):
        _parquet(tmp_path)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="is not a Parquet file"):
        _parquet(tmp_path)


def test_columns_without_features_or_of_a_strange_dtype_are_refused() -> None:
    """At least one column, of real numbers."""
    with pytest.raises(ValueError, match="no feature column"):
        Columns(client="c", features=[], label="y", feature_shape=(1,), feature_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"feature_dtype is torch\.bool"):
        Columns(client="c", features=["x"], label="y", feature_shape=(1,), feature_dtype=torch.bool)


def test_all_kinds_of_population_agree(tmp_path: Path) -> None:
    """The same examples by three roads give the same clients."""
    order = np.argsort(_OWNERS, kind="stable")
    by_ids = ByIds(_OWNERS).split(_OWNERS, seed=Seed(0))
    populations: list[Population] = [
        _arrays(partition=by_ids),
        DatasetPopulation(
            dataset=TensorDataset(_features()[order], _labels()[order]),
            partition=Partition.of_owners(_OWNERS[order], num_clients=4),
            num_classes=3,
        ),
        _parquet(_written(tmp_path / "t.parquet")),
    ]
    for population in populations:
        _assert_owners(population, asked=[3, 0, 2, 1])
