"""The training loop: retries, early stopping, the best model, and resuming after a crash."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.collector import CollectedRound, Collector, GlobalModel, RoundRequest
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.objectives import CrossEntropy
from fedlearn.algorithms.pending_tasks import Draw, PendingTasks
from fedlearn.algorithms.recipes import Algorithm, FedAvg, FedAvgM, FedYogi
from fedlearn.algorithms.sampling import UniformSampler
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.algorithms.strategy import State, StepResult
from fedlearn.core.client_metrics import EvaluationOutcome
from fedlearn.core.clock import VirtualClock
from fedlearn.core.cluster import Alone
from fedlearn.core.codec import decode, encode
from fedlearn.core.distribution import Direction
from fedlearn.core.messages import ClientId, Failure, TrainReply, TrainRequest
from fedlearn.core.params import Params
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError, NoUpdates, RoundError, TooFewReports
from fedlearn.rounds.opening import SampledOpening
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.records import Checkpoint, Outcome, RoundRecord, RunStatus
from fedlearn.rounds.round import RoundPlan
from fedlearn.rounds.run import EarlyStopping, RunPlan, RunState, _summarize_failures, train
from fedlearn.simulation.behavior import (
    Behavior,
    LognormalBandwidth,
)
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.sequential import SequentialExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.training.resident import Precision, ResidentModel
from fedlearn.transport.memory import Handler, MemoryChannel

CPU = torch.device("cpu")


NEVER = EarlyStopping(
    metric="accuracy",
    direction="max",
    patience_rounds=None,
    min_improvement=0.0,
    target=None,
)
POLICY = StragglerPolicy(
    num_wanted=3,
    over_selection=1.0,
    deadline_s=10.0,
    min_reports=2,
    below_minimum=BelowMinimum.RETRY,
    max_retries=2,
)
LOCAL = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


@dataclass
class MemoryStore:
    """A store in memory that keeps a copy of every commit, as it would be found after a crash."""

    records: list[RoundRecord] = field(default_factory=list)
    commits: list[tuple[Checkpoint, tuple[RoundRecord, ...]]] = field(default_factory=list)
    status: RunStatus = RunStatus.RUNNING

    def append(self, record: RoundRecord) -> None:
        self.records.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
        self.commits.append((replace(checkpoint, tensors=tensors), tuple(self.records)))

    def finish(self, status: RunStatus, *, error: str) -> None:
        assert not error
        self.status = status


@dataclass(frozen=True)
class Scripted:
    """An evaluator that reads its values from a list, by number of finished rounds."""

    values: Sequence[float]
    metric: str = "accuracy"

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        return EvaluationOutcome(metrics={self.metric: self.values[model.round_num]})


def linear(value: float = 0.0) -> Params:
    params = Params.of(nn.Linear(2, 1, bias=False))
    return params.with_vector(torch.full_like(params.vector, value))


#: Whether client c fails in round r at attempt a.
Fails = Callable[[int, int, int], bool]


def script_round(
    fails: Fails | None = None,
    *,
    policy: StragglerPolicy = POLICY,
    num_clients: int = 3,
) -> RoundPlan:
    """Rounds with deltas of one that take 2 virtual seconds, with scripted failures."""

    def client(client_id: int) -> Handler:
        def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
            request = decode(data)
            assert isinstance(request, TrainRequest)
            if fails and fails(client_id, request.round_num, request.attempt):
                return encode(Failure("battery low")), state
            size = sum(request.tensors[name].numel() for name in request.order)
            reply = TrainReply(
                round_num=request.round_num,
                lanes={"delta": torch.ones(size)},
                num_examples=1 + client_id,
                metrics={"loss": float(client_id)},
            )
            return encode(reply), state

        return handle

    channel = MemoryChannel(
        {ClientId(i): client(i) for i in range(num_clients)},
        lambda c, _: np.full(len(c), 2.0),
        VirtualClock(),
    )
    algorithm = FedAvg(LOCAL)
    collector = PlainCollector(channel=channel, policy=policy, slab_bytes=0)
    return RoundPlan(
        draw=SampledOpening(
            sampler=UniformSampler(), available=collector.available, seed=Seed(0)
        ).draw_cohort,
        policy=policy,
        collector=collector,
        strategy=algorithm,
        seed=Seed(0),
    )


def ignore(record: RoundRecord, params: Params) -> bool:
    """Continue after every round."""
    return False


def run_plan(
    round_plan: RoundPlan,
    *,
    values: Sequence[float] = (0.0,) * 20,
    num_rounds: int = 4,
    evaluate_every: int = 1,
    early_stopping: EarlyStopping = NEVER,
) -> RunPlan:
    return RunPlan(
        round=round_plan,
        evaluator=Scripted(values, early_stopping.metric),
        evaluate_every=evaluate_every,
        early_stopping=early_stopping,
        num_rounds=num_rounds,
        checkpoint_every_s=0.0,
        clock=VirtualClock(),
    )


def run(
    plan: RunPlan,
    params: Params | None = None,
    *,
    store: MemoryStore | None = None,
    checkpoint: Checkpoint | None = None,
) -> tuple[RunState, MemoryStore]:
    store = store or MemoryStore()
    state = train(
        plan,
        params or linear(),
        checkpoint=checkpoint,
        store=store,
        after_round=ignore,
    )
    return state, store


def test_a_run_records_every_round() -> None:
    """Losses are weighted by examples, virtual time adds up, and the callback gets each record."""
    told: list[RoundRecord] = []
    store = MemoryStore()
    plan = run_plan(script_round(), num_rounds=3)
    seen: list[float] = []

    def after_round(record: RoundRecord, params: Params) -> bool:
        told.append(record)
        seen.append(params.vector[0].item())
        return False

    state = train(plan, linear(), checkpoint=None, store=store, after_round=after_round)
    assert state.server.params.vector.tolist() == [3.0, 3.0]
    assert store.status is RunStatus.DONE
    assert told == store.records
    assert seen == [1.0, 2.0, 3.0]
    assert [record.round_num for record in told] == [0, 1, 2]
    assert [record.virtual_s for record in told] == [2.0, 4.0, 6.0]
    assert {record.outcome for record in told} == {Outcome.AGGREGATED}
    assert told[0].train_loss == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
    assert told[0].count(Status.REPORTED) == 3


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("noticed_after", [0, 1, 2, 3])
def test_a_run_that_is_extended_on_its_way_has_the_rounds_of_one_begun_so(
    every: int, noticed_after: int
) -> None:
    """Whenever the extension is noticed, up to the moment at which the run would have ended."""
    expected, whole = run(run_plan(script_round(), num_rounds=5, evaluate_every=every))
    store = MemoryStore()
    plan = replace(
        run_plan(script_round(), num_rounds=3, evaluate_every=every),
        read_num_rounds=lambda: 5 if len(store.records) >= noticed_after else 3,
    )
    state, _ = run(plan, store=store)
    assert torch.equal(state.server.params.vector, expected.server.params.vector)
    assert [each.participations for each in store.records] == [
        each.participations for each in whole.records
    ]
    assert store.status is RunStatus.DONE


@dataclass(frozen=True)
class Begins(Algorithm):
    """A strategy with metrics of its start and of each step."""

    def begin(self, params: Params) -> StepResult:
        return StepResult(params, self.init(params), {"warm": 0.5})

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        return replace(super().step(params, aggregate, state), metrics={"said": 1.0})


def test_what_a_strategy_says_as_it_begins_stands_in_the_first_record() -> None:
    """Also if the run is killed between its first commit and its first round."""
    fed = FedAvg(LOCAL)
    begins = Begins(**{each.name: getattr(fed, each.name) for each in fields(fed)})
    plan = run_plan(replace(script_round(), strategy=begins), num_rounds=2)
    _, store = run(plan)
    told = [record.metrics for record in store.records]
    assert told == [{"warm": 0.5, "said": 1.0, "accuracy": 0.0}, {"said": 1.0, "accuracy": 0.0}]
    for at, (checkpoint, before) in enumerate(store.commits[:2]):
        resumed = MemoryStore()
        train(plan, linear(), checkpoint=checkpoint, store=resumed, after_round=ignore)
        assert len(before) == at
        assert [record.metrics for record in resumed.records] == told[at:]


class Spends(Algorithm):
    """A strategy with a metric that has the name of the privacy budget spent."""

    def step(self, params: Params, aggregate: Aggregate, state: State) -> StepResult:
        return replace(super().step(params, aggregate, state), metrics={"epsilon": 1.0})


def test_no_metric_of_a_strategy_passes_for_the_privacy_that_was_spent() -> None:
    """It would replace the ledger's metric in the records."""
    fed = FedAvg(LOCAL)
    spends = Spends(**{each.name: getattr(fed, each.name) for each in fields(fed)})
    with pytest.raises(RoundError, match=r"Spends\.step .* 'epsilon' is the privacy spent"):
        run(run_plan(replace(script_round(), strategy=spends), num_rounds=2))


