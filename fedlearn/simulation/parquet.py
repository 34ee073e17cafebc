"""Clients whose examples lie in Parquet files, which may be larger than memory.

Rows are grouped by client, so that a client is a range of them. All that is known of the training
files is an index of their client column; examples are read when they are asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.features import Features, Inputs, mapped, named, rebuilt, tensors_of
from fedlearn.errors import DataError
from fedlearn.simulation.partition import offsets_of
from fedlearn.simulation.population import (
    ClientRows,
    check_examples,
    owner_at,
    places_of,
    row_name,
    sizes_of,
)
from fedlearn.simulation.sources import Examples


@dataclass(frozen=True, kw_only=True)
class InputColumns:
    """The columns that make one input of a model.

    Attributes:
        names: Columns of numbers or of fixed-size lists of numbers, laid side by side.
        shape: Shape of one example; the columns hold as many numbers.
        dtype: What they become, e.g. ``torch.float32``; ``torch.int64`` for tokens,
            ``torch.bool`` for a mask.

    Raises:
        ValueError: No column is named.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("no feature column is named; name at least one")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table hold what.

    Attributes:
        client: Who an example belongs to: integers or strings.
        features: The columns of the features, or of each input.
        label: A number: integers for classes.
    """

    client: str
    features: Inputs[InputColumns]
    label: str

    @property
    def inputs(self) -> Sequence[InputColumns]:
        """The columns of each input, in the order of its tensors."""
        return list(named(self.features).values())

    @classmethod
    def of_file(
        cls, path: Path, *, client: str, label: str, features: Inputs[Sequence[str]] | None
    ) -> Self:
        """Return the columns of a file, with the shape and dtype that its schema tells.

        One feature column keeps its shape, that of nested lists included; several become
        one vector. Features that are all integers become int64, else float32; one of several
        inputs whose columns are all boolean is a mask.

        Args:
            path: A Parquet file, or a folder of them whose first is looked at.
            client: As above.
            label: As above.
            features: Columns, or those of each input; ``None``: all that have no other role.

        Raises:
            DataError: There is no such file, it is not Parquet, or it lacks a column.
            ValueError: An input has no column.
        """
        first = _parquet_files(path)[0]
        with _opened(first) as file:
            schema = file.schema_arrow
        groups = _groups(_free_columns(schema, {client, label}) if features is None else features)
        if not groups:
            raise DataError(f"{first} has no column for features; it has {schema.names}")
        names = [name for group in named(groups).values() for name in group]
        _require_columns(schema, [client, label, *names], path=first)
        of_schema = partial(_input_columns, schema, is_only=isinstance(groups, list))
        return cls(client=client, features=mapped(of_schema, groups), label=label)


def _input_columns(
    schema: Any,  # pyarrow has no types
    names: Sequence[str],
    *,
    is_only: bool,
) -> InputColumns:
    """Return the columns with the shape and dtype of the schema; a mask is not the only input."""
    kinds = [schema.field(name).type for name in names]
    shapes, numbers = [_shape(kind) for kind in kinds], [_number(kind) for kind in kinds]
    dtype = torch.int64 if all(map(pt.is_integer, numbers)) else torch.float32
    width = sum(torch.Size(shape).numel() for shape in shapes)
    return InputColumns(
        names=tuple(names),
        shape=shapes[0] or (1,) if len(names) == 1 else (width,),
        dtype=torch.bool if not is_only and all(map(pt.is_boolean, numbers)) else dtype,
    )


class ParquetPopulation:
    """Clients whose examples stream from Parquet files larger than memory.

    The rows are grouped by client; clients are numbered in order of appearance, files in
    the order of their names. Memory holds an index of the client column, the examples of
    the clients asked, and the row groups used last, up to ``cache_bytes``: write small row
    groups (``row_group_size=10_000``), since a row group is read as a whole.

    Args:
        path: A Parquet file, or a folder of ``*.parquet`` files.
        columns: Which columns hold what.
        num_classes: Labels lie below it; ``None`` where they are not classes.
        cache_bytes: Most bytes of decoded row groups to keep.

    Raises:
        DataError: There is no such file, it is not Parquet, a column is missing or of
            another type, or the rows are not grouped by client.
    """

    def __init__(
        self, path: Path, *, columns: Columns, num_classes: int | None, cache_bytes: int
    ) -> None:
        self._table = _Table.at(path, columns)
        self._num_classes = num_classes
        self._index = _index_clients(self._table)
        self._max_bytes, self._num_bytes = cache_bytes, 0
        self._chunks: dict[int, _Chunk] = {}  # the one used last is last

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self._index.offsets.size - 1

    def name_of(self, client_id: int) -> int | str:
        """Return what the client column calls this client."""
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
        columns, index = self._table.columns, self._index
        features = mapped(
            lambda each: torch.empty(rows.size, *each.shape, dtype=each.dtype), columns.features
        )
        labels = torch.empty(rows.size, dtype=self._table.label_dtype)
        groups = np.searchsorted(index.group_offsets, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            chunk = self._chunk(group)
            here = np.flatnonzero(groups == group)
            inside = torch.from_numpy(rows[here] - index.group_offsets[group])
            for whole, part in zip(tensors_of(features), tensors_of(chunk.features), strict=True):
                whole[torch.from_numpy(here)] = part[inside]
            labels[torch.from_numpy(here)] = chunk.labels[inside]

        def place(at: int) -> str:
            owner = owner_at(at, offsets=offsets, client_ids=client_ids)
            name = f"{columns.client} {self.name_of(owner)!r}"
            return f"{row_name(int(rows[at]), owner=owner)} ({name})"

        check_examples(features, labels=labels, num_classes=self._num_classes, place=place)
        return ClientRows(features, labels, np.arange(rows.size), offsets)

    def _chunk(self, group: int) -> "_Chunk":
        """Return a row group: one of those used last, or read now."""
        chunk = self._chunks.pop(group, None)
        if chunk is None:
            chunk = self._table.read(*self._index.groups[group])
            if chunk.num_bytes > self._max_bytes:
                return chunk
            self._num_bytes += chunk.num_bytes
        self._chunks[group] = chunk
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._chunks.pop(next(iter(self._chunks))).num_bytes
        return chunk


def read_parquet(path: Path, *, columns: Columns) -> Examples:
    """Return all examples of a Parquet file or a folder of them, in memory: a test set.

    The client column is not read and may be absent. Integer labels are classes.

    Raises:
        DataError: There is no such file, it is not Parquet or has no rows, a column is
            missing or of another type, a value is missing or not finite, or a label is
            negative.
    """
    table = _Table.at(path, columns)
    groups = table.row_groups(table.example_columns)
    chunks = [table.decoded(rows, path=file) for file, _, rows in groups]
    table.require_rows(len(chunks))
    inputs = zip(*(tensors_of(chunk.features) for chunk in chunks), strict=True)
    return Examples.of(
        features=rebuilt([torch.cat(parts) for parts in inputs], like=columns.features),
        labels=torch.cat([chunk.labels for chunk in chunks]),
    )


def num_classes_in(path: Path, *, columns: Columns) -> int | None:
    """Return one more than the largest label; ``None`` where labels are no integers.

    The label column is read a piece at a time.

    Raises:
        DataError: There is no such file, it is not Parquet or has no labels, or a column is
            missing or of another type.
    """
    table = _Table.at(path, columns)
    if table.label_dtype != torch.int64:
        return None
    groups = table.row_groups([columns.label])
    pieces = [pc.max(rows.column(0)).as_py() for _, _, rows in groups]
    largest: list[int] = [label for label in pieces if label is not None]
    table.require_rows(len(largest))
    return max(largest) + 1


class _Chunk(NamedTuple):
    """A decoded row group."""

    features: Features
    labels: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(self.features)) + self.labels.nbytes


class _ClientIndex(NamedTuple):
    """Where each client's rows are, counted over all files."""

    offsets: NDArray[np.int64]  # client c has rows offsets[c]:offsets[c + 1]
    names: Any  # what the files call the clients: an array of pyarrow, which has no types
    group_offsets: NDArray[np.int64]  # row group g has rows group_offsets[g]:group_offsets[g + 1]
    groups: list[tuple[Path, int]]  # the file of each row group, and its number there


