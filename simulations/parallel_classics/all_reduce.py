"""All-reduce in four ways: every process ends with the sum of what all have, n numbers each.

With p processes, all of which may send and receive at once:

======== ============================== =========== ============== =======================
method   what is done                   sent by all by the busiest n that follow each other
======== ============================== =========== ============== =======================
naive    everyone sends to everyone     p(p-1)n     (p-1)n         (p-1)n
manager  rank 0 adds, and sends back    2(p-1)n     (p-1)n         2(p-1)n
ring     parts go round twice           2(p-1)n     2(p-1)n/p      2(p-1)n/p
library  ``torch.distributed``          2(p-1)n     2(p-1)n/p      2(p-1)n/p
======== ============================== =========== ============== =======================

No method can do with less than 2(p-1)n/p at the busiest process, so the ring is bandwidth-optimal
for every p [1]_. The naive method is so for two processes, the manager for none: what it sends
follows what it receives. What the ring pays is messages, 2(p-1) that follow each other, where the
naive method has one and the manager two: with few numbers, that counts.

The three are those that lecture 5 of CS 329S (Goel) compares: O(np²), O(np) with a manager that
handles it all, and O(np) of which each process has O(n).

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
    """One direction of a network card, as emulated: messages pass it one after another.

    Attributes:
        bytes_per_s: How fast.

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
        """Return when a message that is given to the line now has passed it."""
        self._free_s = max(self._clock.now_s(), self._free_s) + num_bytes / self.bytes_per_s
        return self._free_s


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Return when it has arrived."""


@dataclass(frozen=True)
class _Paced:
    """A message that takes its time on a line, too."""

    pending: Pending
    passed_s: float
    clock: Clock

    def wait(self) -> None:
        self.pending.wait()
        self.clock.sleep(max(0.0, self.passed_s - self.clock.now_s()))


class _Nothing:
    """What is not sent is there already."""

    def wait(self) -> None:
        pass


class Messages:
    """What this rank of the world sends to single others and receives of them, counted.

    Tensors without numbers are not sent: both sides know that there is nothing.

    Attributes:
        rank: This process.
        world_size: Number of processes.
        sent: Numbers sent so far.
        received: Numbers received so far, or awaited.
        num_sent: Messages sent so far.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.sent = self.received = self.num_sent = 0

    def send(self, tensor: Tensor, *, to: int) -> Pending:
        """Begin to send ``tensor``, which must not change until that is done."""
        if not tensor.numel():
            return _Nothing()
        self.sent += tensor.numel()
        self.num_sent += 1
        work = dist.isend(tensor, to)
        assert work is not None  # of a rank outside of the group
        return work

    def receive(self, tensor: Tensor, *, of: int) -> Pending:
        """Begin to receive into ``tensor``."""
        if not tensor.numel():
            return _Nothing()
        self.received += tensor.numel()
        work = dist.irecv(tensor, of)
        assert work is not None
        return work


