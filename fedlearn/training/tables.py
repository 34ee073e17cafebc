"""Examples in Parquet and Arrow files that may be larger than memory, read by row group.

A row group in Parquet, or a record batch in an Arrow IPC file (Feather, version 2), is a set of
rows that are read together. Files are opened for each read and never held open, so that a table can
be sent to another process.

Why not ``pyarrow.dataset``? It cannot read a single record batch of an Arrow file. It fills a
column that a file lacks with nulls, and casts all files to the types of the first, both of which
are errors here. And ``take`` (rows by number) and ``filter`` (by client) decode whole row groups
each time, where :class:`RowGroups` decodes them once. With ten clients of 200 rows of a kilobyte,
in row groups of 10,000, they took 38 and 27 times its processor time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pyarrow.types as pt
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.features import Features, Inputs, list_tensors, map_inputs, name_inputs
from fedlearn.errors import DataError
from fedlearn.training.decoded_rows import DecodedRows

_ARROW = (".arrow", ".feather")
_SUFFIXES = (".parquet", *_ARROW)
_MOST_AT_ONCE = 8  # row groups being read at once, in addition to the cached ones


@dataclass(frozen=True, kw_only=True)
class InputColumns:
    """The columns that make one input of a model.

    Attributes:
        names: Columns of numbers or of fixed-size lists of numbers, laid side by side.
        shape: Shape of one example, with as many elements as the columns have numbers.
        dtype: Dtype of the tensor, e.g. ``torch.float32``; ``torch.int64`` for tokens,
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
class ExampleColumns:
    """The columns of a table that hold an example's features and label.

    Attributes:
        features: The columns of the features, or of each input.
        label: Column of the label, a number: integers for classes.
    """

    features: Inputs[InputColumns]
    label: str

    @property
    def inputs(self) -> Sequence[InputColumns]:
        """The columns of each input, in the order of its tensors."""
        return list(name_inputs(self.features).values())

    @property
    def names(self) -> list[str]:
        """The columns of features and of the label, each once."""
        names = (name for each in self.inputs for name in each.names)
        return list(dict.fromkeys([*names, self.label]))


def columns_of_file(
    path: Path,
    *,
    label: str,
    features: Inputs[Sequence[str]] | None,
    others: Collection[str] = (),
) -> ExampleColumns:
    """Infer the shape and dtype of the features from a file's schema.

    A single feature column keeps its shape, including that of nested lists; several columns become
    one vector. Features that are all integers become int64, others float32. With several inputs,
    one whose columns are all boolean is a mask.

    Args:
        path: A file, or a folder of files, of which the first is inspected.
        label: Column of the label.
        features: Columns of the features, or of each input; ``None``: all columns that have no
            other role.
        others: Columns with another role, which must exist.

    Raises:
        DataError: There is no such file, it is damaged, or it lacks a column.
        ValueError: An input has no column.
    """
    first = _find_files(path)[0]
    with _open_file(first) as file:
        schema = file.schema
    groups = _groups(_free_columns(schema, {label, *others}) if features is None else features)
    if not groups:
        raise DataError(f"{first} has no column for features; it has {schema.names}")
    names = [name for group in name_inputs(groups).values() for name in group]
    _require_columns(schema, [*others, label, *names], path=first)
    of_schema = partial(_input_columns, schema, is_only=isinstance(groups, list))
    return ExampleColumns(features=map_inputs(of_schema, groups), label=label)


def _input_columns(
    schema: Any,  # pyarrow has no types
    names: Sequence[str],
    *,
    is_only: bool,
) -> InputColumns:
    """Infer one input's shape and dtype; boolean columns of the only input are not a mask."""
    kinds = [schema.field(name).type for name in names]
    shapes, numbers = [_shape(kind) for kind in kinds], [_get_number_type(kind) for kind in kinds]
    dtype = torch.int64 if all(map(pt.is_integer, numbers)) else torch.float32
    width = sum(torch.Size(shape).numel() for shape in shapes)
    return InputColumns(
        names=tuple(names),
        shape=shapes[0] or (1,) if len(names) == 1 else (width,),
        dtype=torch.bool if not is_only and all(map(pt.is_boolean, numbers)) else dtype,
    )


