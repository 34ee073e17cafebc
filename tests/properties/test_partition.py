"""For any rule, labels and seed, a partition is exact and repeatable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedlearn.core.randomness import Seed
from fedlearn.simulation.partition import (
    ByIds,
    Dirichlet,
    DirichletSizes,
    Iid,
    LognormalSizes,
    Partitioner,
    Shards,
)

_labels = st.lists(st.integers(0, 4), min_size=40, max_size=120).map(np.array)
_seeds = st.integers(0, 2**63 - 1).map(Seed)
_rules: st.SearchStrategy[Partitioner] = st.one_of(
    st.integers(1, 40).map(Iid),
    st.builds(Dirichlet, st.integers(1, 3), st.floats(0.5, 100.0), st.just(1)),
    st.builds(Shards, st.integers(1, 10), st.integers(1, 4)),
    st.builds(DirichletSizes, st.integers(1, 20), st.floats(0.001, 100.0), st.integers(1, 2)),
    st.builds(LognormalSizes, st.integers(1, 20), st.floats(0.0, 1000.0), st.integers(1, 2)),
)


@pytest.mark.slow
@given(rule=_rules, labels=_labels, seed=_seeds)
@settings(max_examples=60)
def test_every_row_belongs_to_exactly_one_client(
    rule: Partitioner, labels: NDArray[np.int64], seed: Seed
) -> None:
    """The rows are a permutation, cut into parts that are not empty."""
    partition = rule.split(labels, seed=seed)
    assert np.array_equal(np.sort(partition.rows), np.arange(labels.size))
    assert partition.offsets[0] == 0
    assert partition.offsets[-1] == labels.size
    assert (np.diff(partition.offsets) > 0).all()


@given(rule=_rules, labels=_labels, seed=_seeds, noise=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_the_seed_alone_decides(
    rule: Partitioner, labels: NDArray[np.int64], seed: Seed, noise: int
) -> None:
    """The state of numpy's global generator does not affect a partition."""
    first = rule.split(labels, seed=seed)
    np.random.seed(noise)  # noqa: NPY002  the global generator, which must not matter
    second = rule.split(labels, seed=seed)
    assert np.array_equal(first.rows, second.rows)
    assert np.array_equal(first.offsets, second.offsets)


@given(num_clients=st.integers(1, 40), labels=_labels, seed=_seeds)
@settings(max_examples=30)
def test_iid_parts_are_as_equal_as_can_be(
    num_clients: int, labels: NDArray[np.int64], seed: Seed
) -> None:
    """Sizes differ by at most one."""
    assert np.ptp(np.diff(Iid(num_clients).split(labels, seed=seed).offsets)) <= 1


@given(ids=st.lists(st.text(max_size=3), min_size=1, max_size=40).map(np.array), seed=_seeds)
@settings(max_examples=30)
def test_natural_clients_hold_their_own_rows(ids: NDArray[np.str_], seed: Seed) -> None:
    """All rows of a client carry its name, and no other row does."""
    partition = ByIds(ids).split(np.zeros(ids.size), seed=seed)
    assert partition.names is not None
    for client, name in enumerate(partition.names):
        assert np.array_equal(partition.rows_of(client), np.flatnonzero(ids == name))


def test_another_seed_gives_another_partition() -> None:
    """Control: the seed does matter."""
    labels = np.arange(100) % 5
    for rule in (Iid(5), Dirichlet(5, 1.0, 1), Shards(5, 2), DirichletSizes(5, 1.0, 1)):
        first, second = (rule.split(labels, seed=Seed(value)).rows for value in (0, 1))
        assert not np.array_equal(first, second)
