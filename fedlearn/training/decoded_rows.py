"""Rows that were decoded once, in a file without a name: any of them is then read by itself.

A row group of Parquet is decoded as a whole, which costs many times what a few of its rows are
worth. So what was decoded is written down, each tensor's rows one after another, and from then on a
client costs as many bytes as it has. The system keeps in memory what it has space for.
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

#: Of what is free where temporary files are, the most that one takes.
_MOST_OF_FREE = 0.5

log = structlog.get_logger()


class _Part(NamedTuple):
    """Where the rows of one tensor begin in the file, and what a row takes."""

    start: int
    row_bytes: int


class DecodedRows:
    """The decoded row groups of a table, among the system's temporary files (``TMPDIR``).

    The file has no name: it is gone with the last process that has it. Forked processes share it,
    and what one has decoded, the others need not.

    Args:
        offsets: Row group g has the rows offsets[g]:offsets[g + 1].
        row_bytes: What a row of each tensor takes.
    """

    def __init__(self, offsets: NDArray[np.int64], *, row_bytes: Sequence[int]) -> None:
        num_groups, num_rows = len(offsets) - 1, int(offsets[-1])
        starts = np.cumsum([0, *(num_rows * each for each in row_bytes)]).tolist()
        self._offsets = offsets
        self._parts = [_Part(*each) for each in zip(starts[:-1], row_bytes, strict=True)]
        with tempfile.TemporaryFile(prefix="fedlearn-") as file:
            self._file = PositionedFile(os.dup(file.fileno()))
        weakref.finalize(self, self._file.close).atexit = False
        free = shutil.disk_usage(tempfile.gettempdir()).free
        self._is_writable = True
        if starts[-1] > _MOST_OF_FREE * free:
            self._refuse(f"they would take {starts[-1]} of {free} bytes")
        # Whether a row group is here, a byte each. Forked processes share them, as the file.
        self._here = np.frombuffer(mmap.mmap(-1, max(1, num_groups)), np.uint8)

    def has(self, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return of each of these row groups whether it is here."""
        return self._here[groups].astype(np.bool_)

    def write(self, group: int, tensors: Sequence[Tensor]) -> None:
        """Keep a row group, unless there is no space."""
        if not self._is_writable:
            return
        first = int(self._offsets[group])
        try:
            for part, tensor in zip(self._parts, tensors, strict=True):
                self._file.write_at(_octets(tensor), part.start + first * part.row_bytes)
        except OSError as error:
            self._refuse(error.strerror or str(error))
            return
        self._here[group] = 1  # last: who sees it reads

    def read(self, first: int, tensors: Sequence[Tensor]) -> None:
        """Fill ``tensors`` with the rows from ``first``, whose row groups are here.

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
            "decoded rows are not kept on disk: row groups are decoded again and again; name a "
            "folder with more space in TMPDIR",
            folder=tempfile.gettempdir(),
            why=why,
        )


def _octets(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor whose rows lie one after another."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
