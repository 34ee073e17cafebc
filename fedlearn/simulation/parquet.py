"""Clients whose examples lie in Parquet files, which may be larger than memory.

The rows are grouped by client, so that a client is a range of rows. Everything known of the
training files is an index of their client column; examples are read when they are asked for.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from fedlearn.errors import DataError
from fedlearn.simulation.population import (
    ClientRows,
    check_examples,
    offsets_of,
    owner_at,
    places_of,
    row_name,
    sizes_of,
)
from fedlearn.simulation.sources import Examples, num_classes_of


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table hold what.

    Attributes:
        client: Who an example belongs to: integers or strings.
        features: Columns of numbers or of fixed-size lists of numbers, laid side by side.
        label: A number: integers for classes.
        feature_shape: Shape of one example's features; the columns hold as many numbers.
        feature_dtype: What features become, e.g. ``torch.float32``; ``torch.int64`` for
            tokens.

    Raises:
        ValueError: No feature column is named, or the dtype is not a real number's.
    """

    client: str
    features: Sequence[str]
    label: str
    feature_shape: tuple[int, ...]
    feature_dtype: torch.dtype

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("no feature column is named; name at least one")
        if self.feature_dtype.is_complex or self.feature_dtype == torch.bool:
            raise ValueError(f"feature_dtype is {self.feature_dtype}; it is a real number's")

    @classmethod
    def of_file(
        cls, path: Path, *, client: str, label: str, features: Sequence[str] | None
    ) -> Self:
        """Return the columns of a file, with the shape and dtype that its schema tells.

        One feature column keeps its shape, that of nested lists included; several become
        one vector. Features that are all integers become int64, else float32.

        Args:
            path: A Parquet file, or a folder of them whose first is looked at.
            client: Column that says whose an example is.
            label: Column of labels.
            features: Columns of features; ``None`` takes all that have no other role.

        Raises:
            DataError: There is no such file, it is not Parquet, or it lacks a column.
        """
        first = _parquet_files(path)[0]
        with _opened(first) as file:
            schema = file.schema_arrow
        names = _free_columns(schema, {client, label}) if features is None else list(features)
        if not names:
            raise DataError(f"{first} has no column for features; it has {schema.names}")
        _require_columns(schema, [client, label, *names], path=first)
        shapes = [_shape(schema.field(name).type) for name in names]
        numbers = [_number(schema.field(name).type) for name in names]
        width = sum(torch.Size(shape).numel() for shape in shapes)
        return cls(
            client=client,
            features=tuple(names),
            label=label,
            feature_shape=shapes[0] or (1,) if len(names) == 1 else (width,),
            feature_dtype=torch.int64 if all(map(pt.is_integer, numbers)) else torch.float32,
        )

    @property
    def width(self) -> int:
        """Numbers in one example's features."""
        return torch.Size(self.feature_shape).numel()


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
        cache_bytes: Most bytes of decoded row groups to keep; 0 keeps none.

    Raises:
        DataError: There is no such file, it is not Parquet, a column is missing or of
            another type, or the rows are not grouped by client.
    """

    def __init__(
        self, path: Path, *, columns: Columns, num_classes: int | None, cache_bytes: int
    ) -> None:
        self._columns = columns
        self._num_classes = num_classes
        self._files = _parquet_files(path)
        self._index = _index_clients(self._files, columns=columns)
        self._cache = _RowGroupCache(cache_bytes)

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
        shape, dtype = self._columns.feature_shape, self._columns.feature_dtype
        features = torch.empty(rows.size, *shape, dtype=dtype)
        labels = torch.empty(rows.size, dtype=self._index.label_dtype)
        groups = np.searchsorted(self._index.group_offsets, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            chunk = self._cache.get(group, read=self._read)
            here = np.flatnonzero(groups == group)
            inside = torch.from_numpy(rows[here] - self._index.group_offsets[group])
            features[torch.from_numpy(here)] = chunk.features[inside]
            labels[torch.from_numpy(here)] = chunk.labels[inside]

        def place(at: int) -> str:
            owner = owner_at(at, offsets=offsets, client_ids=client_ids)
            name = f"{self._columns.client} {self.name_of(owner)!r}"
            return f"{row_name(int(rows[at]), owner=owner)} ({name})"

        check_examples(features, labels=labels, num_classes=self._num_classes, place=place)
        return ClientRows(features, labels, np.arange(rows.size), offsets)

    def _read(self, group: int) -> "_Chunk":
        file_num, group_in_file = self._index.groups[group]
        return _read_row_group(
            self._files[file_num],
            group=group_in_file,
            columns=self._columns,
            label_dtype=self._index.label_dtype,
        )


def read_parquet(path: Path, *, columns: Columns) -> Examples:
    """Return all examples of Parquet files, in memory: a test set.

    The client column is not read and may be absent. Integer labels are classes.

    Args:
        path: A Parquet file, or a folder of ``*.parquet`` files.
        columns: Which columns hold what.

    Raises:
        DataError: There is no such file, it is not Parquet or has no rows, a column is
            missing or of another type, a value is missing or not finite, or a label is
            negative.
    """
    files = _parquet_files(path)
    dtype = _label_dtype(files, columns=columns)
    chunks = [
        _read_row_group(file, group=group, columns=columns, label_dtype=dtype)
        for file in files
        for group in range(_num_row_groups(file))
    ]
    _require_some(sum(len(chunk.labels) for chunk in chunks), files=files)
    labels = torch.cat([chunk.labels for chunk in chunks])
    return Examples(
        features=torch.cat([chunk.features for chunk in chunks]),
        labels=labels,
        groups=None,
        num_classes=num_classes_of(labels),
    )


def num_classes_in(path: Path, *, columns: Columns) -> int | None:
    """Return one more than the largest label, reading the label column a piece at a time.

    Args:
        path: A Parquet file, or a folder of ``*.parquet`` files.
        columns: Which columns hold what.

    Returns:
        ``None`` where labels are not integers, hence not classes.

    Raises:
        DataError: There is no such file, it is not Parquet or has no labels, or a column is
            missing or of another type.
    """
    files = _parquet_files(path)
    if _label_dtype(files, columns=columns) != torch.int64:
        return None
    largest = [label for file in files for label in _largest_labels(file, columns=columns)]
    _require_some(len(largest), files=files)
    return max(largest) + 1


def _largest_labels(path: Path, *, columns: Columns) -> Iterator[int]:
    """Yield the largest label of each piece of the file that has one."""
    with _opened(path) as file:
        for batch in file.iter_batches(columns=[columns.label]):
            largest = pc.max(batch.column(0)).as_py()
            if largest is not None:
                yield largest


def _num_row_groups(path: Path) -> int:
    with _opened(path) as file:
        num_row_groups: int = file.num_row_groups
        return num_row_groups


class _Chunk(NamedTuple):
    """A decoded row group."""

    features: Tensor
    labels: Tensor

    @property
    def num_bytes(self) -> int:
        return self.features.nbytes + self.labels.nbytes


class _RowGroupCache:
    """The row groups used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()

    def get(self, group: int, *, read: Callable[[int], _Chunk]) -> _Chunk:
        if group in self._chunks:
            self._chunks.move_to_end(group)
            return self._chunks[group]
        chunk = read(group)
        if chunk.num_bytes <= self._max_bytes:
            self._make_room(chunk.num_bytes)
            self._chunks[group] = chunk
            self._num_bytes += chunk.num_bytes
        return chunk

    def _make_room(self, num_bytes: int) -> None:
        while self._num_bytes + num_bytes > self._max_bytes:
            _, oldest = self._chunks.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


