"""One client's examples as a trainer reads them: in memory, or batch by batch from a dataset."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlearn.core.features import (
    Features,
    map_inputs,
    move_to_device,
    name_inputs,
    rebuild_inputs,
    require_one_label_each,
    take_rows,
)
from fedlearn.core.randomness import reseed_by_key
from fedlearn.errors import DataError

#: Examples per evaluation batch. It bounds memory. The random draws of reading a batch depend on
#: it, too, because the batch's key is the number of its first example.
EVALUATION_BATCH = 256


class LocalData(Protocol):
    """One client's examples, read by their numbers."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:
        """Return features [batch, ...] and labels [batch, ...] on the model's device.

        Args:
            rows: Numbers of the examples, in 0..len-1.
            key: 32-bit key of the random draws that reading them makes.
        """


class TensorData:
    """Examples in memory, as tensors.

    Args:
        features: Shape [n, ...].
        labels: Shape [n, ...].
        device: The model's device.

    Raises:
        DataError: There are no examples, not exactly one label for each, or features are not
            tensors.
    """

    def __init__(self, features: Features, labels: Tensor, *, device: torch.device) -> None:
        if not isinstance(labels, Tensor):
            raise DataError(
                f"labels are a {type(labels).__name__}; give a tensor, as "
                "torch.as_tensor(labels) makes one"
            )
        require_one_label_each(features, labels)
        if not len(labels):
            raise DataError("there are no examples; a client trains on at least one")
        self._features, self._labels = move_to_device(features, device), labels.to(device)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:  # noqa: ARG002 - nothing is random
        """Return a copy of the rows."""
        index = torch.from_numpy(rows).to(self._labels.device)
        return take_rows(self._features, index), self._labels.index_select(0, index)


class DatasetData:
    """Examples of a map-style dataset, read batch by batch, so that they need not fit in memory.

    What an item draws from the global generators of torch, numpy and Python, such as a random
    crop, is a function of the batch's key. The generators are restored after each batch.

    Args:
        dataset: Pairs (features, label), with a length: see :func:`read_pairs`.
        device: The model's device.

    Raises:
        DataError: The dataset is empty or has no length.
    """

    def __init__(self, dataset: Dataset[Any], *, device: torch.device) -> None:
        sized = require_map_style(dataset, what="the dataset")
        self._dataset, self._length, self._device = dataset, len(sized), device

    def __len__(self) -> int:
        return self._length

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:
        """Read the rows and move them to the model's device.

        Raises:
            DataError: See :func:`read_rows`.
        """
        features, labels = read_rows(self._dataset, rows=rows, key=key)
        return move_to_device(features, self._device), labels.to(self._device)


class Readable(Protocol):
    """Anything with examples by number, such as a map-style ``torch.utils.data.Dataset``."""

    def __getitem__(self, index: int, /) -> Any: ...  # a pair of whatever torch can convert


class KeyedBatch(NamedTuple):
    """Examples that are read together.

    Attributes:
        rows: Numbers of the examples: int64 [batch].
        key: 32-bit key of the random draws that reading them makes.
    """

    rows: NDArray[np.int64]
    key: int


def evaluation_batches(num_examples: int) -> Iterator[KeyedBatch]:
    """Split a set into evaluation batches, with the same keys every time.

    Example:
        >>> [(len(rows), key) for rows, key in evaluation_batches(300)]
        [(256, 0), (44, 256)]
    """
    for start in range(0, num_examples, EVALUATION_BATCH):
        yield KeyedBatch(np.arange(start, min(num_examples, start + EVALUATION_BATCH)), start)


#: One example: its features and its label.
Pair: TypeAlias = tuple[Features, Tensor]


def read_rows(dataset: Readable, *, rows: NDArray[np.int64], key: int) -> tuple[Features, Tensor]:
    """Read these rows, at least one, and return their features and labels, stacked.

    Args:
        dataset: Pairs (features, label): see :func:`read_pairs`.
        rows: Numbers of the rows.
        key: 32-bit key of what reading them draws from the global generators.

    Raises:
        DataError: See :func:`read_pairs` and :func:`stack_pairs`.
    """
    with reseed_by_key() as set_key:
        set_key(key)
        pairs = read_pairs(dataset, rows=rows)
    return stack_pairs(pairs, rows=rows)


