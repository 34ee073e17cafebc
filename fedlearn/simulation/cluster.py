"""The processes that share a simulation.

Every process runs the same run loop on the same seeds and trains its share of each cohort;
one all-reduce a round gives all of them the same aggregate, hence the same model, so
nothing else travels. The workers of one machine are forked: the examples are loaded once
and shared, and nothing is pickled. Under ``torchrun`` the processes exist already, on one
machine or many.
"""

import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.errors import EngineError

ResultT = TypeVar("ResultT")

#: Longest wait for another process in one all-reduce: a worker that is merely slow is no error.
_TIMEOUT = timedelta(hours=2)


class Cluster(Protocol):
    """The processes of a simulation, seen from one of them."""

    @property
    def rank(self) -> int:
        """Which process this is, from 0; rank 0 owns the store and the terminal."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in place.

        Raises:
            EngineError: Another process is gone.
        """

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return, in every process, the value that rank 0 has."""


@dataclass(frozen=True)
class Alone:
    """A simulation in a single process."""

    rank: int = 0
    world_size: int = 1

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Leave the tensors as they are: the sum over one process."""

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return the value."""
        assert value is not None  # rank 0 has one
        return value


@dataclass(frozen=True)
class ProcessGroup:
    """Processes joined by torch.distributed: gloo on CPU, NCCL on CUDA.

    Attributes:
        rank: This process.
        world_size: How many there are.
    """

    rank: int
    world_size: int

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors up over all processes: one message, whatever their number."""
        packed = _pack(tensors)
        try:
            dist.all_reduce(packed)
        except RuntimeError as error:
            raise EngineError(
                f"worker {self.rank} lost another worker in the middle of a round ({error}); "
                "the run resumes from its last commit with `fedlearn resume`"
            ) from error
        _unpack(packed, tensors)

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return rank 0's value; it travels pickled, among processes of one user."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        received = box[0]
        assert received is not None  # rank 0 has one
        return received


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors as one vector of the first one's dtype, on its device.

    A float64 among float32 travels as two numbers, its rounded value and the remainder.
    """
    like, parts = tensors[0], []
    for tensor in tensors:
        flat = tensor.flatten().to(like.device)
        rounded = flat.to(like.dtype)
        parts.append(rounded)
        if flat.dtype != like.dtype:
            parts.append((flat - rounded.to(flat.dtype)).to(like.dtype))
    return torch.cat(parts)


def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write what :func:`_pack` made of tensors of these shapes back into them."""
    start = 0
    for tensor in tensors:
        total = torch.zeros((), dtype=tensor.dtype, device=packed.device)
        for _ in range(1 if tensor.dtype == packed.dtype else 2):
            total = total + packed[start : start + tensor.numel()].to(tensor.dtype)
            start += tensor.numel()
        tensor.copy_(total.view(tensor.shape))


def launch(
    body: Callable[[Cluster], ResultT], *, num_workers: int, environment: Mapping[str, str]
) -> ResultT:
    """Run ``body`` in every process and return what it returns in this one.

    Args:
        body: The simulation; must do the same in every process.
        num_workers: Processes to fork on this machine, this one included; ignored under
            torchrun, which has started them already.
        environment: Says whether torchrun did (``RANK`` and ``WORLD_SIZE``).

    Raises:
        EngineError: A worker failed or died; the others were stopped.
    """
    with one_thread():
        if under_torchrun(environment) is not None:
            return _joined(body)
        if num_workers == 1:
            return body(Alone())
        return _forked(body, num_workers)


def under_torchrun(environment: Mapping[str, str]) -> int | None:
    """Return the number of processes that torchrun has started, or ``None`` without it."""
    return int(environment["WORLD_SIZE"]) if "RANK" in environment else None


def local_rank(environment: Mapping[str, str]) -> int:
    """Return which process of its machine torchrun made this one; 0 without torchrun."""
    return int(environment.get("LOCAL_RANK", "0"))


def _joined(body: Callable[[Cluster], ResultT]) -> ResultT:
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        return body(ProcessGroup(dist.get_rank(), dist.get_world_size()))
    finally:
        dist.destroy_process_group()


def _forked(body: Callable[[Cluster], ResultT], num_workers: int) -> ResultT:
    """Fork the workers, be rank 0, and leave none behind whatever happens."""
    lifeline_end, lifeline = os.pipe()
    with tempfile.TemporaryDirectory(prefix="fedlearn-") as folder:
        meeting = Path(folder) / "meeting"
        children = [
            _fork(body, rank, num_workers, meeting, (lifeline_end, lifeline))
            for rank in range(1, num_workers)
        ]
        try:
            with _group(0, num_workers, meeting):
                return body(ProcessGroup(0, num_workers))
        finally:
            os.close(lifeline)
            os.close(lifeline_end)
            for child in children:
                _reap(child)


def _fork(
    body: Callable[[Cluster], object],
    rank: int,
    num_workers: int,
    meeting: Path,
    pipe: tuple[int, int],
) -> int:
    child = os.fork()
    if child:
        return child
    # From here on this is the worker. It must never return into the caller's code.
    status = 1
    try:
        lifeline_end, lifeline = pipe
        os.close(lifeline)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides, the lifeline tells
        threading.Thread(target=_exit_with_parent, args=(lifeline_end,), daemon=True).start()
        with _group(rank, num_workers, meeting), _explained():
            body(ProcessGroup(rank, num_workers))
        status = 0
    finally:
        os._exit(status)


@contextmanager
def _explained() -> Iterator[None]:
    """Say on standard error why a worker ends, while the others still wait for it.

    An :class:`EngineError` is the loss of another process, which speaks for itself.
    """
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, EngineError):
            traceback.print_exception(error)
            sys.stderr.flush()


def _exit_with_parent(lifeline_end: int) -> None:
    os.read(lifeline_end, 1)  # blocks until rank 0 closes its end, by intent or by dying
    os._exit(1)


def _reap(child: int) -> None:
    """Wait for a worker that is ending; the closed lifeline ends one that is not."""
    os.waitpid(child, 0)


@contextmanager
def _group(rank: int, num_workers: int, meeting: Path) -> Iterator[None]:
    """Join the group over loopback; every forked worker is on this machine."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=meeting.as_uri(),
        rank=rank,
        world_size=num_workers,
        timeout=_TIMEOUT,
    )
    if before is None:
        del os.environ["GLOO_SOCKET_IFNAME"]
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = before
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread per process for a while.

    Small tensor operations gain nothing from a second thread, which spins and starves its
    neighbours on a busy machine; and sums then do not depend on the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
