"""Cases of the shelf: client drift and server steps. References are written from the papers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedlearn.algorithms.adaptive_fedprox import AdaptiveFedProx
from fedlearn.algorithms.feddyn import FedDyn
from fedlearn.algorithms.fedexp import FedExP
from fedlearn.algorithms.fednova import FedNova
from fedlearn.algorithms.lanes import Lanes, Updates, stack_rows
from fedlearn.algorithms.mime_lite import MimeLite
from fedlearn.algorithms.recipes import Algorithm, FedAvg, FedAvgM, FedProx
from fedlearn.algorithms.server_optimizers import ServerSgd
from fedlearn.algorithms.server_schedules import ScheduledFedAvg
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

MOMENTUM = replace(SGD, momentum=0.5)
AS_IT_IS = ServerSgd(learning_rate=1.0, momentum=0.0)


def fedexp(x: Tensor) -> Iterator[Tensor]:
    """Algorithm 1 of arXiv:2301.09604, with client weights; epsilon is 1e-3."""
    for round_num, cohort in enumerate(COHORTS):
        p = shares(cohort)
        deltas = [x - train(x, client, round_num)[0] for client in cohort]
        mean = weighted(p, deltas)
        squares = sum(share * delta.dot(delta) for share, delta in zip(p, deltas, strict=True))
        step = max(1.0, float(squares / (2 * (mean.dot(mean) + 1e-3))))
        x = x - step * mean
        yield x


def adaptive_fedprox(x: Tensor) -> Iterator[Tensor]:
    """Section 5.3.2 of arXiv:1812.06127, with a patience of 1 and steps of 0.5."""
    mu, last = 1.0, float("inf")
    for round_num, cohort in enumerate(COHORTS):
        trained = [train_with_loss(x, client, round_num, mu=mu) for client in cohort]
        mean = float(shares(cohort) @ torch.stack([mean_loss for _, mean_loss in trained]))
        if round_num:
            mu = mu + 0.5 if mean > last else max(0.0, mu - 0.5)
        last, x = mean, weighted(shares(cohort), [y for y, _ in trained])
        yield x


def train_with_loss(
    x: Tensor, client: int, round_num: int, *, mu: float = 0.0
) -> tuple[Tensor, Tensor]:
    """SGD with a pull to ``x``: return the local model, and the steps' mean loss by examples."""
    y, total, count = x, torch.zeros(()).double(), 0
    for features, labels in batches(client, round_num):
        total, count = total + len(labels) * loss(y, features, labels), count + len(labels)
        y = y - SGD.learning_rate * (gradient(y, features, labels) + mu * (y - x))
    return y, total / count


def feddyn(theta: Tensor) -> Iterator[Tensor]:
    """Algorithm 1 of arXiv:2111.04263, with SGD on each client's regularized loss; alpha is 0.5."""
    h, alpha = torch.zeros_like(theta), 0.5
    gradients = dict.fromkeys(range(NUM_CLIENTS), torch.zeros_like(theta))
    for round_num, cohort in enumerate(COHORTS):
        trained = {}
        for k in cohort:
            regularize = partial(_regularize, linear=gradients[k], center=theta, alpha=alpha)
            trained[k], _ = train(theta, k, round_num, direction=regularize)
            gradients[k] = gradients[k] - alpha * (trained[k] - theta)
        models = torch.stack(list(trained.values()))
        h = h - alpha / NUM_CLIENTS * (models - theta).sum(0)
        theta = models.mean(0) - h / alpha
        yield theta


def _regularize(g: Tensor, y: Tensor, *, linear: Tensor, center: Tensor, alpha: float) -> Tensor:
    return g - linear + alpha * (y - center)


def fednova(x: Tensor) -> Iterator[Tensor]:
    """Equation 7 of arXiv:2007.07481 for SGD: a client's vector a has a 1 for each step."""
    for round_num, cohort in enumerate(COHORTS):
        p = shares(cohort)
        trained = [train(x, client, round_num) for client in cohort]
        tau = torch.tensor([num_steps for _, num_steps in trained]).double()
        d = [(x - y) / num_steps for y, num_steps in trained]
        x = x - (p @ tau) * weighted(p, d)
        yield x


def fednova_with_momentum(x: Tensor) -> Iterator[Tensor]:
    """The same with local momentum rho: the norm of a is in section 4.1."""
    rho = MOMENTUM.momentum
    for round_num, cohort in enumerate(COHORTS):
        p, norms, d = shares(cohort), list[float](), list[Tensor]()
        for client in cohort:
            y, velocity, tau = x, torch.zeros_like(x), 0
            for features, labels in batches(client, round_num):
                velocity = rho * velocity + gradient(y, features, labels)
                y, tau = y - MOMENTUM.learning_rate * velocity, tau + 1
            norms.append((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))
            d.append((x - y) / norms[-1])
        x = x - (p @ torch.tensor(norms).double()) * weighted(p, d)
        yield x


