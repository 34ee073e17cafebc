"""Ask a cohort over a channel and fold the replies in until the round closes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

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
from fedlearn.core.messages import ClientId, Failure, Reply, TrainReply, TrainRequest
from fedlearn.core.params import Layout, Params
from fedlearn.transport.base import Arrival, Channel

StateT = TypeVar("StateT")

#: No honest client has this many examples; above it a weight is an attack or a bug.
MAX_EXAMPLES = 10**9

#: Elements that are checked at a time where a check needs memory of its own.
_CHECKED_AT_ONCE = 1 << 18

#: Characters of a failure's reason that are kept: a peer chooses them.
MAX_REASON = 300


@dataclass
class _Slab:
    """Memory that is written again in every round: fresh pages cost more than the copy."""

    _rows_RP: Tensor | None = None

    def rows(self, num_rows: int, *, like: Tensor) -> Tensor:
        """Return [num_rows, P] of any content, with P, dtype and device of ``like``."""
        kept, shape = self._rows_RP, (num_rows, *like.shape)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (
            shape,
            like.dtype,
            like.device,
        ):
            # The old rows go first: two slabs at once would be beyond the bound.
            kept = self._rows_RP = None
            kept = self._rows_RP = like.new_empty(shape)
        return kept


@dataclass(kw_only=True)
class _Fold(Generic[StateT]):
    """Updates on their way into the aggregate.

    Attributes:
        aggregator: How they are combined.
        rows_RP: Where they wait until all rows are taken; ``None``: each is combined at once,
            where it lies.
        state: Those that are combined already.
        num_added: How many there were, waiting ones included.
    """

    aggregator: Aggregator[StateT]
    rows_RP: Tensor | None
    state: StateT
    num_added: int = 0
    _waiting: list[int] = field(default_factory=list)

    def next_row(self) -> Tensor | None:
        """Return the row that the next update belongs in; it may be written in vain."""
        return None if self.rows_RP is None else self.rows_RP[len(self._waiting)]

    def add(self, update: "Update") -> None:
        """Take the update that was written to :meth:`next_row`, if there are rows."""
        self._waiting.append(update.num_examples)
        self.num_added += 1
        if self.rows_RP is None:
            self._accumulate(update.delta_P.unsqueeze(0))
        elif len(self._waiting) == len(self.rows_RP):
            self._accumulate(self.rows_RP)

    def close(self) -> StateT:
        """Return the aggregate of all."""
        if self.rows_RP is not None and self._waiting:
            self._accumulate(self.rows_RP[: len(self._waiting)])
        return self.state

    def _accumulate(self, deltas_BP: Tensor) -> None:
        weights_B = self.aggregator.weigh(deltas_BP.new_tensor(self._waiting))
        self.state = self.aggregator.accumulate(self.state, Block(deltas_BP, weights_B))
        self._waiting.clear()


@dataclass(frozen=True, kw_only=True)
class PlainCollector(Generic[StateT]):
    """Collects deltas in the clear, a slab of them at a time.

    Each reply is checked and packed into the next row of a slab; a full slab, and what is in
    it at the close of the round, is one block for the aggregator. Without room for two rows the
    replies are folded in one by one where they lie, to the last bit as by an engine at block
    size 1.

    Memory: the aggregate, one reply, and the slab, which is kept from round to round.

    Attributes:
        channel: How clients are reached.
        aggregator: How deltas are combined.
        policy: When the round closes.
        slab_bytes: Bound of the slab's size; there is none if two models do not fit.
    """

    channel: Channel
    aggregator: Aggregator[StateT]
    policy: StragglerPolicy
    slab_bytes: int
    _slab: _Slab = field(default_factory=_Slab, init=False, repr=False, compare=False)

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
                arrival.reply,
                round_num=request.round_num,
                layout=request.params.layout,
                out=fold.next_row(),
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
        layout, device = params.layout, params.vector.device
        fitting = self.slab_bytes // (layout.size * layout.dtype.itemsize)
        num_rows = min(fitting, self.policy.num_wanted)
        rows_RP = self._slab.rows(num_rows, like=params.vector) if num_rows > 1 else None
        state = self.aggregator.init(layout, device=device)
        return _Fold(aggregator=self.aggregator, rows_RP=rows_RP, state=state)

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


def validated(
    reply: Reply, *, round_num: int, layout: Layout, out: Tensor | None = None
) -> Update | Failure:
    """Return the update in ``reply``, or why it must not be aggregated.

    Clients are not trusted: round, names, shapes, dtype, finiteness and weight are checked
    before any arithmetic.

    Args:
        reply: What the client answered.
        round_num: The round that it must be of.
        layout: The model that it must fit.
        out: Where the delta is written, shape [P]; also that of a reply that is not finite.
            ``None``: it stays where it lies if it is one vector there.
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
    joined_P = layout.joined(reply.delta) if out is None else None
    delta_P = layout.pack(reply.delta, out=out) if joined_P is None else joined_P
    if not is_sound(delta_P):
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
