"""Groups of processes that compute together, connected by torch.distributed."""

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.errors import ProcessesParted

ResultT = TypeVar("ResultT")

# Any: torch's stubs lack its stores and options.
_c10d: Any = dist
#: Address that gloo listens on, so that no other machine can connect.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, eq=False)
class Group:
    """A :class:`~fedlearn.core.cluster.Cluster` by torch.distributed: gloo on CPUs, NCCL on GPUs.

    Create one with :func:`join_group` or :func:`world`.

    Attributes:
        rank: Rank of this process, from 0.
        world_size: Number of processes.
    """

    rank: int
    world_size: int
    _backend: Any  # a process group of torch, or one of its backends
    _device: torch.device  # device of the bytes that are broadcast

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in a single message.

        Raises:
            ProcessesParted: Another process is gone, or did not take part in time.
        """
        travels_as_it_is = len(tensors) == 1 and tensors[0].is_contiguous()
        message = tensors[0] if travels_as_it_is else _pack(tensors)
        with self._convert_errors():
            self._backend.allreduce([message]).wait()
        if not travels_as_it_is:
            _unpack(message, tensors)

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return, in every process, the value that rank 0 has; it is pickled.

        Raises:
            ProcessesParted: Another process is gone, or did not take part in time.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        data, size = data.to(self._device), torch.tensor([len(data)], device=self._device)
        with self._convert_errors():
            # The size first, since the other processes must allocate the memory.
            self._backend.broadcast(size, 0).wait()
            if self.rank > 0:
                data = data.new_empty(int(size))
            self._backend.broadcast(data, 0).wait()
        # Safe to unpickle: all processes belong to the same user.
        received: ResultT | None = pickle.loads(data.cpu().numpy().tobytes())  # noqa: S301
        assert received is not None  # rank 0 has one
        return received

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ProcessesParted(
                f"process {self.rank + 1} of {self.world_size} lost another process in the middle "
                f"of the work ({type(error).__name__})"
            ) from error


def world() -> Group:
    """Return the group of all processes in torch.distributed's world, which is initialized."""
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors into one vector of the first one's dtype, on its device.

    Each float64 number among float32 ones becomes two: the rounded value and the remainder.
    """
    like, parts = tensors[0], []
    for tensor in tensors:
        flat = tensor.flatten().to(like.device)
        # Two float32 numbers carry 48 bits of the 53: enough for losses and counts in one message.
        rounded = flat.to(like.dtype)
        parts.append(rounded)
        if flat.dtype != like.dtype:
            # The remainder of an infinite value is NaN, and would turn the sum into NaN.
            rest = flat - rounded.to(flat.dtype)
            parts.append(torch.where(rest.isfinite(), rest, 0.0).to(like.dtype))
    return torch.cat(parts)


def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of a vector that :func:`_pack` made of these tensors back into them."""
    start = 0
    for tensor in tensors:
        total = torch.zeros((), dtype=tensor.dtype, device=packed.device)
        for _ in range(1 if tensor.dtype == packed.dtype else 2):
            total = total + packed[start : start + tensor.numel()].to(tensor.dtype)
            start += tensor.numel()
        tensor.copy_(total.view(tensor.shape))


def choose_backend(devices: Mapping[int, str]) -> str:
    """Choose the backend for processes on these devices: NCCL only if each has its own GPU.

    Example:
        >>> choose_backend({0: "cuda:0", 1: "cuda:1"}), choose_backend({0: "cuda:0", 1: "cuda:0"})
        ('nccl', 'gloo')
    """
    are_apart = len(set(devices.values())) == len(devices)
    on_gpus = all(device.startswith("cuda") for device in devices.values())
    return "nccl" if on_gpus and are_apart else "gloo"


def join_group(
    file: Path,
    *,
    backend: str,
    rank: int,
    world_size: int,
    device: torch.device,
    meeting: timedelta,
    timeout: timedelta,
) -> Group:
    """Join a group of ``world_size`` processes, all of which call this with the same file.

    It returns when all have joined; the file is not needed any longer then.

    Args:
        file: Rendezvous file, which does not exist yet, in a folder that only this user can access.
        backend: "gloo" or "nccl".
        rank: Rank of this process, from 0.
        world_size: Number of processes.
        device: Device on which this process computes.
        meeting: How long to wait for the others to join.
        timeout: How long to wait for them in each later operation.

    Raises:
        ProcessesParted: Another process did not join in time.
    """
    store = _c10d.FileStore(str(file), world_size)
    store.set_timeout(meeting)
    make = _create_nccl if backend == "nccl" else _create_gloo
    try:
        group = Group(rank, world_size, make(store, rank, world_size, timeout), device)
    except RuntimeError as error:
        raise ProcessesParted(
            f"process {rank + 1} of {world_size} did not find the others within {meeting}"
        ) from error
    # The first sum ends only when all have joined; NCCL does not even connect before it.
    group.all_reduce([torch.zeros(1, device=device)])
    return group


def _create_gloo(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the only way to set the address
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return gloo(store, rank, world_size, options)


def _create_nccl(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    # A timeout should raise an error, not end the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    # All processes are on this machine.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return _c10d.ProcessGroupNCCL(store, rank, world_size, options)