class Rows(NamedTuple):
    """Decoded rows of a table."""

    features: Features
    labels: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take."""
        return sum(tensor.nbytes for tensor in list_tensors(self.features)) + self.labels.nbytes


@dataclass(frozen=True)
class Table:
    """One or more files that are read as one table.

    Attributes:
        files: The files, in the order of their rows.
        columns: The columns of features and label.
        label_dtype: int64 if labels are integers in all files, else float32.
    """

    files: Sequence[Path]
    columns: ExampleColumns
    label_dtype: torch.dtype

    @classmethod
    def at(cls, path: Path, columns: ExampleColumns) -> Self:
        """Open a table and check that all its files have the columns.

        Args:
            path: A file, or a folder of ``*.parquet``, ``*.arrow`` and ``*.feather`` files.
            columns: The columns of features and label.

        Raises:
            DataError: There is no such file, it is damaged, or a column is missing or of
                another type.
        """
        files, dtypes = _find_files(path), set()
        for each in files:
            with _open_file(each) as file:
                dtypes.add(_check_schema(file.schema, columns=columns, path=each))
        return cls(files, columns, torch.int64 if dtypes == {torch.int64} else torch.float32)

    @property
    def row_bytes(self) -> int:
        """Memory that one example takes."""
        return sum(self.bytes_of_tensors)

    @property
    def bytes_of_tensors(self) -> list[int]:
        """Memory that one example takes in each input's tensor, and last in the labels."""
        inputs = self.columns.inputs
        sizes = [torch.Size(each.shape).numel() * each.dtype.itemsize for each in inputs]
        return [*sizes, self.label_dtype.itemsize]

    def sizes(self) -> list["RowGroup"]:
        """List the row groups that have rows.

        Only the files' metadata are read, and the labels of Arrow files.

        Raises:
            DataError: A file cannot be read.
        """
        found = []
        for path in self.files:
            with _open_file(path) as file:
                sizes = [file.num_rows(group, self.columns.label) for group in range(len(file))]
            found += [RowGroup(path, group, size) for group, size in enumerate(sizes) if size]
        return found

    def row_groups(self, names: list[str]) -> Iterator[tuple["RowGroup", Any]]:
        """Yield each row group that has rows, with the named columns as a pyarrow table.

        Raises:
            DataError: A file lacks a column or cannot be read.
        """
        for path in self.files:
            with _open_file(path) as file:
                _require_columns(file.schema, names, path=path)
                for group in range(len(file)):
                    rows = file.read(group, names)
                    if len(rows):
                        yield RowGroup(path, group, len(rows)), rows

    def read(self, group: "RowGroup") -> Rows:
        """Read the examples of a row group.

        Raises:
            DataError: It cannot be read, its number of rows changed, or a value is missing.
        """
        with _open_file(group.path, what=str(group)) as file:
            rows = file.read(group.number, self.columns.names)
        if len(rows) != group.num_rows:
            raise DataError(
                f"{group} has {len(rows)} rows and had {group.num_rows} when training began; do "
                "not change the files while they are read"
            )
        return self.decode(rows, place=str(group))

    def decode(self, rows: Any, *, place: str) -> Rows:  # Any: pyarrow has no types
        """Convert a pyarrow table with the columns of examples to tensors.

        Args:
            rows: The pyarrow table.
            place: Where the rows come from, for error messages.

        Raises:
            DataError: A value is missing.
        """
        labels = _numbers(rows, self.columns.label, place=place)
        return Rows(
            map_inputs(lambda each: _input(rows, each, place=place), self.columns.features),
            _tensor(labels, dtype=self.label_dtype),
        )

    def require_rows(self, num_rows: int) -> None:
        """Check that the table has rows.

        Raises:
            DataError: ``num_rows`` is 0.
        """
        if not num_rows:
            raise DataError(
                f"{self.files[0]} and the other files have no rows; write some examples"
            )


class RowGroup(NamedTuple):
    """The location of rows that are read together: a file and the group's number in it."""

    path: Path
    number: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path}, row group {self.number}"


