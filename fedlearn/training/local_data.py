"""One client's examples as a trainer reads them: in memory, or batch by batch from a dataset."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedlearn.core.features import (
    Features,
    mapped,
    moved,
    named,
    rebuilt,
    require_one_label_each,
    taken,
)
from fedlearn.errors import DataError
from fedlearn.training.keyed_dropout import untouched


class LocalData(Protocol):
    """Examples by number."""

    def __len__(self) -> int:
        """Return how many there are."""

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:
        """Return features [batch, ...] and labels [batch, ...] where the model is.

        Args:
            rows: Which examples, in 0..len-1.
            key: Of what is random in reading them, 32 bits.
        """


class TensorData:
    """Examples that are in memory as tensors.

    Args:
        features: Shape [n, ...].
        labels: Shape [n, ...].
        device: Where the model is.

    Raises:
        DataError: There are no examples, not one label each, or features are no tensors.
    """

    def __init__(self, features: Features, labels: Tensor, *, device: torch.device) -> None:
        require_one_label_each(features, labels)
        if not len(labels):
            raise DataError("there are no examples; a client trains on at least one")
        self._features, self._labels = moved(features, device), labels.to(device)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:  # noqa: ARG002 - nothing is random
        """Return the rows, copied."""
        index = torch.from_numpy(rows).to(self._labels.device)
        return taken(self._features, index), self._labels.index_select(0, index)


class DatasetData:
    """Examples that a map-style dataset reads when they are needed: any number of them.

    What an item draws from torch's generator, such as a random crop, is a function of the
    batch's key; drawing from it leaves the application's own sequence where it was.

    Args:
        dataset: Of pairs (features, label), with a length: see :func:`stacked_rows`.
        device: Where the model is.

    Raises:
        DataError: It is empty or has no length.
    """

    def __init__(self, dataset: Dataset[Any], *, device: torch.device) -> None:
        length = getattr(dataset, "__len__", None)
        if length is None:
            raise DataError(
                f"{type(dataset).__name__} has no length; give a map-style dataset, "
                "with __len__ and __getitem__"
            )
        self._dataset, self._length, self._device = dataset, int(length()), device
        if self._length == 0:
            raise DataError("the dataset is empty; a client trains on at least one example")

    def __len__(self) -> int:
        return self._length

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:
        """Read the rows.

        Raises:
            DataError: As :func:`stacked_rows`.
        """
        generator = torch.default_generator
        with untouched(generator):
            generator.manual_seed(key)
            features, labels = stacked_rows(self._dataset, rows=rows)
        return moved(features, self._device), labels.to(self._device)


class Readable(Protocol):
    """What reads an example by its number, such as a map-style ``torch.utils.data.Dataset``."""

    def __getitem__(self, index: int, /) -> Any: ...  # a pair of whatever torch can convert


def stacked_rows(dataset: Readable, *, rows: NDArray[np.int64]) -> tuple[Features, Tensor]:
    """Read these rows, at least one, and return their features and their labels, stacked.

    A row is a pair (features, label). Features that are a tuple or a mapping are several inputs
    of the model; anything else, a list of numbers too, becomes one tensor.

    Raises:
        DataError: A row is no pair of numbers, or has other inputs, another shape or another
            dtype than the first.
    """
    numbers = rows.tolist()
    read_all = getattr(dataset, "__getitems__", None)  # as a DataLoader asks for it
    items = read_all(numbers) if read_all else [dataset[row] for row in numbers]
    pairs = [_as_pair(item, row=row) for item, row in zip(items, numbers, strict=True)]
    first, rest = named(pairs[0][0]), [named(features) for features, _ in pairs]
    for row, inputs in zip(numbers, rest, strict=True):
        if inputs.keys() != first.keys():
            raise DataError(
                f"dataset[{row}] has {' and '.join(inputs)}, dataset[{numbers[0]}] "
                f"{' and '.join(first)}; give every row the same inputs"
            )
    stacked = [_stacked([each[name] for each in rest], rows=numbers, what=name) for name in first]
    labels = _stacked([label for _, label in pairs], rows=numbers, what="a label")
    return rebuilt(stacked, like=pairs[0][0]), labels


def _as_pair(item: Any, *, row: int) -> tuple[Features, Tensor]:  # Any: not looked at yet
    try:
        given, label = item
        return mapped(torch.as_tensor, given), torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"dataset[{row}] is not a pair of numbers or tensors (features, label): {error}; give "
            "the dataset a transform that makes tensors"
        ) from error


def _stacked(values: Sequence[Tensor], *, rows: Sequence[int], what: str) -> Tensor:
    expected = (values[0].shape, values[0].dtype)
    for row, value in zip(rows, values, strict=True):
        if (value.shape, value.dtype) != expected:
            raise DataError(
                f"dataset[{row}] has {what} of shape {tuple(value.shape)} and {value.dtype}, "
                f"others have {tuple(expected[0])} and {expected[1]}; pad, crop or convert it in a "
                "transform"
            )
    return torch.stack(list(values))
