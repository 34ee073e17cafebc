"""The examples of all clients, and how a block of clients gets at its own.

A population answers two questions by client id: how many examples, and which. What it
returns is one tensor and row numbers into it, so nothing is copied where the examples
already lie in memory. Client ids run from 0 to ``num_clients - 1``.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.partition import Partition


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The examples of several clients.

    Attributes:
        features: Shape [N, *F].
        labels: Shape [N, *L].
        rows: Row numbers into ``features`` and ``labels``, the clients one after another.
        offsets: Client k has ``rows[offsets[k]:offsets[k + 1]]``: int64 [K + 1].
    """

    features: Tensor
    labels: Tensor
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]


class Population(Protocol):
    """Every client that a simulation can ask, with its examples."""

    @property
    def num_clients(self) -> int:
        """Number of clients."""

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has, all at least 1."""

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the examples of these clients, in this order.

        Raises:
            DataError: Examples that were read just now cannot be trained on.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayPopulation:
    """Clients whose examples lie in memory, divided by a partition.

    ``load`` copies no examples: it returns the tensors themselves.

    Attributes:
        features: Finite and real: [N, *F].
        labels: int64 classes, or finite floats to regress on: [N, *L].
        partition: Who holds which row.
        num_classes: Labels lie below it; ``None`` where they are not classes.

    Raises:
        DataError: The lengths differ, a dtype is wrong, a feature or label is not finite,
            a label is out of range, or the partition names rows that are not there.
    """

    features: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    partition: Partition = field(repr=False)
    num_classes: int | None

    def __post_init__(self) -> None:
        _require_rows(self.partition, num_rows=len(self.features))
        check_examples(
            self.features,
            labels=self.labels,
            num_classes=self.num_classes,
            place=lambda row: _place(row, owner=self.partition.owner_of(row)),
        )

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.partition.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return _sizes(self.partition.offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the tensors and the rows of these clients."""
        places, offsets = _places(self.partition.offsets, client_ids=client_ids)
        rows = places if self._is_grouped else self.partition.rows[places]
        return ClientRows(self.features, self.labels, rows, offsets)

    @cached_property
    def _is_grouped(self) -> bool:
        """Whether rows lie client after client already, so that places are rows."""
        rows = self.partition.rows
        return bool((rows == np.arange(rows.size)).all())


