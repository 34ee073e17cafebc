"""Our aggregation of network updates beside Flower's and numpy's: paired ratios.

    python simulations/bench/aggregation.py --flower-python PATH

Encoded updates reach a collector one after another, and all competitors run in turn, several
times over; a ratio compares runs of the same turn. Flower's own function runs in its own
interpreter, on records that are already in its memory. Beside the times stands the fraction
of the machine's read bandwidth, measured in the same turn: an update must be read once.
"""

import argparse
import math
import resource
import statistics
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.collecting import RoundRequest, collect_from
from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import SystemClock
from fedlearn.core.codec import encode
from fedlearn.core.collecting import Status
from fedlearn.core.messages import ClientId, Request, TrainReply
from fedlearn.core.params import Params
from fedlearn.rounds.plain import PlainCollector
from fedlearn.transport.base import Arrival, as_reply

#: Different updates; the cohort sends them again and again.
NUM_DISTINCT = 4
MEAN = WeightedMean(by_examples=True)
STRATEGY = FedAvg(LocalSgd(epochs=1, batch_size=10, learning_rate=0.1))
NOTES = {
    "fedlearn": "decode, validate, aggregate",
    "fedlearn, reduction": "deltas that are decoded and validated",
    "numpy": "sum of w * x, from arrays in memory",
    "flower": "aggregate_arrayrecords",
}

#: Reads a line, aggregates, writes the seconds; ends with its standard input.
FLOWER_PEER = """
import sys
from time import perf_counter
import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
updates, size, tensors, distinct = map(int, sys.argv[1:])
rng = np.random.default_rng(0)
arrays = [
    ArrayRecord({str(t): Array(rng.standard_normal(size // tensors, dtype=np.float32))
                 for t in range(tensors)})
    for _ in range(distinct)
]
records = [
    RecordDict({"arrays": arrays[i % distinct], "metrics": MetricRecord({"num-examples": i + 1})})
    for i in range(updates)
]
for _ in sys.stdin:
    started = perf_counter()
    aggregate_arrayrecords(records, "num-examples")
    print(perf_counter() - started, flush=True)
"""


@dataclass(frozen=True)
class Replay:
    """A channel on which encoded updates arrive, decoded one by one.

    Attributes:
        updates: Encoded replies; a client sends that of its id, modulo their number.
        num_clients: Who there is.
    """

    updates: Sequence[bytes]
    num_clients: int

    def available(self) -> Sequence[ClientId]:
        """Return all clients."""
        return [ClientId(i) for i in range(self.num_clients)]

    def open(self, *, deadline_s: float) -> "Replaying":
        """Open an exchange in which everyone has answered already."""
        return Replaying(self.updates)


@dataclass(frozen=True)
class Replaying:
    """An exchange in which everyone has answered already.

    Attributes:
        updates: As of :class:`Replay`.
        asked: Who is still to be read.
    """

    updates: Sequence[bytes]
    asked: deque[ClientId] = field(default_factory=deque)

    def ask(
        self,
        requests: Mapping[ClientId, Request],
        *,
        number: int | None = None,
    ) -> None:
        """Note who is asked."""
        self.asked.extend(requests)

    def elapsed_s(self) -> float:
        """Return 0: nothing takes time."""
        return 0.0

    def grace_until_s(self) -> float:
        """Return 0: there was no restart."""
        return 0.0

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        """Forget that these were asked."""
        for each in client_ids:
            self.asked.remove(each)

    def next(self, *, until_s: float) -> Arrival | None:
        """Return the next reply."""
        if not self.asked:
            return None
        client_id = self.asked.popleft()
        data = self.updates[client_id % len(self.updates)]
        return Arrival(client_id, as_reply(data), min(until_s, 0.0))

    def close(self) -> None:
        """Forget who was asked."""
        self.asked.clear()


