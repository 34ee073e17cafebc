"""Rows that were decoded once are read from a cache from then on."""

import errno
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from fedlearn.training.decoded_rows import DecodedRows
from fedlearn.training.tables import RowGroups, Table, columns_of_file

_NUM_ROWS, _ROW_GROUP = 22, 4


class _Free(NamedTuple):
    """The free space of a disk."""

    free: int


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a table with two inputs and a label, each the row's number."""
    rows = np.arange(_NUM_ROWS)
    table = pa.table({"x": rows.astype(np.float32), "who": rows, "y": rows})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=_ROW_GROUP)
    return tmp_path / "t.parquet"


def open_rows(path: Path) -> RowGroups:
    """Open the table without a cache in memory."""
    columns = columns_of_file(path, label="y", features={"x": ["x"], "who": ["who"]})
    table = Table.at(path, columns)
    return RowGroups(table, groups=table.sizes(), cache_bytes=0, keeps_decoded=True)


def take_rows(rows: RowGroups, wanted: list[int]) -> list[list[float]]:
    """Return each tensor's values in these rows."""
    features, labels = rows.take(np.array(wanted, np.int64))
    assert isinstance(features, dict)
    return [each.flatten().tolist() for each in (features["x"], features["who"], labels)]


@pytest.mark.parametrize("wanted", [[3, 4, 5, 9, 8, 8, 21, 0], list(range(_NUM_ROWS)), [7]])
def test_rows_are_the_same_from_disk(path: Path, wanted: list[int]) -> None:
    """At first some are cached, then all, in any order; the file itself is read once."""
    rows = open_rows(path)
    take_rows(rows, [5, 17])
    assert take_rows(rows, wanted) == [wanted] * 3
    assert take_rows(rows, wanted) == [wanted] * 3
    take_rows(rows, list(range(_NUM_ROWS)))
    path.unlink()
    assert take_rows(rows, wanted) == [wanted] * 3


def test_a_forked_process_needs_not_decode_again(path: Path) -> None:
    """The parent reads what a worker has decoded, and the other way round."""
    rows = open_rows(path)
    child = os.fork()
    if not child:
        take_rows(rows, list(range(_NUM_ROWS)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    path.unlink()
    assert take_rows(rows, [20, 2]) == [[20, 2]] * 3


def test_a_full_disk_costs_time_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come from the file as before, and one warning names the remedy."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = open_rows(path)
    monkeypatch.setattr(os, "pwrite", full)
    with capture_logs() as logs:
        assert [take_rows(rows, [1, 9]) for _ in range(2)] == [[[1, 9]] * 3] * 2
    assert [("TMPDIR" in each["event"], each["why"]) for each in logs] == [
        (True, os.strerror(errno.ENOSPC))
    ]


@pytest.mark.parametrize(("free", "is_kept"), [(100, False), (10**6, True)])
def test_no_more_than_half_of_the_space_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    is_kept: bool,  # noqa: FBT001 (a parameter)
) -> None:
    """Other programs have temporary files, too."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Free(free))
    kept = DecodedRows(np.array([0, 10]), row_bytes=[8])
    kept.write(0, [torch.arange(10)])
    assert kept.has(np.array([0])).tolist() == [is_kept]


def test_a_part_of_a_tensor_is_filled_in_place() -> None:
    """For every dtype."""
    kept = DecodedRows(np.array([0, 2, 5]), row_bytes=[3, 4])
    masks, numbers = torch.rand(3, 3) > 0.5, torch.rand(3)
    kept.write(1, [masks, numbers])
    found: list[Tensor] = [torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2)]
    kept.read(3, found)
    assert torch.equal(found[0], masks[1:])
    assert torch.equal(found[1], numbers[1:])
    assert kept.has(np.array([0, 1, 1])).tolist() == [False, True, True]
