"""A fedlearn ClientApp with Flower's own strategies: its replies and its refusals."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, fixedclipping_mod, message_size_mod
from torch import Tensor, nn

from fedlearn.algorithms.local import LocalSgd, LocalUpdate
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.client import TorchTrainer
from fedlearn.client.flower import Node, client_app
from fedlearn.client.policy import Policy, PrivacyPolicy, SecureAggregationPolicy
from fedlearn.core.clock import VirtualClock
from fedlearn.training.trainer import (
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)
from fedlearn.transport.flower import Mod
from tests.grid import LocalGrid

LOCAL = LocalSgd(epochs=1, batch_size=None, learning_rate=0.1)
START = ArrayRecord({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})


def torch_trainer(_: Node) -> LocalTrainer:
    features = torch.arange(12.0).view(4, 3)
    labels = torch.tensor([0, 1, 1, 1])
    return TorchTrainer.of(lambda: nn.Linear(3, 2), features, labels, device="cpu")


class Own:
    """A trainer that adds the setting ``step`` to every number."""

    honors: Collection[str] = ("step",)

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        step = context.settings.get("step", 0.0)
        assert isinstance(step, float)
        if step < 0.0:
            raise ValueError("patient 17")
        moved = {name: value + step for name, value in tensors.items()}
        return LocalResult(tensors=moved, num_examples=3, metrics={}, state={})

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return LocalEvaluation(num_examples=3, metrics={"sum": float(tensors["bias"].sum())})


def reply_of(
    *,
    kind: str = "train",
    trainer: Callable[[Node], LocalTrainer] = torch_trainer,
    policy: Policy | None = None,
    local: LocalUpdate | None = LOCAL,
    mods: Sequence[Mod] = (),
    **config: float | str,
) -> Message:
    """Return a node's reply to a strategy's message."""
    app = client_app(trainer, policy_of=lambda _: policy or Policy(), local=local, mods=mods)
    grid = LocalGrid(VirtualClock(), app, nodes={12: 0})
    told: dict[str, float | str] = {"server-round": 1} | {
        k.replace("_", "-"): v for k, v in config.items()
    }
    content = RecordDict({"arrays": START, "config": ConfigRecord({**told})})
    (message_id,) = grid.push_messages([Message(content, 12, kind)])
    (reply,) = grid.pull_messages([message_id])
    return reply


def test_a_trainer_of_ones_own_is_told_the_config() -> None:
    """The entries of Flower's config become the trainer's settings."""
    reply = reply_of(trainer=lambda _: Own(), local=OwnTraining(), step=0.5)
    local = reply.content.array_records["arrays"].to_torch_state_dict()
    assert torch.equal(local["weight"], torch.full((2, 3), 0.5))
    assert reply.content.metric_records["metrics"]["num-examples"] == 3
    measured = reply_of(kind="evaluate", trainer=lambda _: Own(), local=None)
    assert dict(measured.content.metric_records["metrics"]) == {"sum": 0.0, "num-examples": 3}


def weight_in(reply: Message) -> Tensor:
    return reply.content.array_records["arrays"].to_torch_state_dict()["weight"]


def test_flowers_own_mods_are_around_the_client() -> None:
    """Replies use Flower's record names, so its mods can read and change them."""
    plain = reply_of()
    measured = reply_of(mods=[message_size_mod, arrays_size_mod])
    assert torch.equal(weight_in(measured), weight_in(plain))
    assert plain.content.metric_records == measured.content.metric_records
    noised = reply_of(mods=[LocalDpMod(10.0, 1.0, 5.0, 1e-5)])
    assert noised.content.metric_records == plain.content.metric_records
    assert not torch.equal(weight_in(noised), weight_in(plain))


REQUIRED = Policy(secure_aggregation=SecureAggregationPolicy(required=True))


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (lambda: reply_of(local=None), "does not define how to train.*client_app"),
        (lambda: reply_of(policy=REQUIRED), "secure_aggregation.required"),
        (lambda: reply_of(kind="evaluate", policy=REQUIRED), "secure_aggregation.required"),
        (lambda: reply_of(policy=Policy(max_epochs=2), local_epochs=3), "max_epochs"),
        (lambda: reply_of(kind="evaluate", policy=Policy(evaluate=False)), "evaluate"),
        (lambda: reply_of(warmth=3), "does not honor the setting 'warmth', which is 3"),
        (lambda: reply_of(clipping_norm=1.0, mods=[fixedclipping_mod]), "'clipping_norm'"),
        (lambda: reply_of(lr=-1.0), "learning_rate"),
        (lambda: reply_of(lr="much"), "'learning_rate' is 'much'"),
        (lambda: reply_of(proximal_mu=-0.5), "proximal"),
        (
            lambda: reply_of(trainer=lambda _: Own(), local=OwnTraining(), step=-1.0),
            "^ValueError$",  # without the message, which may quote data
        ),
    ],
)
def test_a_refusal_is_an_error_with_its_reason(reply: Callable[[], Message], named: str) -> None:
    """Strategies log the error and continue with other clients. Control: valid settings train."""
    answered = reply()
    assert answered.has_error()
    assert re.search(named, answered.error.reason or ""), answered.error.reason
    assert reply_of(lr=0.5, local_epochs=2, policy=Policy(max_epochs=2)).has_content()


@pytest.mark.parametrize(
    "policy",
    [
        Policy(max_tasks_per_day=3),
        Policy(max_evaluations_per_day=3),
        Policy(privacy=PrivacyPolicy(mode="local", max_epsilon_per_day=1.0)),
    ],
)
def test_a_limit_a_day_that_nobody_counts_on_flower_is_refused(policy: Policy) -> None:
    """Control: policies without such limits, in the tests above."""
    reply = reply_of(policy=policy)
    assert reply.has_error()
    assert "does not count per day" in (reply.error.reason or "")
