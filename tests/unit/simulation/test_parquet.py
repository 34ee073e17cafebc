"""Clients in Parquet files: how they are found, read and checked."""

import os
import signal
import warnings
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

from fedlearn.core.features import require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.parquet import (
    ParquetPopulation,
    TableColumns,
    num_classes_in,
    read_parquet,
)
from fedlearn.simulation.partition import ByIds, Partition
from fedlearn.simulation.population import (
    ArrayPopulation,
    ClientRows,
    DatasetPopulation,
    Population,
)
from fedlearn.training.tables import InputColumns

# Client k holds examples whose features are k and whose label is k % 3.
_OWNERS = np.array([0, 2, 1, 1, 0, 2, 2, 3])
_COLUMNS = TableColumns(
    client="user",
    features=InputColumns(names=["pixels"], shape=(2,), dtype=torch.float32),
    label="digit",
)


def _features() -> Tensor:
    return torch.from_numpy(_OWNERS).float()[:, None].repeat(1, 2)


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


def _write_parquet(path: Path, *, table: pa.Table | None = None, row_group_size: int = 3) -> Path:
    table = _table(np.sort(_OWNERS)) if table is None else table
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def _parquet(
    path: Path,
    *,
    columns: TableColumns = _COLUMNS,
    num_classes: int | None = 3,
    cache_bytes: int = 10**6,
) -> ParquetPopulation:
    return ParquetPopulation(
        path, columns=columns, num_classes=num_classes, cache_bytes=cache_bytes
    )


def _clients(loaded: ClientRows) -> Iterator[tuple[Tensor, Tensor]]:
    for start, end in zip(loaded.offsets[:-1], loaded.offsets[1:], strict=True):
        rows = torch.from_numpy(loaded.rows[start:end])
        yield require_single_input(loaded.features)[rows], loaded.labels[rows]


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


@pytest.mark.parametrize("row_group_size", [1, 2, 3, 100])
@pytest.mark.parametrize("cache_bytes", [0, 60, 10**6])
def test_a_parquet_file_gives_each_client_its_rows(
    tmp_path: Path, row_group_size: int, cache_bytes: int
) -> None:
    """Whatever the row group size and the cache size; clients may span row groups."""
    path = _write_parquet(tmp_path / "train.parquet", row_group_size=row_group_size)
    population = _parquet(path, cache_bytes=cache_bytes)
    assert population.num_clients == 4
    for asked in ([2, 0, 3, 1], [1, 2], [3]):
        _assert_owners(population, asked=asked)


def test_a_folder_is_one_table_and_clients_may_span_its_files(tmp_path: Path) -> None:
    """The order of the files is that of their names."""
    table = _table(np.sort(_OWNERS))
    _write_parquet(tmp_path / "part-1.parquet", table=table.slice(3))
    _write_parquet(tmp_path / "part-0.parquet", table=table.slice(0, 3))
    _assert_owners(_parquet(tmp_path), asked=[1, 3, 0, 2])


def test_clients_may_be_named_by_strings(tmp_path: Path) -> None:
    """Clients are numbered in order of appearance; dictionary-encoded names work as well."""
    names = pa.array(["zoe", "ada", "kim", "bo"]).take(pa.array(np.sort(_OWNERS)))
    for kind, column in (("plain", names), ("dictionary", names.dictionary_encode())):
        path = _write_parquet(tmp_path / f"{kind}.parquet", table=_table(column))
        population = _parquet(path)
        assert [population.name_of(client) for client in range(4)] == ["zoe", "ada", "kim", "bo"]
        _assert_owners(population, asked=[1, 0])


def test_several_numeric_columns_make_a_feature_vector(tmp_path: Path) -> None:
    """Columns of other dtypes are converted and concatenated."""
    owners = np.sort(_OWNERS)
    table = pa.table(
        {"user": owners, "a": owners.astype(np.float64), "b": owners, "digit": owners % 3}
    )
    columns = TableColumns(
        client="user",
        features=InputColumns(names=["a", "b"], shape=(1, 2), dtype=torch.float64),
        label="digit",
    )
    population = _parquet(_write_parquet(tmp_path / "t.parquet", table=table), columns=columns)
    _assert_owners(population, asked=[3, 2])
    loaded = population.load(np.array([2]))
    assert require_single_input(loaded.features).shape == (3, 1, 2)
    assert require_single_input(loaded.features).dtype == torch.float64


