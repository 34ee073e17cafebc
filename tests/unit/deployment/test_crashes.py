"""A coordinator that is killed at any step: updates that clients were told are accepted survive.

The coordinator runs in this process, over an in-memory channel whose reply log outlives it. Every
client trains each model that it is sent once, and its update sets one cell of the model that is
unique to client and round. So the final model shows which updates it contains.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import pytest
import torch
from torch import nn

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.collector import ChannelCollector, GlobalModel
from fedlearn.algorithms.informed_sampling import NO_STATE, SamplerState
from fedlearn.algorithms.late_updates import LateUpdates
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.sampling import without
from fedlearn.algorithms.staleness import Staleness, StalenessWeight
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.client_metrics import EvaluationOutcome
from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId, Request, TrainReply, TrainRequest
from fedlearn.core.params import Params
from fedlearn.core.participations import Status
from fedlearn.core.randomness import Seed
from fedlearn.deployment import record as deployment_record
from fedlearn.rounds.journal import OpenRound, RoundJournal
from fedlearn.rounds.plain import PlainCollector
from fedlearn.rounds.records import Checkpoint, RoundRecord, RunStatus
from fedlearn.rounds.round import RoundPlan
from fedlearn.rounds.run import EarlyStopping, ResumedRound, RunPlan, train
from fedlearn.transport.base import Arrival

Kind = Literal["synchronous", "semi-synchronous", "buffered"]
KINDS: tuple[Kind, ...] = ("synchronous", "semi-synchronous", "buffered")

CLIENTS = [ClientId(each) for each in range(5)]
#: Seconds that each client trains: too few are in time for the first attempts of a round.
DELAYS_S = (0.4, 0.7, 1.6, 2.7, 3.5)
ROUNDS = 3
POLICY = StragglerPolicy(
    num_wanted=4,
    over_selection=1.0,
    deadline_s=1.0,
    min_reports=3,
    below_minimum=BelowMinimum.RETRY,
    max_retries=8,
)
PATIENT = replace(POLICY, deadline_s=1.65)
NEVER = EarlyStopping(
    metric="accuracy", direction="max", patience_rounds=None, min_improvement=0.0, target=None
)
OLD = Staleness(
    max_staleness=ROUNDS,
    staleness_weight=StalenessWeight.POLYNOMIAL,
    staleness_exponent=0.5,
    staleness_hinge=0,
)
LATE = LateUpdates(**vars(OLD), deadline_quantile=None, deadline_window=1, least_deadline_s=0.0)
GRACE_S = 0.5
BUFFER = Asynchrony(**vars(OLD), buffer_size=2, concurrency=4)


class Killed(BaseException):
    """Simulates that the coordinator's process is killed."""


class Key(NamedTuple):
    """Identifies a question to clients."""

    round_num: int
    attempt: int
    number: int


class Reply(NamedTuple):
    """A reply in the log."""

    client_id: ClientId
    elapsed_s: float


@dataclass
class Question:
    """The state of a question: what the server keeps on disk, and when each client finishes."""

    opened_s: float
    log: list[Reply] = field(default_factory=list)
    num_consumed: int | None = None  # once it has closed
    finish_s: dict[ClientId, float] = field(default_factory=dict)


