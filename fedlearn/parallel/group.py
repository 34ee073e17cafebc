"""Processes of one machine that add up through torch.distributed."""

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

# Any: torch's stubs lack the stores and the options that it has.
_c10d: Any = dist
#: Where they listen: nobody outside this machine may.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, eq=False)
class Group:
    """Processes joined by torch.distributed: gloo on CPU, NCCL on GPUs.

    See :func:`joined` and :func:`world`.

    Attributes:
        rank: Which one this is, from 0.
        world_size: How many there are.
    """

    rank: int
    world_size: int
    _backend: Any  # torch's, by either name
    _device: torch.device  # where bytes travel

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors up over all processes: one message, whatever their number.

        Raises:
            ProcessesParted: Another one is gone, or has not come in time.
        """
        travels_as_it_is = len(tensors) == 1 and tensors[0].is_contiguous()
        message = tensors[0] if travels_as_it_is else _pack(tensors)
        with self._noticing_losses():
            self._backend.allreduce([message]).wait()
        if not travels_as_it_is:
            _unpack(message, tensors)

    def broadcast(self, value: ResultT | None) -> ResultT:
        """Return rank 0's value; it travels pickled, among processes of one user.

        Raises:
            ProcessesParted: Another one is gone, or has not come in time.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        data, size = data.to(self._device), torch.tensor([len(data)], device=self._device)
        with self._noticing_losses():
            self._backend.broadcast(size, 0).wait()
            if self.rank > 0:
                data = data.new_empty(int(size))
            self._backend.broadcast(data, 0).wait()
        received: ResultT | None = pickle.loads(data.cpu().numpy().tobytes())  # noqa: S301
        assert received is not None  # rank 0 has one
        return received

    @contextmanager
    def _noticing_losses(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ProcessesParted(
                f"process {self.rank + 1} of {self.world_size} lost another one in the middle of "
                f"their work ({type(error).__name__})"
            ) from error


def world() -> Group:
    """Return all processes of torch.distributed's world, which this one has joined."""
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors as one vector of the first one's dtype, on its device.

    A float64 among float32 becomes two numbers, its rounded value and the remainder.
    """
    like, parts = tensors[0], []
    for tensor in tensors:
        flat = tensor.flatten().to(like.device)
        rounded = flat.to(like.dtype)
        parts.append(rounded)
        if flat.dtype != like.dtype:
            rest = flat - rounded.to(flat.dtype)  # of an infinite value NaN, which would spoil it
            parts.append(torch.where(rest.isfinite(), rest, 0.0).to(like.dtype))
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


def backend_for(devices: Mapping[int, str]) -> str:
    """Return by what processes add up, given the device of each: NCCL needs a GPU for each.

    Example:
        >>> backend_for({0: "cuda:0", 1: "cuda:1"}), backend_for({0: "cuda:0", 1: "cuda:0"})
        ('nccl', 'gloo')
    """
    are_apart = len(set(devices.values())) == len(devices)
    on_gpus = all(device.startswith("cuda") for device in devices.values())
    return "nccl" if on_gpus and are_apart else "gloo"


def joined(
    file: Path,
    *,
    backend: str,
    rank: int,
    world_size: int,
    device: torch.device,
    meeting: timedelta,
    timeout: timedelta,
) -> Group:
    """Return the group of ``world_size`` processes, all of which call this with the same file.

    Once it returns, all have come, and the file has served.

    Args:
        file: Through which they find each other; not there yet, in a folder of this user alone.
        backend: "gloo" or "nccl".
        rank: Which one this is, from 0.
        world_size: How many there are.
        device: Where this one computes.
        meeting: How long one waits for the others here.
        timeout: How long in each sum.

    Raises:
        ProcessesParted: Another one has not come in time.
    """
    store = _c10d.FileStore(str(file), world_size)
    store.set_timeout(meeting)
    make = _nccl if backend == "nccl" else _gloo
    try:
        group = Group(rank, world_size, make(store, rank, world_size, timeout), device)
    except RuntimeError as error:
        raise ProcessesParted(
            f"process {rank + 1} of {world_size} did not find the others within {meeting}"
        ) from error
    group.all_reduce([torch.zeros(1, device=device)])
    return group


def _gloo(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the one way to say where it listens
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return gloo(store, rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    # A sum that takes too long is an error to be told of, not the end of the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return _c10d.ProcessGroupNCCL(store, rank, world_size, options)