def scheduled(x: Tensor) -> Iterator[Tensor]:
    """FedAvgM at the rate 0.8: half of it in the first round, and a tenth from the third on."""
    velocity = torch.zeros_like(x)
    for round_num, (cohort, factor) in enumerate(zip(COHORTS, (0.5, 1.0, 0.1), strict=True)):
        models = [train(x, client, round_num)[0] for client in cohort]
        velocity = 0.5 * velocity + weighted(shares(cohort), models) - x
        x = x + 0.8 * factor * velocity
        yield x


@dataclass(frozen=True)
class LossWeighted:
    """A user's rule: the mean update, weighted by each client's loss times its examples."""

    def weigh(self, num_examples_B: Tensor) -> Tensor:
        return torch.ones_like(num_examples_B)

    def combine(self, updates: Updates) -> Lanes:
        metrics_B = updates.metrics_B
        weights_B = metrics_B["loss"] * metrics_B["num_examples"]
        weights_B = (weights_B / weights_B.sum()).to(updates.weights_B)
        return {name: weights_B @ stack_rows(rows) for name, rows in updates.lanes.items()}


def loss_weighted(x: Tensor) -> Iterator[Tensor]:
    """The rule, written with the losses of each step."""
    for round_num, cohort in enumerate(COHORTS):
        trained = [train_with_loss(x, client, round_num) for client in cohort]
        weights = torch.stack([mean_loss for _, mean_loss in trained]) * shares(cohort)
        x = weighted(weights / weights.sum(), [y for y, _ in trained])
        yield x


def mime_lite(x: Tensor) -> Iterator[Tensor]:
    """Algorithm 1 of arXiv:2008.03606 (MimeLite) with momentum; beta is 0.6."""
    s, beta = torch.zeros_like(x), 0.6
    for round_num, cohort in enumerate(COHORTS):
        follow = partial(_mix, momentum=s, beta=beta)
        models = [train(x, client, round_num, direction=follow)[0] for client in cohort]
        full = weighted(shares(cohort), [gradient(x, *examples(client)) for client in cohort])
        x, s = weighted(shares(cohort), models), (1 - beta) * full + beta * s
        yield x


def _mix(g: Tensor, _: Tensor, *, momentum: Tensor, beta: float) -> Tensor:
    return (1 - beta) * g + beta * momentum


CASES: Mapping[str, Case] = {
    "fedexp": Case(
        FedExP(SGD, epsilon=1e-3),
        fedexp,
        control=FedAvg(SGD),
        protected=FedExP(SGD, epsilon=1e-3, square_norm_bound=81.0, weight_by_examples=False),
        refused="lane 'square_norm' .*has no bound.* set algorithm.square_norm_bound",
    ),
    "adaptive fedprox": Case(
        AdaptiveFedProx(SGD, proximal=1.0, proximal_step=0.5, patience=1),
        adaptive_fedprox,
        control=FedProx(SGD, proximal=1.0),
        protected=None,
    ),
    "weighted by loss": Case(
        Algorithm(local=SGD, aggregation=LossWeighted(), server_optimizer=AS_IT_IS),
        loss_weighted,
        control=FedAvg(SGD),
        protected=None,
        refused="LossWeighted",
    ),
    "feddyn": Case(
        FedDyn(SGD, alpha=0.5, num_clients=NUM_CLIENTS),
        feddyn,
        control=FedAvg(SGD, weight_by_examples=False),
        protected=FedDyn(SGD, alpha=0.5, num_clients=12),
    ),
    "scheduled server": Case(
        ScheduledFedAvg(
            SGD,
            server_learning_rate=0.8,
            server_momentum=0.5,
            server_warmup_rounds=2,
            server_rate_decay=0.1,
            server_decay_rounds=2,
        ),
        scheduled,
        control=FedAvgM(SGD, server_learning_rate=0.8, server_momentum=0.5),
        protected=ScheduledFedAvg(
            SGD, server_learning_rate=0.8, server_warmup_rounds=2, weight_by_examples=False
        ),
    ),
    "mime-lite": Case(
        MimeLite(SGD, server_momentum=0.6),
        mime_lite,
        control=FedAvg(SGD),
        protected=MimeLite(
            SGD, server_momentum=0.6, full_gradient_bound=50.0, weight_by_examples=False
        ),
        refused="lane 'full_gradient' .*has no bound.* set algorithm.full_gradient_bound",
    ),
    "fednova": Case(
        FedNova(SGD),
        fednova,
        control=FedAvg(SGD),
        protected=FedNova(SGD, effective_steps_bound=100.0, weight_by_examples=False),
        refused="lane 'effective_steps' .*has no bound.* set algorithm.effective_steps_bound",
    ),
    "fednova, momentum": Case(
        FedNova(MOMENTUM), fednova_with_momentum, control=FedNova(SGD), protected=None
    ),
}
