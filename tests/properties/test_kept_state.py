"""Clients move their kept state if and only if their update counted.

Histories are random: clients fail, are late or exceed a bound, attempts are thrown away, rounds are
skipped, and the coordinator restarts. The engine, sessions in memory and Flower must agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.bounds import UpdateBounds
from fedlearn.algorithms.collector import CollectedRound, Collector, RoundRequest
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.pending_tasks import Draw, PendingTasks
from fedlearn.algorithms.recipes import FedAvg, Scaffold
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import Bounded, Strategy
from fedlearn.algorithms.top_k import TopK
from fedlearn.core.clock import VirtualClock
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId, TrainRequest
from fedlearn.core.params import Params
from fedlearn.core.randomness import Seed
from fedlearn.rounds.evaluation import Evaluators
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStatus
from fedlearn.rounds.round import RoundPlan, ServerState, run_round
from fedlearn.rounds.run import EarlyStopping, RunPlan, train
from fedlearn.session.secure import SessionState
from fedlearn.simulation.behavior import DeviceRound
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.sessions import (
    SessionCollector,
    SessionStates,
    SimulatedSessions,
    trainers_on,
)
from fedlearn.transport.memory import Handler
from tests.parity import test_flower as flower

NUM_CLIENTS, NUM_ROUNDS = len(flower.SIZES), 6
SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.2)
POLICY = StragglerPolicy(
    num_wanted=3,
    over_selection=1.7,
    deadline_s=5.0,
    min_reports=2,
    below_minimum=BelowMinimum.SKIP,
    max_retries=0,
)
SCAFFOLD = Scaffold(SGD, num_clients=NUM_CLIENTS, server_learning_rate=1.0)
MOMENTUM = FedAvg(replace(SGD, momentum=0.9, keep_momentum=True))
FEEDBACK = replace(FedAvg(SGD), transforms=(TopK(fraction=0.2, error_feedback=True),))


@dataclass(frozen=True)
class Unreliable:
    """Devices of which some are late and some fail, at random in each attempt."""

    history: int

    def durations_s(self, work: DeviceRound) -> NDArray[np.float64]:
        return self._rng(work, 0).uniform(0.0, 7.0, NUM_CLIENTS)[work.client_ids]

    def failures(self, work: DeviceRound) -> NDArray[np.bool_]:
        return (self._rng(work, 1).uniform(size=NUM_CLIENTS) < 0.3)[work.client_ids]

    def _rng(self, work: DeviceRound, what: int) -> np.random.Generator:
        return np.random.default_rng((self.history, work.round_num, work.attempt, what))


def by_the_engine(history: int, strategy: Strategy) -> Collector:
    return Engine(
        population=flower.population(),
        behavior=Unreliable(history),
        executor=SequentialExecutor(flower.resident()),
        policy=POLICY,
        cluster=Alone(),
        block_size=1,
    )


def in_memory(
    history: int, strategy: Strategy, sessions_of: type[SimulatedSessions]
) -> SessionCollector:
    channel = sessions_of(
        flower.population(),
        Unreliable(history),
        trainers_on(flower.resident()),
        work=strategy.local.work,
    ).channel()
    plain = PlainCollector(channel=channel, policy=POLICY, slab_bytes=0)
    return SessionCollector(inner=plain, sessions=SessionStates(channel))


@dataclass(frozen=True)
class LosingReplies(SimulatedSessions):
    """Sessions whose failures happen only after training, when the kept state has changed."""

    def __getitem__(self, client_id: ClientId) -> Handler:
        fails, trains = super().__getitem__(client_id), reliable(self)[client_id]

        def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
            reply, after = fails(data, state)
            return (reply, trains(data, state)[1]) if after == state else (reply, after)

        return handle


def reliable(sessions: SimulatedSessions) -> SimulatedSessions:
    """Return sessions on the same examples in which no client fails."""
    return SimulatedSessions(
        sessions.population, flower.Spread(), sessions.make_trainer, work=sessions.work
    )


@dataclass(frozen=True)
class ThrowingAway:
    """A collector that discards its first attempt at some rounds, even if clients reported."""

    inner: Collector
    rounds: tuple[int, ...] = (1, 2)

    def available(self) -> Sequence[ClientId]:
        return self.inner.available()

    def collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        collected = self.inner.collect(pending, requests, round_num=round_num, draw=draw)
        if requests[round_num].attempt == 0 and round_num in self.rounds:
            return replace(collected, aggregate=None)
        return collected


def one_round(strategy: Strategy, collector: Collector, state: ServerState) -> ServerState:
    """Try a round twice, then skip it, as a run does."""
    opening = SampledOpening(sampler=UniformSampler(), available=collector.available, seed=Seed(5))
    plan = RoundPlan(
        draw=opening.draw_cohort,
        policy=POLICY,
        collector=collector,
        strategy=strategy,
        seed=Seed(5),
    )
    for attempt in range(2):
        ran = run_round(state, plan, attempt=attempt)
        if ran.collected.aggregate is not None:
            return ran.state
        state = ran.state
    return replace(state, round_num=state.round_num + 1)


def start_state(strategy: Strategy) -> ServerState:
    torch.manual_seed(0)
    params = Params.of(flower.make_model())
    return ServerState(round_num=0, params=params, strategy_state=strategy.init(params))


def assert_same(found: ServerState, expected: ServerState) -> None:
    assert torch.equal(found.params.vector, expected.params.vector)
    assert found.counted == expected.counted
    assert found.client_states.keys() == expected.client_states.keys()
    for client_id, own in expected.client_states.items():
        for name, value in own.items():
            assert torch.equal(found.client_states[client_id][name], value)


def assert_controls_agree(state: ServerState) -> None:
    """The server's control variate is the mean of the clients'; a client that keeps none has 0."""
    control = state.strategy_state["control"]
    total = sum((own["control"] for own in state.client_states.values()), torch.zeros_like(control))
    torch.testing.assert_close(total / NUM_CLIENTS, control, rtol=0.0, atol=1e-7)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random history, and the settings it runs with."""

    history: int
    max_norm: float
    restarts: frozenset[int]
    base: Strategy
    is_losing: bool


