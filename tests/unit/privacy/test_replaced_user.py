"""Cohorts of a fixed size: compared with integration, an oracle, and other updates."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from scipy.stats import norm

from fedlearn.algorithms.cohorts import FixedCohorts
from fedlearn.privacy.accounting import epsilon_of_release
from fedlearn.privacy.events import Event
from fedlearn.privacy.replaced_user import (
    WorstRounds,
    odd_first_delta,
    odd_second_delta,
)

DELTA = 1e-6


@pytest.mark.parametrize("epsilon", [-3.0, -0.5, -0.01, 0.0, 0.01, 0.2, 0.36, 2.0])
@pytest.mark.parametrize(("rate", "noise"), [(0.3, 0.8), (0.01, 2.0), (0.9, 1.0)])
def test_the_extremes_by_their_definition(epsilon: float, rate: float, noise: float) -> None:
    """δ is the integral of one density's excess over e^ε times the other."""
    outcomes = np.linspace(-1 - 10 * noise, 1 + 10 * noise, 400_001)
    plain = norm.pdf(outcomes, -1.0, noise)
    odd = (1 - rate) * plain + rate * norm.pdf(outcomes, 1.0, noise)
    for delta, first, second in ((odd_first_delta, odd, plain), (odd_second_delta, plain, odd)):
        above = np.maximum(0.0, first - math.exp(epsilon) * second)
        found = delta(np.array([epsilon]), rate=rate, distance=2.0 / noise)[0]
        assert found == pytest.approx(np.trapezoid(above, outcomes), abs=1e-8)


