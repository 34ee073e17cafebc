"""Aggregation is a monoid: the order of clients, their grouping and the workers do not matter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlearn.algorithms.aggregations import LaneSums, WeightedMean, merge
from fedlearn.algorithms.lanes import DELTA, Updates
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout

CPU = torch.device("cpu")
SIZE = 33
MEAN = WeightedMean(by_examples=True)
DTYPES = {torch.float32: 1e-6, torch.float64: 1e-12}

seeds = st.integers(0, 2**32 - 1)
partitions = st.lists(st.integers(1, 9), min_size=1, max_size=8)  # sizes of the blocks


def layout(dtype: torch.dtype) -> Layout:
    return Layout.of(nn.Linear(SIZE, 1, bias=False).to(dtype))


def clients(seed: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    deltas = rng.normal(size=(count, SIZE)) * rng.lognormal(size=(count, 1))
    weights = rng.integers(1, 1000, count)
    return torch.tensor(deltas, dtype=dtype), torch.tensor(weights, dtype=dtype)


def empty(dtype: torch.dtype) -> LaneSums:
    return MEAN.init([DELTA], layout(dtype), device=CPU)


def updates(deltas: Tensor | list[Tensor], weights: Tensor) -> Updates:
    clients = [ClientId(client) for client in range(len(deltas))]
    return Updates(clients, weights, {"delta": deltas}, [0] * len(deltas))


def mean_of(state: LaneSums) -> Tensor:
    return MEAN.finalize(copy(state)).lanes["delta"]


def fold(deltas: Tensor, weights: Tensor) -> LaneSums:
    state = empty(deltas.dtype)
    return MEAN.accumulate(state, updates(deltas, weights))


def copy(state: LaneSums) -> LaneSums:
    """Clone a state, since folding and merging consume it."""
    sums = {name: total.clone() for name, total in state.sums.items()}
    return replace(
        state, sums=sums, weight=state.weight.clone(), num_clients=state.num_clients.clone()
    )


def assert_same(left: LaneSums, right: LaneSums, dtype: torch.dtype) -> None:
    expected, tolerance = mean_of(left), DTYPES[dtype]
    found = mean_of(right)
    torch.testing.assert_close(
        found, expected, rtol=0.0, atol=tolerance * float(expected.abs().max() + 1)
    )
    assert float(left.weight) == float(right.weight)


@pytest.mark.parametrize("dtype", list(DTYPES))
@settings(max_examples=40)
@given(seed=seeds, blocks=partitions)
def test_any_partition_into_blocks_gives_the_same_mean(
    dtype: torch.dtype, seed: int, blocks: list[int]
) -> None:
    """For one block of all clients, one client per block, and everything in between."""
    deltas, weights = clients(seed, sum(blocks), dtype)
    state = empty(dtype)
    for rows, weights_B in zip(deltas.split(blocks), weights.split(blocks), strict=True):
        state = MEAN.accumulate(state, updates(rows, weights_B))
    assert_same(fold(deltas, weights), state, dtype)
    apart = empty(dtype)
    for rows, weights_B in zip(deltas.split(blocks), weights.split(blocks), strict=True):
        apart = MEAN.accumulate(apart, updates([row.clone() for row in rows], weights_B))
    assert_same(state, apart, dtype)
    exact = (deltas.double() * weights.double()[:, None]).sum(0) / weights.double().sum()
    scale = float(exact.abs().max() + 1)
    torch.testing.assert_close(mean_of(state).double(), exact, rtol=0.0, atol=DTYPES[dtype] * scale)


@pytest.mark.parametrize("dtype", list(DTYPES))
@settings(max_examples=40)
@given(seed=seeds, sizes=st.tuples(*[st.integers(1, 9)] * 3))
def test_merging_is_commutative_and_associative(
    dtype: torch.dtype, seed: int, sizes: tuple[int, int, int]
) -> None:
    """So any tree of workers or edge servers computes the same mean."""
    deltas, weights = clients(seed, sum(sizes), dtype)
    parts = zip(deltas.split(list(sizes)), weights.split(list(sizes)), strict=True)
    a, b, c = (fold(*part) for part in parts)
    assert_same(merge(copy(a), copy(b)), merge(copy(b), copy(a)), dtype)
    left = merge(merge(copy(a), copy(b)), copy(c))
    right = merge(copy(a), merge(copy(b), copy(c)))
    assert_same(left, right, dtype)
    assert_same(fold(deltas, weights), left, dtype)


@settings(max_examples=40)
@given(seed=seeds, count=st.integers(1, 9))
def test_the_empty_state_is_the_identity(seed: int, count: int) -> None:
    """Merging with it, on either side, does not change a bit."""
    state = fold(*clients(seed, count, torch.float32))
    nobody = empty(torch.float32)
    expected = mean_of(state)
    assert torch.equal(mean_of(merge(copy(state), copy(nobody))), expected)
    assert torch.equal(mean_of(merge(copy(nobody), copy(state))), expected)


@settings(max_examples=40)
@given(seed=seeds, count=st.integers(1, 9))
def test_the_order_of_clients_does_not_matter(seed: int, count: int) -> None:
    """Replies may arrive in any order."""
    deltas, weights = clients(seed, count, torch.float64)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    assert_same(fold(deltas, weights), fold(deltas[order], weights[order]), torch.float64)


def test_a_lost_block_is_noticed() -> None:
    """Control: a state without one of the blocks has another mean and another weight."""
    deltas, weights = clients(0, 6, torch.float64)
    whole, part = fold(deltas, weights), fold(deltas[:4], weights[:4])
    assert float(whole.weight) != float(part.weight)
    assert (mean_of(whole) - mean_of(part)).abs().max() > 1e-3
