"""FedExP's server step: when it is that of FedAvg, and when it is longer."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedlearn.algorithms.fedexp import ExtrapolatedAveraging, FedExP
from fedlearn.algorithms.lanes import Aggregate
from fedlearn.algorithms.local import LocalSgd, Moment, lay_out_broadcast
from fedlearn.algorithms.recipes import FedAvg
from fedlearn.core.params import Params

SGD = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def fedexp() -> ExtrapolatedAveraging:
    return FedExP(SGD, epsilon=1e-9)


def params() -> Params:
    """Ten trainable numbers and four statistics."""
    torch.manual_seed(0)
    return Params.of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double())


def test_clients_that_agree_make_it_fedavg_to_the_last_bit() -> None:
    """The squared norm of the mean is the mean of squared norms, so the rate is 1, not 1/2."""
    delta = torch.linspace(-1.0, 1.0, params().vector.numel()).double()
    square = delta[: params().layout.num_trainable].square().sum()[None]
    lanes = {"delta": delta, "square_norm": square}
    stepped = fedexp().step(params(), Aggregate(lanes, num_clients=2), {})
    expected = FedAvg(SGD).step(params(), Aggregate({"delta": delta}, num_clients=2), {})
    assert torch.equal(stepped.params.vector, expected.params.vector)
    assert stepped.metrics == {"server_learning_rate": 1.0}


def test_clients_that_disagree_lengthen_the_step_of_parameters_alone() -> None:
    """Running statistics are averaged as always."""
    model = params()
    delta = torch.ones_like(model.vector)
    lanes = {"delta": delta, "square_norm": torch.tensor([60.0]).double()}
    stepped = fedexp().step(model, Aggregate(lanes, num_clients=2), {})
    moved, last = stepped.params.vector - model.vector, model.layout.num_trainable
    # 60 / (2 * |ones(10)|^2) = 3
    torch.testing.assert_close(moved[:last], torch.full((last,), 3.0).double())
    torch.testing.assert_close(moved[last:], torch.ones(len(moved) - last).double())


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_client_reports_the_square_of_what_it_sends(is_flat: bool) -> None:  # noqa: FBT001
    """One number for each client, whether the parameters are one tensor or several."""
    local, model = fedexp().local, params()
    last = model.layout.num_trainable
    broadcast = lay_out_broadcast({}, {}, layout=model.layout, params_P=model.vector)
    x = [torch.cat([each + 1.0, each + 2.0]) for each in broadcast["model"]]
    if is_flat:
        x = [torch.cat([each.flatten(1) for each in x], dim=1)]
        broadcast = {"model": [model.vector[None, :last]]}
    lanes = local.report(x, {}, broadcast=broadcast, moment=Moment(0, 1))
    (squares,) = lanes["square_norm"]
    torch.testing.assert_close(squares, torch.tensor([[last], [4.0 * last]]).double())


def test_numbers_out_of_range_are_refused() -> None:
    """By name."""
    with pytest.raises(ValueError, match="epsilon is 0"):
        FedExP(SGD, epsilon=0.0)
    with pytest.raises(ValueError, match="square_norm"):
        replace(fedexp().local, square_norm_bound=0.0)
