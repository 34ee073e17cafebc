"""Examples as a stream without end, in an order that is a function of the seed and the position.

Step s of a training with batches of B examples takes the positions from sB on, whoever computes
which part of them: so a batch is the same on every mesh, none is smaller than another, no example
is taken twice to fill one up, and a training that goes on after a crash knows where it was by its
step alone.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.features import Features
from fedlearn.core.randomness import Seed
from fedlearn.training.local_data import LocalData

T = TypeVar("T")


class Stream(Protocol):
    """Examples by their position, from 0 without end."""

    def __len__(self) -> int:
        """Return the examples of one pass."""

    def batch(self, positions: range) -> tuple[Features, Tensor]:
        """Return the examples at these positions: features [b, ...] and labels [b, ...].

        Args:
            positions: Neighbours, b >= 1 of them.

        Raises:
            DataError: They cannot be read.
        """


@runtime_checkable
class ReadInWindows(Stream, Protocol):
    """A stream whose examples are read many at once: those of a window cost little more than one.

    Who reads ahead in several processes has each window read by one of them.
    """

    def window(self, position: int) -> range:
        """Return the positions around this one that are read together."""

    def examples(self, positions: NDArray[np.int64]) -> tuple[Features, Tensor]:
        """Return the examples at these positions, which ascend.

        Raises:
            DataError: They cannot be read.
        """


class Shuffled:
    """All examples in a new order in each pass.

    Args:
        data: The examples.
        seed: Of the orders.

    Example:
        >>> import torch
        >>> from fedlearn.training.local_data import TensorData
        >>> rows = torch.arange(5.0)
        >>> stream = Shuffled(TensorData(rows, rows, device=rows.device), seed=Seed(0))
        >>> first, _ = stream.batch(range(0, 5))
        >>> second, _ = stream.batch(range(5, 10))
        >>> sorted(first.tolist()) == sorted(second.tolist()), torch.equal(first, second)
        (True, False)
    """

    def __init__(self, data: LocalData, *, seed: Seed) -> None:
        self._data, self._seed = data, seed
        self._orders = LastUsed(self._order)

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, positions: range) -> tuple[Features, Tensor]:
        """Return the examples at these positions."""
        parts = passes(positions, len(self))
        rows = np.concatenate([self._orders[number][places] for number, places in parts])
        key = int(self._seed.hash(positions.start)) >> 32
        return self._data.batch(rows, key=key)

    def _order(self, number: int) -> NDArray[np.int64]:
        return self._seed.derive("pass", number).numpy().permutation(len(self)).astype(np.int64)


class LastUsed(Generic[T]):
    """Values that are made when they are asked for, the last two of which are kept.

    A batch lies in two passes at most, unless it is longer; so it does with whatever else follows
    one another.

    Args:
        make: Makes one of its number.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._kept: dict[int, T] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_kept": {}}  # another process makes its own

    def __getitem__(self, number: int) -> T:
        value = self._kept.pop(number, None)
        value = self._make(number) if value is None else value
        self._kept = dict([*self._kept.items()][-1:]) | {number: value}
        return value


def passes(positions: range, length: int) -> list[tuple[int, slice]]:
    """Return which passes positions lie in, and where in each.

    Args:
        positions: Neighbours.
        length: Examples of a pass.

    Example:
        >>> passes(range(3, 9), 5)
        [(0, slice(3, 5, None)), (1, slice(0, 4, None))]
    """
    numbers = range(positions.start // length, -(-positions.stop // length))
    starts = [max(positions.start - number * length, 0) for number in numbers]
    stops = [min(positions.stop - number * length, length) for number in numbers]
    return [(n, slice(a, b)) for n, a, b in zip(numbers, starts, stops, strict=True)]