def model(size: int, *, tensors: int) -> Params:
    """Return a model of zeros with so many elements in so many tensors."""
    parts = [nn.Parameter(torch.zeros(size // tensors)) for _ in range(tensors)]
    return Params.of(nn.ParameterList(parts))


def encoded(params: Params, num_examples: int) -> bytes:
    """Return an update of random numbers as a client sends it."""
    lanes = {DELTA.name: torch.randn(params.layout.size)}
    return encode(TrainReply(round_num=0, lanes=lanes, num_examples=num_examples, metrics={}))


def collector_of(channel: Replay, *, slab_bytes: int) -> PlainCollector:
    """Return what a coordinator collects with, when it wants everybody."""
    policy = StragglerPolicy(
        num_wanted=channel.num_clients,
        over_selection=1.0,
        deadline_s=math.inf,
        min_reports=1,
        below_minimum=BelowMinimum.FAIL,
        max_retries=0,
    )
    return PlainCollector(channel=channel, policy=policy, slab_bytes=slab_bytes)


def collect(collector: PlainCollector, params: Params) -> None:
    """Run the collection of one round.

    Raises:
        SystemExit: A reply was not accepted, so the figure would mean nothing.
    """
    request = RoundRequest(
        round_num=0, attempt=0, params=params, strategy=STRATEGY, told={}, seed=0
    )
    collected = collect_from(collector, collector.available(), request)
    if collected.count(Status.REPORTED) != len(collected.participations):
        raise SystemExit(f"replies were refused: {collected.participations[0]}")


def reduce_slabs(slab_RP: torch.Tensor, params: Params, *, updates: int) -> None:
    """Aggregate so many rows, a slab at a time, as a collector does."""
    state = MEAN.init([DELTA], params.layout, device=slab_RP.device)
    for start in range(0, updates, len(slab_RP)):
        rows_BP = list(slab_RP[: updates - start])
        client_ids = [ClientId(i) for i in range(len(rows_BP))]
        updates_B = Updates(
            client_ids, torch.ones(len(rows_BP)), {DELTA.name: rows_BP}, [0] * len(rows_BP)
        )
        state = MEAN.accumulate(state, updates_B)
    MEAN.finalize(state)


def numpy_mean(slab_RP: torch.Tensor, *, updates: int) -> None:
    """Compute the weighted mean as one would write it down."""
    rows = slab_RP.numpy()
    total = np.zeros(rows.shape[1], np.float32)
    for i in range(updates):
        total += np.float32(i + 1) * rows[i % len(rows)]
    total /= np.float32(updates * (updates + 1) / 2)


@dataclass(frozen=True)
class Flower:
    """Flower's function, warm in its own interpreter.

    Attributes:
        process: Answers each line with seconds.
    """

    process: subprocess.Popen[str]

    def seconds(self) -> float:
        """Aggregate once.

        Raises:
            SystemExit: Its process is gone; what it wrote stands on standard error.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("Flower's process ended; has its interpreter flwr 1.41?")
        return float(line)


def start_flower(arguments: argparse.Namespace) -> Flower:
    """Start Flower's process; it makes its records before it answers the first line."""
    sizes = (arguments.updates, arguments.size, arguments.tensors, NUM_DISTINCT)
    command = [arguments.flower_python, "-c", FLOWER_PEER, *map(str, sizes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return Flower(process)


def timed(clock: SystemClock, action: Callable[[], object]) -> float:
    """Return how long ``action`` takes, in seconds."""
    started = clock.now_s()
    action()
    return clock.now_s() - started


def read_bytes_per_s(clock: SystemClock, tensor: torch.Tensor) -> float:
    """Return the read bandwidth: the best of ten sums over ``tensor``."""
    return tensor.nbytes / min(timed(clock, lambda: float(tensor.sum())) for _ in range(10))


def resident_mb() -> float:
    """Return the highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_table(
    seconds: Mapping[str, list[float]], bandwidths: list[float], *, num_bytes: int
) -> None:
    """Print medians, paired ratios and shares of the read bandwidth."""
    others = [name for name in ("flower", "numpy") if name in seconds]
    header = "".join(f"{'x ' + name:>10}" for name in others)
    print(f"{'':22}{'ms':>8}{'GB/s':>8}{'% of read':>11}{header}")
    for name, times in seconds.items():
        rates = [num_bytes / each for each in times]
        share = statistics.median(100 * r / b for r, b in zip(rates, bandwidths, strict=True))
        ratios = [
            statistics.median(o / t for o, t in zip(seconds[other], times, strict=True))
            for other in others
        ]
        columns = "".join(f"{ratio:10.2f}" for ratio in ratios)
        milliseconds, gigabytes = 1e3 * statistics.median(times), statistics.median(rates) / 1e9
        print(f"{name:22}{milliseconds:8.0f}{gigabytes:8.1f}{share:11.0f}{columns}   {NOTES[name]}")
    print(f"read bandwidth {statistics.median(bandwidths) / 1e9:.1f} GB/s")


def compare(arguments: argparse.Namespace) -> None:
    """Run everyone in turn and print the table."""
    torch.set_num_threads(arguments.threads)
    params = model(arguments.size, tensors=arguments.tensors)
    updates = [encoded(params, i + 1) for i in range(NUM_DISTINCT)]
    collector = collector_of(Replay(updates, arguments.updates), slab_bytes=arguments.slab_mb << 20)
    before_mb = resident_mb()
    collect(collector, params)
    print(
        f"{arguments.updates} updates of {arguments.size} float32 in {arguments.tensors} tensors, "
        f"{torch.get_num_threads()} threads, a slab of {arguments.slab_mb} MB: peak RSS "
        f"{resident_mb():.0f} MB, {resident_mb() - before_mb:.0f} MB of it for the collection"
    )
    num_rows = max(1, (arguments.slab_mb << 20) // (4 * params.layout.size))
    slab_RP = torch.randn(min(num_rows, arguments.updates), params.layout.size)
    clock = SystemClock()
    seconds: dict[str, list[float]] = {}
    bandwidths = []
    flower = start_flower(arguments) if arguments.flower_python else None
    actions: dict[str, Callable[[], float]] = {
        "fedlearn": lambda: timed(clock, lambda: collect(collector, params)),
        "fedlearn, reduction": lambda: timed(
            clock, lambda: reduce_slabs(slab_RP, params, updates=arguments.updates)
        ),
        "numpy": lambda: timed(clock, lambda: numpy_mean(slab_RP, updates=arguments.updates)),
    }
    if flower is None:
        print("flower is left out: --flower-python names no interpreter with flwr 1.41")
    else:
        actions["flower"] = flower.seconds
    for action in actions.values():  # warm
        action()
    for _ in range(arguments.turns):
        bandwidths.append(read_bytes_per_s(clock, slab_RP))
        for name, action in actions.items():
            seconds.setdefault(name, []).append(action())
    print_table(seconds, bandwidths, num_bytes=4 * params.layout.size * arguments.updates)
    if flower is not None and flower.process.stdin is not None:
        flower.process.stdin.close()
        flower.process.wait()


def main() -> None:
    """Parse the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--size", type=int, default=10_000_000, help="elements of an update")
    parser.add_argument("--tensors", type=int, default=10, help="tensors of an update")
    parser.add_argument("--slab-mb", type=int, default=400)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="more spin on a busy machine")
    parser.add_argument("--flower-python", help="of an environment with flwr 1.41")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
