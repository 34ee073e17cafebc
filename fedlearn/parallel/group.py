"""Processes of one machine that add up through torch.distributed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedlearn.errors import ProcessesParted

# Any: torch's stubs lack the stores and the options that it has.
_c10d: Any = dist
#: Where they listen: nobody outside this machine may.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, eq=False)
class Group:
    """Processes that share a training, by gloo on CPU and NCCL on GPUs: see :func:`joined`.

    Attributes:
        rank: Which one this is, from 0.
        world_size: How many there are.
    """

    rank: int
    world_size: int
    _backend: Any  # torch's, by either name

    def all_reduce(self, values: Tensor) -> None:
        """Replace values by their sum over all processes, in place: the same bits in each.

        Raises:
            ProcessesParted: Another one is gone, or has not come in time.
        """
        try:
            self._backend.allreduce([values]).wait()
        except RuntimeError as error:
            raise ProcessesParted(
                f"process {self.rank + 1} of {self.world_size} lost another one in the middle of "
                f"a training ({type(error).__name__})"
            ) from error


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
        group = Group(rank, world_size, make(store, rank, world_size, timeout))
    except RuntimeError as error:
        raise ProcessesParted(
            f"process {rank + 1} of {world_size} did not find the others within {meeting}"
        ) from error
    group.all_reduce(torch.zeros(1, device=device))
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
