"""The graph of pairwise masks: complete, or k neighbors each on a ring in a random order.

The order of the ring is drawn from the hash of the roster, so every party computes the same graph
and no party sends it or chooses it. The *holders* of a client keep shares of its secrets: they are
its neighbors, and in the complete graph also the client itself, which lets a small cohort lose one
more client.

References:
    Bell et al., 2020, `Secure Single-Server Aggregation with (Poly)Logarithmic Overhead
    <https://doi.org/10.1145/3372297.3417885>`_ (Harary graphs).
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


class Topology(IntEnum):
    """Which pairs of clients share a mask."""

    COMPLETE = 0
    SPARSE = 1


def draw_permutation(size: int, *, seed: bytes) -> NDArray[np.int64]:
    """Return 0 … ``size`` - 1 in the pseudorandom order given by ``seed``: shape [size]."""
    # Little-endian words and a stable sort, so that all platforms get the same order.
    drawn = np.frombuffer(hashlib.shake_256(seed).digest(8 * size), "<u8")
    return np.argsort(drawn, kind="stable")


@dataclass(frozen=True, eq=False)
class Ring:
    """Clients on a ring, by their positions in the roster.

    Attributes:
        order: The client at each place of the ring: shape [n].
        num_neighbors: k: the number of nearest clients that are neighbors, half on each side.

    Raises:
        ValueError: k is odd, or not in [2, n - 1].

    Example:
        >>> Ring.from_seed(3, num_neighbors=2, seed=b"").neighbors(1).tolist()
        [0, 2]
    """

    order: NDArray[np.int64]
    num_neighbors: int

    def __post_init__(self) -> None:
        if self.num_neighbors % 2 or not 2 <= self.num_neighbors < len(self.order):  # noqa: PLR2004 - either side
            raise ValueError(
                f"a ring of {len(self.order)} has an even number of neighbors below that, not "
                f"{self.num_neighbors}"
            )

    @classmethod
    def from_seed(cls, num_clients: int, *, num_neighbors: int, seed: bytes) -> "Ring":
        """Return a ring in the pseudorandom order given by ``seed``."""
        return cls(draw_permutation(num_clients, seed=seed), num_neighbors)

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order))
        return places

    @cached_property
    def _steps(self) -> NDArray[np.int64]:
        half = self.num_neighbors // 2
        return np.concatenate([np.arange(-half, 0), np.arange(1, half + 1)])

    def neighbors(self, client: int) -> NDArray[np.int64]:
        """Return the neighbors of one client, ascending: shape [k]."""
        found: NDArray[np.int64] = self.order[
            (self._places[client] + self._steps) % len(self.order)
        ]
        # Indexing with an array made a copy, so this leaves the order of the ring alone.
        found.sort()
        return found
