"""Who masks with whom: everybody, or k neighbours on a ring in an order nobody chose.

The ring's order is drawn from the hash of the roster, so every party computes the same graph
and none of them sends it. A client's *holders*, who keep shares of its secrets, are its
neighbours; in the complete graph it is one itself, which spares small cohorts a dropout.

References:
    Bell et al., 2020, `Secure Single-Server Aggregation with (Poly)Logarithmic Overhead
    <https://doi.org/10.1145/3372297.3417885>`_ (Harary graphs).
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Topology(IntEnum):
    """Which pairs of clients share a mask."""

    COMPLETE = 0
    SPARSE = 1


@dataclass(frozen=True, eq=False)
class MaskGraph:
    """The neighbours of each of n clients, by position in the roster.

    Attributes:
        order: The client at each place of the ring: shape [n].
        places: The place of each client: shape [n].
        num_neighbours: k, even unless the graph is complete.

    Example:
        >>> MaskGraph.complete(3).neighbours(1)
        [0, 2]
    """

    order: NDArray[np.int64]
    places: NDArray[np.int64]
    num_neighbours: int

    @classmethod
    def complete(cls, num_clients: int) -> "MaskGraph":
        """Return the graph in which all are neighbours."""
        every = np.arange(num_clients)
        return cls(every, every, num_clients - 1)

    @classmethod
    def sparse(cls, num_clients: int, *, num_neighbours: int, seed: bytes) -> "MaskGraph":
        """Return the ring in the order of ``seed``, each joined to the k nearest.

        Complete if k >= n - 1.

        Raises:
            ValueError: k is odd or below 2.
        """
        if num_neighbours >= num_clients - 1:
            return cls.complete(num_clients)
        if num_neighbours < 2 or num_neighbours % 2:  # noqa: PLR2004 - one on either side
            raise ValueError(f"a ring has an even number of neighbours, not {num_neighbours}")
        drawn = np.frombuffer(hashlib.shake_256(seed).digest(8 * num_clients), "<u8")
        order = np.argsort(drawn, kind="stable")
        return cls(order, np.argsort(order), num_neighbours)

    @property
    def is_complete(self) -> bool:
        """Whether all are neighbours, and holders of their own shares."""
        return self.num_neighbours == len(self.order) - 1

    def neighbours(self, position: int) -> list[int]:
        """Return the positions of a client's neighbours, ascending."""
        size = len(self.order)
        if self.is_complete:
            return [other for other in range(size) if other != position]
        half = self.num_neighbours // 2
        steps = np.concatenate([np.arange(-half, 0), np.arange(1, half + 1)])
        found = self.order[(self.places[position] + steps) % size]
        return [int(other) for other in np.sort(found)]
