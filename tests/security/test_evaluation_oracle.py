"""Evaluations in the clear as an oracle: the limits on who may ask for them, and how often.

The coordinator chooses models and asks a single client, which answers as a client on Flower does:
the policy judges the request, then the session answers it with the client's own trainer.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedlearn.client.judging import Judge
from fedlearn.client.policy import Policy, PrivacyPolicy, SecureAggregationPolicy
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, EvaluateReply, EvaluateRequest
from fedlearn.errors import PolicyViolation
from fedlearn.session.session import ClientSession
from fedlearn.training.torch_trainer import TorchTrainer

NUM_FEATURES, COUNTS = 4, [31, 17, 9]
LARGE, STEP = 64.0, 2e-2

#: Returns the client's loss and number of examples for a model with these weights and this bias.
Oracle = Callable[[Tensor, Tensor], EvaluateReply]


def examples() -> tuple[Tensor, Tensor]:
    labels = torch.tensor([label for label, count in enumerate(COUNTS) for _ in range(count)])
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(labels), NUM_FEATURES, generator=generator), labels


def network() -> nn.Module:
    return nn.Linear(NUM_FEATURES, len(COUNTS))


def oracle(policy: Policy, *, is_bound: bool = False) -> Oracle:
    """Return a client that counts its evaluations of the day."""
    session = ClientSession(ClientId(1), TorchTrainer.of(network, *examples(), device="cpu"))
    judge, num_evaluations = Judge(policy, is_bound=is_bound), 0

    def ask(weight: Tensor, bias: Tensor) -> EvaluateReply:
        nonlocal num_evaluations
        data = encode(EvaluateRequest(round_num=1, tensors={"weight": weight, "bias": bias}))
        judge.check_request(
            data, num_tasks_today=0, num_evaluations_today=num_evaluations, spent=0.0
        )
        num_evaluations += 1
        reply = decode(session.handle(data, b"")[0])
        assert isinstance(reply, EvaluateReply)
        return reply

    return ask


def histogram(ask: Oracle) -> list[int]:
    """Find the number of examples of each class, with one evaluation per class."""
    found = []
    for label in range(len(COUNTS)):
        bias = torch.zeros(len(COUNTS))
        bias[label] = LARGE  # an example of any other class has a loss of LARGE
        reply = ask(torch.zeros(len(COUNTS), NUM_FEATURES), bias)
        found.append(round(reply.num_examples * (1.0 - reply.metrics["loss"] / LARGE)))
    return found


def gradient(ask: Oracle, weight: Tensor) -> Tensor:
    """Estimate the loss's gradient in the weights, with two evaluations per weight."""
    found, bias = torch.zeros_like(weight), torch.zeros(len(COUNTS))
    for at in range(weight.numel()):
        step = torch.zeros(weight.numel())
        step[at] = STEP
        ahead, behind = (ask(weight + s * step.view_as(weight), bias) for s in (1, -1))
        found.view(-1)[at] = (ahead.metrics["loss"] - behind.metrics["loss"]) / (2 * STEP)
    return found


def test_who_answers_in_the_clear_tells_its_classes_and_its_gradient() -> None:
    """What the rules below prevent: it takes three evaluations, and two per weight."""
    assert histogram(oracle(Policy())) == COUNTS
    weight = 0.1 * torch.randn(
        len(COUNTS), NUM_FEATURES, generator=torch.Generator().manual_seed(2)
    )
    model = nn.Linear(NUM_FEATURES, len(COUNTS))
    with torch.no_grad():
        model.weight.copy_(weight)
        model.bias.zero_()
    features, labels = examples()
    nn.functional.cross_entropy(model(features), labels).backward()
    found = gradient(oracle(Policy()), weight)
    assert model.weight.grad is not None
    assert float((found - model.weight.grad).norm() / model.weight.grad.norm()) < 1e-3


@pytest.mark.parametrize(
    ("policy", "is_bound", "rule"),
    [
        (
            Policy(secure_aggregation=SecureAggregationPolicy(required=True)),
            False,
            "secure_aggregation.required",
        ),
        (Policy(), True, "secure_aggregation.stays_required"),
        (Policy(privacy=PrivacyPolicy(mode="distributed")), False, "privacy.mode"),
        (Policy(evaluate=False), False, "evaluate"),
    ],
)
def test_who_is_for_sums_alone_answers_not_once(
    policy: Policy,
    is_bound: bool,  # noqa: FBT001 - a case
    rule: str,
) -> None:
    ask = oracle(policy, is_bound=is_bound)
    with pytest.raises(PolicyViolation) as refused:
        histogram(ask)
    assert refused.value.rule == rule


def test_a_quota_ends_the_questions() -> None:
    """Two evaluations a day reveal two of three classes, and no gradient."""
    ask = oracle(Policy(max_evaluations_per_day=2))
    with pytest.raises(PolicyViolation, match="max_evaluations_per_day"):
        histogram(ask)
    assert histogram(oracle(Policy(max_evaluations_per_day=3))) == COUNTS, "the control"