class RowGroups:
    """Reads rows of a table by number, with a cache of the most recently used row groups.

    Args:
        table: The table.
        groups: Its row groups, in the order of the rows.
        cache_bytes: Most bytes of decoded row groups to cache in memory.
        check: Called with each row group just read; raises an error to refuse it.
        keeps_decoded: Whether to cache decoded rows on disk as well: see
            :mod:`fedlearn.training.decoded_rows`.

    Attributes:
        offsets: Row group g has the rows offsets[g]:offsets[g + 1].
    """

    def __init__(
        self,
        table: Table,
        *,
        groups: Sequence[RowGroup],
        cache_bytes: int,
        check: Callable[[RowGroup, Rows], None] | None = None,
        keeps_decoded: bool = False,
    ) -> None:
        sizes = [group.num_rows for group in groups]
        self.offsets: NDArray[np.int64] = np.cumsum([0, *sizes], dtype=np.int64)
        self._table, self._groups, self._check = table, groups, check
        self._max_bytes, self._num_bytes = cache_bytes, 0
        self._cache: dict[int, Rows] = {}  # an LRU cache: the most recently used group is last
        self._on_disk: DecodedRows | None = None
        if keeps_decoded:
            self._on_disk = DecodedRows(self.offsets, row_bytes=table.bytes_of_tensors)

    def __getstate__(self) -> dict[str, object]:
        # Caches are not pickled: a process that is not forked fills its own.
        return self.__dict__ | {"_cache": {}, "_num_bytes": 0, "_on_disk": None}

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """Return a copy of these rows, in this order.

        Several row groups are read in parallel, up to the number of torch's threads and no more
        than 8.

        Raises:
            DataError: The files changed or are damaged, or a value is missing.
        """
        columns = self._table.columns.features
        features = map_inputs(
            lambda each: _allocate(rows.size, *each.shape, dtype=each.dtype), columns
        )
        labels = _allocate(rows.size, dtype=self._table.label_dtype)
        groups = np.searchsorted(self.offsets, rows, side="right") - 1
        missing = np.unique(groups)
        if self._on_disk is not None:
            there = self._on_disk.has(groups)
            self._take_decoded(rows, np.flatnonzero(there), [*list_tensors(features), labels])
            missing = np.unique(groups[~there])
        for group, read in self._read(missing.tolist()):
            here = np.flatnonzero(groups == group)
            inside = rows[here] - self.offsets[group]
            for whole, part in zip(
                list_tensors(features), list_tensors(read.features), strict=True
            ):
                _to_items(whole)[here] = _to_items(part)[inside]
            _to_items(labels)[here] = _to_items(read.labels)[inside]
        return Rows(features, labels)

    def _take_decoded(
        self, rows: NDArray[np.int64], places: NDArray[np.int64], tensors: Sequence[Tensor]
    ) -> None:
        """Fill these places of the tensors from the disk cache, one run of adjacent rows a read."""
        assert self._on_disk is not None
        follows = (np.diff(places) == 1) & (np.diff(rows[places]) == 1)
        for run in np.split(places, np.flatnonzero(~follows) + 1) if places.size else ():
            first, last = int(run[0]), int(run[-1])
            self._on_disk.read(int(rows[first]), [each[first : last + 1] for each in tensors])

    def _read(self, groups: list[int]) -> Iterator[tuple[int, Rows]]:
        """Yield these row groups with their rows, from the cache or from the files."""
        at_once = min(torch.get_num_threads(), _MOST_AT_ONCE)  # 1 in a worker of a DataLoader
        for start in range(0, len(groups), at_once):
            some = groups[start : start + at_once]
            # Taken out of the cache here and put back below, as the most recently used.
            read = {group: self._drop(group) for group in some if group in self._cache}
            missing = [group for group in some if group not in read]
            read |= zip(missing, self._decode(missing), strict=True)
            for group in some:
                yield group, read[group]
                self._keep(group, read[group])

    def _decode(self, groups: list[int]) -> list[Rows]:
        if len(groups) <= 1:
            return [self._check_group(each) for each in groups]
        with ThreadPoolExecutor(len(groups)) as pool:
            return list(pool.map(self._check_group, groups))

    def _check_group(self, group: int) -> Rows:
        rows = self._table.read(self._groups[group])
        if self._check is not None:
            self._check(self._groups[group], rows)
        if self._on_disk is not None:
            self._on_disk.write(group, [*list_tensors(rows.features), rows.labels])
        return rows

    def _keep(self, group: int, rows: Rows) -> None:
        if rows.num_bytes > self._max_bytes:
            return
        self._cache[group] = rows
        self._num_bytes += rows.num_bytes
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._cache)))

    def _drop(self, group: int) -> Rows:
        rows = self._cache.pop(group)
        self._num_bytes -= rows.num_bytes
        return rows