@dataclass(frozen=True)
class _Table:
    """Parquet files as one table."""

    files: Sequence[Path]  # in the order of their rows
    columns: Columns
    label_dtype: torch.dtype  # int64 if labels are integers in all files, else float32

    @classmethod
    def at(cls, path: Path, columns: Columns) -> Self:
        """Return the table, if all files have the columns."""
        files, dtypes = _parquet_files(path), set()
        for each in files:
            with _opened(each) as file:
                dtypes.add(_check_schema(file.schema_arrow, columns=columns, path=each))
        return cls(files, columns, torch.int64 if dtypes == {torch.int64} else torch.float32)

    @property
    def example_columns(self) -> list[str]:
        """The columns of features and of the label, each once."""
        names = (name for each in self.columns.inputs for name in each.names)
        return list(dict.fromkeys([*names, self.columns.label]))

    def row_groups(self, names: list[str]) -> Iterator[tuple[Path, int, Any]]:
        """Yield the file, the number and these columns of each row group that has rows."""
        for path in self.files:
            with _opened(path) as file:
                _require_columns(file.schema_arrow, names, path=path)
                for group in range(file.num_row_groups):
                    rows = file.read_row_group(group, columns=names)
                    if len(rows):
                        yield path, group, rows

    def read(self, path: Path, group: int) -> _Chunk:
        """Read the examples of a row group."""
        with _opened(path) as file:
            rows = file.read_row_group(group, columns=self.example_columns)
        return self.decoded(rows, path=path)

    def decoded(self, rows: Any, *, path: Path) -> _Chunk:
        """Return what rows of the example columns hold."""
        labels = _numbers(rows, self.columns.label, path=path)
        return _Chunk(
            mapped(lambda each: _input(rows, each, path=path), self.columns.features),
            torch.tensor(labels, dtype=self.label_dtype),
        )

    def require_rows(self, num_rows: int) -> None:
        """Refuse a table without rows."""
        if not num_rows:
            raise DataError(f"{self.files[0]} and its neighbours have no rows; write some examples")


