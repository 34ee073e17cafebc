"""A sum over the processes of one machine, through memory that they share.

A message wakes threads on both sides, which costs more than the sum where rounds take
milliseconds. Here each process writes its tensors where all can read them, the processes meet,
each adds up its own part for all, and they meet once more.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

#: Bytes to which each tensor is aligned in its row.
_ALIGNMENT = 64


class SharedRows:
    """A row of memory for each process, grown as needed.

    All write tensors of the same sizes and dtypes, meet, add up, meet again, and read.

    Args:
        num_rows: Processes.
        place: Where each process opens the files that all of them map, ``place-0`` and so on;
            ``None``: files without a name, opened before the processes fork.
    """

    def __init__(self, num_rows: int, place: Path | None = None) -> None:
        self._files = [
            _memory_file() if place is None else _named_file(place, row) for row in range(num_rows)
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
            self._forget()  # what is mapped may be smaller
            self._like, self._rows = like, [_views(file, like) for file in self._files]
            by_tensor = zip(*self._rows, strict=True)
            self._parts = [[each.tensor_split(len(self)) for each in rows] for rows in by_tensor]
        for own, tensor in zip(self._rows[rank], tensors, strict=True):
            own.copy_(tensor.flatten())

    def add_up(self, rank: int) -> None:
        """Add all rows up into the row of ``rank``, in the part that belongs to ``rank``.

        Each part is added up once, so all processes read the same sums.
        """
        for by_process in self._parts:
            own = by_process[rank][rank]
            for other, parts in enumerate(by_process):
                if other != rank:
                    own += parts[rank]

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Write the sums into ``tensors``, each part from the row of its process."""
        for tensor, by_process in zip(tensors, self._parts, strict=True):
            flat = torch.cat([parts[rank] for rank, parts in enumerate(by_process)])
            tensor.copy_(flat.view(tensor.shape))

    def close(self) -> None:
        """Give the memory back once nobody looks at it."""
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
    os.truncate(file, max(1, offsets[-1], os.fstat(file).st_size))
    memory = mmap.mmap(file, max(1, offsets[-1]))
    return [
        torch.frombuffer(memory, dtype=dtype, count=size, offset=offset)
        if size
        else torch.empty(0, dtype=dtype)
        for (size, dtype), offset in zip(like, offsets, strict=False)
    ]


def _named_file(place: Path, row: int) -> int:
    return os.open(place.with_name(f"{place.name}-{row}"), os.O_RDWR | os.O_CREAT, 0o600)


def _memory_file() -> int:
    """Return a file without a name, in memory where the system offers that."""
    if sys.platform == "linux":
        return os.memfd_create("fedlearn")
    else:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
