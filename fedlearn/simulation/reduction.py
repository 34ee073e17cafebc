"""Accumulates a round's updates into an aggregate, on one worker or several.

Updates are summed as they arrive, or all kept and then combined. They come in waves: sets of
clients that are trained before checking again whether the round is complete. Each client has a
place in its wave, by order of arrival, and each worker adds the updates that it trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.aggregations import FullAggregation, SumAggregation, combine, merge
from fedlearn.algorithms.bounds import GENEROUS, UpdateBounds, refusal
from fedlearn.algorithms.lanes import METRICS, Aggregate, LaneSpec, Updates, stack_rows
from fedlearn.algorithms.transforms import is_clipped
from fedlearn.core.cluster import Cluster
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout, Params
from fedlearn.core.soundness import MAX_DELTA, is_sound

#: Norms below this part of a bound are within it, no matter how they are rounded.
_CLEARLY = 0.99


class ClipCount:
    """Counts the updates that were clipped by their clients, over waves and workers.

    Attributes:
        wave: The count of this wave, to be summed over the workers: shape [1].
    """

    def __init__(self, clip_norm: float | None) -> None:
        self._clip_norm, self._total = clip_norm, 0
        self.wave = torch.zeros(1, dtype=torch.float64)

    def begin(self) -> None:
        """Start a wave."""
        if self._clip_norm is not None:
            self.wave.zero_()

    def add(self, sent: Updates, reasons: Sequence[str | None]) -> None:
        """Count the clipped rows among the accepted rows of a block."""
        if self._clip_norm is None:
            return
        # Statistics are not clipped, so only the trained part tells.
        trained_BQ, _ = sent.delta_parts()
        for trained, reason in zip(trained_BQ, reasons, strict=True):
            if reason is None:
                self.wave += is_clipped(trained, clip_norm=self._clip_norm)

    def end(self) -> None:
        """End a wave, after its count was summed over all workers."""
        if self._clip_norm is not None:
            self._total += round(float(self.wave))

    def attach_count(self, aggregate: Aggregate) -> Aggregate:
        """Add the count to an aggregate if updates are clipped."""
        if self._clip_norm is None:
            return aggregate
        return replace(aggregate, num_clipped=self._total)


class Summed:
    """Sums updates block by block; takes the memory of one update.

    Attributes:
        aggregation: Combines the updates.
        params: The round's model, to which the aggregate is a change.
    """

    def __init__(
        self,
        aggregation: SumAggregation[Any],  # Any: the type of its state is not used here
        lanes: Sequence[LaneSpec],
        params: Params,
        *,
        bounds: UpdateBounds | None,
        clip_norm: float | None,
    ) -> None:
        self.aggregation, self._lanes, self.params = aggregation, lanes, params
        self._bounds, self._clipped = bounds, ClipCount(clip_norm)
        self._total: Any = None  # until there is a block; Any: as above

    def begin(
        self,
        client_ids: NDArray[np.int64],  # noqa: ARG002 - a sum needs no room
        cluster: Cluster,
    ) -> None:
        """Start a wave of these clients: shape [n], in order of arrival."""
        # Rank 0 continues with the sum of earlier waves, which it received from all workers. So a
        # single worker sums in the order of arrival, however the waves are cut.
        if cluster.rank != 0:
            self._total = None
        self._clipped.begin()

    def fold(
        self,
        sent: Updates,
        places: NDArray[np.int64],  # noqa: ARG002 - a sum has no places
        *,
        current: Updates,
    ) -> list[str | None]:
        """Add the acceptable rows of a block; return the reason for each refused row.

        The block is first summed separately. A sum is finite only if all of its terms are, so rows
        are checked one by one only if the sum is implausible, or if bounds are tighter than the
        default. (Huge values that cancel within a block pass: simulated clients may diverge, but
        they do not collude.)

        Args:
            sent: The updates as clients sent them, with their weights; these are checked.
            places: The rows' places in the wave: shape [B].
            current: The same rows relative to the current model; these are summed.

        Returns:
            One reason per row; ``None``: the row was added.
        """
        # Summed apart, so that a refused block leaves no trace in the total.
        block = self.aggregation.accumulate(self._empty(), current)
        reasons: list[str | None] = [None] * len(sent.client_ids)
        if not self._is_plausible(block, sent.weights_B):
            reasons = find_refusals(sent, self._lanes, self.params.layout, self._bounds)
            if any(reasons):
                some = select_rows(current, _find_accepted(reasons))
                block = self.aggregation.accumulate(self._empty(), some)
        self._total = block if self._total is None else merge(self._total, block)
        self._clipped.add(sent, reasons)
        return reasons

    def _is_plausible(self, block: Any, weights_B: Tensor) -> bool:  # Any: as above
        """Return whether a block's sum shows that none of its rows is refused."""
        bounds, max_norm = self._bounds, None
        if bounds is not None:
            if bounds.max_norm < GENEROUS.max_norm:
                return False  # rows with large norms may cancel in the sum
            # A weight below 1 would hide a row with a large norm in the sum.
            max_norm = bounds.max_norm * min(1.0, float(weights_B.min()))
        return all(is_sound(tensor, max_norm=max_norm) for tensor in block.tensors())

    def share(self, cluster: Cluster, *, more: Tensor) -> None:
        """Sum the workers' totals, and ``more``, over all workers."""
        if self._total is None:
            self._total = self._empty()
        cluster.all_reduce([*self._total.tensors(), self._clipped.wave, more])
        self._clipped.end()

    def close(self) -> Aggregate:
        """Return the aggregate of all waves; a private round may have had none."""
        total = self._empty() if self._total is None else self._total
        aggregate: Aggregate = self.aggregation.finalize(total)
        return self._clipped.attach_count(aggregate)

    def _empty(self) -> Any:  # Any: as above
        device = self.params.vector.device
        return self.aggregation.init(self._lanes, self.params.layout, device=device)


