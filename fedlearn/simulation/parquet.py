"""Clients whose examples are in Parquet files, which may be larger than memory.

Rows are grouped by client, so that each client is a range of rows. Only an index of the client
column stays in memory; examples are read on demand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
import torch
from numpy.typing import NDArray

from fedlearn.core.features import Inputs, list_tensors, rebuild_inputs
from fedlearn.errors import DataError
from fedlearn.simulation.partition import offsets_of, require_ids
from fedlearn.simulation.population import (
    ClientRows,
    check_examples,
    owner_at,
    places_of,
    row_name,
    sizes_of,
)
from fedlearn.simulation.sources import Examples, classes_up_to
from fedlearn.training.tables import ExampleColumns, RowGroup, RowGroups, Table, columns_of_file


@dataclass(frozen=True, kw_only=True)
class TableColumns(ExampleColumns):
    """The columns of a table: features, label, and client.

    Attributes:
        client: Name of the column with the client of each example: integers or strings.
    """

    client: str

    @classmethod
    def of_file(
        cls, path: Path, *, client: str, label: str, features: Inputs[Sequence[str]] | None
    ) -> Self:
        """Find the columns of a file, with shapes and dtypes from its schema.

        See :func:`~fedlearn.training.tables.columns_of_file`.

        Args:
            path: A Parquet file, or a folder of them, of which the first is read.
            client: Name of the client column.
            label: Name of the label column.
            features: Names of the feature columns, or of those of each input; ``None``: all
                columns that have no other role.

        Raises:
            DataError: There is no such file, it is not Parquet, or it lacks a column.
            ValueError: An input has no column.
        """
        found = columns_of_file(path, label=label, features=features, others=[client])
        return cls(client=client, features=found.features, label=label)


class ParquetPopulation:
    """Clients whose examples stream from Parquet files, which may be larger than memory.

    The rows are grouped by client. Clients are numbered in order of appearance, with files in
    the order of their names. Memory holds an index of the client column, the examples of
    the loaded clients, and the most recently used row groups, up to ``cache_bytes``. A row group is
    decoded as a whole, so write small ones (``row_group_size=10_000``). Decoded row groups are also
    kept in temporary files if there is space, so that each is decoded once.

    Args:
        path: A Parquet file, or a folder of ``*.parquet`` files.
        columns: The columns of features, label and client.
        num_classes: Labels are below it; ``None`` if they are not classes.
        cache_bytes: Most bytes of decoded row groups to keep in memory.

    Raises:
        DataError: There is no such file, it is not Parquet, a column is missing or of
            another type, or the rows are not grouped by client.
    """

    def __init__(
        self, path: Path, *, columns: TableColumns, num_classes: int | None, cache_bytes: int
    ) -> None:
        table = Table.at(path, columns)
        self._columns, self._num_classes = columns, num_classes
        self._index = _index_clients(table, client=columns.client)
        self._rows = RowGroups(
            table, groups=self._index.groups, cache_bytes=cache_bytes, keeps_decoded=True
        )

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self._index.offsets.size - 1

    @property
    def names(self) -> NDArray[Any]:
        """The clients' values in the client column, by number: shape [C]."""
        names: NDArray[Any] = self._index.names.to_numpy(zero_copy_only=False)
        return names

    def name_of(self, client_id: int) -> int | str:
        """Return the client's value in the client column."""
        name: int | str = self._index.names[client_id].as_py()
        return name

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return sizes_of(self._index.offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Read the examples of these clients.

        Raises:
            DataError: The files changed or are damaged, a value is missing or not finite, or
                a label is out of range.
        """
        rows, offsets = places_of(self._index.offsets, client_ids=client_ids)
        features, labels = self._rows.take(rows)

        def place(at: int) -> str:
            owner = owner_at(at, offsets=offsets, client_ids=client_ids)
            name = f"{self._columns.client} {self.name_of(owner)!r}"
            return f"{row_name(int(rows[at]), client=f'client {owner}')} ({name})"

        check_examples(features, labels=labels, num_classes=self._num_classes, place=place)
        return ClientRows(features, labels, np.arange(rows.size), offsets)


def read_parquet(path: Path, *, columns: TableColumns, client: str | None = None) -> Examples:
    """Read all examples of a Parquet file or a folder of them into memory, as a test set.

    Integer labels are classes.

    Args:
        path: The file or folder.
        columns: The columns of features and label. The client column in them may be absent.
        client: Column with the client of each row; ``None``: none is read.

    Raises:
        DataError: There is no such file, it is not Parquet or has no rows, a column is
            missing or of another type, a value is missing or not finite, or a label is
            negative.
    """
    table = Table.at(path, columns)
    groups = table.row_groups(columns.names)
    chunks = [table.decode(rows, place=str(group)) for group, rows in groups]
    table.require_rows(len(chunks))
    inputs = zip(*(list_tensors(chunk.features) for chunk in chunks), strict=True)
    return Examples.of(
        features=rebuild_inputs([torch.cat(parts) for parts in inputs], like=columns.features),
        labels=torch.cat([chunk.labels for chunk in chunks]),
        groups=None if client is None else _read_clients(table, client=client),
    )


def _read_clients(table: Table, *, client: str) -> NDArray[Any]:
    """Return the client of each row, in the order of the rows: shape [N]."""
    parts = [rows.column(0) for _, rows in table.row_groups([client])]
    listed = [each for part in parts for each in part.to_pylist()]
    return require_ids(listed, num_examples=len(listed))


def num_classes_in(path: Path, *, columns: TableColumns) -> int | None:
    """Return one more than the largest label; ``None`` if labels are not integers.

    The label column is read one row group at a time.

    Raises:
        DataError: There is no such file, it is not Parquet or has no labels, or a column is
            missing or of another type.
    """
    table = Table.at(path, columns)
    if table.label_dtype != torch.int64:
        return None
    groups = table.row_groups([columns.label])
    maxima = [pc.max(rows.column(0)).as_py() for _, rows in groups]
    largest: list[int] = [label for label in maxima if label is not None]
    table.require_rows(len(largest))
    return classes_up_to(max(largest))


class _ClientIndex(NamedTuple):
    """Maps each client to its range of rows, counted over all files."""

    offsets: NDArray[np.int64]  # client c has rows offsets[c]:offsets[c + 1]
    names: Any  # what the files call the clients: an array of pyarrow, which has no types
    groups: list[RowGroup]


def _index_clients(table: Table, *, client: str) -> _ClientIndex:
    runs, sizes, groups = [], [], []
    for group, rows in table.row_groups([client]):
        names, lengths = _find_runs(rows.column(0), column=client, path=group.path)
        runs.append(names)
        sizes.append(lengths)
        groups.append(group)
    table.require_rows(len(groups))
    kinds = sorted({str(names.type) for names in runs})
    if len(kinds) > 1:
        raise DataError(
            f"client column {client!r} is {' here and '.join(kinds)} there; write "
            "the same type in all files"
        )
    names, lengths = _join_runs(pa.concat_arrays(runs), np.concatenate(sizes))
    _require_grouped(names, column=client)
    return _ClientIndex(offsets_of(lengths), names, groups)


def _find_runs(clients: Any, *, column: str, path: Path) -> tuple[Any, NDArray[np.int64]]:
    """Find runs of consecutive rows of one client: the client of each run, and its length."""
    if pt.is_dictionary(clients.type):
        # Each row group of a dictionary column has its own codes, which do not compare across
        # groups.
        clients = clients.cast(clients.type.value_type)
    text = pt.is_string(clients.type) or pt.is_large_string(clients.type)
    if clients.null_count or not (text or pt.is_integer(clients.type)):
        raise DataError(
            f"{path}: client column {column!r} is {clients.type} with {clients.null_count} "
            "missing; every row needs an integer or a string"
        )
    clients = clients.cast(pa.large_string() if text else pa.int64())
    encoded = pc.run_end_encode(clients.combine_chunks(), run_end_type=pa.int64())
    return encoded.values, np.diff(encoded.run_ends.to_numpy(), prepend=0)


def _join_runs(names: Any, lengths: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """Join runs of one client that continue in the next row group."""
    # A row group may end in the middle of a client's rows.
    changes = pc.not_equal(names.slice(1), names.slice(0, len(names) - 1))
    starts = np.concatenate([[0], np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1])
    return names.take(starts), np.add.reduceat(lengths, starts)


def _require_grouped(names: Any, *, column: str) -> None:
    # Each run is one client by now, so a name that occurs twice has rows in two places.
    if pc.count_distinct(names).as_py() == len(names):
        return
    counts = pc.value_counts(names)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"].as_py()
    raise DataError(
        f"the rows are not grouped by client: {column!r} {repeated!r} appears in several places; "
        f"sort first, e.g. `table.sort_by({column!r})` in pyarrow, and write with a small "
        "`row_group_size`"
    )
