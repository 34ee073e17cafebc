"""Server optimizers, compared with 50-digit arithmetic, and on models with buffers."""

from decimal import Decimal, localcontext

import pytest
import torch
from torch import nn

from fedlearn.algorithms.server_optimizers import (
    SecondMoment,
    ServerAdaptive,
    ServerOptimizer,
    ServerSgd,
)
from fedlearn.core.params import Params

DELTAS = ([0.25, -0.5, 1e-4, 0.0], [-0.125, -1.5, 2e-4, 3.0])
START = [1.0, -2.0, 0.5, 0.0]
ETA, BETA_1, BETA_2, TAU = 0.1, 0.9, 0.99, 1e-3


def vector_model(values: list[float]) -> Params:
    """A float64 model whose only parameter holds ``values``."""
    model = nn.Linear(len(values), 1, bias=False).double()
    params = Params.of(model)
    return params.with_vector(torch.tensor(values, dtype=torch.float64))


def adaptive(second_moment: SecondMoment) -> ServerAdaptive:
    return ServerAdaptive(
        second_moment=second_moment, learning_rate=ETA, beta_1=BETA_1, beta_2=BETA_2, tau=TAU
    )


def by_hand(second_moment: SecondMoment, start: float, deltas: list[float]) -> float:
    """Algorithm 2 of Reddi et al., lines 9 to 16, for one coordinate, in decimal arithmetic."""
    with localcontext() as context:
        context.prec = 50
        eta, beta_1, beta_2, tau = (Decimal(v) for v in (ETA, BETA_1, BETA_2, TAU))
        x, m, v = Decimal(start), Decimal(0), tau**2
        for value in deltas:
            delta = Decimal(value)
            m = beta_1 * m + (1 - beta_1) * delta
            square = delta**2
            if second_moment is SecondMoment.ADAGRAD:
                v = v + square
            elif second_moment is SecondMoment.ADAM:
                v = beta_2 * v + (1 - beta_2) * square
            else:
                sign = (v > square) - (v < square)
                v = v - (1 - beta_2) * square * sign
            x = x + eta * m / (v.sqrt() + tau)
        return float(x)


@pytest.mark.parametrize("second_moment", list(SecondMoment))
def test_two_adaptive_steps_are_those_of_the_paper(second_moment: SecondMoment) -> None:
    """Reddi et al. 2021, algorithm 2: momentum, second moment, step; no bias correction."""
    optimizer, params = adaptive(second_moment), vector_model(START)
    state = optimizer.init(params)
    for delta in DELTAS:
        params, state = optimizer.step(params, torch.tensor(delta, dtype=torch.float64), state)
    expected = [
        by_hand(second_moment, start, deltas) for start, *deltas in zip(START, *DELTAS, strict=True)
    ]
    torch.testing.assert_close(
        params.vector, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-15
    )


def test_server_momentum_adds_up_past_deltas() -> None:
    """Hsu et al. 2019: v = beta v + delta, x = x + eta v."""
    optimizer, params = ServerSgd(learning_rate=0.5, momentum=0.5), vector_model([1.0])
    state = optimizer.init(params)
    for delta in (2.0, 4.0):
        params, state = optimizer.step(params, torch.tensor([delta], dtype=torch.float64), state)
    assert state["velocity"].tolist() == [5.0]
    assert params.vector.tolist() == [1.0 + 0.5 * 2.0 + 0.5 * 5.0]


@pytest.mark.parametrize(
    "optimizer", [ServerSgd(learning_rate=0.3, momentum=0.9), adaptive(SecondMoment.ADAM)]
)
def test_a_step_writes_to_none_of_its_arguments(optimizer: ServerOptimizer) -> None:
    """A retried round uses the old state again."""
    params, delta = vector_model(START), torch.tensor(DELTAS[0], dtype=torch.float64)
    state = optimizer.init(params)
    before = {name: value.clone() for name, value in state.items()}
    optimizer.step(params, delta, state)
    assert params.vector.tolist() == START
    assert delta.tolist() == DELTAS[0]
    assert all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("second_moment", list(SecondMoment))
def test_statistics_move_by_their_mean_and_never_turn_negative(
    second_moment: SecondMoment,
) -> None:
    """BatchNorm's running variance is averaged; an adaptive step could make it negative."""
    params = Params.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    split = params.layout.num_trainable
    optimizer = ServerAdaptive(
        second_moment=second_moment, learning_rate=10.0, beta_1=0.0, beta_2=0.9, tau=1e-6
    )
    variance = params.layout.views(params.vector)["1.running_var"]
    delta = torch.full_like(params.vector, -1e-3)
    params.layout.views(delta)["1.running_var"].copy_(-0.75 * variance)  # clients have 1/4 of it
    moved, state = optimizer.step(params, delta, optimizer.init(params))
    assert torch.equal(moved.vector[split:], (params.vector + delta)[split:])
    assert moved.to_tensors()["1.running_var"].tolist() == [0.25] * 3
    assert state["second_moment"].shape == (split,), "no moments for statistics"
    stepped = params.vector[:split] - moved.vector[:split]
    assert bool((stepped > 0.1).all()), "the parameters did take the optimizer's step"


def test_parameters_that_nobody_changed_stay_where_they_are() -> None:
    """A frozen parameter has a delta of zero, and the optimizer leaves it where it is."""
    params = vector_model(START)
    optimizer = adaptive(SecondMoment.YOGI)
    moved, _ = optimizer.step(params, torch.zeros_like(params.vector), optimizer.init(params))
    assert torch.equal(moved.vector, params.vector)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"beta_1": 1.0}, "beta_1"),
        ({"beta_2": -0.1}, "beta_2"),
        ({"tau": 0.0}, "tau"),
    ],
)
def test_an_adaptive_optimizer_refuses_values_without_meaning(
    changes: dict[str, float], name: str
) -> None:
    values = {"learning_rate": ETA, "beta_1": BETA_1, "beta_2": BETA_2, "tau": TAU} | changes
    with pytest.raises(ValueError, match=name):
        ServerAdaptive(second_moment=SecondMoment.ADAM, **values)


@pytest.mark.parametrize(("rate", "momentum"), [(0.0, 0.0), (-1.0, 0.0), (1.0, 1.0), (1.0, -0.1)])
def test_server_sgd_refuses_values_without_meaning(rate: float, momentum: float) -> None:
    """The rate must be positive, and the momentum in [0, 1)."""
    with pytest.raises(ValueError, match=r"give a finite number"):
        ServerSgd(learning_rate=rate, momentum=momentum)