cases = st.builds(
    Case,
    history=st.integers(0, 2**16),
    max_norm=st.sampled_from([1e9, 1.0, 0.5]),
    restarts=st.frozensets(st.integers(1, NUM_ROUNDS - 1), max_size=2),
    base=st.sampled_from([SCAFFOLD, MOMENTUM, FEEDBACK]),
    is_losing=st.booleans(),
)


#: In the fifth round, a second wave of two clients joins the one client left of the first wave.
TWO_WAVES = Case(history=199, max_norm=0.5, restarts=frozenset(), base=SCAFFOLD, is_losing=False)
#: Updates are refused and replies are lost, and clients resume with what error feedback remembers.
RESIDUALS = Case(history=7, max_norm=0.5, restarts=frozenset({3}), base=FEEDBACK, is_losing=True)


@settings(max_examples=3, deadline=None)
@given(case=cases)
@example(case=TWO_WAVES)
@example(case=RESIDUALS)
def test_clients_keep_what_counted_whatever_happens(case: Case) -> None:
    """Engine and sessions agree to the bit; SCAFFOLD's controls add up after every round."""
    check(case)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(case=cases)
def test_many_histories_of_what_clients_keep(case: Case) -> None:
    """The same check on more examples."""
    check(case)


def check(case: Case) -> None:
    strategy = Bounded(case.base, UpdateBounds(max_norm=case.max_norm, max_examples=1000))
    sessions_of = LosingReplies if case.is_losing else SimulatedSessions
    engine = by_the_engine(case.history, strategy)
    sessions = in_memory(case.history, strategy, sessions_of)
    expected = found = start_state(strategy)
    for round_num in range(NUM_ROUNDS):
        if round_num in case.restarts:
            sessions = in_memory(case.history, strategy, sessions_of)
        expected = one_round(strategy, engine, expected)
        found = one_round(strategy, sessions, found)
        assert_same(found, expected)
        if case.base is SCAFFOLD:
            assert_controls_agree(expected)


