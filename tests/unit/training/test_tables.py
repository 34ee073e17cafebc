"""Tables of examples: which rows they return, and what they refuse."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pytest
import torch

from fedlearn.core.features import require_single_input
from fedlearn.errors import DataError
from fedlearn.training.tables import RowGroups, Table, columns_of_file
from tests.tables import WIDTH, table, write

_KINDS = ["parquet", "arrow", "feather"]


def _open_table(path: Path) -> Table:
    return Table.at(path, columns_of_file(path, label="y", features=None))


def _rows(path: Path, *, cache_bytes: int = 10**6) -> RowGroups:
    opened = _open_table(path)
    return RowGroups(opened, groups=opened.sizes(), cache_bytes=cache_bytes)


def _assert_rows(rows: RowGroups, asked: list[int]) -> None:
    features, labels = rows.take(np.array(asked, np.int64))
    assert labels.tolist() == asked
    assert require_single_input(features)[:, 0].tolist() == asked
    assert require_single_input(features).shape == (len(asked), WIDTH)


def _replace_column(column: str, values: pa.Array) -> pa.Table:
    whole = table(range(8))
    return whole.set_column(whole.schema.get_field_index(column), column, values)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("cache_bytes", [0, 200, 10**6])
def test_rows_come_in_the_order_asked(tmp_path: Path, kind: str, cache_bytes: int) -> None:
    """However small the cache; a row group takes 4 x 20 bytes."""
    rows = _rows(
        write(tmp_path / f"t.{kind}", table(range(22)), row_group_size=4), cache_bytes=cache_bytes
    )
    assert rows.offsets.tolist() == [0, 4, 8, 12, 16, 20, 22]
    _assert_rows(rows, [21, 0, 7, 7, 13])
    _assert_rows(rows, list(reversed(range(22))))
    _assert_rows(rows, [3])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_row_groups_are_read_with_any_number_of_threads(tmp_path: Path, num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        path = write(tmp_path / "t.parquet", table(range(40)), row_group_size=4)
        _assert_rows(
            _rows(path, cache_bytes=250), np.random.default_rng(0).permutation(40).tolist()
        )
    finally:
        torch.set_num_threads(before)


def test_compressed_arrow_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.feather"
    pyarrow.feather.write_feather(table(range(9)), str(path), compression="zstd", chunksize=4)
    _assert_rows(_rows(path), [8, 0, 5])


def test_a_folder_has_files_of_both_kinds_by_name(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", table(range(3, 7)), row_group_size=2)
    write(tmp_path / "a.arrow", table(range(3)), row_group_size=2)
    write(tmp_path / "c.feather", table(range(7, 9)), row_group_size=2)
    _assert_rows(_rows(tmp_path), [8, 1, 5, 2])


def test_row_groups_without_rows_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    whole = table(range(4))
    with pyarrow.ipc.new_file(str(path), whole.schema) as file:
        for part in (whole.slice(0, 0), whole.slice(0, 3), whole.slice(0, 0), whole.slice(3)):
            (batch,) = part.combine_chunks().to_batches() or [
                pa.RecordBatch.from_pylist([], whole.schema)
            ]
            file.write_batch(batch)
    rows = _rows(path)
    assert rows.offsets.tolist() == [0, 3, 4]
    _assert_rows(rows, [3, 2])


def test_what_fits_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", table(range(8)), row_group_size=4)
    rows = _rows(path, cache_bytes=160)
    rows.take(np.arange(8))
    path.unlink()
    _assert_rows(rows, [7, 0])


@pytest.mark.parametrize("kind", _KINDS)
def test_a_file_cut_short_is_refused(tmp_path: Path, kind: str) -> None:
    """Whether it was cut before opening or between two reads."""
    path = write(tmp_path / f"t.{kind}", table(range(4000)), row_group_size=1000)
    rows = _rows(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"{kind}, row group 3 cannot be read as .*; write it"):
        rows.take(np.array([3999]))
    with pytest.raises(DataError, match=rf"t\.{kind} cannot be read as"):
        _open_table(path)


def test_a_changed_page_is_refused_by_its_checksum(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", table(range(4000)), row_group_size=4000)
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="row group 0 cannot be read as Parquet"):
        _rows(path).take(np.array([0]))


def test_a_damaged_arrow_batch_is_refused(tmp_path: Path) -> None:
    """The batch claims more values than it has."""
    path = tmp_path / "t.arrow"
    pyarrow.feather.write_feather(table(range(1000)), str(path), compression="uncompressed")
    content = path.read_bytes()
    length = (1000 * WIDTH).to_bytes(8, "little")
    assert length in content
    path.write_bytes(content.replace(length, (3000 * WIDTH).to_bytes(8, "little")))
    with pytest.raises(DataError, match="row group 0 cannot be read as Arrow"):
        _rows(path).take(np.array([0]))


def test_a_file_that_was_written_anew_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", table(range(8)), row_group_size=4)
    rows = _rows(path)
    write(path, table(range(8)), row_group_size=3)
    with pytest.raises(DataError, match="row group 1 has 3 rows and had 4 when"):
        rows.take(np.array([5]))


def test_a_stream_of_arrow_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """A stream has no index."""
    path = tmp_path / "t.arrow"
    with pyarrow.ipc.new_stream(str(path), table(range(4)).schema) as stream:
        stream.write_table(table(range(4)))
    with pytest.raises(DataError, match=r"cannot be read as Arrow: .*write_feather"):
        _open_table(path)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("column", ["x", "y"])
def test_missing_values_are_refused_by_file_row_group_and_column(
    tmp_path: Path, kind: str, column: str
) -> None:
    values = table(range(8))[column].combine_chunks()
    holed = pa.concat_arrays([values.slice(0, 6), pa.nulls(2, values.type)])
    path = write(tmp_path / f"t.{kind}", _replace_column(column, holed), row_group_size=4)
    rows = _rows(path)
    _assert_rows(rows, [3, 0])
    with pytest.raises(DataError, match=rf"t\.{kind}, row group 1: column '{column}' has missing"):
        rows.take(np.array([4]))


@pytest.mark.parametrize("kind", _KINDS)
def test_columns_of_another_form_are_refused(tmp_path: Path, kind: str) -> None:
    """Ragged lists and text are refused by name, and so is a missing column."""
    ragged = _replace_column("x", pa.array([[1.0], [1.0, 2.0]] * 4))
    path = write(tmp_path / f"ragged.{kind}", ragged, row_group_size=4)
    with pytest.raises(DataError, match=r"feature column 'x' is list.*fixed-size lists"):
        _open_table(path)
    text = _replace_column("y", pa.array(["a"] * 8))
    path = write(tmp_path / f"text.{kind}", text, row_group_size=4)
    with pytest.raises(DataError, match=r"label column 'y' is string; cast it"):
        _open_table(path)
    with pytest.raises(DataError, match=r"no column 'z'; it has \['x', 'y'\]"):
        columns_of_file(path, label="z", features=None)
