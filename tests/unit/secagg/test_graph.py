"""The ring is regular and symmetric, and its order follows from the seed."""

import numpy as np
import pytest

from fedlearn.secagg.graph import Ring


def ring(size: int, *, num_neighbors: int, seed: bytes) -> list[list[int]]:
    drawn = Ring.from_seed(size, num_neighbors=num_neighbors, seed=seed)
    return [drawn.neighbors(each).tolist() for each in range(size)]


@pytest.mark.parametrize(("size", "k"), [(3, 2), (5, 4), (7, 4), (20, 6), (101, 30)])
def test_neighbors_are_mutual_and_k_each(size: int, k: int) -> None:
    found = ring(size, num_neighbors=k, seed=b"roster")
    assert all(len(of) == k == len(set(of)) for of in found)
    assert all(i not in of and of == sorted(of) for i, of in enumerate(found))
    assert all(i in found[j] for i, of in enumerate(found) for j in of)


def test_the_ring_follows_from_its_seed() -> None:
    one, same, other = (ring(50, num_neighbors=6, seed=seed) for seed in (b"a", b"a", b"b"))
    assert one == same != other


def test_the_ring_of_a_seed_stays_as_it_is() -> None:
    """Other versions must draw the same ring, so its order must not change between releases."""
    assert ring(6, num_neighbors=2, seed=b"roster") == [
        [4, 5],
        [3, 4],
        [3, 5],
        [1, 2],
        [0, 1],
        [0, 2],
    ]


def test_positions_say_nothing_about_who_is_near() -> None:
    """Over many seeds, clients 0 and 1 are neighbors as often as any other two: k / (n - 1)."""
    seeds = (i.to_bytes(4) for i in range(2000))
    meetings = sum(
        1 in Ring.from_seed(21, num_neighbors=4, seed=seed).neighbors(0) for seed in seeds
    )
    assert abs(meetings / 2000 - 0.2) < 5 * np.sqrt(0.16 / 2000)


def test_a_ring_with_an_odd_number_of_neighbors_or_too_many_is_refused() -> None:
    for k in (0, 1, 3, 10):
        with pytest.raises(ValueError, match="even number"):
            ring(10, num_neighbors=k, seed=b"")
