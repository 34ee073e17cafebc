"""Ask a cohort over a channel and fold the replies in until the round closes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedlearn.algorithms.aggregators import Aggregator
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.collecting import (
    Block,
    Collected,
    Participation,
    Participations,
    RoundRequest,
    Status,
)
from fedlearn.core.messages import ClientId, Failure, Reply, TrainReply, TrainRequest
from fedlearn.core.params import Layout
from fedlearn.transport.base import Arrival, Channel

StateT = TypeVar("StateT")

#: No honest client has this many examples; above it a weight is an attack or a bug.
MAX_EXAMPLES = 10**9

#: Characters of a failure's reason that are kept: a peer chooses them.
MAX_REASON = 300


@dataclass(frozen=True, kw_only=True)
class PlainCollector(Generic[StateT]):
    """Collects deltas in the clear, folding each in as it arrives. Memory: one model.

    Attributes:
        channel: How clients are reached.
        aggregator: How deltas are combined.
        policy: When the round closes.
    """

    channel: Channel
    aggregator: Aggregator[StateT]
    policy: StragglerPolicy

    def available(self) -> Sequence[ClientId]:
        """Return the clients that can be asked now."""
        return self.channel.available()

    def collect(self, cohort: Sequence[ClientId], request: RoundRequest) -> Collected[StateT]:
        """Run one exchange and aggregate it; a client's failure is data, never raised."""
        message = TrainRequest(
            round_num=request.round_num,
            attempt=request.attempt,
            tensors=request.params.named(),
            settings=request.settings,
            seed=request.seed,
        )
        arrivals = self.channel.exchange(
            dict.fromkeys(cohort, message), deadline_s=self.policy.deadline_s
        )
        layout, device = request.params.layout, request.params.vector.device
        state = self.aggregator.init(layout, device=device)
        settled: dict[ClientId, Participation] = {}
        num_reported = 0
        for arrival in arrivals:
            update = validated(arrival.reply, round_num=request.round_num, layout=layout)
            if isinstance(update, Update):
                state = self.aggregator.accumulate(state, self._block(update, device))
                num_reported += 1
            settled[arrival.client_id] = _participation(arrival, update)
            if num_reported == self.policy.num_wanted:
                break
        is_closed = num_reported == self.policy.num_wanted or len(settled) == len(cohort)
        return Collected(
            aggregate=state,
            participations=Participations.of([*settled.values(), *_late(cohort, settled)]),
            duration_s=_last_s(settled) if is_closed else self._cut_off_s(settled),
        )

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Return nothing: over a channel the clients keep their own state."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take nothing back."""

    def _block(self, update: "Update", device: torch.device) -> Block:
        deltas_BP = update.delta_P.to(device).unsqueeze(0)
        num_examples_B = torch.tensor([update.num_examples], dtype=deltas_BP.dtype, device=device)
        return Block(deltas_BP, self.aggregator.weigh(num_examples_B))

    def _cut_off_s(self, settled: Mapping[ClientId, Participation]) -> float:
        has_deadline = math.isfinite(self.policy.deadline_s)
        return self.policy.deadline_s if has_deadline else _last_s(settled)


@dataclass(frozen=True, eq=False)
class Update:
    """A reply that passed every check and may reach arithmetic.

    Attributes:
        delta_P: Finite, shape [P].
        num_examples: In 1..MAX_EXAMPLES.
        loss: Mean training loss as the client says; NaN if it does not.
    """

    delta_P: Tensor
    num_examples: int
    loss: float


def validated(reply: Reply, *, round_num: int, layout: Layout) -> Update | Failure:
    """Return the update in ``reply``, or why it must not be aggregated.

    Clients are not trusted: round, names, shapes, dtype, finiteness and weight are checked
    before any arithmetic.
    """
    if isinstance(reply, Failure):
        return reply
    if not isinstance(reply, TrainReply):
        return Failure(f"{type(reply).__name__} is no answer to a training request")
    if reply.round_num != round_num:
        return Failure(f"reply to round {reply.round_num} in round {round_num}")
    if (problem := _misfit(reply.delta, layout)) is not None:
        return Failure(problem)
    if not 1 <= reply.num_examples <= MAX_EXAMPLES:
        return Failure(f"num_examples {reply.num_examples} is not in 1..{MAX_EXAMPLES}")
    delta_P = layout.pack(reply.delta)
    if not bool(torch.isfinite(delta_P).all()):
        return Failure("the delta is not finite")
    return Update(delta_P, reply.num_examples, float(reply.metrics.get("loss", math.nan)))


def _misfit(delta: Mapping[str, Tensor], layout: Layout) -> str | None:
    if delta.keys() != layout.by_name.keys():
        wrong = sorted(delta.keys() ^ layout.by_name.keys())[:3]
        return f"the delta lacks or adds tensors: {wrong}"
    for name, spec in layout.by_name.items():
        if tuple(delta[name].shape) != spec.shape:
            return f"{name!r} has shape {tuple(delta[name].shape)}, the model {spec.shape}"
        if delta[name].dtype not in (layout.dtype, spec.dtype):
            return f"{name!r} is {delta[name].dtype}, the model {spec.dtype}"
    return None


def _participation(arrival: Arrival, update: Update | Failure) -> Participation:
    match update:
        case Update():
            fields = (Status.REPORTED, arrival.elapsed_s, update.num_examples, update.loss, "")
        case Failure():
            reason = update.reason[:MAX_REASON]
            fields = (Status.FAILED, arrival.elapsed_s, 0, math.nan, reason)
    return Participation(arrival.client_id, *fields)


def _late(
    cohort: Sequence[ClientId], settled: Mapping[ClientId, Participation]
) -> list[Participation]:
    return [
        Participation(client_id, Status.LATE, math.nan, 0, math.nan, "")
        for client_id in cohort
        if client_id not in settled
    ]


def _last_s(settled: Mapping[ClientId, Participation]) -> float:
    return max((p.duration_s for p in settled.values()), default=0.0)