class _ClientIndex(NamedTuple):
    """Where each client's rows are, counted over all files.

    Attributes:
        offsets: Client c has rows ``offsets[c]:offsets[c + 1]``.
        names: A pyarrow array of what the files call the clients.
        group_offsets: Row group g has rows ``group_offsets[g]:group_offsets[g + 1]``.
        groups: File number and number within that file of each row group.
        label_dtype: int64 or float32.
    """

    offsets: NDArray[np.int64]
    names: Any  # pyarrow has no types
    group_offsets: NDArray[np.int64]
    groups: list[tuple[int, int]]
    label_dtype: torch.dtype


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


def _index_clients(files: Sequence[Path], *, columns: Columns) -> _ClientIndex:
    runs, sizes, groups, group_sizes = [], [], [], []
    for file_num, path in enumerate(files):
        with _opened(path) as file:
            _require_columns(file.schema_arrow, [columns.client], path=path)
            for group in range(file.num_row_groups):
                names, lengths = _runs(file, group=group, column=columns.client, path=path)
                runs.append(names)
                sizes.append(lengths)
                groups.append((file_num, group))
                group_sizes.append(int(lengths.sum()))
    _require_some(sum(group_sizes), files=files)
    names, lengths = _joined(_concatenated(runs, columns=columns), np.concatenate(sizes))
    _require_grouped(names, columns=columns)
    dtype = _label_dtype(files, columns=columns)
    return _ClientIndex(offsets_of(lengths), names, offsets_of(group_sizes), groups, dtype)