@pytest.mark.slow
def test_an_attempt_that_is_thrown_away_is_undone_on_flower_too() -> None:
    """So is an update that exceeds its bound, which Flower does not report to its client."""
    strategy = Bounded(SCAFFOLD, UpdateBounds(max_norm=0.75, max_examples=1000))
    states = list[ServerState]()
    for collector in (flower.by_the_engine(strategy), flower.over_flower(strategy)):
        state, throwing = start_state(strategy), ThrowingAway(collector)
        for _ in range(NUM_ROUNDS):
            state = one_round(strategy, throwing, state)
        states.append(state)
    expected, found = states
    assert torch.equal(found.params.vector, expected.params.vector)
    assert found.counted == expected.counted
    assert_controls_agree(expected)


def test_a_client_that_is_told_nothing_keeps_its_last_training() -> None:
    """Control: if a client does not learn which updates counted, a lost one changes its state."""
    tensors = {"c": torch.ones(2)}
    request = TrainRequest(
        round_num=3, attempt=0, tensors={}, order=(), settings={}, seed=0, counted={}
    )
    me, kept = ClientId(4), SessionState(trainer={}, session=None).record_training(request, tensors)
    kept = SessionState.of(kept.to_bytes())

    def begins_with(counted: Mapping[ClientId, int] | None) -> Mapping[str, Tensor]:
        later = replace(request, round_num=5, counted=counted)
        return kept.settle(later, me).trainer

    assert begins_with({me: 3}).keys() == tensors.keys()
    assert begins_with(None).keys() == tensors.keys()
    for counted in ({}, {me: 2}, {ClientId(5): 3}):
        assert begins_with(counted) == {}


@pytest.mark.parametrize("is_rolled_back", [True, False])
def test_the_server_forgets_controls_that_clients_have_lost(*, is_rolled_back: bool) -> None:
    """After a rollback, clients know the run by another name and start without kept state.

    Control: if clients still keep their controls, the server keeps its own.
    """
    store = Remembering()
    train_rounds(store, num_rounds=2, checkpoint=None)
    checkpoint = store.commits[-1].with_client_run("a")
    if is_rolled_back:
        clients = {name: value for name, value in checkpoint.tensors.items() if "clients/" in name}
        assert clients
        kept = {each: value for each, value in checkpoint.tensors.items() if each not in clients}
        checkpoint = replace(checkpoint, tensors=kept).with_client_run("b")
    state = train_rounds(store, num_rounds=4, checkpoint=checkpoint)
    assert_controls_agree(state)


@dataclass
class Remembering:
    """A store in memory."""

    commits: list[Checkpoint] = field(default_factory=list)

    def append(self, record: RoundRecord) -> None:
        pass

    def commit(self, checkpoint: Checkpoint) -> None:
        self.commits.append(checkpoint)

    def finish(self, status: RunStatus, *, error: str) -> None:
        pass


def train_rounds(
    store: Remembering, *, num_rounds: int, checkpoint: Checkpoint | None
) -> ServerState:
    """Run SCAFFOLD over sessions in memory."""
    collector = in_memory(0, SCAFFOLD, SimulatedSessions)
    opening = SampledOpening(sampler=UniformSampler(), available=collector.available, seed=Seed(5))
    round_plan = RoundPlan(
        draw=opening.draw_cohort,
        policy=POLICY,
        collector=collector,
        strategy=SCAFFOLD,
        seed=Seed(5),
    )
    plan = RunPlan(
        round=round_plan,
        evaluator=Evaluators(parts=[], reveals_clients=True),
        evaluate_every=0,
        early_stopping=EarlyStopping(
            metric="loss", direction="min", patience_rounds=None, min_improvement=0.0, target=None
        ),
        num_rounds=num_rounds,
        checkpoint_every_s=0.0,
        clock=VirtualClock(),
    )
    params = start_state(SCAFFOLD).params
    state = train(plan, params, checkpoint=checkpoint, store=store, after_round=lambda *_: False)
    return state.server
