"""Trains one client after another on one model in memory: works always, and is the reference."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedlearn.algorithms.draws import client_seed
from fedlearn.algorithms.local import LocalReport
from fedlearn.core.features import Features, list_tensors, rebuild_inputs, take_rows
from fedlearn.core.params import Layout, Params
from fedlearn.simulation.executors.base import TrainedBlock, Work, fit_block_size
from fedlearn.training.keyed_dropout import step_keys, step_seed
from fedlearn.training.resident import (
    ClientRound,
    Part,
    ResidentModel,
    Training,
    weighted_mean,
)

#: Bytes of features to gather at a time, unless a single batch has more.
_GATHERED_BYTES = 4 << 20
#: Alignment of torch's memory allocations, in bytes.
_ALIGNMENT = 64


def choose_block_size(layout: Layout) -> int:
    """Return how many clients to train per block, after which their deltas are added to the sum.

    Example:
        >>> choose_block_size(Layout.of(torch.nn.Linear(784, 200)))
        13
    """
    return fit_block_size(8 << 20, each=layout.dtype.itemsize * layout.size)


class SequentialExecutor:
    """Trains the clients of a block one after another.

    Args:
        model: The model in memory, which all clients use in turn.
    """

    def __init__(self, model: ResidentModel) -> None:
        self._model = model
        self._deltas_KP = torch.empty(0, model.layout.size, dtype=model.layout.dtype)

    def train(self, work: Work) -> TrainedBlock:
        """Train the clients and return their deltas and losses."""
        params = work.params.round_to_dtypes()
        num_clients, like = len(work.client_ids), params.vector
        if len(self._deltas_KP) < num_clients or self._deltas_KP.device != like.device:
            self._deltas_KP = like.new_empty(num_clients, len(like))
        steps_K = (work.schedule.counts_TK > 0).sum(0)
        batches, losses, reports = _iterate_batches(work), list[Tensor](), list[LocalReport]()
        training = self._begin(params, work)
        for client, num_steps in enumerate(steps_K.tolist()):
            if work.apart is not None:
                params = work.params.with_vector(work.apart.starts_KP[client]).round_to_dtypes()
                training = self._begin(params, work)
            client_state = {
                name: rows[client : client + 1] for name, rows in work.client_state.items()
            }
            with training.client(client_state, client=_client_round(work, client, num_steps)):
                own = [
                    training.step([batch], num_examples=len(batch.labels))
                    for batch in islice(batches, num_steps)
                ]
                counts_T = work.schedule.counts_TK[:num_steps, client]
                reports.append(training.report(mean_loss=partial(_mean_loss, own, counts_T)))
                losses += own
            torch.sub(self._model.vector_P, params.vector, out=self._deltas_KP[client])
        return TrainedBlock(
            deltas_KP=self._deltas_KP[:num_clients],
            lanes=_stack([report.lanes for report in reports]),
            losses_K=_average_losses(losses, work.schedule.counts_TK),
            num_examples_K=work.num_examples(),
            client_state=_stack([report.client_state for report in reports]),
        )

    def _begin(self, params: Params, work: Work) -> Training:
        """Return the training of clients that start from these parameters."""
        return Training(
            self._model,
            params,
            local=work.local,
            broadcast=work.broadcast,
            round_num=work.round_num,
        )


def _client_round(work: Work, client: int, num_steps: int) -> ClientRound:
    """Describe the part of one client of the block in the round."""
    client_id = int(work.client_ids[client])
    steps_per_epoch = int(work.schedule.steps_per_epoch_K[client])
    return ClientRound(
        client_id=client_id,
        seed=client_seed(work.seed, round_num=work.round_num, client_id=client_id),
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        read_epoch=partial(_read_epoch, work, client, min(num_steps, steps_per_epoch)),
    )


def _read_epoch(work: Work, client: int, num_steps: int) -> Iterator[tuple[Sequence[Part], int]]:
    """Yield the batches of one client's first epoch, one at a time."""
    client_id = int(work.client_ids[client])
    own = step_seed(work.seed, round_num=work.round_num, client_id=client_id)
    keys = step_keys([own], num_steps)[0].tolist()
    for step in range(num_steps):
        size = int(work.schedule.counts_TK[step, client])
        rows = work.schedule.rows_TKB[step, client, :size]
        labels = work.labels.index_select(0, rows)
        yield [Part(take_rows(work.features, rows), labels, keys[step])], size


