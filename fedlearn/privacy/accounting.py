r"""Privacy accounting: the :math:`(\varepsilon, \delta)` that rounds of noisy sums cost a user.

There are two figures, one per adversary, and neither replaces the other. An adversary that sees the
released models but not the cohorts faces *amplification by sampling*: a user is in few rounds, and
the adversary does not know which. An adversary that sees the cohorts, as the coordinator does, gets
no such amplification: against a user that was sampled in every round, a run is the plain Gaussian
mechanism, and that bound holds for every other user too. Where users take turns and noise is
correlated over rounds, there is no sampling to amplify, and both figures are the same.

Sampling users does not hide a single *example* of a user: the user's other examples show in the
model, and reveal that the user was sampled. All that helps is that an example is used by chance,
and rarely: :math:`\delta(\varepsilon)` is the cost of K releases, averaged over K, the number of
times that the user is sampled. The second figure assumes a user that is sampled every time.

For cohorts of a fixed size, drawn without replacement, see
:mod:`~fedlearn.privacy.replaced_user`. Compositions are computed by dp-accounting. Importing this
module takes a second.

References:
    Balle and Wang, 2018, `Improving the Gaussian Mechanism for Differential Privacy
    <https://arxiv.org/abs/1805.06530>`_ (theorem 8: the Gaussian mechanism exactly).
    Koskela, Jälkö and Honkela, 2020, `Computing Tight Differential Privacy Guarantees Using FFT
    <https://arxiv.org/abs/1906.03049>`_ (privacy loss distributions).
"""

import math
from collections.abc import Iterable
from functools import lru_cache, reduce

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from numpy.typing import NDArray
from scipy.stats import binom

from fedlearn.algorithms.cohorts import FixedCohorts, PoissonCohorts
from fedlearn.privacy.events import Cohorts, Event, ExampleCohorts, Spent
from fedlearn.privacy.gaussian import gaussian_epsilon, mixture_epsilon
from fedlearn.privacy.replaced_user import WorstRounds, build_loss_grid, either_side_delta

#: Grid spacing of privacy losses. Losses are rounded up, so rounding can only raise a figure.
_FINE, _ROUGH = 1e-4, 4e-3
#: Most grid points up to the ε of one release: each takes some microseconds.
_LOSSES = 1 << 16
#: If one release costs a sampled user more ε than this, amplification by sampling is not computed.
_HOPELESS = 1e4
#: Largest grid spacing: the arithmetic computes e to its power.
_WIDEST = 500.0
#: Grid spacing as a share of ε, for a reported figure and in a search.
_EXACT_SHARE, _COARSE_SHARE = 2e-4, 1e-3
#: Most grid points for sums of squared distances; sums are rounded up to the grid.
_SUMS = 1 << 14
#: For cohorts of a fixed size, the grid of ε ends where this share of δ is left.
_BEYOND = 1e-4
#: Most values of ε evaluated over all rounds: some seconds of work. A run that needs more gets a
#: looser figure.
_STEPS = 1 << 25
#: Safety factor on ε, since other updates than the two assumed worst ones may cost more: in tests
#: some raised ε by three millionths.
_MARGIN = 1.0 + 1e-5
#: The smallest such grid of ε, as a power of two.
_LEAST_BITS = 8
#: Relative precision of a calibrated noise multiplier.
_CLOSE = 1e-3


def epsilon_of_release(spent: Spent, *, target_delta: float) -> float:
    """Return ε against an adversary that sees the releases but not the cohorts.

    Args:
        spent: All releases that the users' data have been in.
        target_delta: δ, in (0, 1).

    Raises:
        ValueError: δ is out of range, or guarantees of different adjacency would be mixed.

    Guarantees:
        An upper bound for every user, whatever the data of the other users.

    Example:
        >>> event = Event(PoissonCohorts(population=1000, expected=1000, largest=1000), 2.0)
        >>> round(epsilon_of_release({event: 4}, target_delta=1e-5), 3)
        4.377
    """
    _require_delta(target_delta)
    return _epsilon({e: count for e, count in spent.items() if count}, target_delta)


def epsilon_against_coordinator(spent: Spent, *, target_delta: float) -> float:
    r"""Return ε against an adversary that also sees the cohorts, such as the coordinator.

    With :math:`\mu^2` the sum of squared distances, :math:`\delta(\varepsilon) = \Phi(\mu/2 -
    \varepsilon/\mu) - e^\varepsilon \Phi(-\mu/2 - \varepsilon/\mu)`.

    Args:
        spent: All releases that the users' data have been in.
        target_delta: δ, in (0, 1).

    Raises:
        ValueError: δ is out of range, or guarantees of different adjacency would be mixed.

    Guarantees:
        Exact for a user that was sampled in every round, an upper bound for every other user. It
        assumes that the adversary does not see the noise: a coordinator that adds the noise itself
        must not look at it.

    Example:
        >>> event = Event(PoissonCohorts(population=1000, expected=10, largest=20), 2.0)
        >>> round(epsilon_against_coordinator({event: 4}, target_delta=1e-5), 3)
        4.377
    """
    _require_delta(target_delta)
    _require_one_adjacency(spent)
    return gaussian_epsilon(_distance(spent), target_delta)


