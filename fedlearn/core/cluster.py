"""Collective operations of processes that compute together: all-reduce, broadcast, gather."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")


class Cluster(Protocol):
    """The processes that share a simulation or a training, seen from one of them."""

    @property
    def rank(self) -> int:
        """Index of this process, from 0; in a simulation rank 0 owns the store and the terminal."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in place; all get the same bits.

        Raises:
            EngineError: Another process of this machine's simulation is gone.
            ProcessesParted: Another process, connected by torch.distributed, is gone.
        """

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return, in every process, the value that rank 0 has."""


def gather(value: ResultT, cluster: Cluster) -> list[ResultT]:
    """Gather one value from each process, in the order of their ranks; values are pickled.

    Raises:
        FedlearnError: Another process is gone: see :meth:`Cluster.all_reduce`.
    """
    if cluster.world_size == 1:
        return [value]
    # A gather made of all-reduces: each process fills its own part of a buffer of zeros. Bytes
    # are exact in float64.
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.zeros(cluster.world_size, dtype=torch.float64)
    sizes[cluster.rank] = len(mine)
    cluster.all_reduce([sizes])
    parts = torch.zeros(int(sizes.sum()), dtype=torch.float64).split(sizes.long().tolist())
    # `split` returns views, so this fills the process's part of the buffer.
    parts[cluster.rank].copy_(mine)
    cluster.all_reduce(parts)
    # Safe to unpickle: the bytes come from processes of the same user, as in `broadcast`.
    return [pickle.loads(part.byte().numpy().tobytes()) for part in parts]  # noqa: S301


@dataclass(frozen=True)
class Alone:
    """A cluster of one process."""

    rank: int = 0
    world_size: int = 1

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Leave the tensors as they are: the sum over one process."""

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return the value."""
        assert value is not None  # rank 0 has one
        return value
