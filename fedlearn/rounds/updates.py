"""Checks updates that arrive over a channel and adds them to the aggregate."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedlearn.algorithms.aggregations import combine, combines_all, weights
from fedlearn.algorithms.bounds import refusal
from fedlearn.algorithms.collector import RoundRequest
from fedlearn.algorithms.compression import Target, restore_lanes, seed_of_round
from fedlearn.algorithms.lanes import DELTA, METRICS, Aggregate, Updates, describe_misfit
from fedlearn.algorithms.transforms import is_clipped, last_clip
from fedlearn.core.messages import ClientId, Failure, TrainReply
from fedlearn.core.params import rebase_statistics
from fedlearn.core.participations import MAX_REASON, Participation, Status
from fedlearn.core.randomness import Seed
from fedlearn.errors import UnusableResult
from fedlearn.transport.base import Arrival

#: No honest client has more examples: a larger weight is an attack or a bug.
MAX_EXAMPLES = 10**9


class Fold:
    """Aggregates updates as they arrive, in blocks.

    Updates are queued without a copy. A sum adds ``num_together`` of them in one pass. A rule that
    needs all updates at once gets them at the close.
    """

    def __init__(self, request: RoundRequest, *, num_together: int) -> None:
        aggregation, params = request.strategy.aggregation, request.params
        self.num_added = self._num_clipped = 0
        # A strategy without bounds adds noise for privacy. The number of clipped updates would be
        # released without noise, so it is not counted then.
        has_bounds, transforms = request.strategy.bounds is not None, request.strategy.transforms
        self._clip_norm = last_clip(transforms) if has_bounds else None
        self._num_trained = params.layout.num_trainable
        self._current_S = params.current_statistics().cpu()  # replies are on the CPU
        self._aggregation, self._device = aggregation, params.vector.device
        self._num_together = num_together
        self._waiting = list[tuple[ClientId, TrainReply, float]]()
        self._state: Any = None  # Any: each aggregation has its own type of state
        if not combines_all(aggregation):
            lanes, layout = request.strategy.lanes, params.layout
            self._state = aggregation.init(lanes, layout, device=self._device)

    def add(
        self, client_id: ClientId, update: TrainReply, *, factor: float, sent_S: Tensor | None
    ) -> None:
        """Add an update that has passed every check.

        Args:
            client_id: The client that sent it.
            update: The update; not written to.
            factor: Multiplies its weight.
            sent_S: The statistics that the client was sent; see :func:`rebase_statistics`.
        """
        if self._clip_norm is not None:
            trained = update.lanes[DELTA.name][: self._num_trained]
            self._num_clipped += is_clipped(trained, clip_norm=self._clip_norm)
        # Running statistics are averaged as values. The client's delta is relative to the model
        # that it was sent, so make it relative to the current one.
        if len(self._current_S):
            delta = update.lanes[DELTA.name]
            delta = rebase_statistics(delta, sent_S=sent_S, current_S=self._current_S)
            update = replace(update, lanes={**update.lanes, DELTA.name: delta})
        self._waiting.append((client_id, update, factor))
        self.num_added += 1
        if len(self._waiting) == self._num_together:
            self._accumulate()

    def close(self) -> Aggregate:
        """Return the aggregate; at least one update must have been added."""
        if combines_all(self._aggregation):
            aggregate = combine(self._aggregation, self._block())
        else:
            if self._waiting:
                self._accumulate()
            aggregate = self._aggregation.finalize(self._state)
        if self._clip_norm is None:
            return aggregate
        return replace(aggregate, num_clipped=self._num_clipped)

    def _accumulate(self) -> None:
        if not combines_all(self._aggregation):
            self._state = self._aggregation.accumulate(self._state, self._block())
            self._waiting.clear()

    def _block(self) -> Updates:
        """Return the queued updates as one block; those on the model's device are not copied."""
        client_ids, updates, factors = zip(*self._waiting, strict=True)
        lanes = {
            name: [update.lanes[name].to(self._device) for update in updates]
            for name in updates[0].lanes
        }
        like = next(iter(lanes.values()))[0]
        num_examples_B = like.new_tensor([update.num_examples for update in updates])
        based_on = [update.round_num for update in updates]
        # Staleness multiplies the weight; the mean divides by the sum of the products.
        weights_B = weights(self._aggregation, num_examples_B) * like.new_tensor(factors)
        return Updates(
            client_ids,
            weights_B,
            lanes,
            based_on,
            self._num_trained,
            metrics_B=_collect_metrics(updates),
        )


