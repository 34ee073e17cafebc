"""Schedules of the server's learning rate: their factors, their state, and what they refuse."""

from typing import Any

import pytest
import torch
from torch import nn

from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.recipes import FedAdam, FedAvgM
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.server_schedules import ScheduledFedAvg, ScheduledServer
from fedlearn.core.params import Params

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)
SERVER = ServerSgd(learning_rate=1.0, momentum=0.9)


def params() -> Params:
    """Ten trainable numbers and four statistics."""
    torch.manual_seed(0)
    return Params.of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double())


def test_without_a_schedule_it_is_fedavgm_to_the_last_bit() -> None:
    """Over three rounds, with momentum."""
    ours = ScheduledFedAvg(SGD, server_learning_rate=0.5, server_momentum=0.9).server_optimizer
    theirs = FedAvgM(SGD, server_learning_rate=0.5, server_momentum=0.9).server_optimizer
    delta = torch.linspace(-1.0, 1.0, 14).double()
    x, y, state, other = params(), params(), ours.init(params()), theirs.init(params())
    for _ in range(3):
        x, state = ours.step(x, delta, state)
        y, other = theirs.step(y, delta, other)
    assert torch.equal(x.vector, y.vector)
    assert int(state["round_num"]) == 3


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ({"server_rate_decay": 0.5}, [1.0, 0.5, 0.25, 0.125]),
        ({"server_rate_decay": 0.1, "server_decay_rounds": 3}, [1.0, 1.0, 1.0, 0.1]),
        ({"server_cosine_rounds": 2}, [1.0, 0.5, 0.0, 0.0]),
        ({"server_warmup_rounds": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"server_warmup_rounds": 4, "server_cosine_rounds": 2}, [0.25, 0.25, 0.0, 0.0]),
    ],
)
def test_a_step_is_as_long_as_the_schedule_says(
    schedule: dict[str, Any],  # Any: numbers of two kinds
    factors: list[float],
) -> None:
    """Parameters move by the factor; running statistics by the whole mean, and so does momentum."""
    server = ScheduledServer(inner=SERVER, **schedule)
    delta, x, state = torch.ones(14).double(), params(), server.init(params())
    velocity = 0.0
    for factor in factors:
        before = x.vector
        x, state = server.step(x, delta, state)
        velocity = 0.9 * velocity + 1.0
        moved = x.vector - before
        torch.testing.assert_close(moved[:10], torch.full((10,), factor * velocity).double())
        torch.testing.assert_close(moved[10:], torch.ones(4).double())


def test_any_server_optimizer_can_be_scheduled() -> None:
    """Half of FedAdam's rate is FedAdam at half the rate."""
    adam, half = (
        FedAdam(SGD, server_learning_rate=rate, beta_1=0.9, beta_2=0.99, tau=0.1).server_optimizer
        for rate in (0.2, 0.1)
    )
    scheduled = ScheduledServer(inner=adam, server_warmup_rounds=2)
    delta = torch.linspace(-1.0, 1.0, 14).double()
    found, _ = scheduled.step(params(), delta, scheduled.init(params()))
    expected, _ = half.step(params(), delta, half.init(params()))
    torch.testing.assert_close(found.vector, expected.vector)


def test_two_schedules_and_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"server_rate_decay is 0\.5, .*give one of them"):
        ScheduledServer(inner=SERVER, server_rate_decay=0.5, server_cosine_rounds=3)
    with pytest.raises(ValueError, match="server_decay_rounds is 0"):
        ScheduledServer(inner=SERVER, server_decay_rounds=0)
