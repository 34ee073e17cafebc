"""MIME-lite: its identity with FedAvg, the server's momentum, and what it refuses."""

import pytest
import torch

from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.local import LocalSgd
from fedlearn.algorithms.mime_lite import MimeLite
from fedlearn.algorithms.recipes import FedAvg
from tests.parity import shelf

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def test_without_momentum_it_is_fedavg_to_the_last_bit() -> None:
    """In sessions, over three rounds."""
    ours, theirs = (
        shelf.run(strategy, shelf.over(shelf.sessions(strategy)))
        for strategy in (MimeLite(SGD, server_momentum=0.0), FedAvg(SGD))
    )
    assert shelf.largest_difference(ours, theirs) == 0.0


def test_the_momentum_is_a_mean_of_full_gradients() -> None:
    """And clients receive it with the next model."""
    strategy, params = MimeLite(SGD, server_momentum=0.75), shelf.initial()
    ones = torch.ones(params.layout.num_trainable)
    lanes, state = {"delta": ones, "full_gradient": 4 * ones}, strategy.init(params)
    for expected in (1.0, 1.75):
        stepped = strategy.step(params, Aggregate(lanes, num_clients=2), state)
        state = stepped.state
        torch.testing.assert_close(strategy.broadcast(state)["momentum"], expected * ones)
        torch.testing.assert_close(stepped.params.vector, params.vector + 1.0)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="server_momentum is 1"):
        MimeLite(SGD, server_momentum=1.0)
    with pytest.raises(ValueError, match="full_gradient_bound is 0"):
        MimeLite(SGD, server_momentum=0.5, full_gradient_bound=0.0)
