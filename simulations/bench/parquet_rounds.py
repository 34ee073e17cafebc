"""How long a round of a simulation takes on clients in a Parquet file, beside the same from memory.

    python simulations/bench/parquet_rounds.py

Writes examples of one kilobyte, clients one after another, in row groups of 10,000, and simulates
the same rounds of ten clients of 200 examples on them twice: streamed, and from memory. In the
first pass each client is asked once; the rounds after it, whose clients are drawn at random, are
timed. Prints the medians and their ratio, which is wanted to be at most 3.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import nn

import fedlearn as fl
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed

_WIDTH = 256  # float32: 1,024 bytes
_ROW_GROUP = 10_000
_PER_CLIENT = 200
_COHORT = 10


@dataclass(frozen=True)
class _OnceThenAtRandom:
    """Asks each client once, in order, and then any."""

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        first = round_num * num_asked
        if first < len(available):
            return tuple(available[first : first + num_asked])
        drawn = np.random.default_rng(round_num).choice(len(available), num_asked, replace=False)
        return tuple(ClientId(int(each)) for each in drawn)


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


def _write(path: Path, num_examples: int) -> None:
    with pq.ParquetWriter(path, _table(1, first=0).schema) as file:
        for first in range(0, num_examples, _ROW_GROUP):
            size = min(_ROW_GROUP, num_examples - first)
            file.write_table(_table(size, first=first), row_group_size=_ROW_GROUP)


def _in_memory(path: Path, test_path: Path) -> fl.FederatedData:
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


def _rounds_s(data: fl.FederatedData, *, num_timed: int, name: str) -> tuple[float, float]:
    """Return the medians of a round in the first pass, and after it."""
    first_pass = -(-data.population.num_clients // _COHORT)
    run = fl.simulate(
        lambda: nn.Linear(_WIDTH, 10),
        data,
        fl.FedAvg(fl.LocalSgd(epochs=1, batch_size=20, learning_rate=0.01)),
        sampler=_OnceThenAtRandom(),
        name=name,
        num_rounds=first_pass + num_timed,
        cohort={"num_wanted": _COHORT},
        evaluation={"every_rounds": 0, "clients": 0},
        engine={"num_workers": 1, "executor": "fused"},
    )
    seconds = [record.seconds for record in run.history]
    return median(seconds[:first_pass]), median(seconds[first_pass:-1])  # the last one evaluates


def main() -> None:
    """Write, simulate in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200_000, help="2,250,000 are 2.3 GB")
    parser.add_argument("--rounds", type=int, default=200, help="that are timed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        path, test_path = Path("train.parquet"), Path("test.parquet")
        _write(path, args.examples)
        _write(test_path, 1000)
        streamed = fl.from_parquet(
            path, test_path=test_path, client="user", label="y", features=["x"]
        )
        first_s, parquet_s = _rounds_s(streamed, num_timed=args.rounds, name="parquet")
        memory = _in_memory(path, test_path)
        _, memory_s = _rounds_s(memory, num_timed=args.rounds, name="memory")
        print(f"{path.stat().st_size / 1e6:,.0f} MB, rounds of {_COHORT * _PER_CLIENT} examples")
    print(f"from Parquet, first pass: {1e3 * first_s:8.1f} ms")
    print(f"from Parquet, after it:   {1e3 * parquet_s:8.1f} ms")
    print(f"from memory:              {1e3 * memory_s:8.1f} ms")
    print(f"ratio: {parquet_s / memory_s:.2f}, at most 3 is wanted")


if __name__ == "__main__":
    main()