def _require_some(num_rows: int, *, files: Sequence[Path]) -> None:
    if not num_rows:
        raise DataError(f"{files[0]} and its neighbours have no rows; write some examples")


def _label_dtype(files: Sequence[Path], *, columns: Columns) -> torch.dtype:
    """Return what labels become: int64 if they are integers in all files, else float32."""
    dtypes = set()
    for path in files:
        with _opened(path) as file:
            dtypes.add(_check_schema(file.schema_arrow, columns=columns, path=path))
    return torch.int64 if dtypes == {torch.int64} else torch.float32


def _check_schema(schema: Any, *, columns: Columns, path: Path) -> torch.dtype:
    """Return the dtype of labels, or refuse the file."""
    _require_columns(schema, [*columns.features, columns.label], path=path)
    width = 0
    for name in columns.features:
        kind = schema.field(name).type
        width += torch.Size(_shape(kind)).numel()
        if not (pt.is_integer(_number(kind)) or pt.is_floating(_number(kind))):
            raise DataError(
                f"{path}: feature column {name!r} is {kind}; cast it to numbers or to "
                "fixed-size lists of numbers, or name the feature columns without it"
            )
        if pt.is_floating(_number(kind)) and not columns.feature_dtype.is_floating_point:
            raise DataError(
                f"{path}: feature column {name!r} is {kind}, which {columns.feature_dtype} would "
                "round; write the same type in all files"
            )
    if width != columns.width:
        raise DataError(
            f"{path}: {list(columns.features)} hold {width} numbers an example, "
            f"feature_shape {columns.feature_shape} has {columns.width}; change either"
        )
    label = schema.field(columns.label).type
    if not (pt.is_integer(label) or pt.is_floating(label)):
        raise DataError(f"{path}: label column {columns.label!r} is {label}; cast it to numbers")
    return torch.int64 if pt.is_integer(label) else torch.float32


def _runs(file: Any, *, group: int, column: str, path: Path) -> tuple[Any, NDArray[np.int64]]:
    """Return the client of each run of equal clients in a row group, and the run lengths."""
    clients = file.read_row_group(group, columns=[column]).column(0)
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


def _concatenated(runs: Sequence[Any], *, columns: Columns) -> Any:
    kinds = sorted({str(names.type) for names in runs})
    if len(kinds) > 1:
        raise DataError(
            f"client column {columns.client!r} is {' here and '.join(kinds)} there; write the "
            "same type in all files"
        )
    return pa.concat_arrays(runs)


def _joined(names: Any, lengths: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """Join runs of one client that meet at the border of two row groups."""
    changes = pc.not_equal(names.slice(1), names.slice(0, len(names) - 1))
    starts = np.concatenate([[0], np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1])
    return names.take(starts), np.add.reduceat(lengths, starts)


def _require_grouped(names: Any, *, columns: Columns) -> None:
    if pc.count_distinct(names).as_py() == len(names):
        return
    counts = pc.value_counts(names)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"].as_py()
    raise DataError(
        f"the rows are not grouped by client: {columns.client!r} {repeated!r} appears in several "
        f"places; sort first, e.g. `table.sort_by({columns.client!r})` in pyarrow, and write with "
        "a small `row_group_size`"
    )


def _read_row_group(
    path: Path, *, group: int, columns: Columns, label_dtype: torch.dtype
) -> _Chunk:
    wanted = [*columns.features, columns.label]
    with _opened(path) as file:
        table = file.read_row_group(group, columns=wanted)
    parts = [
        _numbers(table.column(name), name=name, path=path).reshape(len(table), _width(table, name))
        for name in columns.features
    ]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    features = torch.tensor(numbers, dtype=columns.feature_dtype)
    labels = _numbers(table.column(columns.label), name=columns.label, path=path)
    return _Chunk(
        features.reshape(len(table), *columns.feature_shape),
        torch.tensor(labels, dtype=label_dtype),
    )


def _width(table: Any, name: str) -> int:
    return torch.Size(_shape(table.schema.field(name).type)).numel()


def _numbers(column: Any, *, name: str, path: Path) -> NDArray[Any]:
    """Return all numbers of a column, those of lists one after another."""
    values = column.combine_chunks()
    while pt.is_fixed_size_list(values.type) and not values.null_count:
        values = values.flatten()
    if values.null_count:
        raise DataError(f"{path}: column {name!r} has missing values; fill or drop them")
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return numbers
