"""Subsets of a population, and the pooled examples of all clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.features import Features, cast_inputs, move_to_device, take_rows
from fedlearn.core.randomness import Seed
from fedlearn.errors import DataError
from fedlearn.simulation.partition import offsets_of
from fedlearn.simulation.population import (
    ClientRows,
    Population,
    UnreadRows,
    client_names,
    unread_rows,
)


@dataclass(frozen=True, eq=False)
class Subpopulation:
    """Some of the clients of a population, renumbered from 0.

    Attributes:
        parts: The whole population.
        client_ids: The clients' ids in it: int64 [n].
    """

    parts: Population
    client_ids: NDArray[np.int64]

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.client_ids)

    @property
    def names(self) -> NDArray[Any] | None:
        """These clients' names in the data: shape [n]; ``None``: they have no names."""
        names = client_names(self.parts)
        return None if names is None else names[self.client_ids]

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each of these clients has."""
        return self.parts.num_examples(self.client_ids[client_ids])

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the examples of these clients."""
        return self.parts.load(self.client_ids[client_ids])

    def unread(self, client_ids: NDArray[np.int64]) -> UnreadRows | None:
        """Return these clients' rows without reading them; ``None`` if no dataset reads them."""
        return unread_rows(self.parts, self.client_ids[client_ids])


def set_aside(
    population: Population, *, share: float, seed: Seed
) -> tuple[Subpopulation, Subpopulation]:
    """Split off a random share of the clients, at least one; return those and the others.

    Args:
        population: All clients.
        share: The share to split off, in (0, 1].
        seed: Seed of the random draw.

    Example:
        >>> from fedlearn.simulation.partition import Iid
        >>> from fedlearn.simulation.population import ArrayPopulation
        >>> rows, partition = torch.zeros(20, 1), Iid(num_clients=5)
        >>> everyone = ArrayPopulation(
        ...     features=rows,
        ...     labels=torch.zeros(20).long(),
        ...     num_classes=1,
        ...     partition=partition.split(np.zeros(20), seed=Seed(0)),
        ... )
        >>> aside, others = set_aside(everyone, share=0.4, seed=Seed(1))
        >>> aside.num_clients, others.num_clients
        (2, 3)
    """
    order = seed.numpy().permutation(population.num_clients).astype(np.int64)
    number = max(1, round(share * population.num_clients))
    aside, others = (np.sort(each) for each in (order[:number], order[number:]))
    return Subpopulation(population, aside), Subpopulation(population, others)


@dataclass(frozen=True, eq=False)
class PooledExamples:
    """The examples of all clients of a population, client after client, read in batches.

    Attributes:
        population: The clients.
        device: The device for batches.
        dtypes: Dtypes of a batch's inputs, in the order of ``named``; ``None``: those of the data.
    """

    population: Population
    device: torch.device
    dtypes: Sequence[torch.dtype] | None = None

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        sizes = self.population.num_examples(np.arange(self.population.num_clients))
        if not sizes.sum():
            raise DataError("there are no examples; give at least one")
        return offsets_of(sizes)

    @cached_property
    def _unread(self) -> UnreadRows | None:
        return unread_rows(self.population, np.arange(self.population.num_clients))

    def batch(self, rows: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:
        """Read a batch of these rows: features [b, ...] and labels [b, ...].

        Raises:
            DataError: An example that was just read is invalid.
        """
        features, labels = self._read(rows, key=key)
        if self.dtypes is not None:
            features = cast_inputs(features, self.dtypes)
        return move_to_device(features, self.device), labels.to(self.device)

    def _read(self, rows: NDArray[np.int64], *, key: int) -> tuple[Features, Tensor]:
        if self._unread is not None:
            return self._unread.batch(rows, key=key)
        owners = np.searchsorted(self._offsets, rows, side="right") - 1
        # Load each client of the batch once; `places` maps the rows back to their clients.
        clients, places = np.unique(owners, return_inverse=True)
        loaded = self.population.load(clients)
        at = loaded.rows[loaded.offsets[places] + rows - self._offsets[owners]]
        index = torch.from_numpy(at).to(loaded.labels.device)
        return take_rows(loaded.features, index), loaded.labels.index_select(0, index)