def read_pairs(dataset: Readable, *, rows: NDArray[np.int64]) -> list[Pair]:
    """Read these rows, each as a pair (features, label) of tensors.

    Features that are a tuple or a mapping are several inputs of the model. Anything else, including
    a list of numbers, becomes one tensor. A row that is itself a mapping, such as
    ``{"img": ..., "label": ...}``, is split like a row of :class:`Columns`: its label is the column
    named "label", "labels", "target", "targets" or "y".

    Raises:
        DataError: A row cannot be read, or is not a pair of numbers.
    """
    numbers = rows.tolist()
    items = _read(dataset, numbers)
    return [_to_pair(item, row=row) for item, row in zip(items, numbers, strict=True)]


def stack_pairs(pairs: Sequence[Pair], *, rows: NDArray[np.int64]) -> tuple[Features, Tensor]:
    """Stack the features and the labels of at least one pair into batches.

    Args:
        pairs: Pairs (features, label).
        rows: Their numbers in the dataset, for error messages.

    Raises:
        DataError: A row has other inputs, another shape or another dtype than the first.
    """
    numbers = rows.tolist()
    first, rest = name_inputs(pairs[0][0]), [name_inputs(features) for features, _ in pairs]
    for row, inputs in zip(numbers, rest, strict=True):
        if inputs.keys() != first.keys():
            raise DataError(
                f"dataset[{row}] has {' and '.join(inputs)}, dataset[{numbers[0]}] "
                f"{' and '.join(first)}; give every row the same inputs"
            )
    stacked = [
        _stack_values([each[name] for each in rest], rows=numbers, what=name) for name in first
    ]
    labels = _stack_values([label for _, label in pairs], rows=numbers, what="a label")
    return rebuild_inputs(stacked, like=pairs[0][0]), labels


def _read(dataset: Readable, rows: Sequence[int]) -> Sequence[Any]:  # Any: not looked at yet
    """Read the items of these rows, and name the row that cannot be read.

    Raises:
        DataError: The dataset raises an error for a row.
    """
    try:
        return _load_items(dataset, rows)
    except DataError:
        raise  # it names the row
    except Exception as error:
        row = next((row for row in rows if not _is_readable(dataset, row)), None)
        which = f"rows {rows[0]}..{rows[-1]}" if row is None else f"row {row}"
        raise DataError(
            f"{which} of the dataset cannot be read: {type(error).__name__}: {error}; correct the "
            "row, or leave it out"
        ) from error


def _load_items(dataset: Readable, rows: Sequence[int]) -> Sequence[Any]:  # Any: as in _read
    read_all = getattr(dataset, "__getitems__", None)  # the batched read that DataLoader uses, too
    return read_all(rows) if read_all else [dataset[row] for row in rows]


def _is_readable(dataset: Readable, row: int) -> bool:
    try:
        dataset[row]
    except Exception:  # noqa: BLE001 - custom code raises anything
        return False
    return True


def require_map_style(dataset: Any, *, what: str) -> Sized:  # Any: not looked at yet
    """Check that ``dataset`` is a map-style dataset with at least one example, and return it.

    Raises:
        DataError: It is a loader, a class, a pair of arrays, or anything else without rows.
    """
    name = type(dataset).__name__
    if isinstance(dataset, type):
        raise DataError(
            f"{what} is the class {dataset.__name__}; make one: {dataset.__name__}(...)"
        )
    if isinstance(dataset, DataLoader):
        raise DataError(f"{what} is a DataLoader; give its dataset: loader.dataset")
    if isinstance(dataset, tuple | list) and any(hasattr(each, "dtype") for each in dataset):
        raise DataError(
            f"{what} is a {name} of arrays; give a dataset of pairs, "
            "torch.utils.data.TensorDataset(features, labels), or use fl.from_arrays"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{what} is a {name}, not a map-style dataset; it needs __len__ and __getitem__"
        )
    sized: Sized = dataset
    if not len(sized):
        raise DataError(f"{what} has no examples; give at least one")
    return sized


