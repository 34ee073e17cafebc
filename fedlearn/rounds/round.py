"""One federated round. Start reading here.

::

    draw -> broadcast ... collect -> aggregate -> release -> server step
                |            ^
                v            |
            client: train locally

:mod:`fedlearn.rounds.run` evaluates the model and saves a checkpoint after a round. Everything
below is a function of the state, the plan and what the collector returns. A simulation and a
deployment differ only in the draw and the collector; kinds of round differ in the collector's state
machine.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from fedlearn.algorithms.client_state import ClientStates
from fedlearn.algorithms.collector import CollectedRound, Collector, RoundRequest
from fedlearn.algorithms.compression import Parts, find_compressor
from fedlearn.algorithms.informed_sampling import (
    NO_STATE,
    InformedSampler,
    SamplerState,
    SamplingDraw,
)
from fedlearn.algorithms.lanes import Aggregate, Lanes
from fedlearn.algorithms.late_updates import Durations
from fedlearn.algorithms.own_training import keeps_something
from fedlearn.algorithms.pending_tasks import Draw, PendingTasks
from fedlearn.algorithms.round_settings import RoundSettings, in_round
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import State, Strategy
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout, Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.core.tracing import span
from fedlearn.rounds.strategy_calls import call_at, call_begin, call_broadcast, call_step


@dataclass(frozen=True, kw_only=True, eq=False)
class Version:
    """The broadcast of an earlier round, for the clients that are still in flight with it.

    Attributes:
        params: The model, as clients received it.
        broadcast: Vectors that were broadcast together with it.
        state: The strategy's state in that round if the clients' work depends on it; else empty.
        counted: Value of :attr:`ServerState.counted` in that round.
        parts: The trained part of the model as it was sent; empty: whole.
    """

    params: Params
    broadcast: Lanes
    state: State
    counted: Mapping[ClientId, int] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """All state that passes from one round to the next.

    Attributes:
        round_num: Index of the next round, from 0.
        params: The global model.
        strategy_state: The strategy's state, such as the momentum of a server optimizer.
        sampler_state: The sampler's state, such as the clients' last losses.
        client_states: Client state, in a process that simulates the clients.
        begin_metrics: Metrics of the strategy's start, by name, for the record of the first round.
        pending: Pending tasks of earlier rounds, in a run that is asynchronous or accepts late
            updates.
        versions: The broadcasts that these tasks are based on, by round.
        durations: Clients' durations in the last rounds, if the deadline adapts to them.
        counted: By client, if clients have state: the round whose model its last counted update
            was based on.
    """

    round_num: int
    params: Params
    strategy_state: State
    sampler_state: SamplerState = field(default_factory=dict)
    client_states: ClientStates = field(default_factory=dict)
    begin_metrics: Mapping[str, float] = field(default_factory=dict)
    pending: PendingTasks = ()
    versions: Mapping[int, Version] = field(default_factory=dict)
    durations: Durations = ()
    counted: Mapping[ClientId, int] = field(default_factory=dict)


class Release(Protocol):
    """Transforms the aggregate before the server step, such as by adding noise for privacy."""

    def __call__(
        self,
        aggregate: Aggregate,
        *,
        strategy: Strategy,
        layout: Layout,
        state: State,
        round_num: int,
        attempt: int,
    ) -> tuple[Aggregate, State]:
        """Return the released aggregate and the strategy's state for the step.

        Both depend on the arguments only and are the same in every process. The state is returned
        because noise that is correlated across rounds must know what was released before.

        Args:
            aggregate: The output of the aggregation; may be overwritten.
            strategy: The strategy of the round.
            layout: Layout of the model.
            state: The strategy's state; not written to.
            round_num: Round index, from 0.
            attempt: Retry number of the round, starting at 0.
        """


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The components of a round; built once by :mod:`fedlearn.assembly`.

    Attributes:
        draw: Draws the clients to ask.
        policy: When the round closes, and what happens if too few clients report.
        collector: Sends them the model and combines their updates.
        strategy: The federated algorithm: local training, aggregation, and the server's step.
        seed: Public seed of everything reproducible.
        release: Transforms the aggregate before the step; ``None``: it is unchanged.
        by_round: Returns the clients' settings of a round; ``None``: they do not change.
        sampler: Keeps the state by which ``draw`` draws; ``None``: there is none.
        is_summed_compressed: Whether the aggregate is of the parts of a compressor, as in a secure
            sum: it is restored before the step.
        is_retried: Whether a round below its minimum is retried or skipped as the policy says. A
            buffered round is not: its collector has already asked other clients when some failed.
    """

    draw: SamplingDraw
    policy: StragglerPolicy
    collector: Collector
    strategy: Strategy
    seed: Seed
    release: Release | None = None
    by_round: RoundSettings | None = None
    sampler: InformedSampler | None = None
    is_summed_compressed: bool = False
    is_retried: bool = True

    def apply_settings(self, strategy: Strategy, round_num: int) -> Strategy:
        """Apply the clients' settings of a round to a strategy; raises as ``by_round`` does."""
        return strategy if self.by_round is None else in_round(strategy, self.by_round, round_num)

    def init(self, params: Params) -> ServerState:
        """Return the state before the first round.

        Raises:
            RoundError: A value of the strategy's state is not a tensor, or a metric is not a
                number.
        """
        begun = call_begin(self.strategy, params)
        return ServerState(
            round_num=0,
            params=begun.params,
            strategy_state=begun.state,
            sampler_state=NO_STATE if self.sampler is None else self.sampler.init(),
            begin_metrics=begun.metrics,
        )