@dataclass
class World:
    """Everything that outlives a coordinator, and the clock.

    Attributes:
        dies_after: Step at which the process is killed; 0: never.
        accepted: By client and round of the model, the attempts that accepted the update.
    """

    dies_after: int
    clock: VirtualClock = field(default_factory=VirtualClock)
    questions: dict[Key, Question] = field(default_factory=dict)
    opened: dict[tuple[int, int], OpenRound] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)
    commits: list[tuple[Checkpoint, int]] = field(default_factory=list)
    accepted: dict[tuple[ClientId, int], set[int]] = field(default_factory=dict)
    num_steps: int = 0
    is_dead: bool = False

    def step(self) -> None:
        """Count a step, and raise :class:`Killed` if the process dies or is dead."""
        self.num_steps += 1
        self.is_dead = self.is_dead or self.num_steps == self.dies_after
        if self.is_dead:
            raise Killed

    # The journal

    def find(self, round_num: int, attempt: int) -> OpenRound | None:
        return self.opened.get((round_num, attempt))

    def open(self, opened: OpenRound) -> None:
        self.step()
        self.opened[opened.round_num, opened.attempt] = opened
        self.step()

    def last(self) -> OpenRound | None:
        return self.opened[max(self.opened)] if self.opened else None

    def forget(self, before_round: int) -> None:
        self.opened = {key: each for key, each in self.opened.items() if key[0] >= before_round}

    # The store

    def append(self, record: RoundRecord) -> None:
        self.records.append(record)

    def commit(self, checkpoint: Checkpoint) -> None:
        self.step()
        tensors = {name: each.clone() for name, each in checkpoint.tensors.items()}
        self.commits.append((replace(checkpoint, tensors=tensors), len(self.records)))
        self.step()
        self.forget(checkpoint.round_num)
        self.step()

    def finish(self, status: RunStatus, *, error: str) -> None:
        assert (status, error) == (RunStatus.DONE, "")


@dataclass
class Gateway:
    """One process's channel to the clients."""

    world: World
    asked: dict[tuple[int, int], int] = field(default_factory=dict)

    def available(self) -> Sequence[ClientId]:
        return CLIENTS

    def open(self, *, deadline_s: float) -> "Exchange":
        return Exchange(self, deadline_s)


class Exchange:
    """Like the server's: logged replies come first, and the next call accepts the last reply."""

    def __init__(self, gateway: Gateway, deadline_s: float) -> None:
        self.gateway, self.world, self.deadline_s = gateway, gateway.world, deadline_s
        self.began_s = self.ends_s = math.nan
        self.awaited = dict[ClientId, tuple[Key, TrainRequest]]()
        self.found = list[tuple[Key, Reply]]()
        self.consumed = dict[Key, int]()
        self.last: tuple[Key, ClientId] | None = None
        self.grace_s = 0.0

    def ask(self, requests: Mapping[ClientId, Request], *, number: int | None = None) -> None:
        self.accept()
        world, now_s = self.world, self.world.clock.now_s()
        first = next(iter(requests.values()))
        assert isinstance(first, TrainRequest)
        if number is None:
            number = self.gateway.asked.get((first.round_num, first.attempt), 0)
            self.gateway.asked[first.round_num, first.attempt] = number + 1
        key = Key(first.round_num, first.attempt, number)
        is_resumed = key in world.questions
        question = world.questions.setdefault(key, Question(now_s))
        world.step()
        if math.isnan(self.began_s):
            left_s = question.opened_s + self.deadline_s - now_s if is_resumed else self.deadline_s
            self.began_s = question.opened_s if math.isfinite(self.deadline_s) else now_s
            self.ends_s = now_s + min(self.deadline_s, max(left_s, GRACE_S))
        if is_resumed and question.num_consumed is None:
            self.grace_s = now_s - self.began_s + GRACE_S
        logged = question.log
        if question.num_consumed is not None:
            logged = logged[: question.num_consumed]
        self.found += [(key, each) for each in logged]
        answered = {each.client_id for each in question.log}
        self.consumed[key] = 0
        for client_id, request in requests.items():
            assert isinstance(request, TrainRequest)
            if question.num_consumed is None or client_id in {e.client_id for e in logged}:
                self.awaited[client_id] = key, request
            if client_id not in answered:
                question.finish_s.setdefault(client_id, now_s + DELAYS_S[client_id])

    def next(self, *, until_s: float) -> Arrival | None:
        self.accept()
        self.world.step()
        if self.found:
            key, reply = self.found.pop(0)
            return self.arrival(key, reply, is_found=True)
        clock, due = self.world.clock, []
        for client_id, (key, _) in self.awaited.items():
            finish_s = self.world.questions[key].finish_s.get(client_id)
            if finish_s is not None:
                due.append((max(finish_s, clock.now_s()), client_id, key))
        most_s = min(self.began_s + until_s, self.ends_s)
        if not due or min(due)[0] > most_s:
            if self.awaited and math.isfinite(most_s):
                clock.sleep(max(0.0, most_s - clock.now_s()))
            return None
        comes_s, client_id, key = min(due)
        clock.sleep(max(0.0, comes_s - clock.now_s()))
        question = self.world.questions[key]
        reply = Reply(client_id, comes_s - question.opened_s)
        question.log.append(reply)
        self.world.step()  # logged, but not returned yet
        return self.arrival(key, reply, is_found=False)

    def arrival(self, key: Key, reply: Reply, *, is_found: bool) -> Arrival:
        _, request = self.awaited.pop(reply.client_id)
        self.last = key, reply.client_id
        delta = torch.zeros(len(CLIENTS) * ROUNDS)
        delta[key.round_num * len(CLIENTS) + reply.client_id] = 1.0
        answer = TrainReply(
            round_num=request.round_num, lanes={"delta": delta}, num_examples=1, metrics={}
        )
        elapsed_s = self.world.questions[key].opened_s + reply.elapsed_s - self.began_s
        logged_s = reply.elapsed_s if is_found else None
        return Arrival(reply.client_id, answer, elapsed_s, logged_s=logged_s)

    def elapsed_s(self) -> float:
        return 0.0 if math.isnan(self.began_s) else self.world.clock.now_s() - self.began_s

    def grace_until_s(self) -> float:
        return self.grace_s

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        self.accept()
        gone = {self.awaited.pop(each)[0] for each in client_ids if each in self.awaited}
        self.found = [each for each in self.found if each[0] not in gone]
        for key in gone:
            self.close_question(key)

    def close(self) -> None:
        with suppress(Killed):  # a generator is closing; the next step fails
            self.accept()
            for key in list(self.consumed):
                self.close_question(key)
        self.awaited.clear()

    def close_question(self, key: Key) -> None:
        self.world.step()
        question = self.world.questions[key]
        if question.num_consumed is None:
            question.num_consumed = self.consumed[key]
        self.consumed.pop(key)

    def accept(self) -> None:
        if self.last is None:
            return
        key, client_id = self.last
        self.last = None
        self.world.step()
        if key in self.consumed:
            self.consumed[key] += 1
        self.world.accepted.setdefault((client_id, key.round_num), set()).add(key.attempt)
        self.world.step()


