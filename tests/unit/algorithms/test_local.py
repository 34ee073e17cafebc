"""LocalSgd takes the steps of torch's SGD; its penalties equal their gradients by autograd."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import (
    LocalSgd,
    Moment,
    batch_positions,
    make_memory,
    shuffle_positions,
)
from fedlearn.algorithms.proximal import Proximal
from fedlearn.core.randomness import Seed

PLAIN = LocalSgd(epochs=1, batch_size=4, learning_rate=0.1)


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5), (3,))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def gradients(num_steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in start()]
        for _ in range(num_steps)
    ]


def stacked(*clients: list[Tensor]) -> list[Tensor]:
    """Stack clients' tensors along a leading client dimension."""
    return [torch.stack(list(each)) for each in zip(*clients, strict=True)]


def at(step: int) -> Moment:
    return Moment(round_num=0, step=step)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_the_steps_are_those_of_torch_sgd(momentum: float, weight_decay: float) -> None:
    """The same gradients give the same parameters: no dampening, and coupled weight decay."""
    local = replace(PLAIN, momentum=momentum, weight_decay=weight_decay)
    ours = stacked(start())
    memory = make_memory(local, ours, client_state={})
    theirs = [nn.Parameter(p) for p in start()]
    optimizer = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for step, grads in enumerate(gradients(6)):
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        local.step(ours, stacked(grads), memory, broadcast={}, moment=at(step))
        assert all(torch.equal(a[0], b) for a, b in zip(ours, theirs, strict=True))


def test_weight_decay_and_proximal_term_are_gradients_of_their_penalties() -> None:
    """A step follows the gradient of f(x) + lambda/2 |x|^2 + mu/2 |x - x0|^2."""
    features = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    anchor, decay, proximal = start(), 0.3, 0.7
    params = [p + 0.1 for p in start()]
    leaves = [p.clone().requires_grad_() for p in params]
    plain = F.linear(features, leaves[0], leaves[1]).square().mean()
    grads = list(torch.autograd.grad(plain, leaves, retain_graph=True))
    size = sum(p.square().sum() for p in leaves)
    distance = sum((p - a).square().sum() for p, a in zip(leaves, anchor, strict=True))
    penalized = torch.autograd.grad(plain + decay / 2 * size + proximal / 2 * distance, leaves)
    local = Proximal(inner=replace(PLAIN, weight_decay=decay), proximal=proximal)
    expected = [p - 0.1 * g for p, g in zip(params, penalized, strict=True)]
    found = stacked(params)
    local.step(found, stacked(grads), {}, broadcast={"model": stacked(anchor)}, moment=at(0))
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value[0], wanted, rtol=0.0, atol=1e-15)


def test_a_stack_of_clients_takes_the_steps_of_its_rows() -> None:
    """Clients are independent: one step on [K, ...] equals K steps of single clients."""
    local = Proximal(inner=replace(PLAIN, momentum=0.9, weight_decay=0.1), proximal=0.5)
    broadcast, num_clients = {"model": stacked(start())}, 3
    clients = [[p + k for p in start()] for k in range(num_clients)]
    grads = [[g + k for g in gradients(1)[0]] for k in range(num_clients)]
    together = stacked(*clients)
    memory = make_memory(local, together, client_state={})
    local.step(together, stacked(*grads), memory, broadcast=broadcast, moment=at(0))
    for k in range(num_clients):
        alone = stacked(clients[k])
        own = make_memory(local, alone, client_state={})
        local.step(alone, stacked(grads[k]), own, broadcast=broadcast, moment=at(0))
        assert all(torch.equal(a[0], b[k]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("batch_size", [None, 1, 3, 4, 7, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_is_visited_once_an_epoch(batch_size: int | None, *, shuffle: bool) -> None:
    """Batches partition a permutation; only the last one of an epoch may be smaller."""
    local = replace(PLAIN, epochs=3, batch_size=batch_size, shuffle=shuffle)
    batches = list(batch_positions(local, seed=Seed(0), round_num=2, client_id=5, num_examples=7))
    steps = int(local.steps_per_epoch(np.array([7]))[0])
    assert len(batches) == int(local.num_steps(np.array([7]))[0]) == 3 * steps
    for epoch in range(3):
        of_epoch = batches[epoch * steps : (epoch + 1) * steps]
        assert sorted(np.concatenate(of_epoch).tolist()) == list(range(7))
        assert all(len(batch) == (batch_size or 7) for batch in of_epoch[:-1])


def test_orders_differ_by_seed_round_client_and_epoch() -> None:
    """Changing any of the four changes the order; the same four give the same order."""
    base = {"round_num": 1, "client_id": 2, "epoch": 0}
    first = shuffle_positions(Seed(0), **base, num_examples=50)
    assert np.array_equal(first, shuffle_positions(Seed(0), **base, num_examples=50))
    assert not np.array_equal(first, shuffle_positions(Seed(1), **base, num_examples=50))
    for name in base:
        other = shuffle_positions(Seed(0), **(base | {name: 7}), num_examples=50)
        assert not np.array_equal(first, other), name


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"weight_decay": -1.0},
        {"keep_momentum": True},
    ],
)
def test_values_without_meaning_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(PLAIN, **changes)


def test_a_proximal_term_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="proximal"):
        Proximal(inner=PLAIN, proximal=float("inf"))
