"""LocalAdam takes the steps of torch's Adam and AdamW, for one client and for many."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlearn.algorithms.adam import LocalAdam
from fedlearn.algorithms.local import Memory, Moment, flatten_rows, make_memory, report_of
from fedlearn.core.params import Layout
from tests.moments import after

ADAM = LocalAdam(
    epochs=1,
    batch_size=4,
    learning_rate=0.01,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-8,
    decoupled=False,
    keep_moments=False,
)
NUM_CLIENTS = 3
#: Shapes of one client's parameters: a matrix, a vector, a scalar.
SHAPES = ((3, 5), (3,), ())


class Parameters(nn.Module):
    """The parameters of one client."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)


LAYOUT = Layout.of(Parameters().double())


def stack(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return random parameters or gradients of all clients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_CLIENTS, *s, generator=generator, dtype=dtype) for s in SHAPES]


def at(step: int) -> Moment:
    return Moment(round_num=0, step=step)


def report_state(local: LocalAdam, x: list[Tensor], memory: Memory) -> Mapping[str, Tensor]:
    """Return the client state after a report: one row per client."""
    num_steps = torch.ones(NUM_CLIENTS)
    return report_of(
        local, x, memory, broadcast={}, moment=after(num_steps), layout=LAYOUT
    ).client_state


def torch_optimizer(local: LocalAdam, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if local.decoupled else torch.optim.Adam
    return kind(
        parameters,
        lr=local.learning_rate,
        betas=(local.beta_1, local.beta_2),
        eps=local.epsilon,
        weight_decay=local.weight_decay,
    )


@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)])
def test_every_row_takes_the_steps_of_torch(
    *, decoupled: bool, weight_decay: float, betas: tuple[float, float]
) -> None:
    """After every step, so the bias corrections agree as well."""
    beta_1, beta_2 = betas
    local = replace(
        ADAM, decoupled=decoupled, weight_decay=weight_decay, beta_1=beta_1, beta_2=beta_2
    )
    ours = stack(0)
    theirs = [[nn.Parameter(p[k].clone()) for p in ours] for k in range(NUM_CLIENTS)]
    optimizers = [torch_optimizer(local, each) for each in theirs]
    memory = make_memory(local, ours, client_state={})
    for step in range(8):
        grads = stack(100 + step)
        local.step(ours, grads, memory, broadcast={}, moment=at(step))
        for k, optimizer in enumerate(optimizers):
            for parameter, grad in zip(theirs[k], grads, strict=True):
                parameter.grad = grad[k].clone()
            optimizer.step()
            for mine, parameter in zip(ours, theirs[k], strict=True):
                torch.testing.assert_close(mine[k], parameter.data, rtol=1e-12, atol=1e-12)


