"""The mask graph: regular, symmetric, and in an order that the seed draws."""

import numpy as np
import pytest

from fedlearn.secagg.graph import MaskGraph


@pytest.mark.parametrize(("size", "k"), [(2, 2), (3, 2), (7, 4), (20, 6), (101, 30), (5, 8)])
def test_neighbours_are_mutual_and_k_each(size: int, k: int) -> None:
    graph = MaskGraph.sparse(size, num_neighbours=k, seed=b"roster")
    found = [graph.neighbours(i) for i in range(size)]
    assert all(len(of) == min(k, size - 1) == len(set(of)) for of in found)
    assert all(i not in of and of == sorted(of) for i, of in enumerate(found))
    assert all(i in found[j] for i, of in enumerate(found) for j in of)


def test_the_graph_follows_from_its_seed() -> None:
    one, same, other = (
        MaskGraph.sparse(50, num_neighbours=6, seed=seed) for seed in (b"a", b"a", b"b")
    )
    every = range(50)
    assert [one.neighbours(i) for i in every] == [same.neighbours(i) for i in every]
    assert [one.neighbours(i) for i in every] != [other.neighbours(i) for i in every]


def test_positions_say_nothing_about_who_is_near() -> None:
    """Over many seeds, clients 0 and 1 meet as often as any other two: k / (n - 1)."""
    meetings = sum(
        1 in MaskGraph.sparse(21, num_neighbours=4, seed=i.to_bytes(4)).neighbours(0)
        for i in range(2000)
    )
    assert abs(meetings / 2000 - 0.2) < 5 * np.sqrt(0.16 / 2000)


def test_a_ring_with_an_odd_number_of_neighbours_is_refused() -> None:
    for k in (0, 1, 3):
        with pytest.raises(ValueError, match="even number"):
            MaskGraph.sparse(10, num_neighbours=k, seed=b"")


def test_enough_neighbours_make_the_graph_complete() -> None:
    assert MaskGraph.sparse(5, num_neighbours=4, seed=b"").is_complete
    assert not MaskGraph.sparse(6, num_neighbours=4, seed=b"").is_complete
