"""What a sampler may know of simulated clients: how many examples they have, and their groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from fedlearn.errors import ConfigError
from fedlearn.simulation.population import ClientRows, Population, client_names

#: Clients whose labels are read at a time.
_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class PopulationProperties:
    """The properties of simulated clients: :class:`ClientProperties` of a population.

    A client's group is its most frequent label (``by="label"``) or its name (``by="name"``).
    """

    population: Population

    def num_examples(self, client_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples each client has."""
        return self.population.num_examples(client_ids)

    def groups(self, client_ids: NDArray[np.int64], *, by: str) -> Sequence[str]:
        """Return each client's group.

        Raises:
            ConfigError: The clients have no such property.
        """
        if by == "label":
            return [str(each) for each in self._labels[client_ids].tolist()]
        names = client_names(self.population)
        if by == "name" and names is not None:
            return [str(names[each]) for each in client_ids.tolist()]
        remedy = 'give "label", each client\'s most frequent label'
        raise ConfigError(
            f'cohort.by: simulated clients have no property "{by}"; {remedy}'
            + ("" if names is None else ', or "name", its name in the data')
        )

    @cached_property
    def _labels(self) -> NDArray[np.int64]:
        """The most frequent label of each client, the smallest of equally frequent ones: [C]."""
        found, num_clients = list[int](), self.population.num_clients
        for begin in range(0, num_clients, _AT_ONCE):
            rows = self.population.load(np.arange(begin, min(begin + _AT_ONCE, num_clients)))
            is_read = isinstance(rows, ClientRows)
            if not is_read or rows.labels.dtype != torch.int64 or rows.labels.dim() != 1:
                raise ConfigError(
                    'cohort.by is "label", but the clients\' labels are not one class an example '
                    "in memory; group them by another property, or draw them by another rule"
                )
            labels = rows.labels.cpu().numpy()[rows.rows]
            found += [
                int(np.bincount(each).argmax()) for each in np.split(labels, rows.offsets[1:-1])
            ]
        return np.asarray(found, np.int64)
