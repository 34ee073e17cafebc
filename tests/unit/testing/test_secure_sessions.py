"""Secure aggregation with a fake coordinator: one client under test, and stand-ins."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedlearn import assembly
from fedlearn.algorithms.aggregations import WeightedMean
from fedlearn.algorithms.bounds import UpdateBounds
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.recipes import FedAvg, FedMedian
from fedlearn.algorithms.settings import settings_of
from fedlearn.algorithms.strategy import Bounded, Strategy
from fedlearn.config import load
from fedlearn.core.messages import EvaluateReply, Failure, TrainReply
from fedlearn.errors import ConfigError, EnrolmentRefused
from fedlearn.testing import FakeCoordinator
from fedlearn.testing.fixtures import fake_coordinator as fake_coordinator  # noqa: PLC0414
from fedlearn.testing.stand_ins import Idle, run_stand_in
from fedlearn.training.trainer import LocalResult, TrainContext

MODEL = nn.Linear(3, 2)
SETTINGS = settings_of(LocalSgd(epochs=1, batch_size=5, learning_rate=0.1))


class Shifting(Idle):
    """A trainer with two examples that learns to add 0.5."""

    num_examples = 2

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        shifted = {name: value + 0.5 for name, value in tensors.items()}
        return LocalResult(tensors=shifted, num_examples=2, metrics={"loss": 1.0}, state={})


class Broken(Idle):
    """A trainer that always fails."""

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        raise KeyError("no such patient")


@contextmanager
def joined(coordinator: FakeCoordinator, folder: Path, trainer: Idle) -> Iterator[None]:
    invitation = coordinator.invite("laptop")
    with run_stand_in(invitation, home=folder / "laptop", trainer=trainer):
        yield


@pytest.mark.slow
def test_the_sum_has_the_update_of_the_client_under_test(
    tmp_path: Path, fake_coordinator: FakeCoordinator
) -> None:
    """The mean over its two examples and those of five stand-ins; no single update is visible."""
    with joined(fake_coordinator, tmp_path, Shifting()), fake_coordinator.add_stand_ins(5) as names:
        fake_coordinator.wait_for(6)
        first = fake_coordinator.train_securely(MODEL, SETTINGS)
        second = fake_coordinator.train_securely(
            MODEL, FedAvg(LocalSgd(epochs=1, batch_size=5, learning_rate=0.1))
        )
    for found in (first, second):
        assert sorted(found.reported) == ["laptop", *names]
        assert found.lost == {}
        expected = torch.full((8,), 0.5 * 2 / 7)
        assert torch.allclose(found.means["delta"], expected, atol=1e-3)


@pytest.mark.slow
def test_a_client_that_fails_in_a_session_is_named_and_the_rest_is_summed(
    tmp_path: Path, fake_coordinator: FakeCoordinator
) -> None:
    """The failure holds the stage and the client's own reason."""
    with joined(fake_coordinator, tmp_path, Broken()), fake_coordinator.add_stand_ins(5) as names:
        fake_coordinator.wait_for(6)
        found = fake_coordinator.train_securely(MODEL, SETTINGS, deadline_s=20.0)
    assert sorted(found.reported) == names
    assert "KeyError" in found.lost["laptop"]
    assert torch.allclose(found.means["delta"], torch.zeros(8), atol=1e-3)


def test_too_few_for_a_session_is_an_error(
    tmp_path: Path, fake_coordinator: FakeCoordinator
) -> None:
    """No client is asked."""
    with joined(fake_coordinator, tmp_path, Shifting()):
        fake_coordinator.wait_for(1)
        with pytest.raises(ConfigError):
            fake_coordinator.train_securely(MODEL, SETTINGS)


@dataclass(frozen=True)
class RootMean(WeightedMean):
    """An aggregation that weighs clients by the square root of their number of examples."""

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        return num_examples_B.sqrt()


LOCAL = LocalSgd(epochs=1, batch_size=5, learning_rate=0.1)


@pytest.mark.parametrize(
    "strategy",
    [
        FedMedian(LOCAL),
        replace(FedAvg(LOCAL), aggregation=RootMean(by_examples=True)),
        PerClient(FedAvg(LOCAL), lambda client: replace(LOCAL, epochs=client + 1)),
        Bounded(FedMedian(LOCAL), UpdateBounds(max_norm=1.0, max_examples=10)),
    ],
    ids=["median", "own weights", "each another", "a median inside"],
)
def test_what_a_coordinator_refuses_is_refused_before_anybody_is_asked(
    fake_coordinator: FakeCoordinator, strategy: Strategy
) -> None:
    """By the same rule, with the same message. Control: the tests above."""
    with pytest.raises(ConfigError) as refused:
        fake_coordinator.train_securely(MODEL, strategy)
    config = load(None, overrides=["secure_aggregation.mode=complete", "engine.transport=memory"])
    policy = assembly.build_simulation(config, data_dir=Path()).policy
    with pytest.raises(ConfigError) as real:
        assembly.build_secure_plan(config, policy, strategy)
    assert str(refused.value) in str(real.value)


def test_stand_ins_answer_whatever_a_client_may_be_asked(
    fake_coordinator: FakeCoordinator,
) -> None:
    """Without secure aggregation, too; then they leave, and later ones have other names."""
    with fake_coordinator.add_stand_ins(1) as (name,):
        fake_coordinator.wait_for(1)
        reply = fake_coordinator.train(MODEL, SETTINGS)[name]
        assert isinstance(reply, TrainReply)
        assert not reply.lanes["delta"].any()
        assert isinstance(fake_coordinator.evaluate(MODEL)[name], EvaluateReply)
    with fake_coordinator.add_stand_ins(1, trainer=Broken()) as (other,):
        fake_coordinator.wait_for(1)
        assert other != name
        assert isinstance(fake_coordinator.train(MODEL, SETTINGS)[other], Failure)


def test_a_stand_in_that_cannot_join_says_why(
    tmp_path: Path, fake_coordinator: FakeCoordinator
) -> None:
    """The caller does not wait for it."""
    invitation = fake_coordinator.invite("laptop")
    with run_stand_in(invitation, home=tmp_path / "one", trainer=Idle()):
        pass
    with (
        pytest.raises(EnrolmentRefused),
        run_stand_in(invitation, home=tmp_path / "two", trainer=Idle()),
    ):
        pass
