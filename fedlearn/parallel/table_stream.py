"""A stream of examples in Parquet or Arrow files, which may be larger than memory.

Each pass visits the row groups in a new order, and shuffles rows within windows of several row
groups. The row at a position is computed from the seed and the sizes of the row groups alone, so
any position can be read without reading those before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import doc
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.features import Features, Inputs, name_inputs, require_finite
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Count, Ranged
from fedlearn.parallel.streams import LastUsed
from fedlearn.training.tables import RowGroup, RowGroups, Rows, Table, columns_of_file


@dataclass(frozen=True, kw_only=True)
class TableFiles(Ranged):
    """Examples in Parquet or Arrow files."""

    path: Annotated[
        Path,
        doc(
            "A file, or a folder of ``*.parquet``, ``*.arrow`` and ``*.feather`` files, in the "
            "order of their names."
        ),
    ]
    label_column: Annotated[
        str, doc("Column with the labels: integers for classes, or other numbers.")
    ]
    feature_columns: Annotated[
        Inputs[Sequence[str]] | None,
        doc(
            "Columns of numbers or of fixed-size lists of them, which are concatenated; not set: "
            "all but the label. A tuple of such lists are the positional, a dict the keyword "
            "arguments of the model's forward."
        ),
    ]
    window_bytes: Annotated[
        Count,
        doc(
            "Size of the window that is shuffled and held in memory by a reader, in bytes of "
            "decoded examples; at least one row group."
        ),
    ]

    def stream(self, *, seed: Seed) -> "TableStream":
        """Open the files as a stream that is shuffled with this seed.

        Raises:
            DataError: As :class:`TableStream`, or no column is left for features.
        """
        columns = columns_of_file(self.path, label=self.label_column, features=self.feature_columns)
        table = Table.at(self.path, columns)
        return TableStream(table, window_bytes=self.window_bytes, seed=seed)


class TableStream:
    """All rows of a table in a new order in each pass, shuffled within windows of row groups.

    Only the sizes of row groups, and the decoded row groups of one window, are in memory. A table
    that fits into one window is shuffled as a whole, and read only once.

    Args:
        table: The files.
        window_bytes: How much is shuffled together, in bytes of decoded examples, >= 1. A window
            contains the row groups that start inside it, so at least one.
        seed: Seed of the orders.

    Raises:
        DataError: A file cannot be read, or there are no rows.
    """

    def __init__(self, table: Table, *, window_bytes: int, seed: Seed) -> None:
        groups = table.sizes()
        table.require_rows(len(groups))
        largest = max(group.num_rows for group in groups) * table.row_bytes
        # A window contains the row groups that start inside it, so the last one may reach beyond
        # it.
        self._rows = RowGroups(
            table, groups=groups, cache_bytes=window_bytes + largest, check=_require_finite
        )
        self._window_rows, self._seed = max(1, window_bytes // table.row_bytes), seed
        self._orders, self._shuffled = LastUsed(self._order), LastUsed(self._shuffle)

    def __len__(self) -> int:
        return int(self._rows.offsets[-1])

    def batch(self, positions: range) -> tuple[Features, Tensor]:
        """Return the examples at these positions.

        Raises:
            DataError: The files changed or are damaged, or a value is missing or not finite.
        """
        return self.examples(np.arange(positions.start, positions.stop))

    def window(self, position: int) -> range:
        """Return the window around a position: positions whose rows share the same row groups."""
        number, place = divmod(position, len(self))
        starts = self._orders[number].starts
        window = int(np.searchsorted(starts, place, side="right")) - 1
        first = number * len(self)
        return range(first + int(starts[window]), first + int(starts[window + 1]))

    def examples(self, positions: NDArray[np.int64]) -> tuple[Features, Tensor]:
        """Return the examples at these positions, which must be in ascending order.

        Raises:
            DataError: As :meth:`batch`.
        """
        parts, rest = [], positions
        while rest.size:
            window = self.window(int(rest[0]))
            inside, rest = np.split(rest, [np.searchsorted(rest, window.stop)])
            parts.append(self._shuffled[window.start][inside - window.start])
        return self._rows.take(np.concatenate(parts))

    def _order(self, number: int) -> "_Order":
        offsets = self._rows.offsets
        groups = self._seed.derive("pass", number).numpy().permutation(offsets.size - 1)
        ends = np.cumsum(np.diff(offsets)[groups])
        begins = np.concatenate([[0], ends[:-1]])
        # A row group belongs to the window in which it starts.
        _, firsts = np.unique(begins // self._window_rows, return_index=True)
        return _Order(groups, np.append(firsts, groups.size), np.append(begins[firsts], ends[-1]))

    def _shuffle(self, position: int) -> NDArray[np.int64]:
        """Return the rows of the window that begins at a position, in shuffled order."""
        number, place = divmod(position, len(self))
        order, offsets = self._orders[number], self._rows.offsets
        window = int(np.searchsorted(order.starts, place))
        groups = order.groups[slice(*order.firsts[window : window + 2])]
        rows = np.concatenate([np.arange(offsets[each], offsets[each + 1]) for each in groups])
        seed = self._seed.derive("pass", number, "window", window)
        return rows[seed.numpy().permutation(rows.size)]


class _Order(NamedTuple):
    """The order of the row groups in a pass, and its division into windows."""

    groups: NDArray[np.int64]  # numbers of the row groups, in order
    firsts: NDArray[np.int64]  # of each window, its first entry in `groups`; last, the end
    starts: NDArray[np.int64]  # of each window, its first place in the pass; last, the end


def _require_finite(group: RowGroup, rows: Rows) -> None:
    def place(at: int) -> str:
        return f"{group}, row {at} of it"

    for name, tensor in name_inputs(rows.features).items():
        what = "feature" if tensor is rows.features else f"value of {name}"
        require_finite(tensor, what=what, place=place)
    require_finite(rows.labels, what="label", place=place)