def adaptive_epsilon(
    rate: float, noise: float, *, num_rounds: int, target_delta: float, spacing: float
) -> float:
    """Return ε against an adversary who chooses one of the two worst pairs in each round.

    With L the loss of a pair, V_k(x) = max over pairs of E[V_{k-1}(x - L)], and δ(ε) = V_K(ε).
    Losses are rounded to the nearest here.
    """
    outcomes = np.linspace(-10.0, 12.0, 400_001)
    plain = norm.pdf(outcomes, -1.0, noise)
    odd = (1 - rate) * plain + rate * norm.pdf(outcomes, 1.0, noise)
    losses = np.log(odd / plain)
    num = math.ceil(float(np.abs(losses[odd > 1e-16]).max()) / spacing)
    size = 1 << math.ceil(math.log2(6 * num))
    places = (np.arange(size) - size // 2) * spacing

    def transformed(
        loss: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> NDArray[np.complex128]:
        at = np.clip(np.rint(loss / spacing).astype(np.int64), -num, num) % size
        return np.asarray(
            np.fft.rfft(np.bincount(at, weights=weights / weights.sum(), minlength=size))
        )

    pairs = [transformed(losses, odd), transformed(-losses, plain)]
    value = np.maximum(0.0, -np.expm1(places))
    inside = slice(num, size - num)  # the transform wraps around outside
    for _ in range(num_rounds):
        before = np.fft.rfft(value)
        for pair in pairs:
            chosen = np.fft.irfft(before * pair, size)
            value[inside] = np.maximum(value[inside], chosen[inside])
    return float(places[np.flatnonzero(value > target_delta)[-1]])


@pytest.mark.parametrize(
    ("size", "noise", "num_rounds", "spacing"),
    [
        (500, 2.0, 40, 2e-3),
        pytest.param(100, 1.0, 500, 1e-3, marks=pytest.mark.slow),
        pytest.param(100, 2.0, 500, 5e-4, marks=pytest.mark.slow),
    ],
)
def test_rounds_cost_what_the_worst_choice_of_updates_shows(
    size: int, noise: float, num_rounds: int, spacing: float
) -> None:
    """Compared with an attack that is computed here: the figure equals it, and is not below."""
    shown = adaptive_epsilon(
        size / 10_000, noise, num_rounds=num_rounds, target_delta=DELTA, spacing=spacing
    )
    event = Event(FixedCohorts(population=10_000, size=size), noise)
    said = epsilon_of_release({event: num_rounds}, target_delta=DELTA)
    assert said == pytest.approx(shown, rel=2e-3)


def test_rounds_of_different_noise_cost_no_less_in_any_order() -> None:
    """Their order is not recorded: the figure is above either order's, and below their sum."""
    cohorts = FixedCohorts(population=1000, size=50)
    events = [Event(cohorts, 2.0), Event(cohorts, 3.0)]
    alone = [epsilon_of_release({each: 10}, target_delta=DELTA) for each in events]
    both = epsilon_of_release(dict.fromkeys(events, 10), target_delta=DELTA)
    twice = epsilon_of_release({events[0]: 20}, target_delta=DELTA)
    assert max(alone) < both < min(sum(alone), 1.001 * twice)


def test_fewer_rounds_are_found_after_more() -> None:
    """From the cached intermediate results, bit for bit."""
    make = partial(WorstRounds, rate=0.1, distance=1.0, interval=0.05, num=256)
    rounds = make()
    after = {count: rounds.deltas(count).copy() for count in (600, 300, 256, 5)}
    for count, deltas in after.items():
        assert np.array_equal(make().deltas(count), deltas)


#: Positions of a and a' relative to b, the mean of those that they replace: shape [2] each.
Updates = tuple[NDArray[np.float64], NDArray[np.float64]]


def compute_delta(
    updates: Updates, epsilons: NDArray[np.float64], *, rate: float
) -> NDArray[np.float64]:
    """Return δ(ε), for ε >= 0, of a round with any updates; the noise has deviation 1.

    The integral runs along the second update; across it, it is a Gaussian's.
    """
    first, second = updates
    places = np.linspace(-14.0, 14.0, 801)
    weights = norm.pdf(places) * (places[1] - places[0])
    length = float(np.hypot(*second))
    along = second / length if length else np.array([1.0, 0.0])
    straight = float(first @ along)
    aside = math.sqrt(max(0.0, float(first @ first) - straight**2))
    ours = np.exp(straight * places - straight**2 / 2)
    theirs = (1 - rate) + rate * np.exp(length * places - length**2 / 2)
    # The excess of ω over e^ε ω', relative to the density at b.
    excess = np.exp(epsilons)[:, None] * theirs - (1 - rate)
    if aside < 1e-9:
        return np.asarray(np.maximum(rate * ours - excess, 0.0) @ weights)
    begins = (np.log(np.maximum(excess, 1e-300) / (rate * ours)) + aside**2 / 2) / aside
    begins = np.where(excess <= 0, -np.inf, begins)
    return np.asarray((rate * ours * norm.sf(begins - aside) - excess * norm.sf(begins)) @ weights)


def losses_of(updates: Updates, *, rate: float, spacing: float, num: int) -> NDArray[np.float64]:
    """Return probabilities of the losses from -num to num spacings, rounded pessimistically."""
    epsilons = np.asarray(np.arange(num + 1) * spacing, np.float64)
    above = compute_delta(updates, epsilons, rate=rate)
    mirrored = compute_delta((updates[1], updates[0]), epsilons[:0:-1], rate=rate)
    low = -epsilons[:0:-1]
    deltas = np.concatenate([-np.expm1(low) + np.exp(low) * mirrored, above])
    steps = np.diff(deltas)
    chances = np.concatenate([[1 - deltas[0]], -steps / -math.expm1(-spacing)])
    chances[:-1] += steps / math.expm1(spacing)
    chances[-1] += deltas[-1]
    return np.asarray(chances)


def epsilon_after(
    pairs: Sequence[NDArray[np.float64]], *, num_rounds: int, spacing: float
) -> float:
    """Return ε against an adversary who chooses one of several losses in each round."""
    num = len(pairs[0]) // 2
    epsilons = np.arange(-num, num + 1) * spacing
    value = np.maximum(0.0, -np.expm1(epsilons))
    for _ in range(num_rounds):
        padded = np.concatenate([np.ones(num), value, np.full(num, value[-1])])
        value = np.max([fftconvolve(padded, each, mode="valid") for each in pairs], axis=0)
    last = np.flatnonzero(value > DELTA)[-1]
    step = math.log(value[last] / DELTA) / math.log(value[last] / value[last + 1])
    return float(epsilons[last] + step * spacing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "noise", "num_rounds", "largest"),
    [(0.01, 1.0, 100, 12.0), (0.1, 2.0, 30, 6.0), (0.3, 4.0, 2, 4.0), (0.5, 4.0, 30, 24.0)],
)
def test_no_other_updates_cost_more_in_many_rounds(
    rate: float, noise: float, num_rounds: int, largest: float
) -> None:
    """With points all over the ball next to the two extremes, ε is the same."""
    far, here = np.array([2.0, 0.0]) / noise, np.zeros(2)
    extremes: list[Updates] = [(far, here), (here, far)]
    rng = np.random.default_rng(0)
    others: list[Updates] = []
    for number, points in enumerate(rng.normal(size=(16, 3, 2))):
        lengths = np.linalg.norm(points, axis=1, keepdims=True)
        inside = points / (lengths if number % 2 else np.maximum(1.0, lengths))
        if number % 4 == 1:
            inside[1] = -inside[0]  # opposite to each other, the third anywhere on the circle
        others.append(((inside[0] - inside[2]) / noise, (inside[1] - inside[2]) / noise))
    spacing = largest / 1000
    losses = [
        losses_of(each, rate=rate, spacing=spacing, num=1000) for each in (*extremes, *others)
    ]
    found = partial(epsilon_after, num_rounds=num_rounds, spacing=spacing)
    least = found(losses[:2])
    assert found(losses) == pytest.approx(least, rel=5e-6)
    assert found(losses[2:]) < least