@dataclass(frozen=True)
class Columns:
    """Chooses the label and the inputs of a dataset whose rows are mappings.

    Rows with exactly one label column of a usual name do not need it; see :func:`read_pairs`.

    Attributes:
        dataset: Map-style, with rows such as ``{"img": ..., "fine_label": ..., "id": ...}``.
        label: Name of the label's column.
        inputs: Names of the columns that the model takes. A single column is passed as a positional
            argument, several as keyword arguments. Empty: all columns but the label.

    Raises:
        DataError: ``inputs`` is a string, not a sequence of strings.

    Example:
        >>> rows = [{"img": [0.0, 1.0], "fine_label": 3, "id": 17}]
        >>> Columns(rows, label="fine_label", inputs=("img",))[0]
        ([0.0, 1.0], 3)
    """

    dataset: Any  # a map-style dataset, of torch's class or not
    label: str
    inputs: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.inputs, str):
            raise DataError(f"fl.Columns: inputs is {self.inputs!r}; give a list of column names")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return a row's inputs and label; raise DataError if it lacks a column."""
        return _split_row(self.dataset[index], row=index, label=self.label, inputs=self.inputs)

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, Any]]:
        """Return several rows, in one batched read if the dataset has one; raise as for one row."""
        rows = zip(indices, _load_items(self.dataset, indices), strict=True)
        return [
            _split_row(item, row=row, label=self.label, inputs=self.inputs) for row, item in rows
        ]


#: Column names that are taken for the label of a row.
_LABELS = ("label", "labels", "target", "targets", "y")


def _split_row(
    item: Any, *, row: int, label: str, inputs: Sequence[str]
) -> tuple[Any, Any]:  # Any: not looked at yet
    """Split a row that is a mapping into its inputs and its label.

    Raises:
        DataError: The row is not a mapping, or lacks a column.
    """
    if not isinstance(item, Mapping):
        raise DataError(
            f"dataset[{row}] is a {type(item).__name__}, not a mapping from columns to values; "
            "leave fl.Columns out"
        )
    chosen = tuple(inputs) or tuple(name for name in item if name != label)
    if missing := [name for name in (label, *chosen) if name not in item]:
        raise DataError(
            f"dataset[{row}] has no column {missing[0]!r}; it has {_list_keys(item)}: correct "
            "fl.Columns"
        )
    if not chosen:
        raise DataError(f"dataset[{row}] has the label {label!r} alone, and no input for the model")
    features = {name: item[name] for name in chosen}
    return features if len(chosen) > 1 else features[chosen[0]], item[label]


def _label_of(item: Mapping[str, Any], *, row: int) -> str:
    """Find a row's label column by its name; raise DataError unless there is exactly one."""
    found = [name for name in _LABELS if name in item]
    if len(found) != 1:
        what = f"both {found[0]!r} and {found[1]!r}" if found else "no column with a usual name"
        raise DataError(
            f"dataset[{row}] has the columns {_list_keys(item)}: for the label it has {what} "
            f'({", ".join(_LABELS)}); name it: fl.Columns(dataset, label="...", inputs=["..."])'
        )
    return found[0]


def _list_keys(item: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in item) or "none"


def _to_pair(item: Any, *, row: int) -> Pair:  # Any: not looked at yet
    if isinstance(item, Mapping):
        item = _split_row(item, row=row, label=_label_of(item, row=row), inputs=())
    try:
        given, label = item
        return map_inputs(torch.as_tensor, given), torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"dataset[{row}] is not a pair of numbers or tensors (features, label): {error}; give "
            "the dataset a transform that makes tensors, or name the columns of numbers: "
            "fl.Columns(dataset, label=..., inputs=[...])"
        ) from error


def _stack_values(values: Sequence[Tensor], *, rows: Sequence[int], what: str) -> Tensor:
    expected = (values[0].shape, values[0].dtype)
    for row, value in zip(rows, values, strict=True):
        if (value.shape, value.dtype) != expected:
            raise DataError(
                f"dataset[{row}] has {what} of shape {tuple(value.shape)} and {value.dtype}, "
                f"others have {tuple(expected[0])} and {expected[1]}; pad, crop or convert it in a "
                "transform"
            )
    return torch.stack(list(values))
