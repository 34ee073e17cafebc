r"""Compute the next global model from the clients' updates.

============================ ==========================================================
symbol                       here
============================ ==========================================================
:math:`\Delta_i, w_i`        a client's ``delta`` and weight
:math:`s(\tau_i)`            the factor of its weight for staleness: ``discount``
:math:`\Delta`               the aggregated delta; it is local minus global, so it is *added*
:math:`\eta_g, \beta, \tau`  ``SERVER_ETA``, ``SERVER_BETA``, ``TAU``
:math:`c, N, S`              SCAFFOLD: ``state["control"]``, all clients, those that reported
============================ ==========================================================

Only trained parameters go through the server's optimizer. Statistics are only averaged.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle.configuration import NUM_CLIENTS, Configuration
from tests.oracle.reference import privacy
from tests.oracle.reference.client import Contribution, Memory
from tests.oracle.reference.model import Model, Tensors
from tests.oracle.reference.policies import num_wanted

SERVER_ETA, SERVER_BETA = 0.9, 0.6
ADAPTIVE_ETA, BETA_1, BETA_2, TAU = 0.1, 0.6, 0.9, 0.05
MIXING, STALENESS_EXPONENT, MAX_STALENESS = 0.6, 0.5, 3
TRIMMED = 1


@dataclass
class Counted:
    """A contribution that counts in a round.

    Attributes:
        x_0: The model that its client received.
    """

    contribution: Contribution
    x_0: Tensors
    staleness: int


def begin(c: Configuration, model: Model, x: Tensors) -> Memory:
    """Return the server's state before the first round."""
    zeros = {name: torch.zeros_like(x[name]) for name in model.trained}
    state = privacy.begin(c, zeros)
    if c.algorithm == "fedavgm":
        state["velocity"] = zeros
    if c.algorithm in ("fedadagrad", "fedadam", "fedyogi"):
        state["first_moment"] = zeros
        state["second_moment"] = {name: value + TAU**2 for name, value in zeros.items()}
    if c.algorithm == "scaffold":
        state["control"] = zeros
    return state


def step(
    c: Configuration,
    model: Model,
    x: Tensors,
    state: Memory,
    counted: Sequence[Counted],
    *,
    noise: privacy.RecordedNoise,
    at: tuple[int, int],
) -> tuple[Tensors, Memory]:
    """Return the next model and state; below, equation numbers are those of the papers.

    Args:
        c: The configuration.
        model: The model's module and roles.
        x: The global model.
        state: The server's state.
        counted: The contributions that count in the round.
        noise: The noise of the run.
        at: Round and attempt.
    """
    num_reports = len(counted)
    if c.privacy in (*privacy.CENTRAL, "distributed"):
        num_reports = num_wanted(c)  # the number of reports is not public
        trained, deltas = (
            {name: x[name] for name in model.trained},
            [each.contribution.delta for each in counted],
        )
        delta, state = privacy.release(c, trained, deltas, state, noise=noise, at=at)
    else:
        delta = aggregate(c, [relative_to(x, model, each) for each in counted], counted)
    if c.own == "strategy":  # FedNova: the mean step, times the mean number of steps
        (tau,) = aggregate(
            c, [each.contribution.lanes["tau"] for each in counted], counted
        ).values()
        delta |= {name: tau * delta[name] for name in model.trained}
    moved, state = optimize(c, {name: delta[name] for name in model.trained}, state, num_reports)
    if c.algorithm == "scaffold":
        mean = {
            name: sum_of(each.contribution.lanes["control"][name] for each in counted)
            / NUM_CLIENTS  # |S| / N times the mean over S
            for name in model.trained
        }
        control = {name: state["control"][name] + mean[name] for name in mean}
        state = state | {"control": control}
    moved |= {name: delta[name] for name in model.statistics}
    return {name: value + moved.get(name, 0.0) for name, value in x.items()}, state


def relative_to(x: Tensors, model: Model, counted: Counted) -> Tensors:
    """Return a delta whose statistics are changes relative to the newest model.

    Statistics are thus averaged as values, whichever models the clients started from: a sum of
    changes to different models could be anything, such as a negative variance.
    """
    delta, x_0 = counted.contribution.delta, counted.x_0
    return delta | {name: x_0[name] + delta[name] - x[name] for name in model.statistics}