class Gathered:
    """Keeps every update, in order of arrival; takes the memory of all updates.

    Attributes:
        aggregation: Combines the updates.
        params: The round's model, to which the aggregate is a change.
    """

    def __init__(
        self,
        aggregation: FullAggregation,
        lanes: Sequence[LaneSpec],
        params: Params,
        *,
        bounds: UpdateBounds | None,
        clip_norm: float | None,
    ) -> None:
        self.aggregation, self.params, self._lanes = aggregation, params, lanes
        self._bounds, self._clipped = bounds, ClipCount(clip_norm)
        self._sizes = {lane.name: lane.size(params.layout) for lane in lanes}
        self._waves = list[Updates]()

    def begin(
        self,
        client_ids: NDArray[np.int64],
        cluster: Cluster,  # noqa: ARG002 - the updates of earlier waves are kept separately
    ) -> None:
        """Allocate memory for a wave of these clients: shape [n], in order of arrival."""
        count, like = len(client_ids), self.params.vector
        self._client_ids, self._weights = client_ids, like.new_zeros(count)
        self._based_on = torch.zeros(count, dtype=torch.float64)
        self._rows = {name: like.new_zeros(count, size) for name, size in self._sizes.items()}
        self._metrics = {name: torch.zeros(count, dtype=torch.float64) for name in METRICS}
        self._clipped.begin()

    def fold(
        self, sent: Updates, places: NDArray[np.int64], *, current: Updates
    ) -> list[str | None]:
        """Copy the acceptable rows of a block to their places; otherwise as :meth:`Summed.fold`."""
        reasons = find_refusals(sent, self._lanes, self.params.layout, self._bounds)
        accepted = _find_accepted(reasons)
        some, index = select_rows(current, accepted), torch.from_numpy(places[accepted])
        self._weights[index] = some.weights_B
        self._based_on[index] = torch.tensor(some.based_on, dtype=torch.float64)
        for name, values_B in some.metrics_B.items():
            self._metrics[name][index] = values_B
        for name, rows in some.lanes.items():
            # A copy: the executor reuses the memory of its block.
            self._rows[name][index] = stack_rows(rows)
        self._clipped.add(sent, reasons)
        return reasons

    def share(self, cluster: Cluster, *, more: Tensor) -> None:
        """Exchange the wave's updates among all workers; sum ``more`` over them."""
        # Each row is zero on all workers but the one that trained it, so the sum fills all in.
        rows = [*self._rows.values(), self._weights, self._based_on, *self._metrics.values()]
        cluster.all_reduce([*rows, self._clipped.wave, more])
        self._clipped.end()
        # A place with weight zero was refused, or its client failed.
        is_there = (self._weights > 0).cpu().numpy()
        client_ids = [ClientId(each) for each in self._client_ids.tolist()]
        wave = Updates(
            client_ids,
            self._weights,
            self._rows,
            self._based_on.long().tolist(),
            self.params.layout.num_trainable,
            metrics_B=self._metrics,
        )
        self._waves.append(select_rows(wave, np.flatnonzero(is_there)))

    def close(self) -> Aggregate:
        """Combine the updates of all waves."""
        waves = self._waves
        client_ids = [client_id for wave in waves for client_id in wave.client_ids]
        weights_B = torch.cat([wave.weights_B for wave in waves])
        lanes = {
            name: _join([stack_rows(each.lanes[name]) for each in waves]) for name in self._sizes
        }
        based_on = [each for wave in waves for each in wave.based_on]
        num_trained = self.params.layout.num_trainable
        metrics_B = {name: torch.cat([each.metrics_B[name] for each in waves]) for name in METRICS}
        everything = Updates(
            client_ids, weights_B, lanes, based_on, num_trained, metrics_B=metrics_B
        )
        return self._clipped.attach_count(combine(self.aggregation, everything))