def _mean_loss(losses: Sequence[Tensor], counts: NDArray[np.int64]) -> float:
    """Return the mean of the steps' losses by examples."""
    return weighted_mean(torch.stack(list(losses)).double().cpu().numpy(), counts)


def _stack(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join single rows [1, n] by name into one tensor each: shape [K, n]."""
    return {name: torch.cat([each[name] for each in rows]) for name in rows[0]}


def _iterate_batches(work: Work) -> Iterator[Part]:
    """Yield the batches of one client after another; gather many small ones at a time."""
    counts_KT = work.schedule.counts_TK.T
    is_step_KT = counts_KT > 0
    rows_KTB = work.schedule.rows_TKB.transpose(0, 1)
    # A boolean mask flattens [K, T] row by row: client after client, steps in order.
    rows_NB = rows_KTB[torch.from_numpy(is_step_KT).to(rows_KTB.device)]
    sizes_N, keys = counts_KT[is_step_KT], work.step_keys()[is_step_KT].tolist()
    like, inputs = work.features, list_tensors(work.features)
    batch_bytes = int(sizes_N.max()) * sum(map(_row_bytes, inputs))
    num_together = max(1, _GATHERED_BYTES // max(1, batch_bytes))
    for first in range(0, len(sizes_N), num_together):
        now = slice(first, first + num_together)
        gathered = [_gather_batches(tensor, rows_NB[now], sizes_N[now]) for tensor in inputs]
        features: Iterable[Features] = gathered[0]
        if not isinstance(work.features, Tensor):
            features = (rebuild_inputs(batch, like=like) for batch in zip(*gathered, strict=True))
        labels = _gather_batches(work.labels, rows_NB[now], sizes_N[now])
        yield from map(Part, features, labels, keys[now])


def _gather_batches(
    tensor: Tensor, rows_NB: Tensor, sizes_N: NDArray[np.int64]
) -> Sequence[Tensor]:
    """Copy the rows of each batch.

    Each copy starts at a multiple of 64 bytes, like the separate allocations in a client session,
    because the bits of a matrix product can depend on the alignment of its operands
    (:mod:`fedlearn.core.mkl_environment`).
    """
    # Pad each batch to a multiple of the fewest rows whose size is a multiple of 64 bytes.
    unit = _ALIGNMENT // gcd(_ALIGNMENT, _row_bytes(tensor))
    units_N = -(-sizes_N // unit)
    width = int(units_N.max()) * unit
    is_taken_NB = torch.from_numpy(np.arange(width) < (units_N * unit)[:, None]).to(rows_NB.device)
    rows = F.pad(rows_NB, (0, width - rows_NB.shape[1]))[is_taken_NB]
    ends = np.stack([sizes_N, units_N * unit - sizes_N], axis=1).flatten().tolist()
    parts: Sequence[Tensor] = tensor.index_select(0, rows).split(ends)
    return parts[::2]  # every second piece is padding


def _row_bytes(tensor: Tensor) -> int:
    return tensor.itemsize * tensor.shape[1:].numel()


def _average_losses(losses: Sequence[Tensor], counts_TK: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each client's mean loss over the examples of all its steps."""
    values = torch.stack(list(losses)).double().cpu().numpy()  # one transfer for all clients
    counts_KT = counts_TK.T
    ends_K = np.cumsum((counts_KT > 0).sum(1))
    own = np.split(values, ends_K[:-1])
    sizes = [counts_T[counts_T > 0] for counts_T in counts_KT]
    return np.asarray([weighted_mean(*each) for each in zip(own, sizes, strict=True)])
