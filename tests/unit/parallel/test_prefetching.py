"""Prefetching: the same batches with any number of readers, none of which is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedlearn.core.features import require_single_input
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.parallel.mixtures import Mixture
from fedlearn.parallel.prefetching import prefetch
from fedlearn.parallel.streams import Shuffled, Stream
from fedlearn.parallel.table_stream import TableFiles, TableStream
from fedlearn.training.local_data import DatasetData
from tests.processes import until
from tests.tables import WIDTH, table, write

pytestmark = pytest.mark.xdist_group("prefetch")  # their readers come from one fork server

_CPU = torch.device("cpu")
_BATCH = 16


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def _files(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(4):
        rows = range(100 * number, 100 * (number + 1))
        write(folder / f"{number}.parquet", table(rows), row_group_size=20)
    return folder


def _stream(folder: Path, *, seed: int = 0) -> TableStream:
    files = TableFiles(
        path=_files(folder),
        label_column="y",
        feature_columns=None,
        window_bytes=60 * (4 * WIDTH + 8),
    )
    return files.stream(seed=Seed(seed))


class _Noisy(Dataset[tuple[Tensor, int]]):
    """Features with noise from torch's generator; row ``bad`` cannot be read."""

    def __init__(self, *, bad: int | None = None) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 70

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == self._bad:
            raise ValueError(f"row {row} is no picture")
        return torch.rand(WIDTH), row


def _shuffle(*, bad: int | None = None) -> Shuffled:
    return Shuffled(DatasetData(_Noisy(bad=bad), device=_CPU), seed=Seed(5))


def _take_any(_labels: Tensor) -> None:
    """Accept any labels."""