def test_a_round_below_its_minimum_is_tried_again_with_others() -> None:
    """The record has the attempt, and the time of all attempts together."""
    asked: list[tuple[int, int]] = []

    def fails(client_id: int, round_num: int, attempt: int) -> bool:
        if client_id == 0:
            asked.append((round_num, attempt))
        return round_num == 1 and attempt < 2

    policy = replace(POLICY, num_wanted=3)
    state, store = run(run_plan(script_round(fails, policy=policy), num_rounds=3))
    assert [record.attempt for record in store.records] == [0, 2, 0]
    assert [record.duration_s for record in store.records] == [2.0, 6.0, 2.0]
    assert state.virtual_s == 10.0
    assert state.server.params.vector.tolist() == [3.0, 3.0]
    assert asked == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_who_made_an_attempt_fail_is_not_asked_in_those_after_it() -> None:
    """It is asked again in the next round, because culprits are those of one round."""
    asked: list[tuple[int, int]] = []

    def fails(client_id: int, round_num: int, attempt: int) -> bool:
        if client_id == 1:
            asked.append((round_num, attempt))
        return (round_num, attempt) == (1, 0)

    @dataclass(frozen=True)
    class Blaming:
        inner: Collector

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
            found = self.inner.collect(pending, requests, round_num=round_num, draw=draw)
            is_over = found.aggregate is None
            return replace(found, culprits=frozenset([ClientId(1)] if is_over else []))

    scripted = script_round(fails, policy=replace(POLICY, num_wanted=3))
    state, _ = run(run_plan(replace(scripted, collector=Blaming(scripted.collector)), num_rounds=3))
    assert asked == [(0, 0), (1, 0), (2, 0)]
    assert state.server.params.vector.tolist() == [3.0, 3.0]