class PacedMessages(Messages):
    """Messages over an emulated network: each rank has a line out and a line in.

    A rank is done with a message when the message has passed its line; what it sends does not
    slow down what it receives, and nothing but the lines takes time.
    """

    def __init__(self, *, bytes_per_s: float, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._out = Line(bytes_per_s=bytes_per_s, clock=clock)
        self._in = Line(bytes_per_s=bytes_per_s, clock=clock)

    def send(self, tensor: Tensor, *, to: int) -> Pending:
        """Begin to send ``tensor`` over the line out."""
        return _Paced(super().send(tensor, to=to), self._out.passed_s(tensor.nbytes), self._clock)

    def receive(self, tensor: Tensor, *, of: int) -> Pending:
        """Begin to receive into ``tensor`` over the line in."""
        return _Paced(super().receive(tensor, of=of), self._in.passed_s(tensor.nbytes), self._clock)


# ---- Methods ------------------------------------------------------------------------------


def naive(values: Tensor, messages: Messages) -> Tensor:
    """Send everything to everyone; each adds up by rank, so all have the same bits."""
    others = [rank for rank in range(messages.world_size) if rank != messages.rank]
    leaving = [messages.send(values, to=rank) for rank in others]
    total = _gathered(values, messages)
    _wait(leaving)
    return total


def manager(values: Tensor, messages: Messages) -> Tensor:
    """Send everything to rank 0, which adds up by rank and sends the sum to everyone."""
    if messages.rank == 0:
        total = _gathered(values, messages)
        _wait([messages.send(total, to=rank) for rank in range(1, messages.world_size)])
        return total
    messages.send(values, to=0).wait()
    total = torch.empty_like(values)
    messages.receive(total, of=0).wait()
    return total


def ring(values: Tensor, messages: Messages) -> Tensor:
    """Cut everything in a part for each rank; parts go from rank to rank and grow to sums.

    A part's sum is made once, on its way round (reduce-scatter), and goes round once more
    (all-gather): all have the same bits. The parts' sizes differ by one number at most, and some
    have none where there are fewer numbers than processes.
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
    """Add up as the library does: NCCL on CUDA, and gloo elsewhere."""
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


def _gathered(values: Tensor, messages: Messages) -> Tensor:
    """Return the sum of this rank's values and those that all others send, added by rank."""
    total, coming = torch.zeros_like(values), torch.empty_like(values)
    for rank in range(messages.world_size):
        if rank == messages.rank:
            total += values
        else:
            messages.receive(coming, of=rank).wait()
            total += coming
    return total


def _pass_on(leaving: Tensor, coming: Tensor, messages: Messages) -> None:
    """Send to the next rank of the ring while the rank before sends."""
    before, after = messages.rank - 1, messages.rank + 1
    received = messages.receive(coming, of=before % messages.world_size)
    _wait([messages.send(leaving, to=after % messages.world_size), received])


def _wait(pending: Sequence[Pending]) -> None:
    for each in pending:
        each.wait()


# ---- Formulas -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one all-reduce costs, as its formula says.

    Attributes:
        sent_P: Numbers that each rank sends.
        received_P: Numbers that each rank receives.
        num_sent_P: Messages that each rank sends.
        in_sequence: Numbers that pass one line after each other, where the lines of all ranks, each
            with one direction out and one in, work at once: over the numbers a line carries in a
            second, the time of the all-reduce.
    """

    sent_P: tuple[int, ...]
    received_P: tuple[int, ...]
    num_sent_P: tuple[int, ...]
    in_sequence: int


def naive_cost(n: int, p: int) -> Cost:
    """Return (p-1)·n for everyone."""
    each = ((p - 1) * n,) * p
    num_sent_P = (p - 1 if n else 0,) * p
    return Cost(sent_P=each, received_P=each, num_sent_P=num_sent_P, in_sequence=(p - 1) * n)


def manager_cost(n: int, p: int) -> Cost:
    """Return (p-1)·n each way for rank 0, first in and then out, and n for each other."""
    numbers_P = ((p - 1) * n, *[n] * (p - 1))
    num_sent_P = (p - 1, *[1] * (p - 1)) if n else (0,) * p
    in_sequence = 2 * (p - 1) * n
    return Cost(
        sent_P=numbers_P, received_P=numbers_P, num_sent_P=num_sent_P, in_sequence=in_sequence
    )


def ring_cost(n: int, p: int) -> Cost:
    """Return 2(p-1)/p·n for everyone, to the number.

    Rank r sends all parts but the one after its own, r + 1, as they grow, and all but r + 2 as
    sums. Each step takes as long as its largest part.
    """
    sizes = part_sizes(n, world_size=p)

    def sent(rank: int) -> tuple[int, int]:
        """Return the numbers and messages of a rank."""
        kept = sizes[(rank + 1) % p], sizes[(rank + 2) % p]
        messages = 2 * sum(map(bool, sizes)) - sum(map(bool, kept))
        return 2 * n - sum(kept), messages

    return Cost(
        sent_P=tuple(sent(rank)[0] for rank in range(p)),
        received_P=tuple(sent(rank - 1)[0] for rank in range(p)),
        num_sent_P=tuple(sent(rank)[1] for rank in range(p)),
        in_sequence=2 * (p - 1) * sizes[0],
    )


AllReduce: TypeAlias = Callable[[Tensor, Messages], Tensor]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to all-reduce, with its formula.

    Attributes:
        name: In a word.
        run: Returns the sum of the vectors of all ranks; this rank's own is not changed.
        cost: Of n numbers and p processes.
        is_own: Whether its messages can be counted and paced: not the library's.
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
