"""A disk cache of decoded table rows, so that a few rows can be read without their row group.

Parquet decodes a row group as a whole, which is wasteful when a client owns only a few of its
rows. Decoded row groups are therefore written to an unnamed temporary file, the rows of each tensor
contiguous, and later reads cost only the bytes of the rows they want. The operating system's page
cache holds as much of the file as fits in memory.
"""

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from errno import EIO
from typing import NamedTuple

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.positioned import PositionedFile

#: Largest share of the free space in the temporary folder that one cache may take.
_MOST_OF_FREE = 0.5

log = structlog.get_logger()


class _Part(NamedTuple):
    """Where the rows of one tensor start in the file, and the bytes of each row."""

    start: int
    row_bytes: int


class DecodedRows:
    """The decoded row groups of a table, in an unnamed file in the temporary folder (``TMPDIR``).

    The file disappears when the last process that has it open exits. Forked processes share it, so
    a row group that one process has decoded is available to the others.

    Args:
        offsets: Row group g has the rows offsets[g]:offsets[g + 1].
        row_bytes: Bytes of one row, for each tensor.
    """

    def __init__(self, offsets: NDArray[np.int64], *, row_bytes: Sequence[int]) -> None:
        num_groups, num_rows = len(offsets) - 1, int(offsets[-1])
        starts = np.cumsum([0, *(num_rows * each for each in row_bytes)]).tolist()
        self._offsets = offsets
        self._parts = [_Part(*each) for each in zip(starts[:-1], row_bytes, strict=True)]
        with tempfile.TemporaryFile(prefix="fedlearn-") as file:
            # The file has no name; the duplicate keeps it alive after the block.
            self._file = PositionedFile(os.dup(file.fileno()))
        weakref.finalize(self, self._file.close).atexit = False
        free = shutil.disk_usage(tempfile.gettempdir()).free
        self._is_writable = True
        if starts[-1] > _MOST_OF_FREE * free:
            self._refuse(f"they would take {starts[-1]} bytes, and {free} are free")
        # One byte per row group: whether it is in the file. The mapping is anonymous and shared,
        # so forked processes see each other's writes, as they do in the file.
        self._here = np.frombuffer(mmap.mmap(-1, max(1, num_groups)), np.uint8)

    def has(self, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for each of these row groups whether it is in the file."""
        return self._here[groups].astype(np.bool_)

    def write(self, group: int, tensors: Sequence[Tensor]) -> None:
        """Add a row group to the file; do nothing if there is no space."""
        if not self._is_writable:
            return
        first = int(self._offsets[group])
        try:
            for part, tensor in zip(self._parts, tensors, strict=True):
                self._file.write_at(_octets(tensor), part.start + first * part.row_bytes)
        except OSError as error:
            self._refuse(error.strerror or str(error))
            return
        self._here[group] = 1  # only after the data: other processes read as soon as they see it

    def read(self, first: int, tensors: Sequence[Tensor]) -> None:
        """Fill ``tensors`` with consecutive rows, whose row groups must be in the file.

        Args:
            first: Number of the first row to read.
            tensors: One for each tensor of a row; as many rows are read as they have.

        Raises:
            OSError: The disk fails.
        """
        for part, tensor in zip(self._parts, tensors, strict=True):
            try:
                self._file.read_into(_octets(tensor), part.start + first * part.row_bytes)
            except EOFError as error:
                raise OSError(
                    EIO, "a temporary file is shorter than what was written to it"
                ) from error

    def _refuse(self, why: str) -> None:
        self._is_writable = False
        log.warning(
            "decoded rows are not kept on disk, so row groups are decoded each time; set TMPDIR "
            "to a folder with more space",
            folder=tempfile.gettempdir(),
            why=why,
        )


def _octets(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory as bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
