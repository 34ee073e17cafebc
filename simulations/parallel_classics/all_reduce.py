"""All-reduce in four ways: every process has n numbers, and ends with the sum over all processes.

With p processes, all of which may send and receive at once, the numbers sent are:

======== ============================== =========== ============== =======================
method   how it works                   in total    by the busiest one after another
======== ============================== =========== ============== =======================
naive    everyone sends to everyone     p(p-1)n     (p-1)n         (p-1)n
manager  rank 0 adds, and sends back    2(p-1)n     (p-1)n         2(p-1)n
ring     parts go round twice           2(p-1)n     2(p-1)n/p      2(p-1)n/p
library  ``torch.distributed``          2(p-1)n     2(p-1)n/p      2(p-1)n/p
======== ============================== =========== ============== =======================

No method needs less than 2(p-1)n/p at the busiest process, so the ring is bandwidth-optimal for
every p [1]_. The naive method is optimal for two processes, and the manager never, since it must
receive before it sends. The ring pays in latency: it sends 2(p-1) messages one after another, the
naive method one, and the manager two. With few numbers this dominates.

Lecture 5 of CS 329S (Goel) compares the first three: O(np²), O(np) with a manager that handles
everything, and O(np) with O(n) for each process.

References:
    .. [1] P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of
       workstations. Journal of Parallel and Distributed Computing 69(2), 2009, 117-124.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.core.clock import Clock


class Line:
    """One direction of an emulated network card: messages pass it one after another.

    Attributes:
        bytes_per_s: Its bandwidth.

    Example:
        >>> from fedlearn.core.clock import VirtualClock
        >>> line = Line(bytes_per_s=100.0, clock=VirtualClock())
        >>> line.passed_s(50), line.passed_s(100)
        (0.5, 1.5)
    """

    def __init__(self, *, bytes_per_s: float, clock: Clock) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_s = clock.now_s()

    def passed_s(self, num_bytes: int) -> float:
        """Queue a message on the line, and return the time when all of it has passed."""
        self._free_s = max(self._clock.now_s(), self._free_s) + num_bytes / self.bytes_per_s
        return self._free_s


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Block until it has arrived."""


@dataclass(frozen=True)
class _Paced:
    """A message that arrives no earlier than the emulated line allows."""

    pending: Pending
    passed_s: float
    clock: Clock

    def wait(self) -> None:
        self.pending.wait()
        self.clock.sleep(max(0.0, self.passed_s - self.clock.now_s()))


class _Nothing:
    """A message without numbers, which is not sent."""

    def wait(self) -> None:
        pass


class Messages:
    """Point-to-point messages of this rank, with counters.

    Empty tensors are not sent, since both sides know that they are empty.

    Attributes:
        rank: Rank of this process.
        world_size: Number of processes.
        sent: Numbers sent so far.
        received: Numbers received so far, including those awaited.
        num_sent: Messages sent so far.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.sent = self.received = self.num_sent = 0

    def send(self, tensor: Tensor, *, to: int) -> Pending:
        """Start to send ``tensor``, which must not change until that is done."""
        if not tensor.numel():
            return _Nothing()
        self.sent += tensor.numel()
        self.num_sent += 1
        work = dist.isend(tensor, to)
        assert work is not None  # None only for a rank outside the group
        return work

    def receive(self, tensor: Tensor, *, of: int) -> Pending:
        """Start to receive into ``tensor``."""
        if not tensor.numel():
            return _Nothing()
        self.received += tensor.numel()
        work = dist.irecv(tensor, of)
        assert work is not None
        return work


class PacedMessages(Messages):
    """Messages over an emulated network: each rank has a line out and a line in.

    A message is complete for a rank when it has passed that rank's line. Sending does not slow down
    receiving, and only the lines take time.
    """

    def __init__(self, *, bytes_per_s: float, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._out = Line(bytes_per_s=bytes_per_s, clock=clock)
        self._in = Line(bytes_per_s=bytes_per_s, clock=clock)

    def send(self, tensor: Tensor, *, to: int) -> Pending:
        """Start to send ``tensor`` over the line out."""
        return _Paced(super().send(tensor, to=to), self._out.passed_s(tensor.nbytes), self._clock)

    def receive(self, tensor: Tensor, *, of: int) -> Pending:
        """Start to receive into ``tensor`` over the line in."""
        return _Paced(super().receive(tensor, of=of), self._in.passed_s(tensor.nbytes), self._clock)


# ---- Methods ------------------------------------------------------------------------------


def naive(values: Tensor, messages: Messages) -> Tensor:
    """Send everything to every rank; each adds up in rank order, so all get the same bits."""
    others = [rank for rank in range(messages.world_size) if rank != messages.rank]
    leaving = [messages.send(values, to=rank) for rank in others]
    total = _gather(values, messages)
    _wait(leaving)
    return total


def manager(values: Tensor, messages: Messages) -> Tensor:
    """Send everything to rank 0, which adds up in rank order and sends the sum to every rank."""
    if messages.rank == 0:
        total = _gather(values, messages)
        _wait([messages.send(total, to=rank) for rank in range(1, messages.world_size)])
        return total
    messages.send(values, to=0).wait()
    total = torch.empty_like(values)
    messages.receive(total, of=0).wait()
    return total


def ring(values: Tensor, messages: Messages) -> Tensor:
    """Split the numbers into one part per rank; parts pass from rank to rank and grow to sums.

    A part is summed once on its way round (reduce-scatter), and its sum goes round once more
    (all-gather), so all ranks get the same bits. The sizes of parts differ by at most one, and some
    parts are empty if there are fewer numbers than processes.
    """
    rank, world_size = messages.rank, messages.world_size
    total = values.clone()
    parts_P = total.split(part_sizes(len(values), world_size=world_size))
    for step in range(world_size - 1):
        coming = torch.empty_like(parts_P[(rank - step - 1) % world_size])
        _pass_on(parts_P[(rank - step) % world_size], coming, messages)
        parts_P[(rank - step - 1) % world_size].add_(coming)
    for step in range(world_size - 1):
        coming = parts_P[(rank - step) % world_size]
        _pass_on(parts_P[(rank - step + 1) % world_size], coming, messages)
    return total


def library(values: Tensor, messages: Messages) -> Tensor:  # noqa: ARG001 - it has its own
    """Use the library's all-reduce: NCCL on CUDA, and gloo elsewhere."""
    total = values.clone()
    dist.all_reduce(total)
    return total