def _parquet_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.parquet"))
    if not files:
        what = "no *.parquet file in the folder" if path.is_dir() else "no file or folder"
        raise DataError(f"{what} {path}; name a Parquet file or a folder of them")
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:  # pyarrow has no types
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}; write it again") from error


def _free_columns(schema: Any, taken: set[str]) -> list[str]:
    """Return the columns without a role: not those taken, nor the index that pandas adds."""
    index = (schema.pandas_metadata or {}).get("index_columns", ())
    return [name for name in schema.names if name not in taken and name not in index]


def _groups(features: Inputs[Sequence[str]]) -> Inputs[Sequence[str]]:
    """Return the columns of each input; names alone, in a list or a tuple, are those of one."""
    if isinstance(features, Mapping):
        return features
    names = [each for each in features if isinstance(each, str)]
    return names if len(names) == len(features) else tuple(features)


def _require_columns(schema: Any, names: Sequence[str], *, path: Path) -> None:
    for name in names:
        if name not in schema.names:
            raise DataError(f"{path} has no column {name!r}; it has {schema.names}")


def _shape(kind: Any) -> tuple[int, ...]:
    """Return the shape of one value of a column: () for a number."""
    if not pt.is_fixed_size_list(kind):
        return ()
    return (kind.list_size, *_shape(kind.value_type))


def _number(kind: Any) -> Any:
    """Return the type of what a column, or the lists in it, hold."""
    return _number(kind.value_type) if pt.is_fixed_size_list(kind) else kind