def test_the_cache_keeps_the_row_groups_used_last(tmp_path: Path) -> None:
    """A cached row group is not read again; one that was evicted is."""
    path = _write_parquet(tmp_path / "t.parquet", row_group_size=2)  # 4 groups of 2 x (8 + 8) bytes
    population = _parquet(path, cache_bytes=64)
    population.load(np.array([0]))
    population.load(np.array([3]))
    path.unlink()
    _assert_owners(population, asked=[0])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        population.load(np.array([2]))


def test_a_streamed_population_is_not_held_in_memory(tmp_path: Path) -> None:
    """Of 32 MB of features, only one row group and a client of 1,600 bytes are read."""
    owners = np.repeat(np.arange(20_000), 4)
    features = torch.zeros(80_000, 100)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(features.numpy().ravel()), 100)
    table = pa.table({"user": owners, "pixels": flat, "digit": owners % 3})
    path = _write_parquet(tmp_path / "t.parquet", table=table, row_group_size=1000)
    columns = TableColumns(
        client="user",
        features=InputColumns(names=["pixels"], shape=(100,), dtype=torch.float32),
        label="digit",
    )
    del table, flat
    before = pa.total_allocated_bytes()
    population = _parquet(path, columns=columns, cache_bytes=10**6)
    assert pa.total_allocated_bytes() - before < 2_000_000
    for client in range(0, 20_000, 4000):
        assert require_single_input(population.load(np.array([client])).features).shape == (4, 100)
    assert pa.total_allocated_bytes() - before < 2_000_000


def test_rows_not_grouped_by_client_are_refused(tmp_path: Path) -> None:
    """Within one file and across files; the message says how to sort."""
    scattered = _write_parquet(tmp_path / "t.parquet", table=_table(_OWNERS))
    with pytest.raises(DataError, match=r"'user' 0 appears in several places; sort first"):
        _parquet(scattered)
    folder = tmp_path / "folder"
    folder.mkdir()
    for part in range(2):
        _write_parquet(folder / f"{part}.parquet")
    with pytest.raises(DataError, match="not grouped by client"):
        _parquet(folder)


def test_bad_values_in_parquet_are_refused_when_loaded(tmp_path: Path) -> None:
    """The message has the row and the client's number and name."""
    features = _features()[np.argsort(_OWNERS)]
    features[4] = float("nan")
    names = pa.array(["zoe", "ada", "kim", "bo"]).take(pa.array(np.sort(_OWNERS)))
    population = _parquet(
        _write_parquet(tmp_path / "t.parquet", table=_table(names, features=features))
    )
    _assert_owners(population, asked=[0, 1])
    with pytest.raises(DataError, match=r"row 4 of client 2 \(user 'kim'\) has a feature"):
        population.load(np.array([1, 2]))
    with pytest.raises(DataError, match=r"row 4 of client 2 \(user 2\) has the label 2"):
        _parquet(_write_parquet(tmp_path / "u.parquet"), num_classes=2).load(np.array([2]))


@pytest.mark.parametrize("column", ["user", "pixels", "digit"])
def test_missing_values_in_parquet_are_refused(tmp_path: Path, column: str) -> None:
    """A null is neither a client, a feature nor a label."""
    table = _table(np.sort(_OWNERS))
    array = table[column].combine_chunks()
    holed = pa.concat_arrays([array.slice(0, 7), pa.nulls(1, array.type)])
    table = table.set_column(table.schema.get_field_index(column), column, holed)
    path = _write_parquet(tmp_path / "t.parquet", table=table)
    with pytest.raises(DataError, match=f"column '{column}' .*missing"):
        _parquet(path).load(np.array([3]))