def part_sizes(num_numbers: int, *, world_size: int) -> list[int]:
    """Return the sizes of the ring's parts, the larger ones first.

    Example:
        >>> part_sizes(10, world_size=4), part_sizes(2, world_size=4)
        ([3, 3, 2, 2], [1, 1, 0, 0])
    """
    size, larger = divmod(num_numbers, world_size)
    return [size + (part < larger) for part in range(world_size)]


def _gather(values: Tensor, messages: Messages) -> Tensor:
    """Receive the values of all other ranks, and return the sum with this one's in rank order."""
    total, coming = torch.zeros_like(values), torch.empty_like(values)
    for rank in range(messages.world_size):
        if rank == messages.rank:
            total += values
        else:
            messages.receive(coming, of=rank).wait()
            total += coming
    return total


def _pass_on(leaving: Tensor, coming: Tensor, messages: Messages) -> None:
    """Send a part to the next rank of the ring while receiving one from the rank before."""
    before, after = messages.rank - 1, messages.rank + 1
    received = messages.receive(coming, of=before % messages.world_size)
    _wait([messages.send(leaving, to=after % messages.world_size), received])


def _wait(pending: Sequence[Pending]) -> None:
    for each in pending:
        each.wait()


# ---- Formulas -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one all-reduce by its formula.

    Attributes:
        sent_P: Numbers that each rank sends.
        received_P: Numbers that each rank receives.
        num_sent_P: Messages that each rank sends.
        in_sequence: Numbers on the critical path, if all ranks send and receive at once. Divided by
            the numbers that a line carries in a second, it is the time of the all-reduce.
    """

    sent_P: tuple[int, ...]
    received_P: tuple[int, ...]
    num_sent_P: tuple[int, ...]
    in_sequence: int


def naive_cost(n: int, p: int) -> Cost:
    """Return (p-1)·n for every rank."""
    each = ((p - 1) * n,) * p
    num_sent_P = (p - 1 if n else 0,) * p
    return Cost(sent_P=each, received_P=each, num_sent_P=num_sent_P, in_sequence=(p - 1) * n)


def manager_cost(n: int, p: int) -> Cost:
    """Return (p-1)·n each way for rank 0, first in and then out, and n for each other rank."""
    numbers_P = ((p - 1) * n, *[n] * (p - 1))
    num_sent_P = (p - 1, *[1] * (p - 1)) if n else (0,) * p
    in_sequence = 2 * (p - 1) * n
    return Cost(
        sent_P=numbers_P, received_P=numbers_P, num_sent_P=num_sent_P, in_sequence=in_sequence
    )


def ring_cost(n: int, p: int) -> Cost:
    """Return 2(p-1)/p·n for every rank, exact to the number for parts of different sizes.

    Rank r sends all parts except r + 1 while they grow, and all sums except that of part r + 2.
    Each step takes as long as its largest part.
    """
    sizes = part_sizes(n, world_size=p)

    def count_sent(rank: int) -> tuple[int, int]:
        """Return the numbers and messages that a rank sends."""
        kept = sizes[(rank + 1) % p], sizes[(rank + 2) % p]
        messages = 2 * sum(map(bool, sizes)) - sum(map(bool, kept))
        return 2 * n - sum(kept), messages

    return Cost(
        sent_P=tuple(count_sent(rank)[0] for rank in range(p)),
        received_P=tuple(count_sent(rank - 1)[0] for rank in range(p)),
        num_sent_P=tuple(count_sent(rank)[1] for rank in range(p)),
        in_sequence=2 * (p - 1) * sizes[0],
    )


AllReduce: TypeAlias = Callable[[Tensor, Messages], Tensor]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to all-reduce, with its cost formula.

    Attributes:
        name: Name in tables.
        run: Returns the sum of the vectors of all ranks; does not change this rank's own.
        cost: Cost for n numbers and p processes.
        is_own: Whether it is implemented here, so that its messages can be counted and paced.
    """

    name: str
    run: AllReduce
    cost: Callable[[int, int], Cost]
    is_own: bool = True


METHODS = (
    Method(name="naive", run=naive, cost=naive_cost),
    Method(name="manager", run=manager, cost=manager_cost),
    Method(name="ring", run=ring, cost=ring_cost),
    Method(name="library", run=library, cost=ring_cost, is_own=False),
)