@dataclass
class Opening:
    """Draws clients in turn, and records the cohort before it returns it."""

    world: World

    def open(self, round_num: int, *, attempt: int) -> tuple[ClientId, ...]:
        return self(POLICY.num_wanted, round_num=round_num, attempt=attempt, busy=())

    def __call__(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState = NO_STATE,
    ) -> tuple[ClientId, ...]:
        found = self.world.find(round_num, attempt)
        if found is not None:
            return found.cohort
        free = without(CLIENTS, frozenset(busy))
        turn = (attempt + 1) % max(1, len(free))
        cohort = tuple(sorted([*free[turn:], *free[:turn]][:num]))
        if not cohort:
            return ()
        self.world.open(
            OpenRound(
                round_num=round_num,
                attempt=attempt,
                cohort=cohort,
                opened_unix_s=self.world.clock.now_s(),
            )
        )
        return cohort


@dataclass(frozen=True)
class Nobody:
    """An evaluator without metrics."""

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        return EvaluationOutcome(metrics={})


def live(world: World, kind: Kind) -> None:
    """Run a coordinator until the run is done or it is killed."""
    world.is_dead = False
    gateway, opening = Gateway(world), Opening(world)
    policy = PATIENT if kind == "synchronous" else POLICY
    collector: ChannelCollector = PlainCollector(channel=gateway, policy=policy, slab_bytes=0)
    if kind == "semi-synchronous":
        collector = PlainCollector(channel=gateway, policy=policy, round_mode=LATE, slab_bytes=0)
    if kind == "buffered":
        policy = replace(POLICY, num_wanted=BUFFER.buffer_size, min_reports=1, deadline_s=9.0)
        collector = PlainCollector(channel=gateway, policy=policy, round_mode=BUFFER, slab_bytes=0)
    del world.records[world.commits[-1][1] if world.commits else 0 :]
    params = Params.of(nn.Linear(len(CLIENTS) * ROUNDS, 1, bias=False))
    plan = RunPlan(
        round=RoundPlan(
            draw=opening,
            policy=policy,
            collector=collector,
            strategy=FedAvg(LocalSgd(epochs=1, batch_size=1, learning_rate=0.1)),
            seed=Seed(0),
            is_retried=kind != "buffered",
        ),
        evaluator=Nobody(),
        evaluate_every=0,
        early_stopping=NEVER,
        num_rounds=ROUNDS,
        checkpoint_every_s=0.0,
        clock=world.clock,
        resumed=deployment_record.resume_round(
            world,
            RunStatus.RUNNING,
            policy,
            restarts=False,
            takes_late_updates=kind == "semi-synchronous",
            now_unix_s=world.clock.now_s(),
        ),
    )
    train(
        plan,
        params.with_vector(torch.zeros_like(params.vector)),
        checkpoint=world.commits[-1][0] if world.commits else None,
        store=world,
        after_round=lambda *_: False,
    )
    collector.close()


