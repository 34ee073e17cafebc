"""Clients with custom trainers, in the engine as in sessions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.client_state import ClientStates
from fedlearn.algorithms.collector import CollectedRound, Collector, RoundRequest, collect_from
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy
from fedlearn.core.cluster import Alone
from fedlearn.core.messages import ClientId
from fedlearn.core.params import Params
from fedlearn.rounds.plain import PlainCollector
from fedlearn.simulation.behavior import Instant
from fedlearn.simulation.engine import Engine
from fedlearn.simulation.executors.trainers import MakeTrainer, TrainerExecutor
from fedlearn.simulation.partition import Partition
from fedlearn.simulation.population import ArrayPopulation
from fedlearn.simulation.sessions import SimulatedSessions
from fedlearn.training.trainer import LocalEvaluation, LocalResult, TaskControl, TrainContext

SIZES = [2, 3, 4]
STRATEGY = FedAvg(OwnTraining(epochs=1))
POLICY = StragglerPolicy(
    num_wanted=3,
    over_selection=1.0,
    deadline_s=float("inf"),
    min_reports=1,
    below_minimum=BelowMinimum.FAIL,
    max_retries=0,
)


@dataclass
class Noting:
    """A trainer that adds its label to the model, and records what it was given.

    Attributes:
        features: Features of its client.
        labels: Labels of its client.
        contexts: By client, the contexts of all its rounds.
        changes: By client, changes to its results.
    """

    features: Tensor
    labels: Tensor
    contexts: dict[int, list[TrainContext]] = field(default_factory=dict)
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    honors = ()

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        self.contexts.setdefault(context.client_id, []).append(context)
        result = LocalResult(
            tensors={name: value + float(self.labels[0]) for name, value in tensors.items()},
            num_examples=len(self.labels),
            metrics={"loss": 0.5, "mine": float(self.labels[0])},
            state={"rounds": context.state.get("rounds", torch.zeros(1)) + 1.0},
        )
        return replace(result, **self.changes.get(context.client_id, {}))

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=len(self.labels), metrics={})


def population() -> ArrayPopulation:
    return ArrayPopulation(
        features=torch.arange(9.0)[:, None],
        labels=torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]),
        partition=Partition(np.arange(9), np.cumsum([0, *SIZES])),
        num_classes=None,
    )


def engine(make_trainer: MakeTrainer) -> Engine:
    return Engine(
        population=population(),
        behavior=Instant(),
        executor=TrainerExecutor(make_trainer),
        policy=POLICY,
        cluster=Alone(),
        block_size=1,
    )


def sessions(make_trainer: MakeTrainer) -> PlainCollector:
    work = STRATEGY.local.work
    channel = SimulatedSessions(population(), Instant(), make_trainer, work=work).channel()
    return PlainCollector(channel=channel, policy=POLICY, slab_bytes=0)


BOTH = pytest.mark.parametrize("collector", [engine, sessions])


def collect(
    collector: Collector, round_num: int = 0, client_states: ClientStates | None = None
) -> CollectedRound:
    params = Params.of(nn.Linear(1, 1))
    request = RoundRequest(
        round_num=round_num,
        attempt=0,
        params=params,
        strategy=STRATEGY,
        broadcast={},
        seed=3,
        client_states=client_states or {},
    )
    return collect_from(collector, [ClientId(k) for k in range(3)], request)


@BOTH
def test_a_trainer_is_made_of_its_clients_examples(collector: Any) -> None:
    """It gets no other client's examples; its delta, examples and metrics count."""
    seen = dict[int, list[float]]()

    def make(features: Tensor, labels: Tensor) -> Noting:
        seen[int(labels[0])] = features.flatten().tolist()
        return Noting(features, labels)

    collected = collect(collector(make))
    assert seen == {0: [0.0, 1.0], 1: [2.0, 3.0, 4.0], 2: [5.0, 6.0, 7.0, 8.0]}
    assert collected.aggregate is not None
    mean = (0.0 * 2 + 1.0 * 3 + 2.0 * 4) / 9
    assert collected.aggregate.lanes["delta"].tolist() == pytest.approx([mean] * 2)
    assert [each.num_examples for each in collected.participations] == SIZES
    assert collected.train_metrics == {"mine": pytest.approx(mean)}


@BOTH
def test_a_trainers_state_is_its_clients(collector: Any) -> None:
    """From round to round; state that it no longer returns is dropped."""
    contexts = dict[int, list[TrainContext]]()
    changes = dict[int, Mapping[str, Any]]()

    def make(features: Tensor, labels: Tensor) -> Noting:
        return Noting(features, labels, contexts, changes)

    clients, client_states = collector(make), dict[int, Any]()
    for round_num in range(4):
        if round_num == 2:
            changes[1] = {"state": {"other": torch.ones(2)}}
        client_states = dict(collect(clients, round_num, client_states).client_states)
    found = {client: [dict(each.state) for each in told] for client, told in contexts.items()}
    assert [state.get("rounds", torch.zeros(1)).item() for state in found[0]] == [0, 1, 2, 3]
    assert found[1][3].keys() == {"other"}
    assert found[1][2].keys() == {"rounds"}


@BOTH
def test_a_trainer_that_diverges_is_no_part_of_the_mean(collector: Any) -> None:
    """Its client state is unchanged."""
    contexts = dict[int, list[TrainContext]]()
    nan = {"weight": torch.full((1, 1), float("nan")), "bias": torch.zeros(1)}
    changes: dict[int, Mapping[str, Any]] = {2: {"tensors": nan}}

    def make(features: Tensor, labels: Tensor) -> Noting:
        return Noting(features, labels, contexts, changes)

    clients, client_states = collector(make), dict[int, Any]()
    for round_num in range(2):
        collected = collect(clients, round_num, client_states)
        client_states |= collected.client_states
        assert collected.aggregate is not None
        assert collected.aggregate.lanes["delta"].tolist() == pytest.approx([3 / 5] * 2)
        assert collected.aggregate.num_clients == 2
    assert [dict(each.state) for each in contexts[2]] == [{}, {}]


def test_a_result_that_cannot_be_used_names_the_client() -> None:
    """That client has failed, in the engine as in sessions."""
    changes: dict[int, Mapping[str, Any]] = {1: {"num_examples": 0}}

    def make(features: Tensor, labels: Tensor) -> Noting:
        return Noting(features, labels, changes=changes)

    for collected in (collect(engine(make)), collect(sessions(make))):
        failed = [each for each in collected.participations if each.reason]
        assert [(each.client_id, each.reason[:17]) for each in failed] == [(1, "num_examples is 0")]
