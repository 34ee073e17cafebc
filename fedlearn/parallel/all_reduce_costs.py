"""What an all-reduce costs on this machine, in bytes and time, beside its formula."""

import statistics
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.core.clock import SystemClock
from fedlearn.core.ranges import Count, Positive, Ranged
from fedlearn.errors import ConfigError, EngineError
from fedlearn.parallel.collectives import METHODS, Cost, Messages, Method, PacedMessages
from fedlearn.parallel.local_world import in_processes
from fedlearn.parallel.tcp_counters import open_sockets, sent_bytes

#: Numbers are float32.
NUMBER_BYTES = 4
_BYTES_PER_S = 1e6 / 8  # of a Mbit/s
#: Beyond what the formulas say: processes start, share cores, add.
_SPARE_S, _SPARE_FACTOR = 120.0, 10.0
#: What the formulas may say of one world: an hour.
_LONGEST_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Settings(Ranged):
    """What is measured.

    Attributes:
        numbers: How many numbers each process has, >= 1; one all-reduce each.
        repeats: How often each is timed, >= 1; medians count.
        mbit_per_s: Of each line of the emulated network.
    """

    numbers: tuple[int, ...]
    repeats: Count
    mbit_per_s: Positive


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One method with so many processes and numbers.

    Attributes:
        method: Which.
        world_size: Processes, p.
        num_numbers: Numbers of each process, n.
        mbit_per_s: Of each line of the emulated network.
        sent_P: Bytes that each rank has sent, as its own messages count, without headers;
            ``None``: they are the library's.
        num_sent_P: Messages that each rank has sent; ``None`` likewise.
        carried_P: Bytes that each rank has sent as the kernel counts, with headers and what holds
            the ranks together; ``None``: it does not.
        seconds: From when all ranks begin until the last one has the sum, over loopback.
        paced_seconds: The same over the emulated network; ``None``: the library knows none.
    """

    method: Method
    world_size: int
    num_numbers: int
    mbit_per_s: float
    sent_P: tuple[int, ...] | None
    num_sent_P: tuple[int, ...] | None
    carried_P: tuple[int, ...] | None
    seconds: float
    paced_seconds: float | None

    @property
    def cost(self) -> Cost:
        """What the formula says, in numbers."""
        return self.method.cost(self.num_numbers, self.world_size)

    @property
    def known_sent(self) -> tuple[int, ...] | None:
        """Bytes that each rank has sent: as counted, or else as the kernel counts."""
        return self.carried_P if self.sent_P is None else self.sent_P

    @property
    def formula_sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends, as the formula says."""
        return tuple(NUMBER_BYTES * numbers for numbers in self.cost.sent_P)

    @property
    def formula_seconds(self) -> float:
        """What the formula says of the emulated network."""
        return _seconds(self.cost, self.mbit_per_s)


@dataclass(frozen=True, kw_only=True)
class _OfRank:
    """What one rank has seen of one method."""

    sent: int
    num_sent: int
    carried: int | None
    seconds: tuple[float, ...]
    paced_seconds: tuple[float, ...]


def measure(settings: Settings, *, world_size: int) -> list[Measured]:
    """Measure every method in a world of so many processes, which is started for it.

    Raises:
        ConfigError: It would take hours.
        EngineError: A process failed or died, or all took much longer than the formulas say; or a
            sum is wrong.
    """
    costs = [method.cost(n, world_size) for n in settings.numbers for method in METHODS]
    expected_s = sum(_seconds(cost, settings.mbit_per_s) for cost in costs) * settings.repeats
    if expected_s > _LONGEST_S:
        raise ConfigError(
            f"with {world_size} processes, {settings.repeats} repeats at {settings.mbit_per_s:g} "
            f"Mbit/s take {expected_s:.3g} s, the limit is {_LONGEST_S:g} s; measure fewer numbers "
            "or repeats, or a faster network"
        )
    inherited = open_sockets()
    by_rank = in_processes(
        lambda: [
            _of_rank(method, num_numbers, settings, inherited=inherited)
            for num_numbers in settings.numbers
            for method in METHODS
        ],
        world_size=world_size,
        timeout_s=_SPARE_S + _SPARE_FACTOR * expected_s,
    )
    cases = [(method, num_numbers) for num_numbers in settings.numbers for method in METHODS]
    return [
        _measured(method, num_numbers, settings, of_ranks)
        for (method, num_numbers), of_ranks in zip(cases, zip(*by_rank, strict=True), strict=True)
    ]


def _seconds(cost: Cost, mbit_per_s: float) -> float:
    return cost.in_sequence * NUMBER_BYTES / (mbit_per_s * _BYTES_PER_S)


def _measured(
    method: Method, num_numbers: int, settings: Settings, of_ranks: Sequence[_OfRank]
) -> Measured:
    carried_P = [each.carried for each in of_ranks if each.carried is not None]
    return Measured(
        method=method,
        world_size=len(of_ranks),
        num_numbers=num_numbers,
        mbit_per_s=settings.mbit_per_s,
        sent_P=tuple(each.sent for each in of_ranks) if method.is_own else None,
        num_sent_P=tuple(each.num_sent for each in of_ranks) if method.is_own else None,
        carried_P=tuple(carried_P) if len(carried_P) == len(of_ranks) else None,
        seconds=_median([each.seconds for each in of_ranks]),
        paced_seconds=_median([each.paced_seconds for each in of_ranks]) if method.is_own else None,
    )


def _median(seconds_PK: Sequence[Sequence[float]]) -> float:
    """Return the median over K repeats of the slowest of P ranks."""
    slowest_K: list[float] = [max(seconds_P) for seconds_P in zip(*seconds_PK, strict=True)]
    return statistics.median(slowest_K)


def _of_rank(
    method: Method, num_numbers: int, settings: Settings, *, inherited: AbstractSet[int]
) -> _OfRank:
    """Run one method in a rank: once to count and check, then to time."""
    values, total = _values(num_numbers)
    messages = Messages()
    dist.barrier()
    before = sent_bytes(without=inherited)
    found = method.run(values, messages)
    dist.barrier()
    after = sent_bytes(without=inherited)
    if not torch.equal(found, total):
        raise EngineError(f"{method.name}: the sum of {num_numbers} numbers is wrong")
    clock = SystemClock()
    bytes_per_s = settings.mbit_per_s * _BYTES_PER_S
    paced_seconds = []
    if method.is_own:
        for _ in range(settings.repeats):
            paced = PacedMessages(bytes_per_s=bytes_per_s, clock=clock)
            paced_seconds.append(_timed(method, values, paced))
    return _OfRank(
        sent=messages.sent * values.element_size(),
        num_sent=messages.num_sent,
        carried=None if before is None or after is None else after - before,
        seconds=tuple(_timed(method, values, Messages()) for _ in range(settings.repeats)),
        paced_seconds=tuple(paced_seconds),
    )


def _timed(method: Method, values: Tensor, messages: Messages) -> float:
    """Return how long this rank took, once all were there."""
    dist.barrier()
    clock = SystemClock()
    began_s = clock.now_s()
    method.run(values, messages)
    return clock.now_s() - began_s


def _values(num_numbers: int) -> tuple[Tensor, Tensor]:
    """Return this rank's numbers and the sum over all ranks: whole, so sums are exact."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(num_numbers, dtype=torch.int32) % 1009
    values = (pattern * (rank + 1)).float()
    total = (pattern * (world_size * (world_size + 1) // 2)).float()
    return values, total