def _index_clients(table: _Table) -> _ClientIndex:
    runs, sizes, groups, group_sizes = [], [], [], []
    for path, group, rows in table.row_groups([table.columns.client]):
        names, lengths = _runs(rows.column(0), column=table.columns.client, path=path)
        runs.append(names)
        sizes.append(lengths)
        groups.append((path, group))
        group_sizes.append(len(rows))
    table.require_rows(len(groups))
    kinds = sorted({str(names.type) for names in runs})
    if len(kinds) > 1:
        raise DataError(
            f"client column {table.columns.client!r} is {' here and '.join(kinds)} there; write "
            "the same type in all files"
        )
    names, lengths = _joined(pa.concat_arrays(runs), np.concatenate(sizes))
    _require_grouped(names, column=table.columns.client)
    return _ClientIndex(offsets_of(lengths), names, offsets_of(group_sizes), groups)


def _check_schema(schema: Any, *, columns: Columns, path: Path) -> torch.dtype:
    """Return the dtype of labels, or refuse the file."""
    for each in columns.inputs:
        _require_columns(schema, [*each.names, columns.label], path=path)
        _check_input(schema, each, path=path)
    label = schema.field(columns.label).type
    if not (pt.is_integer(label) or pt.is_floating(label)):
        raise DataError(f"{path}: label column {columns.label!r} is {label}; cast it to numbers")
    return torch.int64 if pt.is_integer(label) else torch.float32


def _check_input(schema: Any, columns: InputColumns, *, path: Path) -> None:
    width, expected = 0, torch.Size(columns.shape).numel()
    for name in columns.names:
        kind = schema.field(name).type
        number, width = _number(kind), width + torch.Size(_shape(kind)).numel()
        is_mask = columns.dtype == torch.bool
        if is_mask != pt.is_boolean(number) or not (
            is_mask or pt.is_integer(number) or pt.is_floating(number)
        ):
            raise DataError(
                f"{path}: feature column {name!r} is {kind}; cast it to numbers or to "
                "fixed-size lists of numbers, or name the feature columns without it"
            )
        if pt.is_floating(number) and not columns.dtype.is_floating_point:
            raise DataError(
                f"{path}: feature column {name!r} is {kind}, which {columns.dtype} would "
                "round; write the same type in all files"
            )
    if width != expected:
        raise DataError(
            f"{path}: {list(columns.names)} hold {width} numbers an example, "
            f"the shape {columns.shape} has {expected}; change either"
        )


def _runs(clients: Any, *, column: str, path: Path) -> tuple[Any, NDArray[np.int64]]:
    """Return the client of each run of equal clients, and the run lengths."""
    if pt.is_dictionary(clients.type):
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


def _joined(names: Any, lengths: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """Join runs of one client that meet at the border of two row groups."""
    changes = pc.not_equal(names.slice(1), names.slice(0, len(names) - 1))
    starts = np.concatenate([[0], np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1])
    return names.take(starts), np.add.reduceat(lengths, starts)


def _require_grouped(names: Any, *, column: str) -> None:
    if pc.count_distinct(names).as_py() == len(names):
        return
    counts = pc.value_counts(names)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"].as_py()
    raise DataError(
        f"the rows are not grouped by client: {column!r} {repeated!r} appears in several places; "
        f"sort first, e.g. `table.sort_by({column!r})` in pyarrow, and write with a small "
        "`row_group_size`"
    )


def _input(table: Any, columns: InputColumns, *, path: Path) -> Tensor:
    parts = [_numbers(table, name, path=path).reshape(len(table), -1) for name in columns.names]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return torch.tensor(numbers, dtype=columns.dtype).reshape(len(table), *columns.shape)


def _numbers(table: Any, name: str, *, path: Path) -> NDArray[Any]:
    """Return all numbers of a column, those of lists one after another."""
    values = table.column(name).combine_chunks()
    while pt.is_fixed_size_list(values.type) and not values.null_count:
        values = values.flatten()
    if values.null_count:
        raise DataError(f"{path}: column {name!r} has missing values; fill or drop them")
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return numbers
