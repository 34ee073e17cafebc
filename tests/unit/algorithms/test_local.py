"""The local update is torch's SGD, and its penalties are what their gradients say."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlearn.algorithms.local import LocalSgd, batch_positions, shuffled_positions
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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_the_steps_are_those_of_torch_sgd(momentum: float, weight_decay: float) -> None:
    """Same gradients, same sequence of parameters: dampening 0, decay coupled."""
    local = replace(PLAIN, momentum=momentum, weight_decay=weight_decay)
    ours, velocity = start(), [torch.zeros_like(p) for p in start()]
    theirs = [nn.Parameter(p) for p in start()]
    optimizer = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for grads in gradients(6):
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        local.step(ours, grads, anchor=[], velocity=velocity)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_weight_decay_and_proximal_term_are_gradients_of_their_penalties() -> None:
    """A step descends f(x) + lambda/2 |x|^2 + mu/2 |x - x0|^2."""
    features = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    anchor, decay, proximal = start(), 0.3, 0.7
    params = [p + 0.1 for p in start()]
    leaves = [p.clone().requires_grad_() for p in params]
    plain = F.linear(features, leaves[0], leaves[1]).square().mean()
    grads = list(torch.autograd.grad(plain, leaves, retain_graph=True))
    size = sum(p.square().sum() for p in leaves)
    distance = sum((p - a).square().sum() for p, a in zip(leaves, anchor, strict=True))
    penalised = torch.autograd.grad(plain + decay / 2 * size + proximal / 2 * distance, leaves)
    local = replace(PLAIN, weight_decay=decay, proximal=proximal)
    expected = [p - 0.1 * g for p, g in zip(params, penalised, strict=True)]
    local.step(params, grads, anchor=anchor, velocity=[])
    for found, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-15)


def test_a_stack_of_clients_takes_the_steps_of_its_rows() -> None:
    """The rule is element-wise: [K, ...] against one anchor equals K single clients."""
    local = replace(PLAIN, momentum=0.9, weight_decay=0.1, proximal=0.5)
    anchor, num_clients = start(), 3
    stack = [torch.stack([p + k for k in range(num_clients)]) for p in start()]
    grads = [torch.stack([g + k for k in range(num_clients)]) for g in gradients(1)[0]]
    rows = [[p[k].clone() for p in stack] for k in range(num_clients)]
    for k, row in enumerate(rows):
        zeros = [torch.zeros_like(p) for p in row]
        local.step(row, [g[k].clone() for g in grads], anchor=anchor, velocity=zeros)
    local.step(stack, grads, anchor=anchor, velocity=[torch.zeros_like(p) for p in stack])
    for index, tensor in enumerate(stack):
        assert torch.equal(tensor, torch.stack([row[index] for row in rows]))


@pytest.mark.parametrize("batch_size", [None, 1, 3, 4, 7, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_is_visited_once_an_epoch(batch_size: int | None, *, shuffle: bool) -> None:
    """Batches are cut from a permutation; only the last of an epoch is smaller."""
    local = replace(PLAIN, epochs=3, batch_size=batch_size, shuffle=shuffle)
    batches = list(batch_positions(local, seed=Seed(0), round_num=2, client_id=5, num_examples=7))
    steps = int(local.steps_per_epoch(np.array([7]))[0])
    assert len(batches) == int(local.num_steps(np.array([7]))[0]) == 3 * steps
    for epoch in range(3):
        of_epoch = batches[epoch * steps : (epoch + 1) * steps]
        assert sorted(np.concatenate(of_epoch).tolist()) == list(range(7))
        assert all(len(batch) == (batch_size or 7) for batch in of_epoch[:-1])


def test_orders_differ_by_seed_round_client_and_epoch() -> None:
    """Each of the four keys the shuffle, and the same four give the same order."""
    base = {"round_num": 1, "client_id": 2, "epoch": 0}
    first = shuffled_positions(Seed(0), **base, num_examples=50)
    assert np.array_equal(first, shuffled_positions(Seed(0), **base, num_examples=50))
    assert not np.array_equal(first, shuffled_positions(Seed(1), **base, num_examples=50))
    for name in base:
        other = shuffled_positions(Seed(0), **(base | {name: 7}), num_examples=50)
        assert not np.array_equal(first, other), name


def test_settings_travel_and_come_back() -> None:
    """``from_settings`` is the inverse of ``settings``, whole numbers for reals included."""
    local = replace(PLAIN, momentum=0.5, keep_momentum=True, batch_size=None)
    assert LocalSgd.from_settings(local.settings()) == local
    assert LocalSgd.from_settings({**local.settings(), "learning_rate": 1}).learning_rate == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 1.5},
        {"epochs": True},
        {"batch_size": "4"},
        {"learning_rate": None},
        {"shuffle": 1},
        {"more": 1},
    ],
)
def test_settings_of_other_types_or_names_are_refused(
    changes: dict[str, int | float | str | bool | None],
) -> None:
    """A request from another version is an error, not a different training."""
    with pytest.raises(ValueError, match="local setting"):
        LocalSgd.from_settings({**PLAIN.settings(), **changes})


def test_missing_settings_are_refused() -> None:
    """Nothing is filled in."""
    settings = dict(PLAIN.settings())
    del settings["proximal"]
    with pytest.raises(ValueError, match="proximal"):
        LocalSgd.from_settings(settings)


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
        {"proximal": float("inf")},
        {"keep_momentum": True},
    ],
)
def test_values_without_meaning_are_refused(changes: dict[str, float]) -> None:
    """The message names the field."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        LocalSgd.from_settings({**PLAIN.settings(), **changes})