def _allocate(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor through numpy, which asks for huge pages: filling it is 5x faster."""
    octets = torch.from_numpy(np.empty(torch.Size(shape).numel() * dtype.itemsize, np.uint8))
    return octets.view(dtype).reshape(shape)


def _to_items(values: Tensor) -> NDArray[np.void]:
    """View a tensor's rows as a numpy array with one opaque item per row, whatever the dtype.

    Numpy copies rows without starting threads, which would cost more than copying a small batch.
    """
    octets = values.reshape(len(values), -1).view(torch.uint8).numpy()
    return octets.view(f"V{octets.shape[1]}")[:, 0]


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(each for suffix in _SUFFIXES for each in path.glob(f"*{suffix}"))
    if not files:
        known = ", ".join(f"*{suffix}" for suffix in _SUFFIXES)
        what = f"no {known} file in the folder" if path.is_dir() else "no file or folder"
        raise DataError(f"{what} {path}; name a Parquet or Arrow file, or a folder of them")
    return files


class _TableFile(Protocol):
    schema: Any  # pyarrow has no types

    def __len__(self) -> int:
        """Return the number of row groups."""

    def num_rows(self, group: int, column: str) -> int:
        """Return a row group's number of rows; read ``column`` if the metadata do not have it."""

    def read(self, group: int, names: Sequence[str]) -> Any:
        """Return columns of a row group as a pyarrow table."""


class _ParquetFile:
    def __init__(self, file: Any) -> None:  # pyarrow has no types
        self._file, self.schema = file, file.schema_arrow

    def __len__(self) -> int:
        count: int = self._file.num_row_groups
        return count

    def num_rows(self, group: int, column: str) -> int:  # noqa: ARG002 - the metadata tell
        count: int = self._file.metadata.row_group(group).num_rows
        return count

    def read(self, group: int, names: Sequence[str]) -> Any:
        return self._file.read_row_group(group, columns=names)


class _ArrowFile:
    def __init__(self, source: Any) -> None:  # pyarrow has no types
        self._source = source
        self._all = pa.ipc.open_file(source)
        self.schema = self._all.schema

    def __len__(self) -> int:
        count: int = self._all.num_record_batches
        return count

    def num_rows(self, group: int, column: str) -> int:
        # The footer of an Arrow file does not count rows.
        return len(self.read(group, [column]))

    def read(self, group: int, names: Sequence[str]) -> Any:
        wanted = [self.schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(included_fields=wanted)
        batch = pa.ipc.open_file(self._source, options=options).get_batch(group)
        batch.validate()  # a damaged file may declare lengths beyond the end of its buffers
        # The reader returns columns in the file's order.
        return pa.Table.from_batches([batch]).select(names)


@contextmanager
def _open_file(path: Path, *, what: str | None = None) -> Iterator[_TableFile]:
    is_arrow = path.suffix in _ARROW
    kind, remedy = ("Arrow", " with pyarrow.feather.write_feather") if is_arrow else ("Parquet", "")
    try:
        if is_arrow:
            # Not memory-mapped: truncating a mapped file would kill the process with a SIGBUS.
            with pa.OSFile(str(path)) as source:
                yield _ArrowFile(source)
        else:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                yield _ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{what or path} cannot be read as {kind}: {error}; write it again{remedy}"
        ) from error


def _free_columns(schema: Any, taken: set[str]) -> list[str]:
    """List the columns without a role, leaving out the index that pandas adds."""
    index = (schema.pandas_metadata or {}).get("index_columns", ())
    return [name for name in schema.names if name not in taken and name not in index]


def _groups(features: Inputs[Sequence[str]]) -> Inputs[Sequence[str]]:
    """Return the columns of each input; a plain list or tuple of names is a single input."""
    if isinstance(features, Mapping):
        return features
    names = [each for each in features if isinstance(each, str)]
    return names if len(names) == len(features) else tuple(features)


def _require_columns(schema: Any, names: Sequence[str], *, path: Path) -> None:
    for name in names:
        if name not in schema.names:
            raise DataError(f"{path} has no column {name!r}; it has {schema.names}")


def _shape(kind: Any) -> tuple[int, ...]:
    """Return the shape of one value of a column; () for a number."""
    if not pt.is_fixed_size_list(kind):
        return ()
    return (kind.list_size, *_shape(kind.value_type))


def _get_number_type(kind: Any) -> Any:
    """Return the type of a column's numbers, looking through nested lists."""
    return _get_number_type(kind.value_type) if pt.is_fixed_size_list(kind) else kind


def _check_schema(schema: Any, *, columns: ExampleColumns, path: Path) -> torch.dtype:
    """Check a file's columns, and return the dtype of its labels."""
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
        number, width = _get_number_type(kind), width + torch.Size(_shape(kind)).numel()
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
            f"{path}: {list(columns.names)} hold {width} numbers per example, but the shape "
            f"{columns.shape} has {expected}; change one of them"
        )


def _input(table: Any, columns: InputColumns, *, place: str) -> Tensor:
    parts = [_numbers(table, name, place=place).reshape(len(table), -1) for name in columns.names]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return _tensor(numbers, dtype=columns.dtype).reshape(len(table), *columns.shape)


def _tensor(numbers: NDArray[Any], *, dtype: torch.dtype) -> Tensor:  # Any: of any type
    """Convert to a tensor, with a copy if the numbers lie in pyarrow's read-only memory."""
    return torch.from_numpy(np.require(numbers, requirements="W")).to(dtype)


def _numbers(table: Any, name: str, *, place: str) -> NDArray[Any]:
    """Return all numbers of a column, with lists flattened."""
    values = table.column(name).combine_chunks()
    while pt.is_fixed_size_list(values.type) and not values.null_count:
        values = values.flatten()
    if values.null_count:
        raise DataError(f"{place}: column {name!r} has missing values; fill or drop them")
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return numbers