def lives(kind: Kind, *, dies_after: int, away_s: float) -> World:
    """Run a coordinator that is killed after ``dies_after`` steps, and then its successor."""
    world = World(dies_after)
    with suppress(Killed):
        live(world, kind)
        return world
    world.clock.sleep(away_s)
    live(world, kind)
    return world


def audit(world: World, kind: Kind) -> None:
    """Check that receipts, record and model agree, cell by cell."""
    (vector,) = world.commits[-1][0].select_tensors("params/").values()
    cells = vector.view(ROUNDS, len(CLIENTS))
    in_model = {
        (client_id, based_on)
        for based_on in range(ROUNDS)
        for client_id in CLIENTS
        if cells[based_on, client_id] != 0.0
    }
    told = set(world.accepted)
    if kind == "synchronous":  # updates of an attempt below the minimum are dropped
        last = {each.round_num: each.attempt for each in world.records}
        told = {key for key, attempts in world.accepted.items() if last[key[1]] in attempts}
    assert told <= in_model, "an update that was accepted is lost"
    # The client of the reply in hand as the process died may not have a receipt.
    assert len(in_model - told) <= (1 if world.dies_after else 0)
    rows = [
        each.client_id
        for record in world.records
        for each in record.participations
        if each.status is Status.REPORTED
    ]
    assert sorted(rows) == sorted(client_id for client_id, _ in in_model), "counted once"


def num_steps(kind: Kind) -> int:
    return lives(kind, dies_after=0, away_s=0.0).num_steps


@pytest.mark.parametrize(
    ("num_deaths", "absences_s"),
    [(12, (5.0,)), pytest.param(1000, (0.0, 0.5, 5.0), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_crash_loses_an_update_that_was_accepted_or_counts_one_twice(
    kind: Kind, num_deaths: int, absences_s: Sequence[float]
) -> None:
    """Killed at some or all steps; the successor starts at once, or after all clients finished."""
    for away_s in absences_s:
        last = num_steps(kind)
        for step in range(0, last + 1, max(1, last // num_deaths)):
            audit(lives(kind, dies_after=step, away_s=away_s), kind)


def test_the_runs_have_rounds_of_several_attempts_and_late_updates() -> None:
    """Otherwise the crash tests would not cover them."""
    plain, semi, filled = (lives(kind, dies_after=0, away_s=0.0) for kind in KINDS)
    for world in (plain, semi):
        assert max(each.attempt for each in world.records) > 0
    assert any(age > 0 for each in (*semi.records, *filled.records) for age in each.staleness)


def test_a_restart_that_begins_at_the_first_attempt_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: a semi-synchronous round would then lose what its second attempt accepted."""

    def begin_again(journal: RoundJournal, *_: object, **__: object) -> ResumedRound | None:
        last = journal.last()
        return None if last is None else ResumedRound(round_num=last.round_num, attempt=0)

    monkeypatch.setattr(deployment_record, "resume_round", begin_again)
    kind: Kind = "semi-synchronous"
    lost = list[int]()
    for step in range(20, num_steps(kind) + 1, 3):
        try:
            audit(lives(kind, dies_after=step, away_s=5.0), kind)
        except AssertionError:
            lost.append(step)
    assert lost