def test_each_attempt_asks_a_fresh_cohort() -> None:
    """Of 60 clients, three attempts ask three different cohorts."""
    cohorts: dict[int, set[int]] = {}

    def fails(client_id: int, round_num: int, attempt: int) -> bool:
        cohorts.setdefault(attempt, set()).add(client_id)
        return True

    with pytest.raises(TooFewReports):
        run(run_plan(script_round(fails, num_clients=60)))
    assert [len(cohorts[attempt]) for attempt in (0, 1, 2)] == [3, 3, 3]
    assert len({frozenset(cohort) for cohort in cohorts.values()}) == 3


@pytest.mark.parametrize(
    ("below_minimum", "num_attempts"), [(BelowMinimum.RETRY, 3), (BelowMinimum.FAIL, 1)]
)
def test_a_run_fails_when_the_policy_says_so(
    below_minimum: BelowMinimum, num_attempts: int
) -> None:
    """After all retries or at once; the last commit remains and the message has the numbers."""
    attempts: set[int] = set()

    def fails(client_id: int, round_num: int, attempt: int) -> bool:
        if round_num == 1:
            attempts.add(attempt)
        return round_num == 1 and client_id > 0

    store = MemoryStore()
    policy = replace(POLICY, below_minimum=below_minimum)
    with pytest.raises(TooFewReports, match=r"round 2: 1 usable reports .* minimum is 2") as caught:
        run(run_plan(script_round(fails, policy=policy)), store=store)
    assert (caught.value.round_num, caught.value.received, caught.value.minimum) == (1, 1, 2)
    assert len(attempts) == num_attempts
    assert store.commits[-1][0].round_num == 1
    assert store.status is RunStatus.RUNNING, "who called decides what became of the run"