def test_a_table_of_another_form_is_refused(tmp_path: Path) -> None:
    """The error lists the columns present, or names the wrong type or width."""
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
        path = _write_parquet(tmp_path / f"{number}.parquet", table=malformed)
        with pytest.raises(DataError, match=message):
            _parquet(path)
    wide = TableColumns(
        client="user",
        features=InputColumns(names=["pixels"], shape=(28, 28), dtype=torch.float32),
        label="digit",
    )
    with pytest.raises(DataError, match="hold 2 numbers per example"):
        _parquet(_write_parquet(tmp_path / "wide.parquet"), columns=wide)


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    """The message has what was expected and where."""
    with pytest.raises(DataError, match=r"no file or folder .*nowhere"):
        _parquet(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no \*\.parquet, .* file in the folder"):
        _parquet(tmp_path)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        _parquet(tmp_path)


def test_columns_without_features_are_refused() -> None:
    """At least one column is needed."""
    with pytest.raises(ValueError, match="no feature column"):
        InputColumns(names=[], shape=(1,), dtype=torch.float32)


def test_all_kinds_of_population_agree(tmp_path: Path) -> None:
    """Three sources of the same examples give the same clients."""
    order = np.argsort(_OWNERS, kind="stable")
    by_ids = ByIds(_OWNERS).split(_OWNERS, seed=Seed(0))
    populations: list[Population] = [
        ArrayPopulation(
            features=_features(),
            labels=torch.from_numpy(_OWNERS % 3),
            partition=by_ids,
            num_classes=3,
        ),
        DatasetPopulation(
            dataset=TensorDataset(_features()[order], torch.from_numpy(_OWNERS[order] % 3)),
            partition=Partition.of_owners(_OWNERS[order], num_clients=4),
            num_classes=3,
        ),
        _parquet(_write_parquet(tmp_path / "t.parquet")),
    ]
    for population in populations:
        _assert_owners(population, asked=[3, 0, 2, 1])


def _of_file(path: Path, *, features: list[str] | None = None) -> TableColumns:
    return TableColumns.of_file(path, client="user", label="digit", features=features)


def test_columns_take_shape_and_dtype_from_the_schema(tmp_path: Path) -> None:
    """Columns without another role are features; a list column keeps its shape, nested or not."""
    owners = np.sort(_OWNERS)
    whole = _table(owners)
    images = pa.FixedSizeListArray.from_arrays(whole["pixels"].combine_chunks(), 1)
    of_columns = {
        ((2,), torch.float32): whole,
        ((1, 2), torch.float32): whole.set_column(1, "pixels", images),
        ((3,), torch.float32): whole.append_column("age", pa.array(owners)),
        ((1,), torch.int64): whole.set_column(1, "age", pa.array(owners)),
        ((2,), torch.int64): whole.set_column(1, "age", pa.array(owners)).append_column(
            "size", pa.array(owners, pa.uint8())
        ),
    }
    for number, ((shape, dtype), table) in enumerate(of_columns.items()):
        (columns,) = _of_file(_write_parquet(tmp_path / f"{number}.parquet", table=table)).inputs
        assert (columns.shape, columns.dtype) == (shape, dtype)


def test_nested_lists_become_images(tmp_path: Path) -> None:
    """Pixels keep their positions, for every client."""
    pixels = torch.arange(48).float()
    nested = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(pixels.numpy()), 3), 2
    )
    table = _table(np.sort(_OWNERS)).set_column(1, "pixels", nested)
    path = _write_parquet(tmp_path / "t.parquet", table=table)
    columns = _of_file(path)
    assert columns.inputs[0].shape == (2, 3)
    assert torch.equal(
        require_single_input(read_parquet(path, columns=columns).features), pixels.reshape(8, 2, 3)
    )
    second = _parquet(path, columns=columns).load(np.array([1])).features
    assert torch.equal(require_single_input(second), pixels.reshape(8, 2, 3)[2:4])


def test_an_index_that_pandas_wrote_is_no_feature(tmp_path: Path) -> None:
    """Sorting by client in pandas leaves one, and it would reveal the order of the rows."""
    table = _table(np.sort(_OWNERS)).append_column("__index_level_0__", pa.array(range(8)))
    pandas = b'{"index_columns": ["__index_level_0__"], "columns": [], "column_indexes": []}'
    path = _write_parquet(
        tmp_path / "t.parquet", table=table.replace_schema_metadata({"pandas": pandas})
    )
    assert _of_file(path).inputs[0].names == ("pixels",)


def test_columns_that_are_not_there_are_refused(tmp_path: Path) -> None:
    """The client, the label or a feature is missing, or no column is left for features."""
    path = _write_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"no column 'age'; it has \['user', 'pixels', 'digit'\]"):
        _of_file(path, features=["age"])
    with pytest.raises(DataError, match="no column 'who'"):
        TableColumns.of_file(path, client="who", label="digit", features=None)
    bare = _write_parquet(
        tmp_path / "u.parquet", table=_table(np.sort(_OWNERS)).drop_columns(["pixels"])
    )
    with pytest.raises(DataError, match="no column for features"):
        _of_file(bare)


def test_a_column_of_text_among_all_is_refused_by_name(tmp_path: Path) -> None:
    """It is neither left out silently nor encoded by a guess."""
    table = _table(np.sort(_OWNERS)).append_column("city", pa.array(["x"] * 8))
    path = _write_parquet(tmp_path / "t.parquet", table=table)
    with pytest.raises(DataError, match=r"'city' is string; .* name the feature columns without"):
        read_parquet(path, columns=_of_file(path))