def _collect_metrics(updates: Sequence[TrainReply]) -> dict[str, Tensor]:
    columns = (
        [float(each.metrics.get("loss", math.nan)) for each in updates],
        [float(each.num_examples) for each in updates],
    )
    values = (torch.tensor(column, dtype=torch.float64) for column in columns)
    return dict(zip(METRICS, values, strict=True))


def validate_or_refuse(
    arrival: Arrival, request: RoundRequest, *, oldest: int | None = None
) -> TrainReply | Failure:
    """Validate an update with :func:`validate`, and refuse it to its client if it is invalid."""
    update = validate(arrival, request, oldest=oldest)
    # A client that reported its own failure needs no refusal.
    if isinstance(update, Failure) and update is not arrival.reply:
        arrival.refuse(update.reason[:MAX_REASON])
    return update


def validate(
    arrival: Arrival, request: RoundRequest, *, oldest: int | None = None
) -> TrainReply | Failure:
    """Return the update in a reply, or the reason why it must not be aggregated.

    Clients are not trusted: round, lanes, sizes, dtype, finiteness and weight are checked
    before any arithmetic.

    Args:
        arrival: The reply.
        request: The request that it answers.
        oldest: First round whose model the update may be based on; ``None``: the request's round.
    """
    reply, specs = arrival.reply, request.strategy.lanes
    if isinstance(reply, Failure):
        return reply
    if not isinstance(reply, TrainReply):
        return Failure(f"{type(reply).__name__} is not a reply to a training request")
    first = request.round_num if oldest is None else oldest
    if not first <= reply.round_num <= request.round_num:
        return Failure(f"reply to round {reply.round_num} in round {request.round_num}")
    try:
        reply = _restore(reply, request, client_id=arrival.client_id)
    except UnusableResult as error:
        return Failure(str(error))
    if (problem := describe_misfit(reply.lanes, specs, request.params.layout)) is not None:
        return Failure(problem)
    bounds = request.strategy.bounds
    if bounds is None and not 1 <= reply.num_examples <= MAX_EXAMPLES:
        return Failure(f"num_examples {reply.num_examples} is not in 1..{MAX_EXAMPLES}")
    if bounds is not None and not 1 <= reply.num_examples <= bounds.max_examples:
        return Failure(bounds.too_heavy(reply.num_examples))
    # Last, since it reads every number of the update.
    problem = refusal(reply.lanes, specs, layout=request.params.layout, bounds=bounds)
    return reply if problem is None else Failure(problem)


def _restore(reply: TrainReply, request: RoundRequest, *, client_id: ClientId) -> TrainReply:
    """Restore the delta if the request asked for a compressed one.

    Raises:
        UnusableResult: The reply is not what was asked for.
    """
    transforms, layout = request.strategy.transforms, request.params.layout
    if not reply.encoding and not transforms:
        return reply
    target = Target(
        client_ids=[client_id],
        shapes=layout.trainable_shapes,
        dtype=layout.dtype,
        # The round of an older model, if the client began early.
        seed=seed_of_round(Seed(request.seed), transforms, round_num=reply.round_num),
    )
    num_statistics = layout.size - layout.num_trainable
    lanes = restore_lanes(
        reply.lanes, reply.encoding, transforms, target, num_statistics=num_statistics
    )
    return replace(reply, lanes=lanes, encoding="")


def build_participation(
    client_id: ClientId, update: TrainReply | Failure, elapsed_s: float
) -> Participation:
    """Return the record of a client that replied ``elapsed_s`` seconds after it was asked."""
    if isinstance(update, Failure):
        reason = update.reason[:MAX_REASON]
        return Participation(client_id, Status.FAILED, elapsed_s, reason=reason)
    loss = float(update.metrics.get("loss", math.nan))  # as reported; it is not verified
    return Participation(client_id, Status.REPORTED, elapsed_s, update.num_examples, loss)
