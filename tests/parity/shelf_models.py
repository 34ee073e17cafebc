"""Cases of the shelf: several gradients or models in a step. References are from the papers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedlearn.algorithms.apfl import APFL
from fedlearn.algorithms.ditto import Ditto
from fedlearn.algorithms.knn_per import KnnPer
from fedlearn.algorithms.moon import MOON
from fedlearn.algorithms.per_fedavg import PerFedAvg
from fedlearn.algorithms.pfedme import PFedMe
from fedlearn.algorithms.qfedavg import QFedAvg
from fedlearn.algorithms.recipes import FedAvg
from tests.parity.shelf import (
    COHORTS,
    NUM_CLIENTS,
    SGD,
    Case,
    batches,
    examples,
    gradient,
    loss,
    shares,
    train,
    weighted,
)

RATE = SGD.learning_rate
EQUAL = FedAvg(SGD, weight_by_examples=False)


def mean(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)).mean(0)


def hidden(x: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden layer and the logits of the shelf's model, by hand."""
    weight, bias, last, shift = x.split([40, 8, 24, 3])
    z = torch.tanh(features @ weight.view(8, 5).T + bias)
    return z, z @ last.view(3, 8).T + shift


def cosine(z: Tensor, other: Tensor) -> Tensor:
    found: Tensor = (z * other).sum(1) / (z.norm(dim=1) * other.norm(dim=1))
    return found


def moon(x: Tensor) -> Iterator[Tensor]:
    """Algorithm 1 of arXiv:2103.16257, with mu = 2 and tau = 0.4."""
    previous = dict[int, Tensor]()
    for round_num, cohort in enumerate(COHORTS):
        for client in cohort:
            y = x.clone()
            for features, labels in batches(client, round_num):
                w = y.clone().requires_grad_()
                z, logits = hidden(w, features)
                total = nn.functional.cross_entropy(logits, labels)
                if client in previous:  # a client without a last model has no contrast
                    near = (cosine(z, hidden(x, features)[0]) / 0.4).exp()
                    far = (cosine(z, hidden(previous[client], features)[0]) / 0.4).exp()
                    total = total - 2.0 * (near / (near + far)).log().mean()
                (slope,) = torch.autograd.grad(total, w)
                y = y - RATE * slope
            previous[client] = y
        x = weighted(shares(cohort), [previous[client] for client in cohort])
        yield x


def per_fedavg(x: Tensor, *, delta: float | None) -> Iterator[Tensor]:
    """Section 5 of arXiv:2002.07948, with alpha = 0.3, and one batch for all gradients."""
    for round_num, cohort in enumerate(COHORTS):
        locals_ = []
        for client in cohort:
            w = x.clone()
            for batch in batches(client, round_num):
                v = gradient(w - 0.3 * gradient(w, *batch), *batch)
                step = v
                if delta is not None:
                    ahead, behind = (gradient(w + sign * delta * v, *batch) for sign in (1.0, -1.0))
                    step = v - 0.3 * (ahead - behind) / (2 * delta)
                w = w - RATE * step
            locals_.append(w)
        x = mean(locals_)
        yield x


def train_pfedme(w: Tensor, client: int, round_num: int) -> tuple[Tensor, Tensor]:
    """A round of algorithm 1 of arXiv:2006.08848: lambda = 4, K = 3, alpha = 0.2."""
    theta = w
    for batch in batches(client, round_num):
        theta = w
        for _ in range(3):
            theta = theta - 0.2 * (gradient(theta, *batch) + 4.0 * (theta - w))
        w = w - RATE * 4.0 * (w - theta)
    return w, theta


def pfedme(x: Tensor) -> Iterator[Tensor]:
    """Its server, with beta = 0.5."""
    for round_num, cohort in enumerate(COHORTS):
        x = 0.5 * x + 0.5 * mean([train_pfedme(x, c, round_num)[0] for c in cohort])
        yield x


def pfedme_models(x: Tensor) -> Mapping[int, Tensor]:
    """The personal models after the last round."""
    models = dict[int, Tensor]()
    for round_num, (start, cohort) in enumerate(zip([x, *pfedme(x)], COHORTS, strict=False)):
        models |= {client: train_pfedme(start, client, round_num)[1] for client in cohort}
    return models


def fedavg(x: Tensor) -> Iterator[Tensor]:
    """McMahan et al.: what Ditto's global model is."""
    for round_num, cohort in enumerate(COHORTS):
        x = weighted(shares(cohort), [train(x, client, round_num)[0] for client in cohort])
        yield x


def ditto_models(x: Tensor) -> Mapping[int, Tensor]:
    """Algorithm 1 of arXiv:2012.04221, with eta = 0.2 and lambda = 0.7: the personal models."""
    models = dict[int, Tensor]()
    for round_num, (w, cohort) in enumerate(zip([x, *fedavg(x)], COHORTS, strict=False)):
        for client in cohort:
            v = models.get(client, w)
            for batch in batches(client, round_num):
                v = v - 0.2 * (gradient(v, *batch) + 0.7 * (v - w))
            models[client] = v
    return models


