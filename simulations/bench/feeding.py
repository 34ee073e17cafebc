"""How fast a training is fed from Parquet, beside a bare scan of the same file.

    python simulations/bench/feeding.py

Writes examples of one kilobyte in row groups of 10,000, and reads passes of them in turn: pyarrow's
own scan, which neither shuffles nor makes batches of tensors, and our stream, without and with
processes that read ahead. Prints examples a second, and of each turn the ratio to the scan beside
it: at least 0.5 without processes is wanted.
"""

import argparse
import os
import tempfile
from collections import defaultdict
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import torch

from fedlearn.core.clock import SystemClock
from fedlearn.core.randomness import Seed
from fedlearn.parallel.prefetching import read_ahead
from fedlearn.parallel.table_stream import TableFiles

_WIDTH = 256  # float32: 1,024 bytes
_ROW_GROUP = 10_000
_BATCH = 256
_PASSES = 3


def _write(path: Path, num_examples: int) -> None:
    generator = np.random.default_rng(0)
    kind = pa.list_(pa.float32(), _WIDTH)
    schema = pa.schema([("x", kind), ("y", pa.int64())])
    with pq.ParquetWriter(path, schema) as file:
        for _ in range(num_examples // _ROW_GROUP):
            flat = pa.array(generator.normal(size=_ROW_GROUP * _WIDTH).astype(np.float32))
            columns = [
                pa.FixedSizeListArray.from_arrays(flat, type=kind),
                pa.array(generator.integers(0, 10, _ROW_GROUP)),
            ]
            file.write_table(pa.table(columns, schema=schema), row_group_size=_ROW_GROUP)


def _scan(path: Path) -> int:
    return sum(batch.num_rows for batch in pyarrow.dataset.dataset(path).to_batches())


def _read(files: TableFiles, *, num_workers: int, clock: SystemClock) -> float:
    """Read passes and return examples a second, after a quarter: processes have started then."""
    stream = files.stream(seed=Seed(0))
    num_steps = _PASSES * len(stream) // _BATCH
    with read_ahead(
        stream,
        steps=range(num_steps),
        share=lambda step: range(step * _BATCH, (step + 1) * _BATCH),
        num_workers=num_workers,
        device=torch.device("cpu"),
        check=lambda _labels: None,
    ) as batches:
        for _ in islice(batches, num_steps // 4):
            pass
        began_s = clock.now_s()
        num_read = sum(len(labels) for _, labels in batches)
        return num_read / (clock.now_s() - began_s)


def _processor_ratio(path: Path, files: TableFiles) -> float:
    """Return the processor time of a scan over that of reading as many examples without workers.

    It hardly hangs on what else the machine does.
    """
    before = os.times()
    stream = files.stream(seed=Seed(0))
    for start in range(0, len(stream), _BATCH):
        stream.batch(range(start, min(start + _BATCH, len(stream))))
    between = os.times()
    _scan(path)
    after = os.times()
    ours, scan = (
        (end.user + end.system) - (start.user + start.system)
        for start, end in ((before, between), (between, after))
    )
    return scan / ours


def main() -> None:
    """Write, read in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--window-mb", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    args = parser.parse_args()
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.parquet"
        _write(path, args.examples)
        files = TableFiles(
            path=path,
            label_column="y",
            feature_columns=None,
            window_bytes=args.window_mb << 20,
        )
        _scan(path)  # the file is in the system's memory from here on
        ratios: dict[str, list[float]] = defaultdict(list)
        for _ in range(args.turns):
            for num_workers in args.workers:
                began_s = clock.now_s()
                bare = sum(_scan(path) for _ in range(_PASSES)) / (clock.now_s() - began_s)
                rate = _read(files, num_workers=num_workers, clock=clock)
                ratios[f"{num_workers} workers"].append(rate / bare)
                print(f"{num_workers} workers: {rate:9,.0f} examples/s, bare scan {bare:9,.0f}")
            ratios["processor time, batch by batch"].append(_processor_ratio(path, files))
    for name, each in ratios.items():
        print(f"{name}: ratio {median(each):.2f} ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
