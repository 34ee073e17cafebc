"""Cases of the shelf: parts of the model that clients keep for themselves, or begin on their own.

References are from the papers.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedlearn.algorithms.fedala import FedALA
from fedlearn.algorithms.fedbabu import FedBABU
from fedlearn.algorithms.fedrep import FedRep
from fedlearn.algorithms.local_parts import KeepLocal
from fedlearn.algorithms.partial_models import FedBN, FedPer, LGFedAvg
from fedlearn.algorithms.recipes import FedAvg, FedProx
from fedlearn.algorithms.strategy import Strategy
from tests.parity.shelf import (
    COHORTS,
    SGD,
    Case,
    batches,
    gradient,
    make_model,
    shares,
    train,
    weighted,
)

RATE = SGD.learning_rate
#: Of the 75 parameters of the shelf's model, those of its last layer.
HEAD = torch.arange(75) >= 48

#: Trains a client in a round from a start: returns its model.
Train = Callable[[Tensor, int, int], Tensor]


class Round(NamedTuple):
    """The global model and the clients' own parts after a round."""

    x: Tensor
    own: Mapping[int, Tensor]


def rounds(x: Tensor, is_local: Tensor, train_client: Train) -> Iterator[Round]:
    """Average what is shared; each client trains the rest from its own last values on."""
    own = dict[int, Tensor]()
    for round_num, cohort in enumerate(COHORTS):
        for client in cohort:
            begin = torch.where(is_local, own.get(client, x), x)
            own[client] = train_client(begin, client, round_num)
        x = torch.where(is_local, x, weighted(shares(cohort), [own[client] for client in cohort]))
        yield Round(x, {client: each[is_local] for client, each in own.items()})


def train_all(begin: Tensor, client: int, round_num: int, *, proximal: float = 0.0) -> Tensor:
    """SGD on all parameters, with a pull to the start."""
    pull = partial(lambda g, y, start: g + proximal * (y - start), start=begin)
    return train(begin, client, round_num, direction=pull)[0]


def train_in_turn(y: Tensor, client: int, round_num: int) -> Tensor:
    """Algorithm 1 of arXiv:2102.07078: the head in the first epoch, the body in the second."""
    steps = list(batches(client, round_num))
    for step, batch in enumerate(steps):
        is_trained = HEAD if step < len(steps) // 2 else ~HEAD
        y = y - RATE * gradient(y, *batch) * is_trained
    return y


def train_body(y: Tensor, client: int, round_num: int) -> Tensor:
    """Algorithm 1 of arXiv:2106.06042: the head has no gradient."""
    return train(y, client, round_num, direction=lambda g, _: g * ~HEAD)[0]


def build_case(
    strategy: KeepLocal,
    train_client: Train,
    *,
    control: Strategy,
    is_local: Tensor = HEAD,
    protected: Strategy | None = None,
    make: Callable[[], nn.Module] = make_model,
) -> Case:
    """The case of an algorithm with local parts."""
    return Case(
        strategy,
        lambda x: (each.x for each in rounds(x, is_local, train_client)),
        control=control,
        protected=protected,
        personal=lambda x: list(rounds(x, is_local, train_client))[-1].own,
        make=make,
    )


def make_norm_model() -> nn.Module:
    """A model with BatchNorm: 91 parameters and 16 statistics."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


#: BatchNorm's parameters and statistics.
NORMS = torch.cat([(torch.arange(91) >= 48) & (torch.arange(91) < 64), torch.ones(16).bool()])


def train_with_norms(y: Tensor, client: int, round_num: int) -> Tensor:
    """SGD by torch, with BatchNorm's statistics after the parameters."""
    model = make_norm_model().double()
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    with torch.no_grad():
        for each, part in zip(tensors, y.split([t.numel() for t in tensors]), strict=True):
            each.copy_(part.view_as(each))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for features, labels in batches(client, round_num):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in tensors])


def fedala(x: Tensor, *, models: dict[int, Tensor], share: float = 0.3) -> Iterator[Tensor]:
    """Algorithm 1 of arXiv:2212.01197, with eta = 2 for the head; it fills ``models``.

    The first 30 % of an epoch's batches learn the weights, and the others train.
    """
    weights = dict[int, Tensor]()
    for round_num, cohort in enumerate(COHORTS):
        for client in cohort:
            own, w = models.get(client, x), weights.get(client, torch.ones(75).double())
            steps = list(batches(client, round_num))
            num_learning = math.ceil(share * len(steps) / SGD.epochs)
            for batch in steps[:num_learning]:
                slope = gradient(own + (x - own) * w, *batch) * (x - own)
                w = torch.where(HEAD, (w - 2.0 * slope).clamp(0, 1), w)
            y = own + (x - own) * w
            for batch in steps[num_learning:]:
                y = y - RATE * gradient(y, *batch)
            models[client], weights[client] = y, w
        x = weighted(shares(cohort), [models[client] for client in cohort])
        yield x


def fedala_models(x: Tensor) -> Mapping[int, Tensor]:
    """The clients' last local models."""
    models = dict[int, Tensor]()
    list(fedala(x, models=models))
    return models


ALA = partial(FedALA, SGD, adaptive_layers=("2.*",), mixing_rate=2.0, mixing_share=0.3)
PROX = partial(train_all, proximal=0.5)

CASES: Mapping[str, Case] = {
    "fedper": build_case(
        FedPer(SGD, personal_layers=("2.*",)),
        train_all,
        control=FedAvg(SGD),
        protected=FedPer(SGD, personal_layers=("2.*",), weight_by_examples=False),
    ),
    "lgfedavg": build_case(
        LGFedAvg(SGD, representation_layers=("0.*",)),
        train_all,
        is_local=~HEAD,
        control=FedAvg(SGD),
        protected=LGFedAvg(SGD, representation_layers=("0.*",), weight_by_examples=False),
    ),
    "fedbn": build_case(
        FedBN(SGD),
        train_with_norms,
        is_local=NORMS,
        control=FedAvg(SGD),
        protected=FedBN(SGD, weight_by_examples=False),
        make=make_norm_model,
    ),
    "fedrep": build_case(
        FedRep(SGD, head_layers=("2.*",), head_epochs=1),
        train_in_turn,
        control=FedPer(SGD, personal_layers=("2.*",)),
        protected=FedRep(SGD, head_layers=("2.*",), head_epochs=1, weight_by_examples=False),
    ),
    "fedbabu": build_case(
        FedBABU(SGD, head_layers=("2.*",)),
        train_body,
        control=FedAvg(SGD),
        protected=FedBABU(SGD, head_layers=("2.*",), weight_by_examples=False),
    ),
    "fedprox with a personal head": build_case(
        KeepLocal(FedProx(SGD, proximal=0.5), ("2.*",)),
        PROX,
        control=KeepLocal(FedAvg(SGD), ("2.*",)),
    ),
    "fedala": Case(
        ALA(),
        lambda x: fedala(x, models={}),
        control=FedAvg(SGD),
        protected=ALA(weight_by_examples=False),
        personal=fedala_models,
    ),
}
