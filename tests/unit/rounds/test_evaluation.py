"""Federated evaluation over a channel."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedlearn.algorithms.collector import GlobalModel
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.core.client_metrics import EvaluationOutcome
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, EvaluateReply, EvaluateRequest
from fedlearn.core.params import Params
from fedlearn.rounds.evaluation import ChannelEvaluator, Evaluators
from fedlearn.transport.memory import Handler, MemoryChannel

STRATEGY = FedAvg(LocalSgd(epochs=1, batch_size=None, learning_rate=1.0))
PARAMS = Params.of(nn.Linear(2, 1, bias=False))
CLIENTS = [ClientId(i) for i in range(10)]


def measuring(client_id: int) -> Handler:
    """Create a client whose loss is its id plus the first weight of the model that it was sent."""

    def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
        request = decode(data)
        assert isinstance(request, EvaluateRequest)
        loss = client_id + float(request.tensors["weight"][0, 0])
        metrics = {"loss": loss, "accuracy": 1.0 - client_id / 10}
        reply = EvaluateReply(round_num=request.round_num, num_examples=1, metrics=metrics)
        return encode(reply), state

    return handle


def evaluator(deadline_s: float) -> ChannelEvaluator:
    channel = MemoryChannel(
        {c: measuring(c) for c in CLIENTS}, lambda c, _: np.array(c, float), VirtualClock()
    )
    return ChannelEvaluator(
        channel=channel,
        cohort=lambda _: CLIENTS,
        directions={"loss": "min", "accuracy": "max"},
        deadline_s=deadline_s,
        strategy=STRATEGY,
    )


def test_the_spread_is_over_the_clients_and_of_the_model_that_was_sent() -> None:
    """Mean, quantiles and worst decile, whichever direction is worse."""
    params = PARAMS.with_vector(torch.tensor([100.0, 0.0]))
    metrics = evaluator(deadline_s=10.0).evaluate(GlobalModel(params=params, round_num=3)).metrics
    assert metrics["clients/loss_mean"] == pytest.approx(104.5)
    assert metrics["clients/loss_worst_decile"] == 109.0
    assert metrics["clients/accuracy_worst_decile"] == pytest.approx(0.1)
    assert metrics["clients/accuracy_p50"] == pytest.approx(0.55)


@pytest.mark.parametrize(("deadline_s", "expected"), [(4.0, 2.0), (3.9, 1.5), (9.0, 4.5)])
def test_only_those_count_that_answer_in_time(deadline_s: float, expected: float) -> None:
    """A reply exactly at the deadline is in time."""
    params = PARAMS.with_vector(torch.zeros(2))
    metrics = evaluator(deadline_s).evaluate(GlobalModel(params=params, round_num=0)).metrics
    assert metrics["clients/loss_mean"] == expected


def test_when_nobody_answers_there_are_no_metrics() -> None:
    """Neither a zero nor an error."""
    found = evaluator(deadline_s=-1.0).evaluate(GlobalModel(params=PARAMS, round_num=0))
    assert found.metrics == {}
    assert found.clients is None


def counting(num_examples: int, loss: float) -> Handler:
    """Create a client that claims ``num_examples`` examples."""
    reply = EvaluateReply(round_num=1, num_examples=num_examples, metrics={"loss": loss})
    return lambda _, state: (encode(reply), state)


@pytest.mark.parametrize("claimed", [0, 10**9 + 1, 2**63 - 1])
def test_means_by_examples_weigh_clients_and_none_that_claims_too_much(claimed: int) -> None:
    """Its reply is refused. Without means by examples its claim has no effect, and it counts."""
    handlers = {CLIENTS[0]: counting(30, 1.0), CLIENTS[1]: counting(10, 2.0)}
    handlers[CLIENTS[2]] = counting(claimed, 9.0)
    channel = MemoryChannel(handlers, lambda c, _: np.zeros(len(c)), VirtualClock())
    evenly = ChannelEvaluator(
        channel=channel,
        cohort=lambda _: CLIENTS[:3],
        directions={},
        deadline_s=1.0,
        strategy=STRATEGY,
    )
    metrics = replace(evenly, weighs=True).evaluate(GlobalModel(params=PARAMS, round_num=1)).metrics
    assert metrics["clients/loss_by_examples"] == 1.25
    assert metrics["clients/loss_mean"] == 1.5
    assert f"num_examples {claimed}" in channel.refused[CLIENTS[2]]
    others = evenly.evaluate(GlobalModel(params=PARAMS, round_num=1)).metrics
    assert others["clients/loss_mean"] == 4.0
    assert "clients/loss_by_examples" not in others


class Constant:
    """An evaluator with one metric."""

    def __init__(self, name: str, value: float) -> None:
        self.metric = {name: value}

    def evaluate(self, model: GlobalModel) -> EvaluationOutcome:
        return EvaluationOutcome(
            metrics={name: value + model.round_num for name, value in self.metric.items()}
        )


def test_several_evaluators_are_one() -> None:
    """Their metrics are merged."""
    both = Evaluators(
        parts=[Constant("loss", 0.5), Constant("accuracy", 0.25)], reveals_clients=True
    )
    found = both.evaluate(GlobalModel(params=PARAMS, round_num=1))
    assert found.metrics == {"loss": 1.5, "accuracy": 1.25}
