"""How fast does a coordinator aggregate updates, compared with Flower's function and numpy?

    python simulations/bench/aggregation.py --flower-python PYTHON

A collector receives encoded updates one after another, decodes and validates them, and adds them
up. Flower's function runs in its own process, on records that are already in memory. The limit is
the machine's read bandwidth, since each update must be read once.
"""

import argparse
import math
import resource
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from harness import (
    Action,
    Row,
    add_flower,
    flower_python,
    in_turn,
    options,
    parse,
    ratio,
    report,
    started,
    timed,
)
from torch import nn

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.collector import RoundRequest, collect_from
from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, Request, TrainReply
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.rounds.plain import PlainCollector
from fedlearn.transport.base import Arrival, decode_reply_or_failure

#: Number of different updates, which the cohort sends repeatedly.
NUM_DISTINCT = 4
MEAN = WeightedMean(by_examples=True)
STRATEGY = FedAvg(LocalSgd(epochs=1, batch_size=10, learning_rate=0.1))

#: Program that aggregates once for each input line and writes the seconds that it took.
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
    print(f'{{"seconds": {perf_counter() - started}}}', flush=True)
"""


@dataclass(frozen=True)
class Replay:
    """A channel on which encoded updates arrive, decoded one by one.

    Attributes:
        updates: Encoded replies; a client sends the one at its id modulo their number.
        num_clients: Number of clients.
    """

    updates: Sequence[bytes]
    num_clients: int

    def available(self) -> Sequence[ClientId]:
        """Return all clients."""
        return [ClientId(i) for i in range(self.num_clients)]

    def open(self, *, deadline_s: float) -> "Replaying":
        """Open an exchange in which every reply is ready."""
        return Replaying(self.updates)


@dataclass(frozen=True)
class Replaying:
    """An exchange in which every reply is ready.

    Attributes:
        updates: See :class:`Replay`.
        asked: Clients whose reply has not been read.
    """

    updates: Sequence[bytes]
    asked: deque[ClientId] = field(default_factory=deque)

    def ask(
        self,
        requests: Mapping[ClientId, Request],
        *,
        number: int | None = None,
    ) -> None:
        """Note which clients are asked."""
        self.asked.extend(requests)

    def elapsed_s(self) -> float:
        """Return 0, since nothing takes time."""
        return 0.0

    def grace_until_s(self) -> float:
        """Return 0, since there was no restart."""
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
        return Arrival(client_id, decode_reply_or_failure(data), min(until_s, 0.0))

    def close(self) -> None:
        """Forget all clients that were asked."""
        self.asked.clear()


def model(size: int, *, tensors: int) -> Params:
    """Build a model of zeros, with ``size`` elements in ``tensors`` tensors."""
    parts = [nn.Parameter(torch.zeros(size // tensors)) for _ in range(tensors)]
    return Params.of(nn.ParameterList(parts))


def encode_update(params: Params, num_examples: int) -> bytes:
    """Encode an update of random numbers as a client does."""
    lanes = {DELTA.name: torch.randn(params.layout.size)}
    return encode(TrainReply(round_num=0, lanes=lanes, num_examples=num_examples, metrics={}))


def collector_of(channel: Replay, *, slab_bytes: int) -> PlainCollector:
    """Build a coordinator's collector that waits for all clients."""
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
        SystemExit: A reply was not accepted, so the figure is meaningless.
    """
    request = RoundRequest(
        round_num=0, attempt=0, params=params, strategy=STRATEGY, broadcast={}, seed=0
    )
    collected = collect_from(collector, collector.available(), request)
    if collected.count(Status.REPORTED) != len(collected.participations):
        raise SystemExit(f"replies were refused: {collected.participations[0]}")


def reduce_slabs(slab_RP: torch.Tensor, params: Params, *, updates: int) -> None:
    """Aggregate ``updates`` rows, a slab at a time, as a collector does."""
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
    """Compute the weighted mean in the straightforward way."""
    rows = slab_RP.numpy()
    total = np.zeros(rows.shape[1], np.float32)
    for i in range(updates):
        total += np.float32(i + 1) * rows[i % len(rows)]
    total /= np.float32(updates * (updates + 1) / 2)


def resident_mb() -> float:
    """Return the peak resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rows(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[Row]:
    """Measure our collector, numpy, Flower and reading memory, in turn."""
    params = model(arguments.size, tensors=arguments.tensors)
    slab_bytes, num_bytes = arguments.slab_mb << 20, 4 * params.layout.size * arguments.updates
    updates = [encode_update(params, i + 1) for i in range(NUM_DISTINCT)]
    collector = collector_of(Replay(updates, arguments.updates), slab_bytes=slab_bytes)
    before_mb = resident_mb()
    collect(collector, params)
    yield Row("collection", "memory that it adds, MB", resident_mb() - before_mb)
    num_rows = max(1, slab_bytes // (4 * params.layout.size))
    slab_RP = torch.randn(min(num_rows, arguments.updates), params.layout.size)
    reduce = partial(reduce_slabs, slab_RP, params, updates=arguments.updates)
    actions: dict[str, Action] = {
        "reading once": lambda: num_bytes / slab_RP.nbytes * timed(slab_RP.sum),
        "fedlearn": partial(timed, partial(collect, collector, params)),
        "fedlearn, decoded before": partial(timed, reduce),
        "numpy": partial(timed, partial(numpy_mean, slab_RP, updates=arguments.updates)),
    }
    if (python := flower_python(arguments)) is not None:
        sizes = (arguments.updates, arguments.size, arguments.tensors, NUM_DISTINCT)
        flower = stack.enter_context(started([python, "-c", FLOWER_PEER, *map(str, sizes)]))
        actions["flower"] = lambda: float(flower.ask("aggregate")["seconds"])
    found = in_turn(actions, turns=arguments.turns, warmup=1)
    for name, seconds in found.items():
        yield Row("aggregation", f"{name}, ms", 1e3 * statistics.median(seconds))
        rate = num_bytes / statistics.median(seconds) / 1e9
        yield Row("aggregation", f"{name}, GB/s", rate)
    for name in ("fedlearn", "fedlearn, decoded before"):
        for other in ("flower", "numpy", "reading once"):
            if other in found:
                times = ratio(found[other], found[name])
                yield Row("aggregation", f"{name}, times as fast as {other}", times)


def main() -> None:
    """Parse the arguments and compare."""
    parser = options(__doc__, turns=7)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--size", type=int, default=10_000_000, help="elements of an update")
    parser.add_argument("--tensors", type=int, default=10, help="tensors of an update")
    parser.add_argument("--slab-mb", type=int, default=400)
    parser.add_argument(
        "--threads", type=int, default=1, help="threads; more spin on a busy machine"
    )
    add_flower(parser)
    small = {"turns": 1, "updates": 10, "size": 100_000, "slab_mb": 2, "without_flower": True}
    arguments = parse(parser, check=small)
    torch.set_num_threads(arguments.threads)
    with ExitStack() as stack:
        report(rows(arguments, stack), arguments)


if __name__ == "__main__":
    main()
