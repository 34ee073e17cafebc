"""How fast can Parquet files feed a training and the rounds of a simulation?

    python simulations/bench/feeding.py

stream  examples per second of our shuffled, batched stream, with and without prefetching processes,
        compared with pyarrow's bare scan of the same file
rounds  a simulated round of ten clients with 200 examples each, compared with the same from memory;
        each client is asked once before the timed rounds

Examples have one kilobyte; they are written in row groups of 10,000. Other programs on the machine
slow processes more than threads, so the ratio of processor times is printed as well.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import torch
from harness import Row, in_turn, options, parse, ratio, report, timed
from numpy.typing import NDArray
from parts.rounds import Stopwatch
from torch import nn

import fedlearn as fl
from fedlearn.core.clock import SystemClock
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.parallel.prefetching import prefetch
from fedlearn.parallel.table_stream import TableFiles

_WIDTH = 256  # float32: 1,024 bytes
_ROW_GROUP, _BATCH, _PASSES = 10_000, 256, 3
_PER_CLIENT, _COHORT = 200, 10


def write(path: Path, num_examples: int) -> None:
    """Write examples to a file, one client after another."""
    with pq.ParquetWriter(path, _table(1, first=0).schema) as file:
        for first in range(0, num_examples, _ROW_GROUP):
            size = min(_ROW_GROUP, num_examples - first)
            file.write_table(_table(size, first=first), row_group_size=_ROW_GROUP)


def _table(num_examples: int, *, first: int) -> pa.Table:
    generator = np.random.default_rng(first)
    flat = pa.array(generator.normal(size=num_examples * _WIDTH).astype(np.float32))
    return pa.table(
        {
            "user": np.arange(first, first + num_examples) // _PER_CLIENT,
            "x": pa.FixedSizeListArray.from_arrays(flat, _WIDTH),
            "y": generator.integers(0, 10, num_examples),
        }
    )


# ---- A stream -----------------------------------------------------------------------------


def scan(path: Path) -> int:
    """Read the columns without shuffling or batching, and return the number of rows."""
    table = pyarrow.dataset.dataset(path)
    return sum(batch.num_rows for batch in table.to_batches(columns=["x", "y"]))


def scan_per_s(path: Path) -> float:
    """Run some bare scans and return examples per second."""
    num_read = 0

    def read() -> None:
        nonlocal num_read
        num_read = sum(scan(path) for _ in range(_PASSES))

    seconds = timed(read)
    return num_read / seconds


def read_per_s(files: TableFiles, *, num_workers: int) -> float:
    """Read some passes and return examples per second.

    The first quarter is not timed: until then the processes may still be starting.
    """
    stream, clock = files.stream(seed=Seed(0)), SystemClock()
    num_steps = _PASSES * len(stream) // _BATCH
    with prefetch(
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


def processor_ratio(path: Path, files: TableFiles) -> float:
    """Return the processor time of a bare scan divided by that of reading the same in batches."""
    before = os.times()
    stream = files.stream(seed=Seed(0))
    for start in range(0, len(stream), _BATCH):
        stream.batch(range(start, min(start + _BATCH, len(stream))))
    between = os.times()
    scan(path)
    after = os.times()
    ours, bare = (
        (end.user + end.system) - (start.user + start.system)
        for start, end in ((before, between), (between, after))
    )
    return bare / ours


def stream(path: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure the stream with each number of processes, and the bare scan, in turn."""
    files = TableFiles(
        path=path,
        label_column="y",
        feature_columns=("x",),
        window_bytes=arguments.window_mb << 20,
    )
    scan(path)  # so that the file is in the page cache for all of them
    names = {f"{num_workers} workers": num_workers for num_workers in arguments.workers}
    found = in_turn(
        {
            "bare scan": partial(scan_per_s, path),
            **{name: partial(read_per_s, files, num_workers=num) for name, num in names.items()},
            "processor time of the scan over ours": partial(processor_ratio, path, files),
        },
        turns=arguments.turns,
    )
    scans, processor = found.pop("bare scan"), "processor time of the scan over ours"
    yield Row("stream", "bare scan, examples/s", statistics.median(scans))
    yield Row("stream", processor, statistics.median(found.pop(processor)))
    for name, rates in found.items():
        yield Row("stream", f"{name}, examples/s", statistics.median(rates))
        at_least = None if names[name] else 0.5
        yield Row("stream", f"{name}, times the scan", ratio(rates, scans), at_least=at_least)