def calibrate(cohorts: Cohorts, *, epsilon: float, target_delta: float, num_rounds: int) -> float:
    """Return the smallest noise multiplier that keeps ``num_rounds`` releases within a budget.

    Args:
        cohorts: How cohorts are drawn.
        epsilon: Largest ε of the release (:func:`epsilon_of_release`), > 0.
        target_delta: δ, in (0, 1).
        num_rounds: Releases, >= 1.

    Returns:
        The smallest multiplier with which ε is at most ``epsilon``, to one part in a thousand.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> cohorts = PoissonCohorts(population=1000, expected=1000, largest=1000)
        >>> round(calibrate(cohorts, epsilon=4.378, target_delta=1e-5, num_rounds=4), 2)
        2.0
    """
    _require_delta(target_delta)
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}; give a finite number above 0")
    if num_rounds < 1:
        raise ValueError(f"num_rounds is {num_rounds}; there is at least one release")
    if isinstance(cohorts, ExampleCohorts):
        chance = 1.0 - (1.0 - cohorts.rate) ** num_rounds
        if target_delta >= chance:
            raise ValueError(
                f"target_delta is {target_delta:g}, which is not below the probability "
                f"({chance:.2g}) that a user is asked at all, so no noise would be needed; give a "
                "smaller one"
            )

    coarse = max(_FINE, _COARSE_SHARE * epsilon)

    def is_within(multiplier: float, interval: float | None = None) -> bool:
        return _epsilon({Event(cohorts, multiplier): num_rounds}, target_delta, interval) <= epsilon

    # Sampling never raises ε, so the noise that is enough without it is enough.
    enough = _calibrate_without_sampling(cohorts, epsilon, target_delta, num_rounds)
    too_little = enough / 2.0
    while is_within(too_little, coarse):
        enough, too_little = too_little, too_little / 2.0
    while enough / too_little > 1.0 + _CLOSE:
        middle = math.sqrt(enough * too_little)
        if is_within(middle, coarse):
            enough = middle
        else:
            too_little = middle
    # A finer grid should only lower ε; rounding in the arithmetic may still raise it a little.
    while not is_within(enough):
        enough *= 1.0 + _CLOSE
    return enough


def _calibrate_without_sampling(
    cohorts: Cohorts, epsilon: float, target_delta: float, num_rounds: int
) -> float:
    """Return the multiplier that is enough for users that are sampled in every round."""
    low, high = 0.0, 1.0
    while gaussian_epsilon(high, target_delta) < epsilon:
        low, high = high, high * 2.0
    # 60 halvings are more than float64 has digits.
    for _ in range(60):
        middle = (low + high) / 2.0
        if gaussian_epsilon(middle, target_delta) <= epsilon:
            low = middle
        else:
            high = middle
    # Distances are proportional to 1 / z.
    one = Event(cohorts, 1.0)
    return math.sqrt(one.squared_distance(num_rounds)) / low


def _epsilon(spent: Spent, target_delta: float, interval: float | None = None) -> float:
    """Return ε, with losses on a grid of ``interval``; by default the grid is as fine as needed."""
    _require_one_adjacency(spent)
    if not spent:
        return 0.0
    # An adversary that does not see the cohorts learns no more than one that does. The accountant's
    # bound for it may be looser all the same, so take the smaller of both.
    unsampled = gaussian_epsilon(_distance(spent), target_delta)
    if all(event.cohorts.rate == 1.0 for event in spent):
        return unsampled
    if all(isinstance(event.cohorts, ExampleCohorts) for event in spent):
        return mixture_epsilon(*_mix_distances(spent), target_delta)
    return min(unsampled, _compute_sampled_epsilon(tuple(spent.items()), target_delta, interval))


@lru_cache(maxsize=1024)  # a run needs the same figure when it is built, logged and reported
def _compute_sampled_epsilon(
    spent: tuple[tuple[Event, int], ...], target_delta: float, interval: float | None
) -> float:
    """Return ε against an adversary that does not see the cohorts."""
    most = max(gaussian_epsilon(event.distance, target_delta) for event, _ in spent)
    if most > _HOPELESS:
        return math.inf  # too slow to compute; the caller has the bound without sampling
    if interval is None:
        # A coarser grid for large losses makes ε no less precise relatively, and saves seconds.
        parts = _compose_losses(spent, max(_ROUGH, most / _LOSSES))
        rough = _compose_epsilon(parts.values(), target_delta)
        num_rounds = sum(count for event, count in spent if _is_fixed(event))
        enough = max(_FINE, _EXACT_SHARE * rough, 2.0 * num_rounds * rough / _STEPS)
        # Powers of two: few distinct spacings, so that the cache of losses is hit.
        interval = _FINE * 2.0 ** math.floor(math.log2(enough / _FINE))
    return _compute_amplified_epsilon(spent, target_delta, min(interval, _WIDEST))