def equal_fedavg(x: Tensor) -> Iterator[Tensor]:
    """What APFL's global model is: each client counts alike."""
    for round_num, cohort in enumerate(COHORTS):
        x = mean([train(x, client, round_num)[0] for client in cohort])
        yield x


def apfl_models(x: Tensor, *, alpha: float, adapts: bool) -> Mapping[int, Tensor]:
    """Algorithm 1 of arXiv:2003.13461, with eta = 0.2: the clients' own models v."""
    models, alphas = dict[int, Tensor](), dict.fromkeys(range(NUM_CLIENTS), torch.tensor(alpha))
    for round_num, (start, cohort) in enumerate(zip([x, *equal_fedavg(x)], COHORTS, strict=False)):
        for i in cohort:
            w, v, a = start, models.get(i, start), alphas[i].double()
            for step, batch in enumerate(batches(i, round_num)):
                slope = gradient(a * v + (1 - a) * w, *batch)
                if adapts and step == 0:
                    a = (a - 0.2 * (v - w).dot(slope)).clamp(0, 1)
                v, w = v - 0.2 * a * slope, w - RATE * gradient(w, *batch)
            models[i], alphas[i] = v, a
    return models


def qfedavg(x: Tensor) -> Iterator[Tensor]:
    """Algorithm 2 of arXiv:1905.10497, with q = 2 and L = 1 / 0.1."""
    q, smoothness = 2.0, 1.0 / RATE
    for round_num, cohort in enumerate(COHORTS):
        scaled, normalizers = [], []
        for client in cohort:
            value = loss(x, *examples(client))
            move = smoothness * (x - train(x, client, round_num)[0])
            scaled.append(value**q * move)
            normalizers.append(q * value ** (q - 1) * move.dot(move) + smoothness * value**q)
        x = x - torch.stack(scaled).sum(0) / torch.stack(normalizers).sum()
        yield x


CASES: Mapping[str, Case] = {
    "moon": Case(
        MOON(SGD, contrast=2.0, temperature=0.4, representation="1"),
        moon,
        control=FedAvg(SGD),
        protected=MOON(
            SGD, contrast=2.0, temperature=0.4, representation="1", weight_by_examples=False
        ),
    ),
    "per-fedavg, first order": Case(
        PerFedAvg(SGD, adaptation_rate=0.3),
        partial(per_fedavg, delta=None),
        control=EQUAL,
        protected=None,
    ),
    "per-fedavg, hessian-free": Case(
        PerFedAvg(SGD, adaptation_rate=0.3, hessian_step=1e-2),
        partial(per_fedavg, delta=1e-2),
        control=PerFedAvg(SGD, adaptation_rate=0.3),
        protected=PerFedAvg(SGD, adaptation_rate=0.3, hessian_step=1e-2),
    ),
    "pfedme": Case(
        PFedMe(
            SGD,
            attachment=4.0,
            personal_steps=3,
            personal_learning_rate=0.2,
            server_learning_rate=0.5,
        ),
        pfedme,
        control=PFedMe(SGD, attachment=4.0, personal_steps=2, personal_learning_rate=0.2),
        protected=PFedMe(SGD, attachment=4.0, personal_steps=3, personal_learning_rate=0.2),
        personal=pfedme_models,
    ),
    "ditto": Case(
        Ditto(SGD, personal_learning_rate=0.2, personal_pull=0.7),
        fedavg,
        control=EQUAL,  # what is new does not show in the global model, but in the personal ones
        protected=Ditto(
            SGD, personal_learning_rate=0.2, personal_pull=0.7, weight_by_examples=False
        ),
        personal=ditto_models,
    ),
    "knn-per": Case(
        KnnPer(SGD, representation="1", num_neighbors=3, neighbor_weight=0.4),
        fedavg,
        control=EQUAL,  # neighbors vote only at evaluation: see test_knn_per.py
        protected=KnnPer(
            SGD, representation="1", num_neighbors=3, neighbor_weight=0.4, weight_by_examples=False
        ),
    ),
    **{
        f"apfl, {'adaptive' if adapts else 'fixed'}": Case(
            APFL(SGD, personal_learning_rate=0.2, mixing=0.6, adapts_mixing=adapts),
            equal_fedavg,
            control=FedAvg(SGD),  # the mixture shows only in the clients' own models
            protected=APFL(SGD, personal_learning_rate=0.2, mixing=0.6, adapts_mixing=adapts),
            personal=partial(apfl_models, alpha=0.6, adapts=adapts),
        )
        for adapts in (False, True)
    },
    "q-fedavg": Case(
        QFedAvg(SGD, fairness=2.0, step_size=RATE),
        qfedavg,
        control=EQUAL,
        protected=QFedAvg(SGD, fairness=2.0, step_size=RATE, normalizer_bound=1e3),
        refused="lane 'normalizer' .*has no bound.* set algorithm.normalizer_bound",
    ),
}