def _second_half(step: int) -> range:
    """Return the second process's share of a batch, of two processes."""
    return range(step * _BATCH + _BATCH // 2, (step + 1) * _BATCH)


def _read(stream: Stream, *, num_workers: int, steps: range) -> list[tuple[Tensor, Tensor]]:
    with prefetch(
        stream,
        steps=steps,
        share=_second_half,
        num_workers=num_workers,
        device=_CPU,
        check=_take_any,
    ) as batches:
        return [
            (require_single_input(features).clone(), labels.clone()) for features, labels in batches
        ]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_are_those_of_the_stream(tmp_path: Path, num_workers: int) -> None:
    """Across passes, windows and blocks, and if a data set has no example in a batch."""
    streams: list[Stream] = [
        _stream(tmp_path),
        _shuffle(),
        Mixture([_stream(tmp_path), _shuffle()], weights=[1, 1], seed=Seed(1)),
        Mixture([_stream(tmp_path), _stream(tmp_path, seed=1)], weights=[30, 1], seed=Seed(1)),
    ]
    steps = range(11, 80)
    for stream in streams:
        read = _read(stream, num_workers=num_workers, steps=steps)
        assert len(read) == len(steps)
        for step, (features, labels) in zip(steps, read, strict=True):
            expected, numbers = stream.batch(_second_half(step))
            assert torch.equal(features, require_single_input(expected))
            assert torch.equal(labels, numbers)


class _Windows:
    """Windows of 100 positions, whose features show the reader, its read count and its threads."""

    def __init__(self) -> None:
        self._num_readings = 0

    def __len__(self) -> int:
        return 1000

    def window(self, position: int) -> range:
        start = position // 100 * 100
        return range(start, start + 100)

    def examples(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        self._num_readings += 1
        features = torch.tensor([os.getpid(), self._num_readings, torch.get_num_threads()])
        return features.repeat(len(positions), 1), torch.from_numpy(positions)

    def batch(self, positions: range) -> tuple[Tensor, Tensor]:
        return self.examples(np.arange(positions.start, positions.stop))


@pytest.mark.slow
def test_a_window_is_read_once_by_one_process() -> None:
    """Readers take windows in turn, and each computes with one thread."""
    read = _read(_Windows(), num_workers=2, steps=range(120))
    readers, positions = (torch.cat(each) for each in zip(*read, strict=True))
    of_windows = [readers[positions // 100 == window].unique(dim=0) for window in range(19)]
    assert [len(each) for each in of_windows] == [1] * 19
    pids = [int(each[0, 0]) for each in of_windows]
    assert all(one != next_one for one, next_one in pairwise(pids))
    assert len({os.getpid(), *pids}) == 3
    assert {int(each[0, 2]) for each in of_windows} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_arrives_with_its_reason_where_it_is_met(tmp_path: Path, num_workers: int) -> None:
    """It comes after all earlier batches, and no reader is left, even while the error is alive."""
    stream = _stream(tmp_path)
    expected = [stream.batch(_second_half(step))[1] for step in range(8)]
    bad = int(stream.window(8 * _BATCH).start)
    number = int(stream.batch(range(bad, bad + 1))[1]) // 100
    fresh = _stream(tmp_path)
    (tmp_path / f"{number}.parquet").write_bytes(b"PAR1")
    seen: list[Tensor] = []
    with (
        pytest.raises(
            DataError, match=rf"{number}\.parquet, row group \d cannot be read"
        ) as caught,
        prefetch(
            fresh,
            steps=range(80),
            share=_second_half,
            num_workers=num_workers,
            device=_CPU,
            check=_take_any,
        ) as batches,
    ):
        seen.extend(labels for _, labels in batches)
    assert multiprocessing.active_children() == []
    assert "Traceback" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_dataset_raises_arrives(num_workers: int) -> None:
    with pytest.raises(DataError, match=r"row 3 of the dataset cannot .*: row 3 is no picture"):
        _read(_shuffle(bad=3), num_workers=num_workers, steps=range(40))


@pytest.mark.slow
def test_no_process_stays_when_reading_ends_early(tmp_path: Path) -> None:
    """Reading may end by leaving the context, or by an exception while batches are used."""
    stream = _stream(tmp_path)
    with prefetch(
        stream, steps=range(10**6), share=_second_half, num_workers=2, device=_CPU, check=_take_any
    ) as batches:
        next(batches)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []

    def fail() -> None:
        with prefetch(
            stream,
            steps=range(10**6),
            share=_second_half,
            num_workers=1,
            device=_CPU,
            check=_take_any,
        ) as batches:
            next(batches)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_reader_that_was_killed_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    stream = _stream(tmp_path)
    with prefetch(
        stream, steps=range(10**6), share=_second_half, num_workers=1, device=_CPU, check=_take_any
    ) as batches:
        next(batches)
        (child,) = multiprocessing.active_children()
        child.kill()
        with pytest.raises(DataError, match=r"was killed: .*; it may lack memory"):
            list(batches)


def test_a_stream_that_cannot_be_sent_is_refused() -> None:
    class Local(_Noisy):
        """A class that pickle cannot find by its name."""

    stream = Shuffled(DatasetData(Local(), device=_CPU), seed=Seed(0))
    with pytest.raises(DataError, match="cannot be sent to the reader processes"):
        _read(stream, num_workers=1, steps=range(2))


def test_numbers_of_the_application_are_not_drawn() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    _read(_shuffle(), num_workers=0, steps=range(3))
    assert torch.equal(torch.rand(2), expected)


_SCRIPT = """
import multiprocessing, sys, torch
from pathlib import Path
from fedlearn.core.randomness import Seed
from fedlearn.parallel.prefetching import prefetch
from fedlearn.parallel.table_stream import TableFiles

def take_any(*_):
    pass


if __name__ == "__main__":
    files = TableFiles(
        path=Path(sys.argv[1]), label_column="y", feature_columns=None, window_bytes=1000
    )
    with prefetch(
        files.stream(seed=Seed(0)),
        steps=range(10**6),
        share=lambda step: range(step, step + 1),
        num_workers=2,
        device=torch.device("cpu"),
        check=take_any,
    ) as batches:
        next(batches)
        print(*(each.pid for each in multiprocessing.active_children()), flush=True)
        sys.stdin.read()
"""


@pytest.mark.slow
def test_no_process_stays_when_the_one_that_trains_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    with subprocess.Popen(
        [sys.executable, script, _files(tmp_path / "t")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        readers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(readers) == 2
        assert all(map(_runs, readers))
        process.send_signal(signal.SIGKILL)
    until(lambda: not any(map(_runs, readers)))


def _runs(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
