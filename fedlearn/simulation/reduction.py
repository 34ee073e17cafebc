"""What blocks of updates come to, on one worker or many: summed as they come, or kept and combined.

A wave is a set of clients that are trained before the round is looked at again. They have places,
in order of arrival, and each worker folds in its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import FullAggregation, SumAggregation, merged
from fedlearn.algorithms.lanes import Aggregate, LaneSpec, Updates, matrix
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.core.soundness import is_sound
from fedlearn.simulation.cluster import Cluster


class Summed:
    """Adds blocks up. Memory: one contribution.

    Attributes:
        aggregation: What the updates are combined by.
        params: The model of the round, which the aggregate is a change of.
    """

    def __init__(
        self,
        aggregation: SumAggregation[Any],  # Any: its state is its own business
        lanes: Sequence[LaneSpec],
        params: Params,
        *,
        max_norm: float | None,
    ) -> None:
        self.aggregation, self._lanes, self.params = aggregation, lanes, params
        self._max_norm = max_norm
        self._total = self._wave = self._empty()

    def begin(self, client_ids: NDArray[np.int64]) -> None:  # noqa: ARG002 - a sum needs no room
        """Begin a wave of these clients: shape [n], in order of arrival."""
        self._wave = self._empty()

    def fold(
        self,
        updates: Updates,
        places: NDArray[np.int64],  # noqa: ARG002 - a sum has no places
    ) -> NDArray[np.bool_]:
        """Add a block by itself, then to the wave; return which of its rows are in it: [B].

        A sum is finite only if all its terms are, so the usual block is read once; only if it is
        not, or longer than one of them may be, are the rows looked at one by one. (Absurd values
        that cancel within a block pass: simulated clients diverge, they do not conspire.)
        """
        block = self.aggregation.accumulate(self._empty(), updates)
        sound, max_norm = np.ones(len(updates.client_ids), np.bool_), self._max_norm
        if max_norm is not None:  # a weight below 1 would hide a long row in the sum
            max_norm *= min(1.0, float(updates.weights_B.min()))
        if not all(is_sound(tensor, max_norm=max_norm) for tensor in block.tensors()):
            sound = sound_rows(updates, max_norm=self._max_norm)
            if not sound.all():
                some = only(updates, np.flatnonzero(sound))
                block = self.aggregation.accumulate(self._empty(), some)
        self._wave = merged(self._wave, block)
        return sound

    def share(self, cluster: Cluster, *, more: Tensor) -> None:
        """Add up the wave, and ``more``, over the workers."""
        cluster.all_reduce([*self._wave.tensors(), more])
        self._total = merged(self._total, self._wave)

    def close(self) -> Aggregate:
        """Return the aggregate of all waves, of at least one client."""
        aggregate: Aggregate = self.aggregation.finalize(self._total)
        return aggregate

    def _empty(self) -> Any:  # Any: as above
        device = self.params.vector.device
        return self.aggregation.init(self._lanes, self.params.layout, device=device)


class Gathered:
    """Keeps every update, in order of arrival whoever trained it. Memory: all contributions.

    Attributes:
        aggregation: What the updates are combined by.
        params: The model of the round, which the aggregate is a change of.
    """

    def __init__(
        self,
        aggregation: FullAggregation,
        lanes: Sequence[LaneSpec],
        params: Params,
        *,
        max_norm: float | None,
    ) -> None:
        self.aggregation, self.params, self._max_norm = aggregation, params, max_norm
        self._sizes = {lane.name: lane.size(params.layout) for lane in lanes}
        self._waves = list[Updates]()

    def begin(self, client_ids: NDArray[np.int64]) -> None:
        """Have room for a wave of these clients: shape [n], in order of arrival."""
        count, like = len(client_ids), self.params.vector
        self._client_ids, self._weights = client_ids, like.new_zeros(count)
        self._based_on = torch.zeros(count, dtype=torch.float64)
        self._rows = {name: like.new_zeros(count, size) for name, size in self._sizes.items()}

    def fold(self, updates: Updates, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Copy the sound rows of a block to their places [B]; return which they are: [B]."""
        sound = sound_rows(updates, max_norm=self._max_norm)
        some, index = only(updates, np.flatnonzero(sound)), torch.from_numpy(places[sound])
        self._weights[index] = some.weights_B
        self._based_on[index] = torch.tensor(some.based_on, dtype=torch.float64)
        for name, rows in some.lanes.items():
            self._rows[name][index] = matrix(rows)
        return sound

    def share(self, cluster: Cluster, *, more: Tensor) -> None:
        """Fill in what the other workers have; ``more`` is added up."""
        cluster.all_reduce([*self._rows.values(), self._weights, self._based_on, more])
        is_there = (self._weights > 0).cpu().numpy()
        client_ids = [ClientId(each) for each in self._client_ids.tolist()]
        wave = Updates(client_ids, self._weights, self._rows, self._based_on.long().tolist())
        self._waves.append(only(wave, np.flatnonzero(is_there)))

    def close(self) -> Aggregate:
        """Return what the aggregation makes of all."""
        waves = self._waves
        client_ids = [client_id for wave in waves for client_id in wave.client_ids]
        weights_B = torch.cat([wave.weights_B for wave in waves])
        lanes = {
            name: torch.cat([matrix(wave.lanes[name]) for wave in waves]) for name in self._sizes
        }
        based_on = [each for wave in waves for each in wave.based_on]
        combined = self.aggregation.combine(Updates(client_ids, weights_B, lanes, based_on))
        return Aggregate(lanes=combined, num_clients=len(client_ids))


Reduction: TypeAlias = Summed | Gathered
"""The updates of one round on their way into an aggregate; a block's memory is used again."""


def sound_rows(updates: Updates, *, max_norm: float | None) -> NDArray[np.bool_]:
    """Return which rows may reach arithmetic in all their lanes: shape [B]."""
    sound = np.ones(len(updates.client_ids), np.bool_)
    for rows in updates.lanes.values():
        sound &= np.asarray([is_sound(row, max_norm=max_norm) for row in rows])
    return sound


def only(updates: Updates, rows: NDArray[np.int64]) -> Updates:
    """Return some rows of ``updates``, all of them without a copy."""
    if len(rows) == len(updates.client_ids):
        return updates
    index = torch.from_numpy(rows)
    lanes: Mapping[str, Tensor] = {name: matrix(r)[index] for name, r in updates.lanes.items()}
    client_ids, based_on = (
        [each[row] for row in rows.tolist()] for each in (updates.client_ids, updates.based_on)
    )
    weights_B = updates.weights_B[index]
    return Updates(client_ids, weights_B, lanes, based_on)
