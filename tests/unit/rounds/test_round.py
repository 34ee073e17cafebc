"""One round, and the collector interface, which fits protocols of any shape."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.collector import CollectedRound, Collector, RoundRequest, draw_cohort
from fedlearn.algorithms.lanes import Aggregate, Updates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.pending_tasks import Draw, PendingTasks
from fedlearn.algorithms.recipes import Algorithm
from fedlearn.algorithms.sampling import PoissonSampler, UniformSampler
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.settings import update_from
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    TrainReply,
    TrainRequest,
)
from fedlearn.core.params import Params
from fedlearn.core.participations import (
    Participation,
    Participations,
    Status,
)
from fedlearn.core.randomness import Seed
from fedlearn.errors import CohortTooSmall
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.round import RoundPlan, run_round
from fedlearn.rounds.updates import validate
from fedlearn.transport.base import ask_once
from fedlearn.transport.memory import Handler, MemoryChannel

MEAN = WeightedMean(by_examples=True)
LOCAL = LocalSgd(epochs=1, batch_size=None, learning_rate=0.5)
POLICY = StragglerPolicy(
    num_wanted=4,
    over_selection=1.0,
    deadline_s=10.0,
    min_reports=3,
    below_minimum=BelowMinimum.SKIP,
    max_retries=0,
)


def zeros() -> Params:
    params = Params.of(nn.Linear(2, 1, bias=False))
    return params.with_vector(torch.zeros_like(params.vector))


@dataclass
class Asked:
    """Clients whose delta is 1, and the requests that they were sent."""

    requests: dict[int, TrainRequest]
    failing: frozenset[int] = frozenset()

    def handler(self, client_id: int) -> Handler:
        def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
            request = decode(data)
            assert isinstance(request, TrainRequest)
            self.requests[client_id] = request
            if client_id in self.failing:
                return encode(Failure("battery low")), state
            lanes = {"delta": torch.ones(2)}
            reply = TrainReply(round_num=request.round_num, lanes=lanes, num_examples=1, metrics={})
            return encode(reply), state

        return handle


def plan_of(asked: Asked, *, num_clients: int = 4, policy: StragglerPolicy = POLICY) -> RoundPlan:
    handlers = {ClientId(i): asked.handler(i) for i in range(num_clients)}
    channel = MemoryChannel(handlers, lambda c, _: np.zeros(len(c)), VirtualClock())
    return plan_with(PlainCollector(channel=channel, policy=policy, slab_bytes=0), policy)


def plan_with(collector: Collector, policy: StragglerPolicy = POLICY) -> RoundPlan:
    return RoundPlan(
        draw=SampledOpening(
            sampler=UniformSampler(), available=collector.available, seed=Seed(7)
        ).draw_cohort,
        policy=policy,
        collector=collector,
        strategy=Algorithm(
            local=LOCAL,
            aggregation=MEAN,
            server_optimizer=ServerSgd(learning_rate=0.5, momentum=0.5),
        ),
        seed=Seed(7),
    )


def test_a_round_samples_broadcasts_aggregates_and_steps() -> None:
    """Two rounds with deltas of one: v = 1, 1.5 and x = 0.5, 1.25."""
    asked = Asked({})
    plan = plan_of(asked)
    state = plan.init(zeros())
    state, collected, _ = run_round(state, plan, attempt=0)
    assert state.params.vector.tolist() == [0.5, 0.5]
    state, _, _ = run_round(state, plan, attempt=0)
    assert state.params.vector.tolist() == [1.25, 1.25]
    assert state.round_num == 2
    assert collected.count(Status.REPORTED) == 4


def test_clients_are_sent_the_model_the_settings_and_the_seed() -> None:
    """The request has everything that they need to train."""
    asked = Asked({})
    plan = plan_of(asked)
    state, _, _ = run_round(plan.init(zeros()), plan, attempt=0)
    run_round(state, plan, attempt=2)
    request = asked.requests[0]
    assert (request.round_num, request.attempt, request.seed) == (1, 2, 7)
    assert update_from(request.settings) == LOCAL
    assert request.tensors["weight"].tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("num_failing", "moves"), [(0, True), (1, True), (2, False), (4, False)])
def test_below_the_minimum_nothing_is_released(num_failing: int, *, moves: bool) -> None:
    """Three of four reports are enough; with two, the state keeps the same model object."""
    asked = Asked({}, failing=frozenset(range(num_failing)))
    plan = plan_of(asked)
    before = plan.init(zeros())
    after, collected, _ = run_round(before, plan, attempt=0)
    assert collected.count(Status.FAILED) == num_failing
    assert (after.params is not before.params) is moves
    assert (after.strategy_state is not before.strategy_state) is moves
    assert after.round_num == int(moves)


@dataclass(frozen=True)
class Playing:
    """A collector that simulates one client, whose state counts its rounds."""

    has_enough: bool

    def available(self) -> Sequence[ClientId]:
        return [ClientId(k) for k in range(4)]

    def collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        request = requests[round_num]
        before = request.client_states[0]["rounds"] if request.client_states else torch.zeros(1)
        lanes = {"delta": torch.ones(2)}
        return CollectedRound(
            aggregate=Aggregate(lanes, num_clients=4) if self.has_enough else None,
            participations=Participations.of([]),
            duration_s=1.0,
            client_states={0: {"rounds": before + 1.0}},
        )


@pytest.mark.parametrize("has_enough", [True, False])
def test_what_clients_keep_passes_on_with_the_state(*, has_enough: bool) -> None:
    """After a round below its minimum it does not change, since no update counted."""
    plan = plan_with(Playing(has_enough))
    state = plan.init(zeros())
    for num_rounds in (1, 2):
        state, _, _ = run_round(state, plan, attempt=0)
        kept = {each: own["rounds"].tolist() for each, own in state.client_states.items()}
        assert kept == ({0: [num_rounds]} if has_enough else {})
        assert state.round_num == (num_rounds if has_enough else 0)


def test_another_attempt_asks_others() -> None:
    """With 10 clients drawn out of 100, two attempts rarely have the same cohort."""
    policy = replace(POLICY, num_wanted=10)
    cohorts = []
    for attempt in (0, 1, 0):
        asked = Asked({})
        plan = plan_of(asked, num_clients=100, policy=policy)
        run_round(plan.init(zeros()), plan, attempt=attempt)
        cohorts.append(set(asked.requests))
    assert cohorts[0] == cohorts[2]
    assert cohorts[0] != cohorts[1]
    assert {len(cohort) for cohort in cohorts} == {10}


def test_more_clients_than_there_are_is_an_error() -> None:
    """Raised before any client is asked."""
    asked = Asked({})
    plan = plan_of(asked, num_clients=3)
    with pytest.raises(CohortTooSmall):
        run_round(plan.init(zeros()), plan, attempt=0)
    assert not asked.requests


def test_a_cohort_may_be_empty() -> None:
    """Poisson sampling may choose no clients: the model stays, and nothing divides by zero."""
    policy = replace(POLICY, num_wanted=1, min_reports=1)
    plan = plan_of(Asked({}), num_clients=500, policy=policy)
    plan = replace(
        plan,
        draw=SampledOpening(
            sampler=PoissonSampler(cap=2.0), available=plan.collector.available, seed=Seed(7)
        ).draw_cohort,
    )
    state = plan.init(zeros())
    sizes = []
    for attempt in range(20):
        after, collected, _ = run_round(state, plan, attempt=attempt)
        sizes.append(len(collected.participations))
        assert (after.round_num == 0) is (collected.count(Status.REPORTED) == 0)
    assert 0 in sizes


@dataclass(frozen=True)
class LossGuidedCollector:
    """A protocol of two exchanges: all evaluate, then the half with the highest loss trains.

    Clients carry their loss from the first message to the second in their state.
    """

    channel: MemoryChannel
    policy: StragglerPolicy

    def available(self) -> Sequence[ClientId]:
        return self.channel.available()

    def collect(
        self,
        pending: PendingTasks,
        requests: Mapping[int, RoundRequest],
        *,
        round_num: int,
        draw: Draw,
    ) -> CollectedRound:
        request = requests[round_num]
        cohort = draw_cohort(self.policy, request, draw)
        tensors = request.params.to_tensors()
        question = EvaluateRequest(round_num=request.round_num, tensors=tensors)
        losses = {
            arrival.client_id: arrival.reply.metrics["loss"]
            for arrival in ask_once(
                self.channel, dict.fromkeys(cohort, question), deadline_s=self.policy.deadline_s
            )
            if isinstance(arrival.reply, EvaluateReply)
        }
        chosen = sorted(losses, key=lambda c: -losses[c])[: len(cohort) // 2]
        training = request.message()
        layout, device = request.params.layout, request.params.vector.device
        state = MEAN.init(request.strategy.lanes, layout, device=device)
        rows = []
        for arrival in ask_once(
            self.channel, dict.fromkeys(chosen, training), deadline_s=self.policy.deadline_s
        ):
            update = validate(arrival, request)
            assert isinstance(update, TrainReply)
            weight_B = torch.tensor([float(update.num_examples)])
            rows_B = {name: vector[None] for name, vector in update.lanes.items()}
            updates = Updates([arrival.client_id], weight_B, rows_B, [request.round_num])
            state = MEAN.accumulate(state, updates)
            rows.append(
                Participation(
                    arrival.client_id,
                    Status.REPORTED,
                    arrival.elapsed_s,
                    update.num_examples,
                    losses[arrival.client_id],
                    "",
                )
            )
        return CollectedRound(
            aggregate=MEAN.finalize(state),
            participations=Participations.of(rows),
            duration_s=self.channel.clock.now_s(),
        )


def remembering(client_id: int) -> Handler:
    """Create a client whose delta is the loss that it reported in the previous message."""

    def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
        request = decode(data)
        match request:
            case EvaluateRequest():
                loss = float(client_id)
                reply = EvaluateReply(
                    round_num=request.round_num, num_examples=1, metrics={"loss": loss}
                )
                return encode(reply), safetensors.torch.save({"loss": torch.tensor(loss)})
            case TrainRequest():
                remembered = safetensors.torch.load(state)["loss"]
                lanes = {"delta": remembered.expand(2)}
                trained = TrainReply(
                    round_num=request.round_num, lanes=lanes, num_examples=1, metrics={}
                )
                return encode(trained), b""
            case _:
                raise AssertionError(request)

    return handle


def test_a_protocol_of_several_exchanges_fits_the_seam() -> None:
    """The round runs it unchanged, and clients remember the first message in the second."""
    clients = [ClientId(i) for i in range(4)]
    channel = MemoryChannel(
        {c: remembering(c) for c in clients}, lambda c, _: np.ones(len(c)), VirtualClock()
    )
    policy = replace(POLICY, min_reports=2)
    plan = plan_with(LossGuidedCollector(channel, policy), policy)
    state, collected, _ = run_round(plan.init(zeros()), plan, attempt=0)
    assert sorted(p.client_id for p in collected.participations) == [2, 3]
    assert state.params.vector.tolist() == [0.5 * 2.5, 0.5 * 2.5], "the mean of their losses"
    assert collected.duration_s == 2.0, "each exchange takes a second"
    assert [bool(channel.states[client]) for client in clients] == [True, True, False, False]
    assert not math.isnan(sum(p.loss for p in collected.participations))