@pytest.mark.parametrize(
    ("num_failing", "told"),
    [
        (1, "(0 late; 1 failed: battery low (client 0))"),
        (3, "(0 late; 3 failed: battery low (clients 0, 1, 2))"),
        (8, "(0 late; 8 failed: battery low (clients 0, 1, 2, 3, 4 and 3 more))"),
    ],
)
def test_the_error_of_a_round_names_who_failed_and_why(num_failing: int, told: str) -> None:
    """It lists the first few clients and the number of the others."""
    policy = replace(POLICY, num_wanted=8, min_reports=8, over_selection=1.0)
    plan = script_round(lambda c, _, __: c < num_failing, policy=policy, num_clients=8)
    with pytest.raises(TooFewReports) as caught:
        run(run_plan(plan))
    assert told in str(caught.value)


def test_of_many_reasons_the_most_frequent_are_told() -> None:
    """The three most frequent reasons, and the number of clients that failed for another one."""
    reasons = ["a", "b", "b", "c", "d", "d", "e"]
    rows = [
        Participation(ClientId(k), Status.FAILED, 1.0, 0, math.nan, reason)
        for k, reason in enumerate(reasons)
    ]
    late = Participation(ClientId(9), Status.LATE, 1.0, 0, math.nan, "")
    collected = CollectedRound(
        aggregate=None, participations=Participations.of([*rows, late]), duration_s=1.0
    )
    assert _summarize_failures(collected.participations) == (
        "1 late; 2 failed: b (clients 1, 2); 2 failed: d (clients 4, 5); 1 failed: a (client 0); "
        "and 2 more failed"
    )


def test_a_skipped_round_counts_and_leaves_the_model() -> None:
    """It is finished, its record says that it was skipped, and the next round follows."""
    policy = replace(POLICY, below_minimum=BelowMinimum.SKIP)
    state, store = run(
        run_plan(script_round(lambda c, r, _: r == 1 and c != 2, policy=policy), num_rounds=3)
    )
    assert [record.outcome for record in store.records] == [
        Outcome.AGGREGATED,
        Outcome.SKIPPED,
        Outcome.AGGREGATED,
    ]
    assert state.server.round_num == 3
    assert state.server.params.vector.tolist() == [2.0, 2.0]
    assert store.records[1].count(Status.FAILED) == 2
    assert store.records[1].train_loss == 2.0, "of the one that did report"


SKIPPING = replace(POLICY, below_minimum=BelowMinimum.SKIP)


def test_a_round_without_reports_has_no_loss() -> None:
    """It is NaN, not zero."""
    plan = script_round(lambda _, round_num, __: round_num == 0, policy=SKIPPING)
    _, store = run(run_plan(plan, num_rounds=2))
    assert math.isnan(store.records[0].train_loss)


