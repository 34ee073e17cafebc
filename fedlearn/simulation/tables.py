"""Clients of a simulation that hold tables, for statistics rather than training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.errors import DataError
from fedlearn.simulation.federated_data import FederatedData, without_test
from fedlearn.simulation.partition import offsets_of
from fedlearn.simulation.population import ClientRows, places_of, sizes_of
from fedlearn.statistics.schema import ClientTable


@dataclass(frozen=True, eq=False, kw_only=True)
class TablePopulation:
    """Clients that hold a table each; values may be missing, and tables empty.

    Attributes:
        tables: One for each client, with the same columns.
        names: The clients' names, by number: [C].
    """

    tables: Sequence[ClientTable] = field(repr=False)
    names: NDArray[Any]

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.tables)

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many rows each of these clients has; an empty table has one of padding."""
        return sizes_of(self._offsets, client_ids=client_ids)

    def load(self, client_ids: NDArray[np.int64]) -> ClientRows:
        """Return the tensors, uncopied, and the rows of these clients."""
        rows, offsets = places_of(self._offsets, client_ids=client_ids)
        return ClientRows(self._features, self._labels, rows, offsets)

    @cached_property
    def _features(self) -> Mapping[str, Tensor]:
        of_clients = [each.features for each in self.tables]
        return {name: torch.cat([each[name] for each in of_clients]) for name in of_clients[0]}

    @cached_property
    def _labels(self) -> Tensor:
        return torch.cat([each.labels for each in self.tables])

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return offsets_of(np.asarray([len(each.labels) for each in self.tables], np.int64))


def from_tables(tables: Mapping[str, ClientTable]) -> FederatedData:
    """Build a federated data set from the clients' tables, by name.

    Raises:
        DataError: There are none.
    """
    if not tables:
        raise DataError("there are no tables; give one for each client")
    population = TablePopulation(
        tables=list(tables.values()), names=np.asarray(list(map(str, tables)))
    )
    return without_test(population, num_classes=None)