# ---- Rounds -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnceThenAtRandom:
    """A sampler that draws each client once, in order, and then at random."""

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Draw the next clients in order, or random ones after the first pass."""
        first = round_num * cohort_size
        if first < len(available):
            return tuple(available[first : first + cohort_size])
        drawn = np.random.default_rng(round_num).choice(len(available), cohort_size, replace=False)
        return tuple(ClientId(int(each)) for each in drawn)


def in_memory(path: Path, test_path: Path) -> fl.FederatedData:
    """Read the same clients into memory."""

    def arrays(table: pa.Table) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        flat = table["x"].combine_chunks().values.to_numpy()
        return flat.reshape(-1, _WIDTH), table["y"].to_numpy()

    table = pq.read_table(path)
    features, labels = arrays(table)
    return fl.from_arrays(
        features,
        labels,
        partition=fl.Natural(),
        groups=table["user"].to_numpy(),
        test=arrays(pq.read_table(test_path)),
        seed=0,
    )


def round_s(data: fl.FederatedData, runs_dir: Path, *, num_timed: int) -> float:
    """Return the median seconds of a round, after each client was asked once."""
    first_pass = -(-data.population.num_clients // _COHORT)
    run = fl.simulate(
        lambda: nn.Linear(_WIDTH, 10),
        data,
        fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=20, learning_rate=0.01)),
        sampler=OnceThenAtRandom(),
        progress=Stopwatch(),
        num_rounds=first_pass + num_timed,
        cohort={"num_wanted": _COHORT},
        evaluation={"every_rounds": 0, "clients": 0},
        engine={"num_workers": 1, "executor": "fused"},
        store={"runs_dir": runs_dir},
    )
    # The last round evaluates.
    return statistics.median(record.seconds for record in run.history[first_pass:-1])


def rounds(path: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    """Simulate rounds from Parquet and from memory, in turn."""
    test_path = path.with_name("test.parquet")
    write(test_path, 1000)
    sources = {
        "from Parquet": fl.from_parquet(
            path, test_path=test_path, client="user", label="y", features=["x"]
        ),
        "from memory": in_memory(path, test_path),
    }
    runs_dir = path.with_name("runs")
    found = in_turn(
        {
            name: partial(round_s, data, runs_dir, num_timed=arguments.rounds)
            for name, data in sources.items()
        },
        turns=min(2, arguments.turns),
    )
    for name, seconds in found.items():
        yield Row("rounds", f"{name}, ms", 1e3 * statistics.median(seconds))
    times = ratio(found["from Parquet"], found["from memory"])
    yield Row("rounds", "from Parquet, times from memory", times, at_most=3.0)


def main() -> None:
    """Write the file, and measure the selected parts."""
    measures = {"stream": stream, "rounds": rounds}
    parser = options(__doc__, turns=5)
    parser.add_argument("--parts", nargs="+", choices=measures, default=list(measures))
    parser.add_argument("--examples", type=int, default=200_000, help="2,250,000 are 2.3 GB")
    parser.add_argument("--window-mb", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds")
    small = {"turns": 1, "examples": 20_000, "workers": [0, 1], "rounds": 10}
    arguments = parse(parser, check=small)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.parquet"
        write(path, arguments.examples)
        rows = (row for name in arguments.parts for row in measures[name](path, arguments))
        report(rows, arguments)


if __name__ == "__main__":
    main()
