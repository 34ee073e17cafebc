"""Streams of examples in files: their order, the row groups that they read, and their errors."""

import pickle
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlearn.core.features import require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.parallel.table_stream import TableFiles, TableStream
from tests.tables import WIDTH, table, write

_ROW_BYTES = 4 * WIDTH + 8


def _stream(path: Path, *, window_rows: int = 12, seed: int = 0) -> TableStream:
    files = TableFiles(
        path=path,
        label_column="y",
        feature_columns=None,
        window_bytes=window_rows * _ROW_BYTES,
    )
    return files.stream(seed=Seed(seed))


def _write_groups(folder: Path, *, sizes: list[int]) -> Path:
    """Write row groups of these sizes, each to its own file; return the folder."""
    folder.mkdir(exist_ok=True)
    ends = np.cumsum([0, *sizes]).tolist()
    for number, (start, end) in enumerate(pairwise(ends)):
        write(folder / f"{number:03}.parquet", table(range(start, end)), row_group_size=1000)
    return folder


def _labels(stream: TableStream, positions: range) -> list[int]:
    features, labels = stream.batch(positions)
    assert require_single_input(features)[:, 0].tolist() == labels.tolist()
    found: list[int] = labels.tolist()
    return found


_FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@_FEW
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    window_rows=st.integers(1, 30),
    cuts=st.lists(st.integers(0, 100), min_size=2, max_size=6, unique=True).map(sorted),
    kind=st.integers(0, 10**9),
)
def test_any_position_is_read_without_those_before_it(
    tmp_path: Path, sizes: list[int], window_rows: int, cuts: list[int], kind: int
) -> None:
    """Each example comes once per pass, and the order does not depend on where reading starts."""
    folder = _write_groups(tmp_path / repr(sizes), sizes=sizes)
    stream = _stream(folder, window_rows=window_rows, seed=kind)
    num_examples = len(stream)
    assert num_examples == sum(sizes)
    whole = _labels(stream, range(100 + num_examples))
    for start in range(0, 100, num_examples):
        seen = whole[start : start + num_examples]
        assert sorted(seen) == list(range(num_examples))
    fresh = _stream(folder, window_rows=window_rows, seed=kind)
    parts = [_labels(fresh, range(a, b)) for a, b in reversed(list(pairwise(cuts)))]
    assert list(chain.from_iterable(reversed(parts))) == whole[cuts[0] : cuts[-1]]


@_FEW
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), window_rows=st.integers(1, 30))
def test_a_window_is_row_groups_as_a_whole(
    tmp_path: Path, sizes: list[int], window_rows: int
) -> None:
    """Windows follow one another without gaps, and each row group is in exactly one of them."""
    stream = _stream(_write_groups(tmp_path / repr(sizes), sizes=sizes), window_rows=window_rows)
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    position, windows = 0, []
    while position < 2 * len(stream):
        window = stream.window(position)
        assert window.start == position
        assert stream.window(window.stop - 1) == window
        groups, counts = np.unique(group_of[_labels(stream, window)], return_counts=True)
        assert counts.tolist() == [sizes[group] for group in groups]
        assert len(window) < window_rows + max(sizes)
        windows.append(set(groups.tolist()))
        position = window.stop
    assert position == 2 * len(stream)
    assert sum(map(len, windows)) == 2 * len(sizes)


def test_rows_are_shuffled_across_row_groups_of_a_window(tmp_path: Path) -> None:
    """A window mixes its row groups, and row groups come in another order in each pass."""
    path = write(tmp_path / "t.parquet", table(range(4000)), row_group_size=100)
    stream = _stream(path, window_rows=1000)
    labels = np.array(_labels(stream, range(8000)))
    first = np.unique(labels[:1000] // 100)
    assert first.size == 10
    assert set(first.tolist()) != set(np.unique(labels[4000:5000] // 100).tolist())
    assert first.tolist() != list(range(10))
    changes = np.diff(labels[:1000] // 100) != 0
    assert changes.mean() > 0.8  # 0.9 of neighbors are expected to be from two row groups


def test_what_fits_into_a_window_is_shuffled_as_a_whole_and_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", table(range(40)), row_group_size=10)
    stream = _stream(path, window_rows=40)
    first = _labels(stream, range(40))
    path.unlink()
    assert sorted(_labels(stream, range(40, 80))) == sorted(first)


def test_a_row_group_is_read_once_a_pass(tmp_path: Path) -> None:
    """Reading batch by batch does not need a window's files again: they are removed after it."""
    folder = _write_groups(tmp_path / "t", sizes=[10] * 12)
    stream = _stream(folder, window_rows=30)
    for start in range(0, 120, 5):
        window = stream.window(start)
        _labels(stream, range(start, start + 5))
        if start == window.start:
            groups = {label // 10 for label in _labels(stream, window)}
            for group in groups:
                (folder / f"{group:03}.parquet").unlink()


def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    path = write(tmp_path / "t.feather", table(range(60)), row_group_size=7)
    orders = [_labels(_stream(path, seed=seed), range(60)) for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_a_stream_that_was_sent_takes_no_rows_with_it(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", table(range(5000)), row_group_size=1000)
    stream = _stream(path, window_rows=2000)
    before = _labels(stream, range(2500, 3500))
    sent = pickle.dumps(stream)
    assert len(sent) < 5000
    assert _labels(pickle.loads(sent), range(2500, 3500)) == before  # noqa: S301


def test_a_value_that_is_not_finite_is_refused_by_its_place(tmp_path: Path) -> None:
    whole = table(range(8))
    flat = np.zeros((8, WIDTH), np.float32)
    flat[5, 1] = np.nan
    values = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), WIDTH)
    path = write(tmp_path / "t.parquet", whole.set_column(0, "x", values), row_group_size=4)
    with pytest.raises(DataError, match=r"t\.parquet, row group 1, row 1 of it has a feature"):
        _stream(path).batch(range(8))


def test_files_without_rows_or_features_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", table(range(0)), row_group_size=4)
    with pytest.raises(DataError, match="have no rows"):
        _stream(path)
    path = write(tmp_path / "u.parquet", table(range(4)).select(["y"]), row_group_size=4)
    with pytest.raises(DataError, match="no column for features"):
        _stream(path)


def test_a_window_holds_something() -> None:
    with pytest.raises(ValueError, match="window_bytes is 0"):
        TableFiles(path=Path("t"), label_column="y", feature_columns=None, window_bytes=0)