def _mix_distances(spent: Spent) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sums of squared distances of the releases with an example, and their probabilities."""
    squares: NDArray[np.float64] = np.zeros(1)
    chances: NDArray[np.float64] = np.ones(1)
    for event, count in spent.items():
        times = np.arange(count + 1)
        own = binom.pmf(times, count, event.cohorts.rate)
        squares = np.add.outer(squares, times * event.distance**2).ravel()
        chances = np.multiply.outer(chances, own).ravel()
        if len(squares) > _SUMS:
            unit = squares.max() / _SUMS
            # Round up: a larger distance can only raise ε.
            cells = np.ceil(squares / unit).astype(np.int64)
            chances = np.bincount(cells, weights=chances).astype(np.float64)
            squares = np.linspace(0.0, unit * (len(chances) - 1), len(chances))
    return squares, chances


def _compute_amplified_epsilon(
    spent: tuple[tuple[Event, int], ...], target_delta: float, interval: float
) -> float:
    parts = _compose_losses(spent, interval)
    epsilon = _compose_epsilon(parts.values(), target_delta)
    fixed = [each for each in spent if _is_fixed(each[0])]
    if not fixed:
        return epsilon
    # The event with the largest total distance gets the tight analysis. All others get the loss
    # that is the worst on both sides, so that the bound holds for any order of the rounds.
    event, count = max(fixed, key=lambda each: each[0].squared_distance(each[1]))
    beyond = _compose_epsilon([parts[event]], target_delta * _BEYOND)
    if not count * beyond <= _STEPS * interval:
        return epsilon
    # A power of two, so that one cached grid serves many numbers of rounds.
    num = 1 << max(_LEAST_BITS, math.ceil(math.log2(beyond / interval + 1.0)))
    rounds = _worst_rounds(event, interval, num)
    places = np.arange(-num, num + 1)
    parts[event] = _build_from_deltas(places, rounds.deltas(count), interval)
    return min(epsilon, _MARGIN * _compose_epsilon(parts.values(), target_delta))


def _is_fixed(event: Event) -> bool:
    return isinstance(event.cohorts, FixedCohorts)


def _compose_losses(
    spent: tuple[tuple[Event, int], ...], interval: float
) -> dict[Event, pld.PrivacyLossDistribution]:
    return {
        event: _build_loss(event, interval).self_compose(event.cohorts.participations(count))
        for event, count in spent
    }


def _compose_epsilon(parts: Iterable[pld.PrivacyLossDistribution], target_delta: float) -> float:
    total = reduce(pld.PrivacyLossDistribution.compose, parts)
    return max(0.0, float(total.get_epsilon_for_delta(target_delta)))


@lru_cache(maxsize=4)  # it keeps the rounds computed so far, so that one more round is quick
def _worst_rounds(event: Event, interval: float, num: int) -> WorstRounds:
    rate, distance = event.cohorts.rate, event.distance
    return WorstRounds(rate=rate, distance=distance, interval=interval, num=num)


def _build_from_deltas(
    losses: NDArray[np.int64], deltas: NDArray[np.float64], interval: float
) -> pld.PrivacyLossDistribution:
    return pld.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots(interval, losses, deltas)
    )


def _distance(spent: Spent) -> float:
    """Return the distance that a user in every round moves all sums, in units of their noise."""
    return math.sqrt(sum(event.squared_distance(count) for event, count in spent.items()))


@lru_cache(maxsize=64)
def _build_loss(event: Event, interval: float) -> pld.PrivacyLossDistribution:
    cohorts = event.cohorts
    if cohorts.rate == 1.0:
        # dp-accounting takes the deviation of the noise for a sensitivity of 1.
        return pld.from_gaussian_mechanism(
            1.0 / event.distance, value_discretization_interval=interval
        )
    if isinstance(cohorts, FixedCohorts):
        losses = build_loss_grid(event.distance, interval)
        at = np.asarray(losses * interval, np.float64)
        deltas = either_side_delta(at, rate=cohorts.rate, distance=event.distance)
        return _build_from_deltas(losses, deltas, interval)
    assert isinstance(cohorts, PoissonCohorts)  # no other kind keeps its cohorts secret
    return pld.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=cohorts.population,
        sampling_probability=cohorts.rate,
        truncated_batch_size=cohorts.largest,
        noise_multiplier=event.noise_multiplier,
        value_discretization_interval=interval,
    )


def _require_delta(target_delta: float) -> None:
    if not 0.0 < target_delta < 1.0:
        raise ValueError(f"target_delta is {target_delta}; give a number above 0 and below 1")


def _require_one_adjacency(spent: Spent) -> None:
    if len({event.cohorts.adjacency for event in spent}) > 1:
        raise ValueError(
            "releases with Poisson sampling (a user added or removed), with cohorts of a fixed "
            "size (a user replaced) and with noise per example (one example of a user) have no "
            "common guarantee; use only one of them"
        )
