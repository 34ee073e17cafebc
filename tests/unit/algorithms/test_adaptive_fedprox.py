"""The pull of adaptive FedProx, and which runs may compute with clients' losses."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fedlearn as fl
from fedlearn.algorithms.adaptive_fedprox import AdaptiveAveraging, AdaptiveFedProx
from fedlearn.algorithms.lanes import Aggregate, TrainMetrics
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.proximal import Proximal
from fedlearn.algorithms.recipes import FedAvg, FedProx
from fedlearn.algorithms.strategy import StrategyWrapper
from fedlearn.algorithms.transforms import NoisedUpdates
from fedlearn.errors import ConfigError
from tests.parity import shelf

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def pulls(strategy: AdaptiveAveraging, losses: Sequence[float]) -> list[float]:
    """The pull of each round after one with these losses."""
    params = shelf.initial()
    state, found = strategy.init(params), []
    for loss in losses:
        lanes = {"delta": torch.zeros_like(params.vector)}
        train = TrainMetrics(loss=loss, num_examples=3)
        state = strategy.step(params, Aggregate(lanes, num_clients=1, train=train), state).state
        local = strategy.at(state).local
        assert isinstance(local, Proximal)
        found.append(round(local.proximal, 9))
    return found


def test_without_steps_of_the_pull_it_is_fedprox_to_the_last_bit() -> None:
    """In sessions, over three rounds."""
    ours, theirs = (
        shelf.run(strategy, shelf.over(shelf.sessions(strategy)))
        for strategy in (
            AdaptiveFedProx(SGD, proximal=0.5, proximal_step=0.0),
            FedProx(SGD, proximal=0.5),
        )
    )
    assert shelf.largest_difference(ours, theirs) == 0.0


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0, 4.0, 5.0], [0.0, 0.1, 0.2]),  # it rises at once
        ([9.0, 10.0, 8.0, 7.0, 6.0, 5.0], [0.0, 0.1, 0.1, 0.0, 0.0, 0.0]),  # and falls after two
        ([9.0, 10.0, 8.0, 8.0, 7.0, 6.0], [0.0, 0.1, 0.1, 0.1, 0.1, 0.0]),  # two in a row
        ([9.0, 8.0, 7.0, 6.0], [0.0, 0.0, 0.0, 0.0]),  # never below 0
        ([9.0, math.nan, 10.0], [0.0, 0.0, 0.1]),  # a round without a loss is skipped
    ],
)
def test_the_pull_follows_the_loss(losses: list[float], expected: list[float]) -> None:
    """With a patience of two rounds."""
    assert pulls(AdaptiveFedProx(SGD, proximal=0.0, patience=2), losses) == expected


@pytest.mark.usefixtures("surroundings")
def test_privacy_refuses_what_depends_on_losses() -> None:
    """Before the first round, also inside a wrapper. Control: FedProx is accepted."""
    strategy = AdaptiveFedProx(SGD, proximal=1.0, weight_by_examples=False)
    reason = r"FedProx's pull from the clients' losses, which have no noise"
    for each in (strategy, StrategyWrapper(strategy)):
        with pytest.raises(ConfigError, match=rf'privacy.mode is "central", but .* {reason}'):
            shelf.simulate(each, privacy=shelf.PRIVATE)
    shelf.simulate(FedProx(SGD, proximal=1.0, weight_by_examples=False), privacy=shelf.PRIVATE)


class Noised(StrategyWrapper):
    """A strategy whose clients add noise to what they send."""

    @property
    def transforms(self) -> tuple[NoisedUpdates, ...]:
        return (NoisedUpdates(clip_norm=1.0, noise_multiplier=1.0),)


@pytest.mark.usefixtures("surroundings")
def test_clients_that_add_noise_send_no_losses() -> None:
    """So the algorithm is refused."""
    with pytest.raises(ConfigError, match="clients that add noise send no losses"):
        shelf.simulate(Noised(AdaptiveFedProx(SGD, proximal=1.0)))


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_a_secure_sum_reveals_the_mean_loss() -> None:
    """It is recorded anyway, so the pull may follow it. Control: the pull does change."""
    strategy = AdaptiveFedProx(
        SGD, proximal=1.0, proximal_step=0.9, patience=1, weight_by_examples=False
    )
    expected = shelf.simulate(strategy)
    secure = shelf.simulate(strategy, secure_aggregation=shelf.SECURE)
    torch.testing.assert_close(secure, expected, rtol=0.0, atol=shelf.TOLERANCE)


def test_a_strategy_that_does_not_ask_gets_no_losses() -> None:
    """What no algorithm needs cannot leak through one."""

    class Asserts(StrategyWrapper):
        def step(self, params: Any, aggregate: Aggregate, state: Any) -> fl.StepResult:
            assert aggregate.train is None
            return super().step(params, aggregate, state)

    strategy = Asserts(FedAvg(SGD))
    shelf.run(strategy, shelf.over(shelf.sessions(strategy)))