def test_a_run_in_which_all_clients_failed_has_failed() -> None:
    """Even if rounds may be skipped. A resumed run remembers the earlier rounds."""
    failing = script_round(lambda *_: True, policy=SKIPPING)
    plan, store = run_plan(failing, num_rounds=3), MemoryStore()
    with pytest.raises(NoUpdates, match=r"in 3 rounds.*last one 0 late; . failed: battery low"):
        run(plan, store=store)
    assert [record.outcome for record in store.records] == [Outcome.SKIPPED] * 3
    assert store.status is RunStatus.RUNNING, "who called decides what became of the run"
    checkpoint, _ = store.commits[-1]
    with pytest.raises(NoUpdates, match="in 3 rounds, so the model is the initial one; mend"):
        run(plan, store=MemoryStore(), checkpoint=checkpoint)
    well = run_plan(script_round(policy=SKIPPING), num_rounds=4)
    state, store = run(well, checkpoint=checkpoint)
    assert (store.status, state.server.round_num) == (RunStatus.DONE, 4)


def test_a_run_that_was_resumed_has_the_updates_of_before() -> None:
    """Controls of the test above; a checkpoint of an earlier version does not say, so it passes."""
    few = run_plan(script_round(lambda client, *_: client > 0, policy=SKIPPING), num_rounds=3)
    assert run(few)[1].status is RunStatus.DONE, "too few reports are skipped, as the policy says"
    first = run_plan(script_round(policy=SKIPPING), num_rounds=1)
    _, store = run(first)
    checkpoint, _ = store.commits[-1]
    failing = run_plan(script_round(lambda *_: True, policy=SKIPPING), num_rounds=2)
    assert run(failing, checkpoint=checkpoint)[1].status is RunStatus.DONE
    earlier = {n: v for n, v in checkpoint.values.items() if n not in ("has_asked", "has_updates")}
    old = replace(checkpoint, values=earlier)
    assert run(failing, checkpoint=old)[1].status is RunStatus.DONE


