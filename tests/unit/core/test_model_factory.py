"""A module that the user also holds, in whole or in part, is copied; a new one is not."""

import copy
import functools
import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from fedlearn.core.model_factory import ModelFactory
from fedlearn.errors import ConfigError

Make = Callable[[], nn.Module]


class Tied(nn.Module):
    """A parameter with two names, a cycle, a view as a buffer, and a hook that refers to it."""

    def __init__(self, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embedding.weight
        self.backbone = nn.Linear(4, 4) if backbone is None else backbone
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4, 4).tril()[None])
        self.owner = [self]
        self.register_forward_hook(self.note)

    def note(self, *_: object) -> None: ...

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.backbone(self.embedding(rows))))
        return found


class Application:
    """An application and its network, which refer to each other."""

    def __init__(self) -> None:
        self.net = on(Tied(), "application", self)


class WithClassAttribute(nn.Module):
    """A network whose layer is a class attribute, shared by all instances."""

    backbone = nn.Linear(2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.part = WithClassAttribute.backbone


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer: nn.Module = weight_norm(nn.Linear(3, 3))
        return layer


def on(layer: nn.Module, name: str, value: object) -> nn.Module:
    setattr(layer, name, value)
    return layer


def make_constant(net: nn.Module) -> tuple[Make, nn.Module]:
    return lambda: net, net


def build_cached() -> tuple[Make, nn.Module]:
    make = functools.cache(Tied)
    return make, make()


def alternating() -> tuple[Make, nn.Module]:
    nets = Tied(), Tied()
    turns = cycle(nets)
    return lambda: next(turns), nn.ModuleList(nets)


def of_application() -> tuple[Make, nn.Module]:
    application = Application()
    return lambda: application.net, application.net


def around(backbone: nn.Module) -> tuple[Make, nn.Module]:
    return lambda: Tied(backbone), backbone


def build_pretrained() -> tuple[Make, nn.Module]:
    table = torch.randn(5, 4)
    own = nn.Embedding.from_pretrained(table)
    return lambda: nn.Embedding.from_pretrained(table, freeze=False), own


def of_numpy() -> tuple[Make, nn.Module]:
    array = np.ones((3, 3), np.float32)
    own = on(nn.Linear(3, 3), "weight", nn.Parameter(torch.from_numpy(array)))
    return (
        lambda: on(nn.Linear(3, 3), "weight", nn.Parameter(torch.from_numpy(array))),
        nn.Sequential(own),
    )


def of_a_row() -> tuple[Make, nn.Module]:
    table = torch.ones(5, 4)
    own = on(nn.BatchNorm1d(4), "running_mean", table[0])
    return lambda: on(nn.BatchNorm1d(4), "running_mean", table[0]), own


KEPT: dict[str, Callable[[], tuple[Make, nn.Module]]] = {
    "one network": lambda: make_constant(Tied()),
    "a cache": build_cached,
    "two by turns": alternating,
    "an object's, which the network leads back to": of_application,
    "a backbone": lambda: around(nn.Linear(4, 4).requires_grad_(False)),
    "an attribute of a class": lambda: (WithClassAttribute, WithClassAttribute.backbone),
    "a pretrained table": build_pretrained,
    "an array of numpy": of_numpy,
    "a row of a table": of_a_row,
    "parametrized": lambda: make_constant(parametrizations.weight_norm(nn.Linear(3, 3))),
    "old weight_norm": lambda: make_constant(old_weight_norm()),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_user_keeps_is_not_changed_by_what_is_built(name: str) -> None:
    make, own = KEPT[name]()
    for parameter in own.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    own.eval()
    before = copy.deepcopy({n: (t, t.requires_grad) for n, t in own.state_dict().items()})
    needs_grad = [each.requires_grad for each in own.parameters()]
    build, states = ModelFactory.of(make), []
    for _ in range(4):
        module = build()
        states.append({n: t.clone() for n, t in module.state_dict().items()})
        module.train().requires_grad_(True)
        module.register_forward_hook(lambda *_: None)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.fill_(3)
            tensor.data = torch.zeros(1)
    assert all(torch.equal(own.state_dict()[n], t) for n, (t, _) in before.items())
    assert [each.requires_grad for each in own.parameters()] == needs_grad
    assert not any(part.training for part in own.modules())
    assert all(bool((each.grad == 7.0).all()) for each in own.parameters() if each.grad is not None)


def test_copies_of_one_network_begin_alike_and_keep_its_ties() -> None:
    net = Tied()
    net.backbone.requires_grad_(False)
    build = ModelFactory.of(lambda: net)
    for built in (build(), build()):
        assert isinstance(built, Tied)
        assert built.out.weight is built.embedding.weight
        assert built.out.weight is not net.out.weight
        assert built.owner[0] is built
        assert not built.backbone.weight.requires_grad
        assert all(torch.equal(t, net.state_dict()[n]) for n, t in built.state_dict().items())


NEW: dict[str, Make] = {
    "tied": Tied,
    "recurrent": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
    "lazy": lambda: nn.LazyLinear(3),
    "a copy": lambda: copy.deepcopy(Tied()),
    "loaded": lambda: on(nn.Linear(2, 2), "weight", nn.Parameter(torch.ones(2, 2))),
}


@pytest.mark.parametrize("name", NEW)
def test_a_new_network_is_not_copied(name: str) -> None:
    """It may refer to the user's objects, such as a list that its forward pass appends to."""
    seen: list[int] = []
    built: Any = ModelFactory.of(lambda: on(NEW[name](), "seen", seen))()
    assert built.seen is seen
    assert ModelFactory.of(lambda: built)().seen is not seen, "the control: what is kept is copied"


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2))
    net.forward = lambda rows: net[0](rows) + 0  # a copy would still call this network
    assert ModelFactory.of(lambda: nn.Sequential(nn.Linear(2, 2)))() is not None
    with pytest.raises(ConfigError, match=r"in use elsewhere \(Sequential\).* still uses its Seq"):
        ModelFactory.of(lambda: net)()
    other = nn.Linear(2, 2)
    other.register_module("part", on(nn.Identity(), "stream", (each for each in range(3))))
    with pytest.raises(ConfigError, match=r"in use elsewhere \(Linear\).*cannot be copied: TypeEr"):
        ModelFactory.of(lambda: other)()