class RoundResult(NamedTuple):
    """The result of one attempt at a round.

    Attributes:
        state: State after the round. With fewer reports than the minimum, nothing is released and
            no update counts, so model, client state and ``round_num`` are unchanged.
        collected: Who took part, and the aggregate.
        metrics: Metrics of the strategy's step.
    """

    state: ServerState
    collected: CollectedRound
    metrics: Mapping[str, float]


def run_round(
    state: ServerState,
    plan: RoundPlan,
    *,
    attempt: int,
    without: Collection[ClientId] = frozenset(),
) -> RoundResult:
    """Run one attempt at a round: draw, broadcast, collect, aggregate and take the server's step.

    Args:
        state: State before the round, with its pending tasks.
        plan: The components of the round.
        attempt: Retry number of the round, starting at 0; each retry draws other clients.
        without: Clients that are not asked even if they are drawn.

    Raises:
        CohortTooSmall: Fewer clients are available than are asked.
        RoundError: A broadcast, aggregate or return value of the strategy is invalid.
    """
    # 1. Fix the strategy and the request of this round.
    strategy = call_at(plan.strategy, state.strategy_state)
    request = _build_request(state, plan, strategy, attempt=attempt)
    # An empty state of a version means that `at` changed nothing (see `newest` below), or that the
    # strategy has no state.
    unchanged = plan.strategy if state.strategy_state else strategy
    # A client in flight was sent an older model, perhaps by a process that has since crashed.
    # Rebuild the request of each such round, to ask again and to check the updates.
    requests = {
        based_on: replace(
            request,
            round_num=based_on,
            params=sent.params,
            parts=sent.parts,
            broadcast=sent.broadcast,
            counted=None if request.counted is None else sent.counted,
            strategy=plan.apply_settings(
                call_at(plan.strategy, sent.state) if sent.state else unchanged, based_on
            ),
        )
        for based_on, sent in state.versions.items()
    } | {state.round_num: request}
    # 2. Ask clients, and collect their updates.
    draw = partial(plan.draw, state=state.sampler_state)
    with span("round.collect", attempt=attempt):
        collected = plan.collector.collect(
            state.pending,
            requests,
            round_num=state.round_num,
            draw=_leave_out(without, draw) if without else draw,
        )
    # Keep the strategy's state only if the clients' work depends on it, since it can be large.
    newest = Version(
        params=request.params,
        broadcast=request.broadcast,
        state={} if strategy is plan.strategy else state.strategy_state,
        counted=request.counted or {},
        parts=request.parts,
    )
    sent_in = {**state.versions, state.round_num: newest}
    # Keep the broadcasts of pending tasks only, so that memory is bounded by the staleness.
    versions = {each: sent_in[each] for each in sorted({e.based_on for e in collected.pending})}
    state = replace(
        state, pending=collected.pending, versions=versions, durations=collected.durations
    )
    # 3. Release the aggregate and take the server's step.
    with span("round.step", attempt=attempt):
        return _take_step(state, plan, collected, request, strategy=strategy)


def _leave_out(some: Collection[ClientId], draw: Draw) -> Draw:
    """Wrap a draw to drop some clients from its result; the cohort is otherwise unchanged."""

    def draw_others(
        num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        drawn = draw(num, round_num=round_num, attempt=attempt, busy=busy)
        return [each for each in drawn if each not in some]

    return draw_others


def _build_request(
    state: ServerState, plan: RoundPlan, strategy: Strategy, *, attempt: int
) -> RoundRequest:
    request = RoundRequest(
        round_num=state.round_num,
        attempt=attempt,
        params=state.params,
        strategy=plan.apply_settings(strategy, state.round_num),
        broadcast=call_broadcast(strategy, state.strategy_state, state.params),
        seed=plan.seed.value,
        client_states=state.client_states,
        durations=state.durations,
        counted=state.counted if _keeps_state(strategy, state.params) else None,
    )
    return request.compress()


def _keeps_state(strategy: Strategy, params: Params) -> bool:
    """Return whether clients may keep something between their rounds."""
    compressor = find_compressor(strategy.transforms)
    shapes = params.layout.trainable_shapes
    keeps_own = compressor is not None and bool(compressor.list_kept_sizes(shapes))
    return keeps_own or keeps_something(strategy.local) or bool(strategy.keep_local)


def _find_counted_rounds(collected: CollectedRound, round_num: int) -> Mapping[ClientId, int]:
    """Return, for each client in an aggregate, the round whose model its update is based on."""
    if collected.counted is not None:
        return collected.counted
    rows = collected.participations
    return {each.client_id: round_num for each in rows if each.status is Status.REPORTED}


def _take_step(
    state: ServerState,
    plan: RoundPlan,
    collected: CollectedRound,
    request: RoundRequest,
    *,
    strategy: Strategy,
) -> RoundResult:
    attempt, aggregate = request.attempt, collected.aggregate
    if aggregate is None:  # no update counted, so the client state before the round stays valid
        return RoundResult(state, collected, {})
    counted = state.counted
    if request.counted is not None:
        counted = {**counted, **_find_counted_rounds(collected, state.round_num)}
    strategy_state = state.strategy_state
    if plan.release is not None:
        aggregate, strategy_state = plan.release(
            aggregate,
            strategy=strategy,
            layout=state.params.layout,
            state=strategy_state,
            round_num=state.round_num,
            attempt=attempt,
        )
    if plan.is_summed_compressed:
        aggregate = request.restore_sum(aggregate)
    if strategy.needs_train_metrics:
        aggregate = replace(aggregate, train=collected.train())
    stepped = call_step(strategy, state.params, aggregate, strategy_state)
    next_state = replace(
        state,
        round_num=state.round_num + 1,
        params=stepped.params,
        strategy_state=stepped.state,
        client_states=collected.client_states,
        counted=counted,
    )
    return RoundResult(next_state, collected, stepped.metrics)
