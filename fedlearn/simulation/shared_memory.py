"""A sum over forked processes, through memory that they share.

A message between processes wakes threads on both sides, which costs more than the sum
itself where rounds take milliseconds. Here each process writes its tensors where all can
read them, the processes meet, each adds up its own part for all, and they meet once more.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Bytes to which each tensor is aligned in its row.
_ALIGNMENT = 64


@dataclass(frozen=True)
class SharedTensors:
    """The same tensors in the row of each process, as vectors cut into one part a process.

    Attributes:
        like: Their sizes and dtypes, in order.
        rows: By process, then by tensor: views of the shared memory.
        parts: By tensor, then by process, then by part: views of the rows.
    """

    like: tuple[tuple[int, torch.dtype], ...]
    rows: Sequence[Sequence[Tensor]]
    parts: Sequence[Sequence[Sequence[Tensor]]]

    @classmethod
    def of(
        cls, like: tuple[tuple[int, torch.dtype], ...], rows: Sequence[Sequence[Tensor]]
    ) -> "SharedTensors":
        """Cut the rows into parts."""
        parts = [[row[i].tensor_split(len(rows)) for row in rows] for i in range(len(like))]
        return cls(like, rows, parts)

    def write(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Write ``tensors`` into the row of process ``rank``."""
        for own, tensor in zip(self.rows[rank], tensors, strict=True):
            own.copy_(tensor.flatten())

    def add_up(self, rank: int) -> None:
        """Add all rows up into the row of ``rank``, in the part that belongs to ``rank``.

        Each part is added up once, so all processes read the same sums.
        """
        for by_process in self.parts:
            own = by_process[rank][rank]
            for other, parts in enumerate(by_process):
                if other != rank:
                    own += parts[rank]

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Write the sums into ``tensors``, each part from the row of its process."""
        for tensor, by_process in zip(tensors, self.parts, strict=True):
            flat = torch.cat([parts[rank] for rank, parts in enumerate(by_process)])
            tensor.copy_(flat.view(tensor.shape))


@dataclass
class SharedRows:
    """A row of memory for each process, grown as needed; made before the processes fork.

    Attributes:
        files: Descriptor of each row's memory.
    """

    files: Sequence[int]
    _tensors: SharedTensors | None = None

    @classmethod
    def create(cls, num_rows: int) -> "SharedRows":
        """Return empty rows."""
        return cls([_memory_file() for _ in range(num_rows)])

    def tensors(self, like: Sequence[Tensor]) -> SharedTensors:
        """Return room for ``like`` in every row; all processes must ask for the same."""
        wanted = tuple((tensor.numel(), tensor.dtype) for tensor in like)
        if self._tensors is None or self._tensors.like != wanted:
            self._tensors = None  # what it maps may be smaller
            rows = [_views(file, wanted) for file in self.files]
            self._tensors = SharedTensors.of(wanted, rows)
        return self._tensors

    def close(self) -> None:
        """Give the memory back once nobody looks at it."""
        self._tensors = None
        for file in self.files:
            os.close(file)


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


def _memory_file() -> int:
    """Return a file without a name, in memory where the system offers that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedlearn")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
