"""One client after another on one resident model: always possible, and the reference."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.core.params import Layout
from fedlearn.simulation.executors.base import Trained, Work
from fedlearn.training.resident import Part, ResidentModel, weighted_mean

#: Bytes of deltas that are summed up together, which is cheaper than one by one.
_SUMMED_BYTES = 8 << 20
#: Bytes of features that are gathered at a time, unless a batch alone has more.
_GATHERED_BYTES = 4 << 20
#: From here on more clients at once save nothing.
_LARGEST_BLOCK = 64


def preferred_block(layout: Layout) -> int:
    """Return how many clients to train before their deltas are summed up, >= 2.

    Example:
        >>> preferred_block(Layout.of(torch.nn.Linear(784, 200)))
        13
    """
    return min(_LARGEST_BLOCK, max(2, _SUMMED_BYTES // (layout.dtype.itemsize * layout.size)))


class SequentialExecutor:
    """Trains the clients of a block in turn.

    Args:
        model: The model that stays in memory.
    """

    def __init__(self, model: ResidentModel) -> None:
        self._model = model
        self._deltas_KP = torch.empty(0, model.layout.size, dtype=model.layout.dtype)

    def train(self, work: Work) -> Trained:
        """Return the clients' deltas and losses."""
        num_clients, global_P = len(work.client_ids), work.params.vector
        if len(self._deltas_KP) < num_clients or self._deltas_KP.device != global_P.device:
            self._deltas_KP = global_P.new_empty(num_clients, len(global_P))
        steps_K = (work.schedule.counts_TK > 0).sum(0)
        batches, losses, kept = _batches(work), list[Tensor](), list[Tensor]()
        for client, num_steps in enumerate(steps_K.tolist()):
            velocity = self._velocity(work, client)
            losses += self._model.train(
                work.params, islice(batches, num_steps), local=work.local, velocity=velocity
            )
            torch.sub(self._model.vector_P, global_P, out=self._deltas_KP[client])
            if work.velocity_KQ is not None:
                kept.append(torch.cat([value.flatten() for value in velocity]))
        return Trained(
            deltas_KP=self._deltas_KP[:num_clients],
            losses_K=_mean_losses(losses, work.schedule.counts_TK),
            velocity_KQ=torch.stack(kept) if kept else None,
        )

    def _velocity(self, work: Work, client: int) -> list[Tensor]:
        if not work.local.momentum:
            return []
        velocity = self._model.new_velocity()
        if work.velocity_KQ is not None:
            parts = torch.split(work.velocity_KQ[client], [value.numel() for value in velocity])
            for value, part in zip(velocity, parts, strict=True):
                value.copy_(part.view_as(value))
        return velocity


def _batches(work: Work) -> Iterator[Part]:
    """Yield the batches of one client after another; small ones are gathered many at a time."""
    counts_KT = work.schedule.counts_TK.T
    is_real_KTB = np.arange(work.schedule.rows_TKB.shape[2]) < counts_KT[:, :, None]
    rows_KTB = work.schedule.rows_TKB.transpose(0, 1)
    rows = rows_KTB[torch.from_numpy(is_real_KTB).to(rows_KTB.device)]
    sizes = counts_KT[counts_KT > 0].tolist()
    keys = work.step_keys()[counts_KT > 0].tolist()
    batch_bytes = max(sizes) * work.features.itemsize * work.features[:1].numel()
    num_together = max(1, _GATHERED_BYTES // max(1, batch_bytes))
    for first in range(0, len(sizes), num_together):
        together = slice(first, first + num_together)
        now, rows = rows.tensor_split([sum(sizes[together])])
        features = work.features.index_select(0, now).split(sizes[together])
        labels = work.labels.index_select(0, now).split(sizes[together])
        yield from map(Part, features, labels, keys[together])


def _mean_losses(losses: Sequence[Tensor], counts_TK: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each client's mean loss over the examples of its steps; one transfer for all."""
    values = torch.stack(list(losses)).double().cpu().numpy()
    counts_KT = counts_TK.T
    ends_K = np.cumsum((counts_KT > 0).sum(1))
    own = np.split(values, ends_K[:-1])
    sizes = [counts_T[counts_T > 0] for counts_T in counts_KT]
    return np.asarray([weighted_mean(*each) for each in zip(own, sizes, strict=True)])
