"""The schedule of a block matches that of each of its clients alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from fedlearn.algorithms.local import LocalSgd, batch_positions
from fedlearn.core.randomness import Seed
from fedlearn.simulation.population import ClientRows
from fedlearn.simulation.schedule import Schedule, schedule

CPU = torch.device("cpu")


def rows_of(sizes: list[int]) -> ClientRows:
    """Build clients whose rows are scattered over the examples."""
    offsets = np.cumsum([0, *sizes])
    rows = (np.arange(offsets[-1]) * 7 + 3) % 1009
    return ClientRows(torch.zeros(1009, 1), torch.zeros(1009), rows, offsets)


def schedule_of(local: LocalSgd, sizes: list[int]) -> Schedule:
    return schedule(
        local,
        rows_of(sizes),
        np.arange(len(sizes)) * 5 + 2,
        round_num=3,
        seed=Seed(1),
        dtype=torch.float64,
        device=CPU,
    )


locals_ = st.builds(
    LocalSgd,
    epochs=st.integers(1, 3),
    batch_size=st.none() | st.integers(1, 9),
    learning_rate=st.just(0.1),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    max_steps=st.none() | st.integers(1, 12),
)
sizes_ = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=100)
@given(local=locals_, sizes=sizes_)
def test_every_client_trains_on_its_own_batches(local: LocalSgd, sizes: list[int]) -> None:
    """Rows, order and number of steps are those of a client that trains alone."""
    sizes.sort(reverse=True)
    made, rows = schedule_of(local, sizes), rows_of(sizes)
    for client, size in enumerate(sizes):
        of_client = {"round_num": 3, "client_id": client * 5 + 2, "num_examples": size}
        alone = list(batch_positions(local, seed=Seed(1), **of_client))
        own = rows.rows[rows.offsets[client] : rows.offsets[client + 1]]
        counts = made.counts_TK[:, client]
        for step, positions in enumerate(alone):
            scheduled = made.rows_TKB[step, client, : counts[step]]
            assert scheduled.tolist() == own[positions].tolist()
        assert not counts[len(alone) :].any()


@settings(max_examples=100)
@given(local=locals_, size=st.integers(1, 20))
def test_batches_are_those_of_a_data_loader(local: LocalSgd, size: int) -> None:
    """Except that a client with fewer examples than a batch trains on all of them."""
    batch_size = local.batch_size or size
    drops = local.drop_last and size >= batch_size
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(
        TensorDataset(torch.zeros(size)), batch_size=batch_size, drop_last=drops
    )
    epoch = [len(batch[0]) for batch in loader]
    want = (epoch * local.epochs)[: local.max_steps]
    counts = schedule_of(local, [size]).counts_TK[:, 0].tolist()
    assert counts == want
    assert int(local.num_steps(np.array(size))) == len(want)
    assert int(local.num_processed(np.array(size))) == sum(want)
    assert int(local.count_used(np.array(size))) == min(sum(epoch), sum(want))
    assert int(local.last_batch(np.array(size))) == epoch[-1]


@settings(max_examples=100)
@given(local=locals_, sizes=sizes_)
def test_weights_are_means_and_padding_weighs_nothing(local: LocalSgd, sizes: list[int]) -> None:
    """They add up to one per batch; the active clients are always a prefix."""
    sizes.sort(reverse=True)
    made = schedule_of(local, sizes)
    sums_TK = made.weights_TKB.sum(2).numpy()
    np.testing.assert_allclose(sums_TK, made.counts_TK > 0, atol=1e-12)
    assert ((made.weights_TKB.numpy() > 0).sum(2) == made.counts_TK).all()
    for step, num_active in enumerate(made.active_T.tolist()):
        assert (made.counts_TK[step] > 0).tolist() == [k < num_active for k in range(len(sizes))]
    assert made.num_steps == int(local.num_steps(np.array(sizes)).max())


@pytest.mark.parametrize(("sizes", "is_uniform"), [([8, 8], True), ([8, 4], False), ([6], False)])
def test_equal_batches_are_recognized(sizes: list[int], *, is_uniform: bool) -> None:
    """A block is uniform if it has no padding and all clients finish at the same step."""
    local = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
    assert schedule_of(local, sizes).is_uniform is is_uniform


def test_a_huge_batch_size_takes_no_more_memory_than_the_largest_client() -> None:
    """The width of a block is the largest batch that occurs."""
    local = LocalSgd(epochs=1, batch_size=1_000_000, learning_rate=0.1)
    assert schedule_of(local, [5, 3]).rows_TKB.shape == (1, 2, 5)