def test_a_test_table_is_read_whole_without_a_client_column(tmp_path: Path) -> None:
    """All rows of all files, in order; integer labels are classes, float labels are not."""
    table = _table(np.sort(_OWNERS)).drop_columns(["user"])
    _write_parquet(tmp_path / "0.parquet", table=table.slice(0, 5), row_group_size=2)
    _write_parquet(tmp_path / "1.parquet", table=table.slice(5))
    examples = read_parquet(tmp_path, columns=_COLUMNS)
    assert require_single_input(examples.features)[:, 0].tolist() == np.sort(_OWNERS).tolist()
    assert examples.labels.tolist() == (np.sort(_OWNERS) % 3).tolist()
    assert (examples.num_classes, examples.groups) == (3, None)
    floats = table.set_column(1, "digit", pa.array(np.linspace(0.0, 1.0, 8)))
    path = _write_parquet(tmp_path / "floats", table=floats)
    regression = read_parquet(path, columns=_COLUMNS)
    assert (regression.num_classes, regression.labels.dtype) == (None, torch.float32)


def test_fractions_are_not_cut_off_to_the_integers_of_another_file(tmp_path: Path) -> None:
    """The first file defines the dtype; a later file that does not fit it is refused."""
    owners = np.sort(_OWNERS)
    whole = pa.table({"user": owners, "age": owners, "digit": owners % 3})
    path = _write_parquet(tmp_path / "0.parquet", table=whole)
    columns = _of_file(path)
    assert require_single_input(read_parquet(path, columns=columns).features).dtype == torch.int64
    halves = whole.set_column(1, "age", pa.array(owners + 0.5))
    _write_parquet(tmp_path / "1.parquet", table=halves)
    with pytest.raises(DataError, match=r"'age' is double, which torch\.int64 would round"):
        read_parquet(tmp_path, columns=columns)


def test_an_empty_test_table_is_refused(tmp_path: Path) -> None:
    """There are no examples to evaluate on, and no class to count."""
    path = _write_parquet(tmp_path / "t.parquet", table=_table(np.sort(_OWNERS)).slice(0, 0))
    with pytest.raises(DataError, match="have no rows"):
        read_parquet(path, columns=_COLUMNS)
    with pytest.raises(DataError, match="have no rows"):
        num_classes_in(path, columns=_COLUMNS)


def test_classes_are_counted_over_all_files(tmp_path: Path) -> None:
    """The largest label may be anywhere; float labels are not classes."""
    table = _table(np.sort(_OWNERS))
    _write_parquet(tmp_path / "0.parquet", table=table)
    assert num_classes_in(tmp_path, columns=_COLUMNS) == 3
    late = table.set_column(2, "digit", pa.array([0] * 7 + [6]))
    _write_parquet(tmp_path / "1.parquet", table=late)
    assert num_classes_in(tmp_path, columns=_COLUMNS) == 7
    _write_parquet(tmp_path / "2.parquet", table=table.set_column(2, "digit", pa.array([0.5] * 8)))
    assert num_classes_in(tmp_path, columns=_COLUMNS) is None


def test_clients_of_two_types_are_refused(tmp_path: Path) -> None:
    """1 in one file and "1" in another may or may not be the same client."""
    _write_parquet(tmp_path / "0.parquet")
    _write_parquet(tmp_path / "1.parquet", table=_table(["x"] * 8))
    with pytest.raises(DataError, match="is int64 here and large_string there"):
        _parquet(tmp_path)


def test_a_damaged_row_group_is_refused(tmp_path: Path) -> None:
    """Its bytes are overwritten, although the footer is intact."""
    path = _write_parquet(tmp_path / "t.parquet")
    population = _parquet(path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * (len(content) // 3) + content[4 + len(content) // 3 :])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        population.load(np.array([0]))


def test_a_forked_process_reads_after_its_parent_has(tmp_path: Path) -> None:
    """A simulation forks its workers after it has read the index."""
    population = _parquet(_write_parquet(tmp_path / "t.parquet"))
    _assert_owners(population, asked=[0, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: forking with threads
        child = os.fork()
    if not child:
        signal.alarm(120)  # so that a hanging child ends
        try:
            loaded = population.load(np.array([1, 2]))
            os._exit(0 if loaded.labels.tolist() == [1, 1, 2, 2, 2] else 1)
        finally:
            os._exit(2)  # the child must not continue with its parent's tests
    assert os.waitpid(child, 0)[1] == 0