def test_the_first_steps_in_single_precision_are_as_exact_as_those_of_torch() -> None:
    """Bias corrections are small differences of numbers near 1, so they are computed in float64."""
    ours = [torch.zeros(1, 50)]
    exact, single = nn.Parameter(torch.zeros(50).double()), nn.Parameter(torch.zeros(50))
    optimizers = [torch_optimizer(ADAM, [each]) for each in (exact, single)]
    memory = make_memory(ADAM, ours, client_state={})
    for step in range(3):
        grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        exact.grad, single.grad = grad.double(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        ADAM.step(ours, [grad[None]], memory, broadcast={}, moment=at(step))
        errors = [
            float((each.double() - exact).detach().abs().max()) for each in (ours[0][0], single)
        ]
        assert errors[0] <= 2.0 * errors[1] + 1e-9


def test_gradients_are_only_read() -> None:
    """Two gradients may be the same tensor, so a step must not write to them."""
    for decoupled in (False, True):
        local, x, grads = replace(ADAM, weight_decay=0.1, decoupled=decoupled), stack(0), stack(1)
        before = [g.clone() for g in grads]
        local.step(x, grads, make_memory(local, x, client_state={}), broadcast={}, moment=at(0))
        assert all(torch.equal(*pair) for pair in zip(grads, before, strict=True))


def test_a_schedule_scales_the_step_and_the_decoupled_decay() -> None:
    """A torch scheduler changes the learning rate, which scales both."""
    local = replace(ADAM, weight_decay=0.5, decoupled=True)
    slower = replace(local, learning_rate=local.learning_rate / 4)
    scheduled, expected = stack(0), stack(0)
    for rule, x, moment in (
        (local, scheduled, at(0)._replace(rate=0.25)),
        (slower, expected, at(0)),
    ):
        rule.step(x, stack(1), make_memory(rule, x, client_state={}), broadcast={}, moment=moment)
    assert all(torch.equal(*pair) for pair in zip(scheduled, expected, strict=True))


def test_kept_moments_go_on_where_the_client_was() -> None:
    """Two rounds of two steps equal four steps of torch: moments and counts are kept per client."""
    local, x = replace(ADAM, keep_moments=True), stack(0)
    theirs = [nn.Parameter(p.clone()) for p in stack(0)]  # rows are independent
    optimizer = torch_optimizer(local, theirs)
    kept: Mapping[str, Tensor] = {}
    for round_num in range(2):
        memory = make_memory(local, x, client_state=kept)
        for step in range(2):
            grads = stack(10 * round_num + step)
            local.step(x, grads, memory, broadcast={}, moment=Moment(round_num, step))
            for parameter, grad in zip(theirs, grads, strict=True):
                parameter.grad = grad
            optimizer.step()
        kept = report_state(local, x, memory)
    assert {name: tuple(each.shape) for name, each in kept.items()} == {
        "first_moment": (NUM_CLIENTS, 19),
        "second_moment": (NUM_CLIENTS, 19),
        "num_steps": (NUM_CLIENTS, 3),
    }
    assert (kept["num_steps"] == 4.0).all()
    for mine, parameter in zip(x, theirs, strict=True):
        torch.testing.assert_close(mine, parameter.data, rtol=1e-12, atol=1e-12)


def test_clients_with_other_histories_have_their_own_corrections() -> None:
    """One row starts from zero, next to one that has taken ten steps."""
    local, x, grads = replace(ADAM, keep_moments=True), stack(0), stack(1)
    kept = {
        "first_moment": torch.zeros(NUM_CLIENTS, 19, dtype=torch.float64),
        "second_moment": torch.zeros(NUM_CLIENTS, 19, dtype=torch.float64),
        "num_steps": torch.tensor([[0.0], [10.0], [0.0]], dtype=torch.float64).expand(3, 3),
    }
    memory = make_memory(local, x, client_state=kept)
    local.step(x, grads, memory, broadcast={}, moment=at(0))
    moved = [(p - q).abs() for p, q in zip(x, stack(0), strict=True)]
    first, later = moved[0][0], moved[0][1]
    torch.testing.assert_close(first, torch.full_like(first, 0.01), rtol=1e-6, atol=0.0)
    ratio = (0.1 / (1 - 0.9**11)) / ((0.001 / (1 - 0.999**11)) ** 0.5)
    torch.testing.assert_close(later, torch.full_like(later, 0.01 * ratio), rtol=1e-6, atol=0.0)


def test_a_count_stands_for_all_tensors_where_they_are_one() -> None:
    """The fused executor passes one flat tensor; the kept state must be as for separate tensors."""
    local = replace(ADAM, keep_moments=True)
    apart, together = stack(0), [flatten_rows(stack(0))]
    kept: Mapping[str, Tensor] = {}
    for round_num in range(2):
        found = []
        for x, grads in ((apart, stack(round_num)), (together, [flatten_rows(stack(round_num))])):
            memory = make_memory(local, x, client_state=kept)
            local.step(x, grads, memory, broadcast={}, moment=Moment(round_num, 0))
            found.append(report_state(local, x, memory))
        kept = found[0]
        assert all(torch.equal(found[1][name], kept[name]) for name in kept)
        assert torch.equal(flatten_rows(apart), together[0])
    assert (kept["num_steps"] == 2.0).all()


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    """By default, every round starts from zero."""
    assert report_state(ADAM, stack(0), make_memory(ADAM, stack(0), client_state={})) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("inf")},
        {"beta_1": 1.0},
        {"beta_2": -0.1},
        {"beta_2": float("nan")},
        {"epsilon": 0.0},
        {"epsilon": float("nan")},
        {"weight_decay": -1.0},
        {"epochs": 0},
        {"batch_size": 0},
    ],
)
def test_values_without_meaning_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(ADAM, **changes)
