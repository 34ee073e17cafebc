"""Ask a cohort over a channel and fold the replies in until the round closes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedlearn.algorithms.aggregators import Aggregator
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.collecting import (
    UNSOUND_DELTA,
    Block,
    Collected,
    Participation,
    Participations,
    RoundRequest,
    Status,
    is_sound,
)
from fedlearn.core.cores import on_all_cores
from fedlearn.core.messages import ClientId, Failure, Reply, TrainReply, TrainRequest
from fedlearn.core.params import Layout, Params
from fedlearn.transport.base import Arrival, Channel

StateT = TypeVar("StateT")

#: No honest client has this many examples; above it a weight is an attack or a bug.
MAX_EXAMPLES = 10**9

#: Characters of a failure's reason that are kept: a peer chooses them.
MAX_REASON = 300


@dataclass(kw_only=True)
class _Fold(Generic[StateT]):
    """Updates on their way into the aggregate.

    Attributes:
        aggregator: How they are combined.
        num_together: So many wait, each where it lies, and are combined in one pass.
        device: Where that happens.
        state: Those that are combined already.
        num_added: How many there were, waiting ones included.
    """

    aggregator: Aggregator[StateT]
    num_together: int
    device: torch.device
    state: StateT
    num_added: int = 0
    _waiting: list["Update"] = field(default_factory=list)

    def add(self, update: "Update") -> None:
        """Take an update that passed every check."""
        self._waiting.append(update)
        self.num_added += 1
        if len(self._waiting) == self.num_together:
            self._accumulate()

    def close(self) -> StateT:
        """Return the aggregate of all."""
        if self._waiting:
            self._accumulate()
        return self.state

    def _accumulate(self) -> None:
        deltas_BP = [update.delta_P.to(self.device) for update in self._waiting]
        num_examples_B = deltas_BP[0].new_tensor([each.num_examples for each in self._waiting])
        block = Block(deltas_BP, self.aggregator.weigh(num_examples_B))
        self.state = self.aggregator.accumulate(self.state, block)
        self._waiting.clear()


@dataclass(frozen=True, kw_only=True)
class PlainCollector(Generic[StateT]):
    """Collects deltas in the clear, some of them at a time.

    Each reply is checked as it arrives and waits where it lies; as many as fit the bound, and
    what waits at the close of the round, are one block for the aggregator: it passes over the
    sum once for all of them. Without room for two the replies are folded in one by one, to the
    last bit as by an engine at block size 1.

    Memory: the aggregate, one reply, and those that wait.

    Attributes:
        channel: How clients are reached.
        aggregator: How deltas are combined.
        policy: When the round closes.
        slab_bytes: Bound of the replies that wait; each is folded in at once if no two fit.
    """

    channel: Channel
    aggregator: Aggregator[StateT]
    policy: StragglerPolicy
    slab_bytes: int

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
        fold = self._fold(request.params)
        settled: dict[ClientId, Participation] = {}
        for arrival in arrivals:
            update = validated(
                arrival.reply, round_num=request.round_num, layout=request.params.layout
            )
            if isinstance(update, Update):
                fold.add(update)
            settled[arrival.client_id] = _participation(arrival, update)
            del arrival, update  # before the next one is read: it may be as large as the model
            if fold.num_added == self.policy.num_wanted:
                break
        is_closed = fold.num_added == self.policy.num_wanted or len(settled) == len(cohort)
        return Collected(
            aggregate=fold.close(),
            participations=Participations.of([*settled.values(), *_late(cohort, settled)]),
            duration_s=_last_s(settled) if is_closed else self._cut_off_s(settled),
        )

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Return nothing: over a channel the clients keep their own state."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take nothing back."""

    def _fold(self, params: Params) -> _Fold[StateT]:
        num_together = max(1, self.slab_bytes // params.vector.nbytes)
        device = params.vector.device
        return _Fold(
            aggregator=self.aggregator,
            num_together=num_together,
            device=device,
            state=self.aggregator.init(params.layout, device=device),
        )

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

    Args:
        reply: What the client answered.
        round_num: The round that it must be of.
        layout: The model that it must fit. A delta stays where it lies if it is one vector there.
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
    joined_P = layout.joined(reply.delta)
    delta_P = layout.pack(reply.delta) if joined_P is None else joined_P
    if not all(on_all_cores(layout.size, lambda part: is_sound(delta_P[part]))):
        return Failure(UNSOUND_DELTA)
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