def weight(c: Configuration, num_examples: int) -> float:
    """Return a client's weight."""
    if c.own == "weigh":  # clients that add noise themselves report one example
        return 1.0 if c.privacy in ("local", "example") else math.sqrt(num_examples)
    unweighted = ("scaffold", "easgd", "median", "fedasync")
    is_private = c.privacy != "off"
    if not c.by_examples or c.algorithm in unweighted or c.own == "aggregation" or is_private:
        return 1.0
    return float(num_examples)


def discount(staleness: int) -> float:
    """Return the weight of an update that is ``staleness`` rounds old: (1 + tau)^-a."""
    return float((1 + staleness) ** -STALENESS_EXPONENT)


def aggregate(c: Configuration, vectors: Sequence[Tensors], counted: Sequence[Counted]) -> Tensors:
    """Aggregate one vector from each client.

    Means and medians use undiscounted weights; the result is then scaled by the weighted mean of
    the discounts, so that a buffer of stale updates makes a smaller step.
    """
    w = [weight(c, each.contribution.num_examples) for each in counted]
    s = [discount(each.staleness) for each in counted]
    names = list(vectors[0])
    if c.algorithm == "median" or c.own == "aggregation":
        factor = sum(map(float.__mul__, w, s)) / sum(w)
        combine = median if c.algorithm == "median" else trimmed_mean
        return {name: factor * combine([each[name] for each in vectors]) for name in names}
    lowered = list(map(float.__mul__, w, s))
    return {
        name: weighted_sum([each[name] for each in vectors], lowered) / sum(w) for name in names
    }


def optimize(
    c: Configuration, delta: Tensors, state: Memory, num_reports: int
) -> tuple[Tensors, Memory]:
    """Return the change of the trained parameters, and the optimizer's next state."""
    if c.algorithm == "fedavgm":  # Hsu, Qi and Brown, 2019
        v = {name: SERVER_BETA * state["velocity"][name] + d for name, d in delta.items()}
        moved = {name: SERVER_ETA * value for name, value in v.items()}
        return moved, state | {"velocity": v}
    if c.algorithm in ("fedadagrad", "fedadam", "fedyogi"):  # Reddi et al., 2021, algorithm 2
        m = {
            name: BETA_1 * state["first_moment"][name] + (1 - BETA_1) * d
            for name, d in delta.items()
        }
        v = {
            name: second_moment(c.algorithm, state["second_moment"][name], d**2)
            for name, d in delta.items()
        }
        moved = {name: ADAPTIVE_ETA * m[name] / (v[name].sqrt() + TAU) for name in delta}
        return moved, state | {"first_moment": m, "second_moment": v}
    eta = {"scaffold": SERVER_ETA, "fedasync": MIXING, "easgd": float(num_reports)}
    return {name: eta.get(c.algorithm, 1.0) * d for name, d in delta.items()}, state


def second_moment(algorithm: str, v: Tensor, square: Tensor) -> Tensor:
    """Return the next second moment."""
    if algorithm == "fedadagrad":
        return v + square
    if algorithm == "fedadam":
        return BETA_2 * v + (1 - BETA_2) * square
    return v - (1 - BETA_2) * square * torch.sign(v - square)


def median(values: Sequence[Tensor]) -> Tensor:
    """Return the median of each coordinate; of an even count the mean of the middle two."""
    return torch.quantile(torch.stack(list(values)), 0.5, dim=0)


def trimmed_mean(values: Sequence[Tensor]) -> Tensor:
    """Return the mean of each coordinate without its extreme values: the user's rule."""
    cut = min(TRIMMED, (len(values) - 1) // 2)
    ordered = torch.stack(list(values)).sort(dim=0).values
    return ordered[cut : len(values) - cut].mean(dim=0)


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the sum of weighted tensors."""
    return sum_of(value * w for value, w in zip(values, weights, strict=True))


def sum_of(values: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors."""
    return torch.stack(list(values)).sum(dim=0)
