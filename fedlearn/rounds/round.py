"""One federated round. Start reading here.

::

    draw -> broadcast ... collect -> aggregate -> release -> server step
                |            ^
                v            |
            client: train locally

:mod:`fedlearn.rounds.run` evaluates and persists after a round. Everything below is a function of
the state, the plan and what the collector returns. So a simulation and a deployment differ only in
who draws the clients and in the collector, and so do synchronous rounds and buffers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from fedlearn.algorithms.collecting import Collected, Collector, RoundRequest
from fedlearn.algorithms.flight import Draw, Flight
from fedlearn.algorithms.kept import Kept
from fedlearn.algorithms.lanes import Aggregate, Lanes
from fedlearn.algorithms.late_updates import Durations
from fedlearn.algorithms.own_training import keeps_something
from fedlearn.algorithms.round_settings import RoundSettings, in_round
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.algorithms.strategy import State, Strategy
from fedlearn.core.collecting import Status
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Layout, Params
from fedlearn.core.randomness import Seed
from fedlearn.rounds.pieces import begun_by, stepped_by, strategy_at, told_by


@dataclass(frozen=True, kw_only=True, eq=False)
class Version:
    """What clients in flight were sent, in an earlier round.

    Attributes:
        params: The model.
        told: What they were told beside it.
        state: The strategy's state of that round, where what clients do depends on it; else empty.
        counted: Of which clients which update was the last that counted then.
    """

    params: Params
    told: Lanes
    state: State
    counted: Mapping[ClientId, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """All that passes from one round to the next.

    Attributes:
        round_num: Index of the next round, from 0.
        params: Global model.
        strategy_state: What the strategy keeps from round to round.
        kept: What the clients keep, where this process plays them.
        begun: What the strategy said as it began, by name: for the record of the first round.
        flight: Of an asynchronous run, or one that takes late updates, the clients that were asked
            in earlier rounds and are awaited.
        versions: What they were sent, by the round that they are based on.
        durations: What clients took in the last rounds, where a deadline follows it.
        counted: By client, where clients keep something, the round whose model the last of its
            updates that counted was based on.
    """

    round_num: int
    params: Params
    strategy_state: State
    kept: Kept = field(default_factory=dict)
    begun: Mapping[str, float] = field(default_factory=dict)
    flight: Flight = ()
    versions: Mapping[int, Version] = field(default_factory=dict)
    durations: Durations = ()
    counted: Mapping[ClientId, int] = field(default_factory=dict)


class Release(Protocol):
    """What becomes of an aggregate before anybody looks at it, such as noise that hides clients."""

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
        """Return what is released of an attempt at a round, the same in every process.

        With it comes the strategy's state, as its step shall find it: noise that is correlated over
        rounds needs to know what was released before.

        Args:
            aggregate: What the aggregation made; may be overwritten.
            strategy: Of the round.
            layout: Of the model.
            state: The strategy's; not written to.
            round_num: Index, from 0.
            attempt: 0, or how often the round was tried before.
        """


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The pieces of a round; built once by :mod:`fedlearn.assembly`.

    Attributes:
        draw: Draws the clients to ask.
        policy: When the round closes.
        collector: Sends them the model and combines their updates.
        strategy: What they do, how it is combined, and what becomes of the model.
        seed: Public seed of everything reproducible.
        release: What becomes of the aggregate before the step; ``None``: nothing.
        by_round: Returns the clients' settings of a round; ``None``: they do not change.
        is_retried: Whether a round below its minimum is retried or skipped as the policy says. A
            buffer is not: its collector has asked other clients as some failed.
    """

    draw: Draw
    policy: StragglerPolicy
    collector: Collector
    strategy: Strategy
    seed: Seed
    release: Release | None = None
    by_round: RoundSettings | None = None
    is_retried: bool = True

    def for_clients(self, strategy: Strategy, round_num: int) -> Strategy:
        """Return a strategy as the clients of a round are asked by it; raises as ``by_round``."""
        return strategy if self.by_round is None else in_round(strategy, self.by_round, round_num)

    def init(self, params: Params) -> ServerState:
        """Return the state before the first round.

        Raises:
            RoundError: The strategy's is no tensors, or a metric is no number.
        """
        begun = begun_by(self.strategy, params)
        return ServerState(
            round_num=0, params=begun.params, strategy_state=begun.state, begun=begun.metrics
        )


