"""One client's examples as a trainer reads them: in memory, or batch by batch from a dataset."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from fedlearn.errors import DataError
from fedlearn.training.keyed_dropout import untouched


class LocalData(Protocol):
    """Examples by number."""

    def __len__(self) -> int:
        """Return how many there are."""

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Tensor, Tensor]:
        """Return features [batch, ...] and labels [batch, ...] where the model is.

        Args:
            rows: Which examples, in 0..len-1.
            key: Of what is random in reading them, 32 bits.
        """


class TensorData:
    """Examples that are in memory as two tensors.

    Args:
        features: Shape [n, ...].
        labels: Shape [n, ...].
        device: Where the model is.

    Raises:
        DataError: There are no examples, or not one label each.
    """

    def __init__(self, features: Tensor, labels: Tensor, *, device: torch.device) -> None:
        if len(features) == 0 or len(features) != len(labels):
            raise DataError(
                f"{len(features)} examples with {len(labels)} labels; a client trains on at "
                "least one example and each has one label"
            )
        self._features, self._labels = features.to(device), labels.to(device)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - nothing is random
        """Return the rows, copied."""
        index = torch.from_numpy(rows).to(self._labels.device)
        return self._features.index_select(0, index), self._labels.index_select(0, index)


class DatasetData:
    """Examples that a map-style dataset reads when they are needed: any number of them.

    What an item draws from torch's generator, such as a random crop, is a function of the
    batch's key; drawing from it leaves the application's own sequence where it was.

    Args:
        dataset: Of pairs (features, label), with a length; items are collated as by a
            ``DataLoader``.
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

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Tensor, Tensor]:
        """Read the rows.

        Raises:
            DataError: The items are not pairs of features and label.
        """
        generator = torch.default_generator
        with untouched(generator):
            generator.manual_seed(key)
            collated = default_collate(self._items(rows.tolist()))
        is_pair = isinstance(collated, list | tuple) and len(collated) == 2  # noqa: PLR2004
        if not is_pair or not all(isinstance(each, Tensor) for each in collated):
            raise DataError(
                f"an item of {type(self._dataset).__name__} is not a pair (features, label) of "
                "tensors or numbers; wrap the dataset in one whose items are"
            )
        features, labels = collated
        return features.to(self._device), labels.to(self._device)

    def _items(self, rows: list[int]) -> list[Any]:  # Any: not looked at yet
        read_all = getattr(self._dataset, "__getitems__", None)  # as a DataLoader asks for it
        return list(read_all(rows)) if read_all else [self._dataset[row] for row in rows]