Reduction: TypeAlias = Summed | Gathered
"""The updates of one round on their way into an aggregate; a block's memory is used again."""


def find_refusals(
    sent: Updates,
    lanes: Sequence[LaneSpec],
    layout: Layout,
    bounds: UpdateBounds | None,
) -> list[str | None]:
    """Return the reason for each row that must not be aggregated; ``None`` if it may be."""
    # One norm per row for the whole block, which is far cheaper than checking row by row.
    if _are_clearly_within(sent, bounds):
        return [None] * len(sent.client_ids)
    rows = range(len(sent.client_ids))
    updates = [{name: values[row] for name, values in sent.lanes.items()} for row in rows]
    return [refusal(update, lanes, layout=layout, bounds=bounds) for update in updates]


def _are_clearly_within(sent: Updates, bounds: UpdateBounds | None) -> bool:
    """Return whether all rows are far below the bounds, by a fast check of the whole block."""
    max_norm = MAX_DELTA if bounds is None else min(MAX_DELTA, bounds.max_norm)
    return all(
        isinstance(rows, Tensor)
        and float(torch.linalg.vector_norm(rows, dim=1).max()) <= _CLEARLY * max_norm
        for rows in sent.lanes.values()
    )


def _join(stacks: Sequence[Tensor]) -> Tensor:
    """Concatenate stacks of rows; a single one, as in most rounds, is not copied."""
    return stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))


def _find_accepted(reasons: Sequence[str | None]) -> NDArray[np.int64]:
    return np.flatnonzero([reason is None for reason in reasons])


def select_rows(updates: Updates, rows: NDArray[np.int64]) -> Updates:
    """Select rows of ``updates``; without a copy if they are all selected."""
    if len(rows) == len(updates.client_ids):
        return updates
    index = torch.from_numpy(rows)
    lanes: Mapping[str, Tensor] = {name: stack_rows(r)[index] for name, r in updates.lanes.items()}
    client_ids, based_on = (
        [each[row] for row in rows.tolist()] for each in (updates.client_ids, updates.based_on)
    )
    weights_B = updates.weights_B[index]
    metrics_B = {name: values_B[index] for name, values_B in updates.metrics_B.items()}
    return replace(
        updates,
        client_ids=client_ids,
        weights_B=weights_B,
        lanes=lanes,
        based_on=based_on,
        metrics_B=metrics_B,
    )
