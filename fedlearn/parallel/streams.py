"""Endless streams of examples, in an order that depends only on the seed and the position.

Step s of a training with batches of B examples takes the B positions from sB on, no matter which
process computes which of them. Batches are therefore the same on every mesh, all have the same
size, no example is repeated to fill one up, and a training that resumes after a crash finds its
place from the step number alone.
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
    """Examples at positions 0, 1, 2 and so on, without end."""

    def __len__(self) -> int:
        """Return the number of examples in one pass."""

    def batch(self, positions: range) -> tuple[Features, Tensor]:
        """Return the examples at these positions: features [b, ...] and labels [b, ...].

        Args:
            positions: Consecutive positions, b >= 1 of them.

        Raises:
            DataError: The examples cannot be read.
        """


@runtime_checkable
class ReadInWindows(Stream, Protocol):
    """A stream in which reading a whole window of examples costs little more than reading one.

    When several processes prefetch, each window should be read by only one of them.
    """

    def window(self, position: int) -> range:
        """Return the window around a position: the positions that are read together."""

    def examples(self, positions: NDArray[np.int64]) -> tuple[Features, Tensor]:
        """Return the examples at these positions, which must be in ascending order.

        Raises:
            DataError: The examples cannot be read.
        """


class Shuffled:
    """All examples of a data set, in a new order in each pass.

    Args:
        data: The examples.
        seed: Seed of the orders.

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
        key = int(self._seed.hash(positions.start)) >> 32  # LocalData takes 32 bits
        return self._data.batch(rows, key=key)

    def _order(self, number: int) -> NDArray[np.int64]:
        return self._seed.derive("pass", number).numpy().permutation(len(self)).astype(np.int64)


class LastUsed(Generic[T]):
    """Cache of the last two values that were used, each computed from its number when needed.

    Two are enough for consecutive positions: a batch lies in at most two passes, unless it is
    longer than a pass. The same holds for windows and blocks.

    Args:
        make: Computes the value with a given number.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._cache: dict[int, T] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_cache": {}}  # not pickled: another process computes its own

    def __getitem__(self, number: int) -> T:
        # Popped and put back last, so that the first entry is the one to forget.
        value = self._cache.pop(number, None)
        value = self._make(number) if value is None else value
        self._cache = dict([*self._cache.items()][-1:]) | {number: value}
        return value


def passes(positions: range, length: int) -> list[tuple[int, slice]]:
    """Divide positions by passes: return the number of each pass, and the places in it.

    Args:
        positions: Consecutive positions.
        length: Number of examples in a pass.

    Example:
        >>> passes(range(3, 9), 5)
        [(0, slice(3, 5, None)), (1, slice(0, 4, None))]
    """
    numbers = range(positions.start // length, -(-positions.stop // length))
    starts = [max(positions.start - number * length, 0) for number in numbers]
    stops = [min(positions.stop - number * length, length) for number in numbers]
    return [(n, slice(a, b)) for n, a, b in zip(numbers, starts, stops, strict=True)]
