"""Privacy accounting: published figures, independent oracles, and mistakes that must be caught."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import (
    from_gaussian_mechanism,
    from_truncated_subsampled_gaussian_mechanism,
)
from dp_accounting.rdp import RdpAccountant
from scipy.integrate import quad
from scipy.stats import norm

from fedlearn.algorithms.cohorts import CyclicCohorts, FixedCohorts, PoissonCohorts
from fedlearn.privacy.accounting import (
    calibrate,
    epsilon_against_coordinator,
    epsilon_of_release,
)
from fedlearn.privacy.events import Event
from fedlearn.privacy.gaussian import gaussian_epsilon

DELTA = 1e-6
POISSON = PoissonCohorts(population=10_000, expected=100, largest=200)
FIXED = FixedCohorts(population=10_000, size=100)
FIXED_EVENT = Event(FIXED, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cohorts", "multiplier", "expected"),
    [
        (POISSON, 1.0, 1.5803),
        (POISSON, 2.0, 0.5051),
        (FIXED, 1.0, 12.184),
        (FIXED, 2.0, 1.587),
    ],
)
def test_the_figures_of_a_release(
    cohorts: PoissonCohorts | FixedCohorts, multiplier: float, expected: float
) -> None:
    """N = 10,000, m = 100, T = 500, δ = 1e-6, computed independently of this code."""
    spent = {Event(cohorts, multiplier): 500}
    assert epsilon_of_release(spent, target_delta=DELTA) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("multiplier", "expected"), [(1.0, 355.38), (2.0, 114.81)])
def test_the_figures_against_a_coordinator(multiplier: float, expected: float) -> None:
    """Without amplification by sampling; for replaced users the noise counts half."""
    for cohorts, factor in ((POISSON, 1.0), (FIXED, 2.0)):
        spent = {Event(cohorts, factor * multiplier): 500}
        found = epsilon_against_coordinator(spent, target_delta=DELTA)
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("multiplier", "epochs", "published"), [(1.12, 60, 2.92), (0.6, 30, 9.74), (1.2, 10, 1.20)]
)
def test_published_figures_bound_ours(multiplier: float, epochs: int, published: float) -> None:
    """TensorFlow Privacy's tutorial (MNIST, B = 256, δ = 1e-5) uses Rényi divergences: looser."""
    cohorts = PoissonCohorts(population=60_000, expected=256, largest=60_000)
    spent = {Event(cohorts, multiplier): epochs * 60_000 // 256}
    assert 0.6 * published < epsilon_of_release(spent, target_delta=1e-5) < published


@pytest.mark.slow
def test_a_large_figure_is_found_quickly_and_no_worse() -> None:
    """Losses are on a grid no finer than necessary: still an upper bound, and as tight."""
    finer = from_truncated_subsampled_gaussian_mechanism(
        dataset_size=10_000,
        sampling_probability=0.01,
        truncated_batch_size=200,
        noise_multiplier=0.5,
        value_discretization_interval=4e-4,  # a quarter of ours
    ).self_compose(500)
    expected = finer.get_epsilon_for_delta(DELTA)
    found = epsilon_of_release({Event(POISSON, 0.5): 500}, target_delta=DELTA)
    assert expected * (1 - 1e-9) <= found < expected * (1 + 1e-4)


@pytest.mark.parametrize("distance", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_the_gaussian_mechanism_by_its_definition(distance: float, delta: float) -> None:
    """δ is the integral of one density's excess over e^ε times the other."""
    spent = {Event(PoissonCohorts(1, 1, 1), 1.0 / distance): 1}
    epsilon = epsilon_against_coordinator(spent, target_delta=delta)

    def above(x: float) -> float:
        excess = float(norm.pdf(x, loc=distance)) - math.exp(epsilon) * float(norm.pdf(x))
        return max(0.0, excess)

    begin = epsilon / distance + distance / 2  # below it the difference is negative
    found, _ = quad(above, begin, begin + 12.0, epsabs=0.0, epsrel=1e-9)
    assert found == pytest.approx(delta, rel=1e-4)


@pytest.mark.slow
def test_without_sampling_both_figures_are_one() -> None:
    """It also equals the result of an accountant that convolves losses, for plain Gaussians."""
    cohorts = PoissonCohorts(50, 50, 50)
    spent = {Event(cohorts, 1.5): 3, Event(cohorts, 4.0): 9}
    release = epsilon_of_release(spent, target_delta=1e-5)
    assert release == epsilon_against_coordinator(spent, target_delta=1e-5)
    losses = [
        from_gaussian_mechanism(event.noise_multiplier).self_compose(count)
        for event, count in spent.items()
    ]
    convolved = losses[0].compose(losses[1]).get_epsilon_for_delta(1e-5)
    assert release == pytest.approx(convolved, rel=1e-4)
    # Together with releases of sampled cohorts, the others are convolved too.
    more = {**spent, Event(PoissonCohorts(50, 5, 10), 9.0): 1}
    assert release < epsilon_of_release(more, target_delta=1e-5) < 1.05 * release


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", [0.8, 3.0])
def test_a_renyi_accountant_bounds_the_losses(multiplier: float) -> None:
    """For plain Poisson sampling they differ by little: the cap, and the tighter accountant."""
    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(0.02, GaussianDpEvent(multiplier)), 40)
    bound = float(accountant.get_epsilon(1e-5))
    cohorts = PoissonCohorts(population=5000, expected=100, largest=200)
    ours = epsilon_of_release({Event(cohorts, multiplier): 40}, target_delta=1e-5)
    assert 0.7 * bound < ours < bound


@pytest.mark.slow
@pytest.mark.parametrize(("multiplier", "renyi"), [(1.0, 17.859), (2.0, 2.885)])
def test_a_fixed_size_costs_less_than_its_renyi_divergences_say(
    multiplier: float, renyi: float
) -> None:
    """From the accountant of Wang et al. (2019), with the noise for the distance 2C."""
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    release = SampledWithoutReplacementDpEvent(10_000, 100, GaussianDpEvent(multiplier / 2.0))
    accountant.compose(release, 500)
    bound = float(accountant.get_epsilon(DELTA))
    assert bound == pytest.approx(renyi, rel=1e-3)
    assert epsilon_of_release({Event(FIXED, multiplier): 500}, target_delta=DELTA) < 0.7 * bound


@pytest.mark.slow
def test_a_tight_cap_costs_something() -> None:
    """If a cohort is cut, one user's membership depends on the others."""
    epsilons = [
        epsilon_of_release(
            {Event(PoissonCohorts(population=400, expected=40, largest=largest), 1.0): 5},
            target_delta=1e-5,
        )
        for largest in (400, 45)
    ]
    assert epsilons[0] < epsilons[1]


@pytest.mark.slow
def test_what_is_spent_adds_up_over_runs_of_different_noise() -> None:
    """Two runs cost more than either and less than the sum of their ε; no rounds cost nothing."""
    first, second = Event(POISSON, 2.0), Event(PoissonCohorts(10_000, 50, 100), 1.5)
    each = [epsilon_of_release({event: 10}, target_delta=DELTA) for event in (first, second)]
    both = epsilon_of_release({first: 10, second: 10}, target_delta=DELTA)
    assert max(each) < both < sum(each)
    assert epsilon_of_release({first: 10, second: 0}, target_delta=DELTA) == each[0]
    assert epsilon_of_release({}, target_delta=DELTA) == 0.0
    assert epsilon_against_coordinator({}, target_delta=DELTA) == 0.0


TURNS = Event(CyclicCohorts(population=60, expected=15, largest=15), 2.0)


@pytest.mark.parametrize(("num_rounds", "turns"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_users_that_take_turns_are_in_one_round_of_so_many(num_rounds: int, turns: int) -> None:
    """With 4 groups. Seeing the cohorts reveals nothing more, and sampling amplifies nothing."""
    expected = gaussian_epsilon(math.sqrt(turns) / 2.0, DELTA)
    for figure in (epsilon_of_release, epsilon_against_coordinator):
        assert figure({TURNS: num_rounds}, target_delta=DELTA) == pytest.approx(expected, rel=1e-9)
    everybody = Event(PoissonCohorts(population=60, expected=60, largest=60), 2.0)
    assert epsilon_of_release({everybody: turns}, target_delta=DELTA) == pytest.approx(expected)


def test_the_turns_of_two_runs_are_rounded_up_apart() -> None:
    """A user may be in the first round of both; rounds within one run add up before rounding."""
    apart = {TURNS.for_run("a"): 5, TURNS.for_run("b"): 3}
    expected = gaussian_epsilon(math.sqrt(2 + 1) / 2.0, DELTA)
    for figure in (epsilon_of_release, epsilon_against_coordinator):
        assert figure(apart, target_delta=DELTA) == pytest.approx(expected, rel=1e-9)
    together = {TURNS.for_run("a"): 5 + 3}
    assert epsilon_of_release(together, target_delta=DELTA) < expected
    assert FIXED_EVENT.for_run("a") == FIXED_EVENT


@pytest.mark.slow
def test_turns_add_up_with_sampled_rounds_and_not_with_replaced_users() -> None:
    """For added or removed users, by their losses, and at most as if all users were asked."""
    sampled = Event(PoissonCohorts(population=60, expected=15, largest=60), 2.0)
    both = {TURNS.for_run("a"): 8, sampled: 4}
    found = epsilon_of_release(both, target_delta=DELTA)
    turns_alone = epsilon_of_release({TURNS: 8}, target_delta=DELTA)
    assert turns_alone < found < gaussian_epsilon(math.sqrt(2 + 4) / 2.0, DELTA)
    # The losses of the turns alone, from the other accountant.
    loss = from_gaussian_mechanism(2.0, value_discretization_interval=1e-4).self_compose(2)
    assert turns_alone == pytest.approx(loss.get_epsilon_for_delta(DELTA), rel=1e-3)
    with pytest.raises(ValueError, match="no common guarantee"):
        epsilon_of_release({TURNS: 1, FIXED_EVENT: 1}, target_delta=DELTA)


@pytest.mark.parametrize("num_rounds", [1, 4, 5, 17])
def test_noise_is_found_for_users_that_take_turns(num_rounds: int) -> None:
    """It suffices, and a hundredth less does not."""
    found = calibrate(TURNS.cohorts, epsilon=3.0, target_delta=DELTA, num_rounds=num_rounds)
    turns = -(-num_rounds // 4)
    assert gaussian_epsilon(math.sqrt(turns) / found, DELTA) <= 3.0
    assert gaussian_epsilon(math.sqrt(turns) / (0.99 * found), DELTA) > 3.0


@pytest.mark.parametrize(("population", "expected"), [(60, 31), (1, 1)])
def test_one_group_takes_no_turns(population: int, expected: int) -> None:
    """Its users would be in every round."""
    with pytest.raises(ValueError, match=rf"expected is {expected}.*lower cohort.num_wanted"):
        CyclicCohorts(population=population, expected=expected, largest=population)
    with pytest.raises(ValueError, match="largest is 14, below what is expected: 15"):
        CyclicCohorts(population=60, expected=15, largest=14)


def test_adjacencies_do_not_mix() -> None:
    """No single guarantee bounds both figures."""
    spent = {Event(POISSON, 1.0): 1, Event(FIXED, 1.0): 1}
    for figure in (epsilon_of_release, epsilon_against_coordinator):
        with pytest.raises(ValueError, match="no common guarantee"):
            figure(spent, target_delta=DELTA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cohorts", "epsilon"), [(PoissonCohorts(1000, 100, 200), 0.3), (FixedCohorts(1000, 50), 4.0)]
)
def test_a_calibrated_multiplier_is_enough_and_no_more(
    cohorts: PoissonCohorts | FixedCohorts, epsilon: float
) -> None:
    """The budget holds with it, and is exceeded with a multiplier a hundredth smaller."""
    multiplier = calibrate(cohorts, epsilon=epsilon, target_delta=1e-4, num_rounds=20)
    found = [
        epsilon_of_release({Event(cohorts, factor * multiplier): 20}, target_delta=1e-4)
        for factor in (1.0, 0.99)
    ]
    assert found[0] <= epsilon < found[1]


@pytest.mark.slow
def test_more_noise_or_fewer_rounds_cost_less() -> None:
    """A smaller δ costs more."""
    spent = [{Event(FIXED, 2.0): 50}, {Event(FIXED, 2.0): 40}, {Event(FIXED, 3.0): 40}]
    epsilons = [epsilon_of_release(each, target_delta=DELTA) for each in spent]
    assert all(more > less for more, less in pairwise(epsilons))
    assert epsilon_of_release(spent[0], target_delta=1e-9) > epsilons[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PoissonCohorts(10, 11, 11), "above the population 10"),
        (lambda: PoissonCohorts(10, 5, 4), "below what is expected: 5"),
        (lambda: FixedCohorts(10, 11), "above the population 10"),
        (lambda: FixedCohorts(10, 0), "size is 0"),
        (lambda: Event(FIXED, 0.0), "noise_multiplier is 0"),
        (lambda: epsilon_of_release({}, target_delta=0.0), "target_delta is 0"),
        (lambda: epsilon_against_coordinator({}, target_delta=1.0), "target_delta is 1"),
        (
            lambda: calibrate(FIXED, epsilon=0.0, target_delta=DELTA, num_rounds=1),
            "epsilon is 0",
        ),
        (
            lambda: calibrate(FIXED, epsilon=1.0, target_delta=DELTA, num_rounds=0),
            "num_rounds is 0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object], message: str) -> None:
    """The error names the place and the value."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("cohorts", [POISSON, FIXED])
@pytest.mark.parametrize("multiplier", [1e-3, 1e-9])
def test_next_to_no_noise_costs_what_it_costs_without_sampling(
    cohorts: PoissonCohorts | FixedCohorts, multiplier: float
) -> None:
    """The answer is immediate and finite: exact arithmetic with so little noise took minutes."""
    event = Event(cohorts, multiplier)
    expected = gaussian_epsilon(math.sqrt(event.squared_distance(100)), DELTA)
    assert epsilon_of_release({event: 100}, target_delta=DELTA) == expected


def test_a_budget_of_millions_is_calibrated_for() -> None:
    """The grid of losses must stay within the exponents that floats can raise e to."""
    found = calibrate(POISSON, epsilon=1e6, target_delta=DELTA, num_rounds=100)
    assert epsilon_of_release({Event(POISSON, found): 100}, target_delta=DELTA) <= 1e6


@pytest.mark.slow
def test_little_noise_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of grid points is bounded; ε stays above the exact value without a cap."""
    event, exactly = Event(POISSON, 0.02), from_truncated_subsampled_gaussian_mechanism
    most, intervals = gaussian_epsilon(event.distance, DELTA), list[float]()

    def counted(*, value_discretization_interval: float, **others: float) -> object:
        intervals.append(value_discretization_interval)
        return exactly(value_discretization_interval=value_discretization_interval, **others)

    monkeypatch.setattr(
        privacy_loss_distribution, "from_truncated_subsampled_gaussian_mechanism", counted
    )
    found = epsilon_of_release({event: 1}, target_delta=DELTA)
    assert max(most / each for each in intervals) <= 1 << 16
    # A single release by independent coins: the Gaussian's at δ / q, and its odds times q.
    rate = event.cohorts.rate
    assert gaussian_epsilon(event.distance, DELTA / rate) + math.log(rate) <= found <= most
