"""Who masks with whom: everybody, or k neighbours on a ring in an order nobody chose.

The ring's order is drawn from the hash of the roster, so every party computes the same graph
and none of them sends it. A client's *holders*, who keep shares of its secrets, are its
neighbours; in the complete graph it is one itself, which spares small cohorts a dropout.

References:
    Bell et al., 2020, `Secure Single-Server Aggregation with (Poly)Logarithmic Overhead
    <https://doi.org/10.1145/3372297.3417885>`_ (Harary graphs).
"""

import hashlib
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Topology(IntEnum):
    """Which pairs of clients share a mask."""

    COMPLETE = 0
    SPARSE = 1


def ring(num_clients: int, *, num_neighbours: int, seed: bytes) -> NDArray[np.int64]:
    """Return the k nearest of each client on a ring in the order of ``seed``: shape [n, k].

    They are positions in the roster, ascending.

    Raises:
        ValueError: k is odd, or not from 2 to n - 1.

    Example:
        >>> ring(3, num_neighbours=2, seed=b"").tolist()
        [[1, 2], [0, 2], [0, 1]]
    """
    if num_neighbours % 2 or not 2 <= num_neighbours < num_clients:  # noqa: PLR2004 - either side
        raise ValueError(
            f"a ring of {num_clients} has an even number of neighbours below that, not "
            f"{num_neighbours}"
        )
    drawn = np.frombuffer(hashlib.shake_256(seed).digest(8 * num_clients), "<u8")
    order = np.argsort(drawn, kind="stable")
    half = num_neighbours // 2
    steps = [*range(-half, 0), *range(1, half + 1)]
    found = np.empty((num_clients, num_neighbours), np.int64)
    found[order] = np.stack([np.roll(order, step) for step in steps], axis=1)
    return np.sort(found, axis=1)