class Ran(NamedTuple):
    """A round that was run.

    Attributes:
        state: After the round. Below the minimum of reports nothing is released and no update
            counts, so it is the one that came in, its ``round_num`` included.
        collected: Who took part, and what was aggregated.
        metrics: What the strategy says of its step.
    """

    state: ServerState
    collected: Collected
    metrics: Mapping[str, float]


def run_round(
    state: ServerState,
    plan: RoundPlan,
    *,
    attempt: int,
    without: Collection[ClientId] = frozenset(),
) -> Ran:
    """Run one attempt at a round: from one server step to the next.

    Args:
        state: Before the round, with the clients in flight.
        plan: The pieces.
        attempt: Retry number of the round, starting at 0; each retry draws other clients.
        without: Clients that are not asked even if they are drawn.

    Raises:
        CohortTooSmall: Fewer clients are available than are asked.
        RoundError: The strategy told, aggregated or returned what cannot be used.
    """
    strategy = strategy_at(plan.strategy, state.strategy_state)
    request = _request(state, plan, strategy, attempt=attempt)
    usual = plan.strategy if state.strategy_state else strategy
    requests = {
        based_on: replace(
            request,
            round_num=based_on,
            params=sent.params,
            told=sent.told,
            counted=None if request.counted is None else sent.counted,
            strategy=plan.for_clients(
                strategy_at(plan.strategy, sent.state) if sent.state else usual, based_on
            ),
        )
        for based_on, sent in state.versions.items()
    } | {state.round_num: request}
    collected = plan.collector.collect(
        state.flight,
        requests,
        round_num=state.round_num,
        draw=_leave_out(without, plan.draw) if without else plan.draw,
    )
    newest = Version(
        params=request.params,
        told=request.told,
        state={} if strategy is plan.strategy else state.strategy_state,
        counted=request.counted or {},
    )
    sent_in = {**state.versions, state.round_num: newest}
    versions = {each: sent_in[each] for each in sorted({e.based_on for e in collected.flight})}
    state = replace(state, flight=collected.flight, versions=versions)
    return _stepped(state, plan, collected, request, strategy=strategy)


def _leave_out(some: Collection[ClientId], draw: Draw) -> Draw:
    """Draw as ``draw`` does and ask the others: the cohort is smaller, and otherwise the same."""

    def draw_others(
        num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        drawn = draw(num, round_num=round_num, attempt=attempt, busy=busy)
        return [each for each in drawn if each not in some]

    return draw_others


def _request(
    state: ServerState, plan: RoundPlan, strategy: Strategy, *, attempt: int
) -> RoundRequest:
    """Return what is asked on the newest model."""
    return RoundRequest(
        round_num=state.round_num,
        attempt=attempt,
        params=state.params,
        strategy=plan.for_clients(strategy, state.round_num),
        told=told_by(strategy, state.strategy_state, state.params),
        seed=plan.seed.value,
        kept=state.kept,
        durations=state.durations,
        counted=state.counted if keeps_something(strategy.local) else None,
    )


def _counted(collected: Collected, round_num: int) -> Mapping[ClientId, int]:
    """Return by client in an aggregate the round whose model its update is based on."""
    if collected.counted is not None:
        return collected.counted
    rows = collected.participations
    return {each.client_id: round_num for each in rows if each.status is Status.REPORTED}


def _stepped(
    state: ServerState,
    plan: RoundPlan,
    collected: Collected,
    request: RoundRequest,
    *,
    strategy: Strategy,
) -> Ran:
    """Release what was collected, if it is enough, and take the strategy's step."""
    attempt = request.attempt
    state = replace(state, durations=collected.durations)
    aggregate = collected.aggregate
    if aggregate is None:  # no update counted, so clients keep what they kept before
        return Ran(state, collected, {})
    state = replace(state, kept=collected.kept)
    if request.counted is not None:
        state = replace(state, counted={**state.counted, **_counted(collected, state.round_num)})
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
    stepped = stepped_by(strategy, state.params, aggregate, strategy_state)
    next_state = replace(
        state,
        round_num=state.round_num + 1,
        params=stepped.params,
        strategy_state=stepped.state,
    )
    return Ran(next_state, collected, stepped.metrics)
