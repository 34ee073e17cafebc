"""All-reduce over the processes of one machine, through shared memory.

In rounds of milliseconds, waking up threads by messages costs more than the sum itself. Here, each
process writes its tensors to memory that all can read. After a barrier, each process sums its own
part for all of them, and a second barrier follows.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

#: Alignment of each tensor in its row, in bytes.
_ALIGNMENT = 64


class SharedRows:
    """A row of shared memory for each process, grown as needed.

    All processes write tensors of the same sizes and dtypes, wait for each other, sum, wait again,
    and read.

    Args:
        num_rows: Number of processes.
        place: Path prefix of the files that all processes map, ``place-0`` and so on; ``None``:
            anonymous files, opened before the processes fork.
    """

    def __init__(self, num_rows: int, place: Path | None = None) -> None:
        self._files = [
            _open_memory_file() if place is None else _open_named_file(place, row)
            for row in range(num_rows)
        ]
        self._like: Sequence[tuple[int, torch.dtype]] | None = None
        self._rows: list[list[Tensor]] = []  # by process, then by tensor
        self._parts: list[list[Sequence[Tensor]]] = []  # by tensor, by process, then by part

    def __len__(self) -> int:
        return len(self._files)

    def write(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Write ``tensors`` into the row of process ``rank``."""
        like = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        if self._like != like:
            self._forget()  # the mapped memory may be too small
            self._like, self._rows = like, [_views(file, like) for file in self._files]
            by_tensor = zip(*self._rows, strict=True)
            self._parts = [[each.tensor_split(len(self)) for each in rows] for rows in by_tensor]
        for own, tensor in zip(self._rows[rank], tensors, strict=True):
            own.copy_(tensor.flatten())

    def add_up(self, rank: int) -> None:
        """Sum all rows into the row of ``rank``, for the part of the elements assigned to ``rank``.

        Each part is summed by one process only, so all processes read the same bits.
        """
        for by_process in self._parts:
            own = by_process[rank][rank]
            for other, parts in enumerate(by_process):
                if other != rank:
                    own += parts[rank]

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Copy the sums into ``tensors``, each part from the row of the process that summed it."""
        for tensor, by_process in zip(tensors, self._parts, strict=True):
            flat = torch.cat([parts[rank] for rank, parts in enumerate(by_process)])
            tensor.copy_(flat.view(tensor.shape))

    def close(self) -> None:
        """Close the files and drop the views; the memory is freed with its last user."""
        self._forget()
        for file in self._files:
            os.close(file)

    def _forget(self) -> None:
        self._like, self._rows, self._parts = None, [], []


def _views(file: int, like: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    offsets = [0]
    for size, dtype in like:
        end = offsets[-1] + size * dtype.itemsize
        offsets.append(end + -end % _ALIGNMENT)
    # Never shrink: a slower process may still map the larger size of the call before.
    os.truncate(file, max(1, offsets[-1], os.fstat(file).st_size))
    memory = mmap.mmap(file, max(1, offsets[-1]))
    return [
        torch.frombuffer(memory, dtype=dtype, count=size, offset=offset)
        if size
        else torch.empty(0, dtype=dtype)
        for (size, dtype), offset in zip(like, offsets, strict=False)
    ]


def _open_named_file(place: Path, row: int) -> int:
    return os.open(place.with_name(f"{place.name}-{row}"), os.O_RDWR | os.O_CREAT, 0o600)


def _open_memory_file() -> int:
    """Open an anonymous file, in memory on Linux."""
    if sys.platform == "linux":
        return os.memfd_create("fedlearn")
    else:
        # The file has no name any more; the duplicate keeps it alive when the block ends.
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