@pytest.mark.parametrize(
    ("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (0, [5]), (9, [5])]
)
def test_the_model_is_measured_every_k_rounds_and_at_the_end(
    every: int, evaluated: list[int]
) -> None:
    """And never twice; other records have no metrics."""
    _, store = run(run_plan(script_round(), num_rounds=5, evaluate_every=every))
    assert [r.round_num + 1 for r in store.records if r.metrics] == evaluated


@pytest.mark.parametrize(
    ("metric", "direction", "values", "best_value", "best_round"),
    [
        ("accuracy", "max", [math.nan, 0.1, 0.7, 0.5, 0.7], 0.7, 2),
        ("loss", "min", [math.nan, 0.9, 0.3, 0.5, 0.3], 0.3, 2),
        ("clients/error_mean", "min", [math.nan, 0.9, 0.8, 0.7, 0.6], 0.6, 4),
        ("lossless", "max", [math.nan, 0.1, 0.2, 0.3, 0.3], 0.3, 3),
        ("accuracy", "max", [math.nan, math.nan, 0.2, math.nan, 0.1], 0.2, 2),
    ],
)
def test_the_best_model_is_kept(
    metric: str, direction: Direction, values: list[float], best_value: float, best_round: int
) -> None:
    """In the declared direction; the first of equal values wins, and a NaN is never best."""
    watched = replace(NEVER, metric=metric, direction=direction)
    state, store = run(run_plan(script_round(), values=values, early_stopping=watched))
    assert (state.best_value, state.best_round) == (best_value, best_round)
    assert state.best_params is not None
    assert state.best_params.vector.tolist() == [best_round] * 2
    assert store.commits[-1][0].tensors["best/weight"].tolist() == [[best_round] * 2]


def test_without_any_finite_metric_there_is_no_best_model() -> None:
    """Nor is there one in the checkpoint."""
    state, store = run(run_plan(script_round(), values=[math.nan] * 5))
    assert state.best_params is None
    assert math.isnan(state.best_value)
    assert not any(name.startswith("best/") for name in store.commits[-1][0].tensors)


@pytest.mark.parametrize(
    ("early_stopping", "values", "num_rounds"),
    [
        (replace(NEVER, target=0.5), [0, 0.1, 0.49, 0.5, 0.9], 3),
        (replace(NEVER, metric="loss", direction="min", target=0.5), [9, 0.9, 0.51, 0.5, 0.1], 3),
        (replace(NEVER, target=2.0), [0.0] * 13, 12),
        (replace(NEVER, patience_rounds=3), [0, 0.1, 0.5, 0.4, 0.5, 0.2, 0.9], 5),
        (
            replace(NEVER, metric="loss", direction="min", patience_rounds=2),
            [0, 0.5, 0.3, 0.4, 0.3, 0.1],
            4,
        ),
        (replace(NEVER, patience_rounds=2, min_improvement=0.1), [0, 0.1, 0.19, 0.2, 0.9], 3),
        (replace(NEVER, patience_rounds=2, min_improvement=0.1), [0, 0.1, 0.21, 0.3, 0.3, 0], 4),
        (replace(NEVER, patience_rounds=2), [math.nan] * 13, 2),
        (NEVER, [0.0] * 13, 12),
    ],
)
def test_a_run_stops_early(
    early_stopping: EarlyStopping, values: list[float], num_rounds: int
) -> None:
    """At its target, or when patience runs out; improvements below the minimum do not count."""
    plan = run_plan(script_round(), values=values, num_rounds=12, early_stopping=early_stopping)
    state, store = run(plan)
    assert len(store.records) == state.server.round_num == num_rounds
    assert store.commits[-1][0].round_num == num_rounds, "the end is always committed"


@pytest.mark.parametrize(("every", "num_rounds"), [(5, 10), (0, 12), (2, 6), (1, 4)])
def test_patience_is_lost_only_where_the_model_was_measured(every: int, num_rounds: int) -> None:
    """A run stops only after an evaluation, so its last model always has metrics."""
    patient = replace(NEVER, patience_rounds=3)
    values = [0.5] * 13
    plan = run_plan(
        script_round(),
        values=values,
        num_rounds=12,
        evaluate_every=every,
        early_stopping=patient,
    )
    _, store = run(plan)
    assert len(store.records) == num_rounds
    assert store.records[-1].metrics


def test_commits_are_spaced_in_real_time() -> None:
    """The first and the last state are always durable."""
    plan = replace(run_plan(script_round(), num_rounds=6), checkpoint_every_s=2.0)
    clock = plan.clock
    store = MemoryStore()

    def after_round(record: RoundRecord, params: Params) -> bool:
        clock.sleep(1.0)
        return False

    train(plan, linear(), checkpoint=None, store=store, after_round=after_round)
    assert [checkpoint.round_num for checkpoint, _ in store.commits] == [0, 2, 4, 6]


def test_a_run_that_is_told_to_end_is_done_and_durable() -> None:
    """After the round whose callback ended it, and no matter when the last commit was."""
    plan = replace(run_plan(script_round(), num_rounds=6), checkpoint_every_s=math.inf)
    store = MemoryStore()

    def after_round(record: RoundRecord, params: Params) -> bool:
        return record.round_num == 1

    state = train(plan, linear(), checkpoint=None, store=store, after_round=after_round)
    assert state.server.round_num == 2
    assert store.status is RunStatus.DONE
    assert [checkpoint.round_num for checkpoint, _ in store.commits] == [0, 2]


@pytest.mark.parametrize("ends", [True, False])
def test_the_last_model_of_a_run_that_is_told_to_end_is_evaluated(*, ends: bool) -> None:
    """Also in a round without an evaluation; it may be the best model. Control: no early end."""
    plan = run_plan(script_round(), values=[0.0, 0.1, 0.2, 0.3, 0.4], num_rounds=4)
    store = MemoryStore()

    def after_round(record: RoundRecord, params: Params) -> bool:
        return ends and record.round_num == 1

    state = train(
        replace(plan, evaluate_every=0),
        linear(),
        checkpoint=None,
        store=store,
        after_round=after_round,
    )
    metrics = [record.metrics for record in store.records]
    expected = [{}, {"accuracy": 0.2}] if ends else [{}, {}, {}, {"accuracy": 0.4}]
    assert metrics == expected
    assert (state.best_round, state.best_value) == ((2, 0.2) if ends else (4, 0.4))


def make_network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network with everything that a checkpoint must hold: statistics, counters, dropout."""
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    ).to(dtype)


def start(dtype: torch.dtype = torch.float32) -> Params:
    torch.manual_seed(0)
    return Params.of(make_network(dtype))


def simulated(
    algorithm: Algorithm, *, dtype: torch.dtype = torch.float32, num_rounds: int = 6
) -> RunPlan:
    """Build a new plan with engine, behavior and evaluator, as a new process would."""
    sizes = [8, 14, 7, 11, 12, 10, 15, 6]  # BatchNorm refuses batches of one example
    num_examples = sum(sizes)
    generator = torch.Generator().manual_seed(1)
    population = ArrayPopulation(
        features=torch.randn(num_examples, 5, generator=generator).to(start(dtype).vector.dtype),
        labels=torch.randint(0, 3, (num_examples,), generator=generator),
        partition=Partition(np.arange(num_examples), np.cumsum([0, *sizes])),
        num_classes=3,
    )
    model = ResidentModel(
        lambda: make_network(dtype), CrossEntropy(), device=CPU, precision=Precision.FLOAT32
    )
    policy = replace(POLICY, num_wanted=4, over_selection=1.5, deadline_s=3.0)
    collector = Engine(
        population=population,
        behavior=Behavior(
            median_ms_per_example=30.0,
            speed_sigma=0.5,
            bandwidth=LognormalBandwidth(median_mbit_per_s=1.0, sigma=0.5),
            dropout_rate=0.1,
            round_jitter_sigma=0.2,
        ),
        executor=SequentialExecutor(model),
        policy=policy,
        cluster=Alone(),
        block_size=2,
    )
    plan = RoundPlan(
        draw=SampledOpening(
            sampler=UniformSampler(), available=collector.available, seed=Seed(5)
        ).draw_cohort,
        policy=policy,
        collector=collector,
        strategy=algorithm,
        seed=Seed(5),
    )
    values = [0.0, 0.1, 0.4, 0.3, 0.6, 0.2, 0.5]
    return run_plan(plan, values=values, num_rounds=num_rounds)


MOMENTUM = LocalSgd(epochs=2, batch_size=4, learning_rate=0.05, momentum=0.9, keep_momentum=True)
ALGORITHMS = {
    "kept momentum": FedAvg(MOMENTUM),
    "server momentum": FedAvgM(LOCAL, server_learning_rate=0.7, server_momentum=0.9),
    "adaptive": FedYogi(MOMENTUM, server_learning_rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
}


def assert_same_state(found: RunState, expected: RunState) -> None:
    assert found.server.round_num == expected.server.round_num
    assert torch.equal(found.server.params.vector, expected.server.params.vector)
    assert_same_tensors(found.server.params.constants, expected.server.params.constants)
    assert_same_tensors(found.server.strategy_state, expected.server.strategy_state)
    assert (found.virtual_s, found.best_value, found.best_round) == (
        expected.virtual_s,
        expected.best_value,
        expected.best_round,
    )
    assert found.best_params is not None
    assert expected.best_params is not None
    assert torch.equal(found.best_params.vector, expected.best_params.vector)


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("kept momentum", torch.float32),
        pytest.param("server momentum", torch.float64, marks=pytest.mark.slow),
        pytest.param("adaptive", torch.float32, marks=pytest.mark.slow),
        pytest.param("adaptive", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_after_any_commit_ends_in_the_same_model(
    name: str, dtype: torch.dtype
) -> None:
    """Bit for bit, with the same records: server moments, kept momentum, and the best model."""
    algorithm = ALGORITHMS[name]
    expected, whole = run(simulated(algorithm, dtype=dtype), start(dtype))
    assert len(whole.commits) == 7
    assert any(record.count(Status.LATE) for record in whole.records)
    for checkpoint, records in whole.commits[:-1]:
        store = MemoryStore(list(records))
        plan = simulated(algorithm, dtype=dtype)
        resumed = train(
            plan,
            start(dtype),
            checkpoint=checkpoint,
            store=store,
            after_round=ignore,
        )
        assert_same_state(resumed, expected)
        assert store.records == whole.records
        assert_same_tensors(store.commits[-1][0].tensors, whole.commits[-1][0].tensors)
        assert store.commits[-1][0].values == whole.commits[-1][0].values


def test_a_checkpoint_without_the_clients_momentum_would_be_noticed() -> None:
    """Control: without it, the resumed run ends with another model."""
    algorithm = ALGORITHMS["kept momentum"]
    expected, whole = run(simulated(algorithm), start())
    checkpoint, records = whole.commits[3]
    kept = {n: t for n, t in checkpoint.tensors.items() if not n.startswith("clients/")}
    assert len(kept) < len(checkpoint.tensors)
    resumed = train(
        simulated(algorithm),
        start(),
        checkpoint=replace(checkpoint, tensors=kept),
        store=MemoryStore(list(records)),
        after_round=ignore,
    )
    assert not torch.equal(resumed.server.params.vector, expected.server.params.vector)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (nn.Linear(3, 1, bias=False), r"has weight \[1, 3\], but .* began with weight \[1, 2\]"),
        (nn.Linear(1, 1, bias=False), r"has weight \[1, 1\], but .* began with weight \[1, 2\]"),
        (nn.Linear(2, 1), r"has bias \[1\], but .* began with no bias .*1 of 2"),
    ],
)
def test_a_run_does_not_go_on_with_another_model(other: nn.Module, told: str) -> None:
    """Neither if the tensors could not take the values, nor if they could."""
    _, whole = run(run_plan(script_round()))
    checkpoint, records = whole.commits[1]
    with pytest.raises(ConfigError, match=told):
        train(
            run_plan(script_round()),
            Params.of(other),
            checkpoint=checkpoint,
            store=MemoryStore(list(records)),
            after_round=ignore,
        )


def test_a_run_whose_strategy_kept_numbers_for_frozen_parameters_is_refused() -> None:
    """An earlier version did that; the message says what to do."""
    plan = simulated(ALGORITHMS["server momentum"])
    _, whole = run(plan, start())
    checkpoint, records = whole.commits[1]
    longer = torch.cat([checkpoint.tensors["server/velocity"], torch.zeros(2)])
    with pytest.raises(ConfigError, match=r"keeps 'velocity' .* earlier version .* frozen ones"):
        train(
            plan,
            start(),
            checkpoint=replace(
                checkpoint, tensors={**checkpoint.tensors, "server/velocity": longer}
            ),
            store=MemoryStore(list(records)),
            after_round=ignore,
        )


def test_a_finished_run_has_nothing_to_resume() -> None:
    """Resuming from its last commit runs no round and reports that it is done."""
    expected, whole = run(run_plan(script_round()))
    checkpoint, records = whole.commits[-1]
    store = MemoryStore(list(records))
    state = train(
        run_plan(script_round()),
        linear(),
        checkpoint=checkpoint,
        store=store,
        after_round=ignore,
    )
    assert store.records == whole.records
    assert store.status is RunStatus.DONE
    assert torch.equal(state.server.params.vector, expected.server.params.vector)


def test_integer_buffers_stay_as_they_were() -> None:
    """2**62 + 1 is unchanged after rounds and checkpoints."""

    def make_model() -> nn.Module:
        model = nn.Linear(5, 3)
        model.register_buffer("version", torch.tensor(2**62 + 1))
        return model

    plan = run_plan(script_round(), num_rounds=2)
    params = Params.of(make_model())
    state, store = run(plan, params)
    checkpoint, _ = store.commits[1]
    assert int(state.server.params.constants["version"]) == 2**62 + 1
    assert int(checkpoint.tensors["params/version"]) == 2**62 + 1