@dataclass(frozen=True, eq=False, kw_only=True)
class BootstrapPopulation:
    """Virtual clients, each a sample with replacement from the same examples.

    Row j of client c is a keyed hash of (c, j): there are no tables, so memory does not
    depend on the number of clients.

    Attributes:
        features: Finite and real: [N, *F].
        labels: int64 classes, or finite floats to regress on: [N, *L].
        num_classes: Labels lie below it; ``None`` where they are not classes.
        num_clients: As many as you like, >= 1.
        examples_per_client: >= 1.
        seed: Who draws what.

    Raises:
        ValueError: ``num_clients`` or ``examples_per_client`` is below 1.
        DataError: There are no examples, the lengths differ, a dtype is wrong, a feature or
            label is not finite, or a label is out of range.
    """

    features: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    num_classes: int | None
    num_clients: int
    examples_per_client: int
    seed: Seed

    def __post_init__(self) -> None:
        for name in ("num_clients", "examples_per_client"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least 1")
        if not len(self.features):
            raise DataError("there are no examples to draw from; give at least one")
        check_examples(
            self.features, labels=self.labels, num_classes=self.num_classes, place=_place
        )

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``examples_per_client`` for each of these clients."""
        return np.full(client_ids.shape, self.examples_per_client, np.int64)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the tensors and the rows that these clients drew."""
        positions = np.arange(self.examples_per_client)
        hashes = self.seed.derive("bootstrap").hash(client_ids[:, None], positions)
        rows = (hashes % np.uint64(len(self.features))).astype(np.int64).ravel()
        offsets = np.arange(client_ids.size + 1) * self.examples_per_client
        return ClientRows(self.features, self.labels, rows, offsets)


class MapDataset(Protocol):
    """A map-style ``torch.utils.data.Dataset``: pairs of features and label by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...  # a pair of whatever torch can convert


@dataclass(frozen=True, eq=False, kw_only=True)
class DatasetPopulation:
    """Clients whose examples are fetched one by one from a torch dataset.

    Only the rows of the clients asked are fetched, and they are checked then. For examples
    that fit in memory :class:`ArrayPopulation` is much faster.

    Attributes:
        dataset: ``dataset[i]`` is a pair (features, label); all of the same shape.
        partition: Who holds which row.
        num_classes: Labels lie below it; ``None`` where they are not classes.

    Raises:
        DataError: The partition names rows that the dataset has not.
    """

    dataset: MapDataset = field(repr=False)
    partition: Partition = field(repr=False)
    num_classes: int | None

    def __post_init__(self) -> None:
        _require_rows(self.partition, num_rows=len(self.dataset))

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.partition.num_clients

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return _sizes(self.partition.offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Fetch and stack the examples of these clients.

        Raises:
            DataError: An example is no pair of numbers or has another shape than the
                others, a dtype is wrong, a feature or label is not finite, or a label is
                out of range.
        """
        places, offsets = _places(self.partition.offsets, client_ids=client_ids)
        rows = self.partition.rows[places]
        pairs = [_as_pair(self.dataset[row], row=row) for row in rows.tolist()]
        features = _stacked([x for x, _ in pairs], rows=rows, what="features")
        labels = _stacked([y for _, y in pairs], rows=rows, what="a label")
        check_examples(
            features,
            labels=labels,
            num_classes=self.num_classes,
            place=lambda at: _place(int(rows[at]), owner=_owner(at, offsets, client_ids)),
        )
        return ClientRows(features, labels, np.arange(rows.size), offsets)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table hold what.

    Attributes:
        client: Who an example belongs to: integers or strings.
        features: One column of fixed-size lists, or several columns of numbers.
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
        return _sizes(self._index.offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Read the examples of these clients.

        Raises:
            DataError: The files changed or are damaged, a value is missing or not finite, or
                a label is out of range.
        """
        rows, offsets = _places(self._index.offsets, client_ids=client_ids)
        features = torch.empty(rows.size, *self._columns.feature_shape, dtype=self._feature_dtype)
        labels = torch.empty(rows.size, dtype=self._index.label_dtype)
        groups = np.searchsorted(self._index.group_offsets, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            chunk = self._cache.get(group, read=self._read)
            here = np.flatnonzero(groups == group)
            inside = torch.from_numpy(rows[here] - self._index.group_offsets[group])
            features[torch.from_numpy(here)] = chunk.features[inside]
            labels[torch.from_numpy(here)] = chunk.labels[inside]
        check_examples(
            features,
            labels=labels,
            num_classes=self._num_classes,
            place=lambda at: self._place(int(rows[at]), owner=_owner(at, offsets, client_ids)),
        )
        return ClientRows(features, labels, np.arange(rows.size), offsets)

    @property
    def _feature_dtype(self) -> torch.dtype:
        return self._columns.feature_dtype

    def _read(self, group: int) -> "_Chunk":
        file_num, group_in_file = self._index.groups[group]
        return _read_row_group(
            self._files[file_num],
            group=group_in_file,
            columns=self._columns,
            label_dtype=self._index.label_dtype,
        )

    def _place(self, row: int, *, owner: int) -> str:
        return f"{_place(row, owner=owner)} ({self._columns.client} {self.name_of(owner)!r})"


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


def _open_parquet(path: Path) -> Any:  # pyarrow has no types
    import pyarrow.parquet as pq  # noqa: PLC0415  a simulation on arrays does not need pyarrow
    from pyarrow import ArrowInvalid  # noqa: PLC0415

    try:
        return pq.ParquetFile(path)
    except ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file: {error}; write it again") from error


def _index_clients(files: Sequence[Path], *, columns: Columns) -> _ClientIndex:
    import pyarrow as pa  # noqa: PLC0415  a simulation on arrays does not need pyarrow

    runs, sizes, groups, group_sizes, label_dtypes = [], [], [], [], set()
    for file_num, path in enumerate(files):
        with _open_parquet(path) as file:
            label_dtypes.add(_check_schema(file.schema_arrow, columns=columns, path=path))
            for group in range(file.num_row_groups):
                names, lengths = _runs(file, group=group, column=columns.client, path=path)
                runs.append(names)
                sizes.append(lengths)
                groups.append((file_num, group))
                group_sizes.append(int(lengths.sum()))
    if not sum(group_sizes):
        raise DataError(f"{files[0]} and its neighbours have no rows; write some examples")
    names, lengths = _joined(pa.concat_arrays(runs), np.concatenate(sizes))
    _require_grouped(names, columns=columns)
    dtype = torch.int64 if label_dtypes == {torch.int64} else torch.float32
    return _ClientIndex(_cumulated(lengths), names, _cumulated(group_sizes), groups, dtype)


def _check_schema(schema: Any, *, columns: Columns, path: Path) -> torch.dtype:
    """Return the dtype of labels, or refuse the file."""
    import pyarrow.types as pt  # noqa: PLC0415  a simulation on arrays does not need pyarrow

    for name in (columns.client, *columns.features, columns.label):
        if name not in schema.names:
            raise DataError(f"{path} has no column {name!r}; it has {schema.names}")
    width = 0
    for name in columns.features:
        kind = schema.field(name).type
        is_list = pt.is_fixed_size_list(kind)
        width += kind.list_size if is_list else 1
        number = kind.value_type if is_list else kind
        if not (pt.is_integer(number) or pt.is_floating(number)):
            raise DataError(
                f"{path}: feature column {name!r} is {kind}; cast it to numbers or to "
                "fixed-size lists of numbers"
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
    import pyarrow as pa  # noqa: PLC0415  a simulation on arrays does not need pyarrow
    import pyarrow.compute as pc  # noqa: PLC0415

    clients = file.read_row_group(group, columns=[column]).column(0)
    if pa.types.is_dictionary(clients.type):
        clients = clients.cast(clients.type.value_type)
    text = pa.types.is_string(clients.type) or pa.types.is_large_string(clients.type)
    if clients.null_count or not (text or pa.types.is_integer(clients.type)):
        raise DataError(
            f"{path}: client column {column!r} is {clients.type} with {clients.null_count} "
            "missing; every row needs an integer or a string"
        )
    clients = clients.cast(pa.large_string() if text else pa.int64())
    encoded = pc.run_end_encode(clients.combine_chunks(), run_end_type=pa.int64())
    return encoded.values, np.diff(encoded.run_ends.to_numpy(), prepend=0)


def _joined(names: Any, lengths: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """Join runs of one client that meet at the border of two row groups."""
    import pyarrow.compute as pc  # noqa: PLC0415  a simulation on arrays does not need pyarrow

    changes = pc.not_equal(names.slice(1), names.slice(0, len(names) - 1))
    starts = np.concatenate([[0], np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1])
    return names.take(starts), np.add.reduceat(lengths, starts)


def _require_grouped(names: Any, *, columns: Columns) -> None:
    import pyarrow.compute as pc  # noqa: PLC0415  a simulation on arrays does not need pyarrow

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
    with _open_parquet(path) as file:
        table = file.read_row_group(group, columns=wanted)
    parts = [
        _numbers(table.column(name), name=name, path=path).reshape(len(table), -1)
        for name in columns.features
    ]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    features = torch.tensor(numbers, dtype=columns.feature_dtype)
    labels = _numbers(table.column(columns.label), name=columns.label, path=path)
    return _Chunk(
        features.reshape(len(table), *columns.feature_shape),
        torch.tensor(labels, dtype=label_dtype),
    )


def _numbers(column: Any, *, name: str, path: Path) -> NDArray[Any]:
    """Return all numbers of a column, those of lists one after another."""
    array = column.combine_chunks()
    values = array.flatten() if hasattr(array.type, "list_size") else array
    if array.null_count or values.null_count:
        raise DataError(f"{path}: column {name!r} has missing values; fill or drop them")
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return numbers


def check_examples(
    features: Tensor, *, labels: Tensor, num_classes: int | None, place: Callable[[int], str]
) -> None:
    """Refuse examples that cannot be trained on.

    Args:
        features: Shape [N, *F].
        labels: Shape [N, *L].
        num_classes: Labels lie below it; ``None`` where they are not classes.
        place: Says where a row is, for the message.

    Raises:
        DataError: The lengths differ, features are complex or boolean, labels are neither
            int64 nor (without classes) floats, a value is not finite, or a label is outside
            ``0..num_classes - 1``.
    """
    if not features.ndim or not labels.ndim or len(features) != len(labels):
        raise DataError(
            f"features of shape {tuple(features.shape)} and labels of shape "
            f"{tuple(labels.shape)}; the first dimension counts examples in both"
        )
    if features.is_complex() or features.dtype == torch.bool:
        raise DataError(f"features are {features.dtype}; convert them with `.float()`")
    if labels.dtype != torch.int64 and (num_classes is not None or not labels.is_floating_point()):
        raise DataError(f"labels are {labels.dtype}; convert class labels with `.long()`")
    _require_finite(features, what="feature", place=place)
    _require_finite(labels, what="label", place=place)
    if num_classes is not None:
        _require_classes(labels, num_classes=num_classes, place=place)


def _require_finite(values: Tensor, *, what: str, place: Callable[[int], str]) -> None:
    if not values.is_floating_point() or not values.numel():
        return
    low, high = values.aminmax()  # both propagate NaN, and no mask the size of the data is made
    if bool(low.isfinite() & high.isfinite()):
        return
    bad = (~values.isfinite()).flatten(1).any(1) if values.ndim > 1 else ~values.isfinite()
    row = int(bad.nonzero()[0])
    raise DataError(
        f"{place(row)} has a {what} that is NaN or infinite ({int(bad.sum())} rows have); "
        "fill or drop such rows"
    )


def _require_classes(labels: Tensor, *, num_classes: int, place: Callable[[int], str]) -> None:
    if not labels.numel():
        return
    low, high = (int(extreme) for extreme in labels.aminmax())
    if low >= 0 and high < num_classes:
        return
    bad = ((labels < 0) | (labels >= num_classes)).reshape(len(labels), -1)
    row = int(bad.any(1).nonzero()[0])
    value = int(labels.reshape(len(labels), -1)[row][bad[row]][0])
    raise DataError(
        f"{place(row)} has the label {value}, outside 0..{num_classes - 1}; correct the label or "
        "`num_classes`"
    )


def _require_rows(partition: Partition, *, num_rows: int) -> None:
    low, high = int(partition.rows.min()), int(partition.rows.max())
    if low < 0 or high >= num_rows:
        raise DataError(
            f"the partition names rows {low}..{high}, there are {num_rows} examples; split the "
            "labels of these examples"
        )


def _sizes(offsets: NDArray[np.int64], *, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return offsets[client_ids + 1] - offsets[client_ids]


def _places(
    offsets: NDArray[np.int64], *, client_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ranges of these clients laid end to end, and where each begins."""
    sizes = _sizes(offsets, client_ids=client_ids)
    ends = _cumulated(sizes)
    shifts = np.repeat(offsets[client_ids] - ends[:-1], sizes)
    return np.arange(ends[-1]) + shifts, ends


def _cumulated(sizes: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _owner(at: int, offsets: NDArray[np.int64], client_ids: NDArray[np.int64]) -> int:
    return int(client_ids[np.searchsorted(offsets, at, side="right") - 1])


def _place(row: int, owner: int | None = None) -> str:
    return f"row {row}" if owner is None else f"row {row} of client {owner}"


def _as_pair(item: Any, *, row: int) -> tuple[Tensor, Tensor]:
    try:
        features, label = item
        return torch.as_tensor(features), torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"dataset[{row}] is not a pair of numbers or tensors (features, label): {error}; give "
            "the dataset a transform that makes tensors"
        ) from error


def _stacked(values: Sequence[Tensor], *, rows: NDArray[np.int64], what: str) -> Tensor:
    expected = (values[0].shape, values[0].dtype)
    for row, value in zip(rows.tolist(), values, strict=True):
        if (value.shape, value.dtype) != expected:
            raise DataError(
                f"dataset[{row}] has {what} of shape {tuple(value.shape)} and {value.dtype}, "
                f"others have {tuple(expected[0])} and {expected[1]}; pad, crop or convert it in a "
                "transform"
            )
    return torch.stack(list(values))
