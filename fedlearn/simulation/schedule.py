"""Schedules of batches for blocks of clients with different numbers of examples.

Step t of a block runs on the prefix of clients that still have a batch, so only the last batch of
an epoch is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.local import LocalWork, batch_positions
from fedlearn.core.randomness import Seed
from fedlearn.simulation.population import ClientRows, Population, unread_rows
from fedlearn.training.keyed_dropout import step_keys, step_seed
from fedlearn.training.local_data import KeyedBatch, evaluation_batches


@dataclass(frozen=True, eq=False)
class Schedule:
    """The batches of a block of K clients, with up to T steps and up to B examples per batch.

    Attributes:
        rows_TKB: Row numbers into the features, int64; 0 where padded.
        weights_TKB: 1 / (size of the batch), 0 where padded.
        counts_TK: Examples in each batch; 0 once a client has finished.
        active_T: Clients that still train at each step: always a prefix.
        steps_per_epoch_K: Number of batches in an epoch of each client.
    """

    rows_TKB: Tensor
    weights_TKB: Tensor
    counts_TK: NDArray[np.int64]
    active_T: NDArray[np.int64]
    steps_per_epoch_K: NDArray[np.int64]

    @property
    def num_steps(self) -> int:
        """T, the largest number of steps of a client."""
        return len(self.active_T)

    @property
    def is_uniform(self) -> bool:
        """Whether every batch of every client has the same size."""
        return bool((self.counts_TK == self.counts_TK.flat[0]).all())


def schedule(
    work: LocalWork,
    rows: ClientRows,
    client_ids: NDArray[np.int64],
    *,
    round_num: int | NDArray[np.int64],
    seed: Seed,
    dtype: torch.dtype,
    device: torch.device,
) -> Schedule:
    """Build the schedule of a block.

    ``client_ids`` are sorted by descending number of steps: shape [K]. ``rows`` are their examples,
    in this order. ``round_num`` is one for all clients, or one for each: shape [K]. ``dtype`` is
    that of the weights.
    """
    sizes_K = rows.num_examples()
    steps_K, num_steps_K = work.steps_per_epoch(sizes_K), work.num_steps(sizes_K)
    largest = int(sizes_K.max())
    batch = min(work.batch_size or largest, largest)
    step_T = np.arange(int(num_steps_K.max()))[:, None]
    epoch_TK, within_TK = step_T // steps_K, step_T % steps_K
    positions_TKB = (within_TK * batch)[:, :, None] + np.arange(batch)
    used_K = work.count_used_per_epoch(sizes_K)
    real_TKB = (positions_TKB < used_K[:, None]) & (step_T < num_steps_K)[:, :, None]
    # Padding points to the first row, which exists, with a weight of zero.
    positions_TKB = np.where(real_TKB, positions_TKB, 0)
    if work.shuffle:
        # With max_steps, clients may not get to all epochs.
        num_epochs = int((-(-num_steps_K // steps_K)).max())
        order_KEN = _orders(
            sizes_K, client_ids, num_epochs=num_epochs, round_num=round_num, seed=seed
        )
        client_K = np.arange(len(sizes_K))[:, None]
        # Clients that have finished step past their last epoch; their rows are masked out below.
        epochs_TK1 = np.minimum(epoch_TK, num_epochs - 1)[:, :, None]
        positions_TKB = order_KEN[client_K, epochs_TK1, positions_TKB]
    if rows.num_reads_K is not None:  # each epoch has its own copy of the examples
        reading_TK = np.minimum(epoch_TK, rows.num_reads_K - 1)
        positions_TKB = positions_TKB + (reading_TK * sizes_K)[:, :, None]
    rows_TKB = rows.rows[rows.offsets[:-1, None] + positions_TKB] * real_TKB
    counts_TK = real_TKB.sum(2)
    weights_TKB = real_TKB / np.maximum(1, counts_TK)[:, :, None]
    return Schedule(
        rows_TKB=torch.from_numpy(rows_TKB.astype(np.int64, copy=False)).to(device),
        weights_TKB=torch.from_numpy(weights_TKB).to(device=device, dtype=dtype),
        counts_TK=counts_TK,
        active_T=(counts_TK > 0).sum(1),
        steps_per_epoch_K=steps_K,
    )


def training_rows(
    population: Population,
    client_ids: NDArray[np.int64],
    *,
    work: LocalWork,
    round_num: int | NDArray[np.int64],
    seed: Seed,
) -> ClientRows:
    """Load the examples of these clients for a round, as deployed clients read them.

    A dataset whose items draw random numbers is read in batches, again in each epoch, with the
    keys that a deployed client's trainer uses. The other arguments are those of :func:`schedule`.

    Raises:
        DataError: An example that was just read is invalid.
    """
    unread = unread_rows(population, client_ids)
    if unread is None:
        return population.load(client_ids)
    sizes_K = np.diff(unread.offsets)
    rounds_K = np.broadcast_to(round_num, sizes_K.shape).tolist()

    def epochs_of(client: int) -> Sequence[Sequence[KeyedBatch]]:
        at, client_id, size = rounds_K[client], int(client_ids[client]), int(sizes_K[client])
        positions = batch_positions(
            work, seed=seed, round_num=at, client_id=client_id, num_examples=size
        )
        batches = list(positions)
        keys = step_keys([step_seed(seed, round_num=at, client_id=client_id)], len(batches))[0]
        keyed = list(map(KeyedBatch, batches, keys.tolist()))
        # Batch after batch and epoch after epoch, in the order in which a deployed trainer derives
        # keys.
        per_epoch = int(work.steps_per_epoch(np.asarray(size)))
        return [keyed[first : first + per_epoch] for first in range(0, len(keyed), per_epoch)]

    return unread.read_epochs(epochs_of)


def rows_of_round(
    population: Population, client_id: int, *, round_num: int, seed: Seed
) -> ClientRows:
    """Load one client's examples for a custom trainer, which takes tensors.

    A dataset is read once per round; random numbers that its items draw depend on the seed, the
    round and the client.

    Raises:
        DataError: An example that was just read is invalid.
    """
    client_ids = np.asarray([client_id])
    unread = unread_rows(population, client_ids)
    if unread is None:
        return population.load(client_ids)
    batches = list(evaluation_batches(len(unread.rows)))
    of_round = seed.derive("own reads", round_num, client_id)
    keys = step_keys([of_round], len(batches))[0].tolist()
    keyed = [batch._replace(key=key) for batch, key in zip(batches, keys, strict=True)]
    return unread.read_epochs(lambda _: [keyed])


def _orders(
    sizes_K: NDArray[np.int64],
    client_ids: NDArray[np.int64],
    *,
    num_epochs: int,
    round_num: int | NDArray[np.int64],
    seed: Seed,
) -> NDArray[np.int64]:
    """Shuffle each client's examples in each epoch, with the same result as ``shuffle_positions``.

    Shape [K, E, largest client].
    """
    # An example's key is a hash of (round, client, epoch, position), so a block needs no loop over
    # clients, and a device computes the same order.
    position_N = np.arange(int(sizes_K.max()))
    keys_KEN = seed.hash(
        round_num if isinstance(round_num, int) else round_num[:, None, None],
        client_ids[:, None, None],
        np.arange(num_epochs)[None, :, None],
        position_N[None, None, :],
    )
    # The largest key sorts the padding of smaller clients to the end.
    is_padding = position_N >= sizes_K[:, None, None]
    keys_KEN = np.where(is_padding, np.iinfo(np.uint64).max, keys_KEN)
    return np.argsort(keys_KEN, axis=2, kind="stable")
