"""The privacy of single examples: their user may be asked, and sampling hides none of them."""

import math
from itertools import pairwise, product

import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedlearn.algorithms.cohorts import FixedCohorts, PoissonCohorts, UserCohorts
from fedlearn.algorithms.local import LocalSgd, LocalUpdate, LocalWork, Memory, Moment, Tensors
from fedlearn.algorithms.noised_gradients import NoisedGradients
from fedlearn.algorithms.own_training import OwnTraining
from fedlearn.algorithms.per_client import PerClient
from fedlearn.algorithms.recipes import EASGD, FedAvg, FedMedian, FedProx, Scaffold
from fedlearn.algorithms.strategy import Strategy
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.privacy.accounting import (
    calibrate,
    epsilon_against_coordinator,
    epsilon_of_release,
)
from fedlearn.privacy.events import Event, ExampleCohorts, Spent
from fedlearn.privacy.plan import ExampleLevelPlan
from fedlearn.privacy.secret import ReproducibleStreams

DELTA = 1e-5
COHORTS = ExampleCohorts(population=1000, expected=50)
SGD = LocalSgd(epochs=4, batch_size=8, learning_rate=0.5)


def gaussian_delta(epsilon: float, distance: float) -> float:
    """Return a Gaussian's δ: the integral of one density's excess over e^ε times the other."""
    start = epsilon / distance + distance / 2.0
    above = quad(lambda x: norm.pdf(x - distance) - math.exp(epsilon) * norm.pdf(x), start, 40.0)
    return float(above[0])


def delta_if_seen(epsilon: float, spent: Spent) -> float:
    """Return δ against an observer of the cohorts, by enumerating all courses of a run."""
    rounds = [event for event, count in spent.items() for _ in range(count)]
    total = 0.0
    for course in product((False, True), repeat=len(rounds)):
        chance, square = 1.0, 0.0
        for event, is_asked in zip(rounds, course, strict=True):
            chance *= event.cohorts.rate if is_asked else 1.0 - event.cohorts.rate
            square += event.distance**2 if is_asked else 0.0
        if square:
            total += chance * gaussian_delta(epsilon, math.sqrt(square))
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "spent",
    [
        {Event(COHORTS, 1.0): 1},
        {Event(COHORTS, 0.7): 6},
        {Event(COHORTS, 0.7): 3, Event(ExampleCohorts(10, 9), 2.0): 3},
    ],
)
def test_a_release_costs_the_mean_over_the_rounds_that_an_example_is_in(spent: Spent) -> None:
    """The oracle enumerates all courses of a run; the figure is never below it."""
    found = epsilon_of_release(spent, target_delta=DELTA)
    assert delta_if_seen(found, spent) == pytest.approx(DELTA, rel=1e-3)
    assert delta_if_seen(0.95 * found, spent) > DELTA * 1.05


@pytest.mark.slow
def test_sampling_of_users_does_not_amplify_for_their_examples() -> None:
    """The usual figure ignores that an attacker can tell from other examples who was asked."""
    usual = Event(PoissonCohorts(population=1000, expected=50, largest=1000), 1.0)
    claimed = epsilon_of_release({usual: 6}, target_delta=DELTA)
    assert delta_if_seen(claimed, {Event(COHORTS, 1.0): 6}) > 100.0 * DELTA
    assert epsilon_of_release({Event(COHORTS, 1.0): 6}, target_delta=DELTA) > 2.0 * claimed


def test_who_sees_the_cohorts_may_see_that_it_was_each() -> None:
    """Then, as where all users are asked, each round is one Gaussian at a distance of 1 / z."""
    all_asked = ExampleCohorts(population=1000, expected=1000)
    seen = epsilon_against_coordinator({Event(COHORTS, 2.0): 4}, target_delta=DELTA)
    assert seen == pytest.approx(4.377, abs=1e-3)
    assert epsilon_of_release({Event(all_asked, 2.0): 4}, target_delta=DELTA) == seen
    assert epsilon_of_release({Event(COHORTS, 2.0): 4}, target_delta=DELTA) < seen


def test_many_releases_of_many_kinds_are_rounded_up() -> None:
    """Runs with several noises cost what one run with one noise costs, plus a little."""
    one = epsilon_of_release({Event(COHORTS, 1.0): 400}, target_delta=DELTA)
    pieces = {Event(COHORTS, 1.0 + 1e-9 * piece): 100 for piece in range(4)}
    assert one <= epsilon_of_release(pieces, target_delta=DELTA) < 1.01 * one


def test_users_and_examples_have_no_common_guarantee() -> None:
    """Removing an example moves a user's update by up to twice the clip; the user stays in."""
    spent = {Event(COHORTS, 1.0): 1, Event(PoissonCohorts(1000, 50, 100), 1.0): 1}
    with pytest.raises(ValueError, match="no common guarantee"):
        epsilon_of_release(spent, target_delta=DELTA)


def test_calibrated_noise_is_enough_and_no_more() -> None:
    """The budget holds with it, and is exceeded with noise a hundredth smaller."""
    multiplier = calibrate(COHORTS, epsilon=3.0, target_delta=DELTA, num_rounds=50)
    found = [
        epsilon_of_release({Event(COHORTS, factor * multiplier): 50}, target_delta=DELTA)
        for factor in (1.0, 0.99)
    ]
    assert found[0] <= 3.0 < found[1]


def test_a_delta_that_needs_no_noise_is_refused() -> None:
    """It would allow everything about each asked user to be revealed."""
    with pytest.raises(
        ValueError, match=r"target_delta is 0.06.*not below the probability \(0.05\)"
    ):
        calibrate(COHORTS, epsilon=1.0, target_delta=0.06, num_rounds=1)
    with pytest.raises(ValueError, match="above the population 10"):
        ExampleCohorts(10, 11)


def plan(*, epochs: int = 4, cohorts: UserCohorts | None = None) -> ExampleLevelPlan:
    return ExampleLevelPlan(
        cohorts=cohorts or FixedCohorts(1000, 50),
        clip_norm=0.2,
        noise_multiplier=3.0,
        num_wanted=50,
        streams=ReproducibleStreams(Seed(0)),
        epochs=epochs,
    )


@pytest.mark.parametrize("cohorts", [FixedCohorts(1000, 50), PoissonCohorts(1000, 50, 100)])
def test_four_epochs_are_four_gaussians(cohorts: UserCohorts) -> None:
    """An example is in one batch of each: a noise of 3 leaves 1.5 a round."""
    assert plan(cohorts=cohorts).event == Event(COHORTS, 1.5)
    figures = [
        epsilon_of_release({plan(epochs=epochs).event: 20}, target_delta=DELTA)
        for epochs in (1, 2, 4)
    ]
    assert all(less < more for less, more in pairwise(figures))


@pytest.mark.parametrize(
    "inner",
    [
        FedAvg(SGD, weight_by_examples=False),
        FedProx(SGD, proximal=0.1, weight_by_examples=False),
        FedMedian(SGD),
        Scaffold(SGD, num_clients=100, server_learning_rate=1.0),
        EASGD(SGD, elasticity=0.02, cohort_size=100),
    ],
)
def test_every_step_of_every_client_is_noised(inner: Strategy) -> None:
    """The noise is outermost, around all rules, lanes and aggregations."""
    strategy = plan().wrap_strategy(inner)
    for local in (strategy.local, *strategy.locals_for([ClientId(0), ClientId(1)])):
        assert local == NoisedGradients(
            inner=inner.local, example_clip_norm=0.2, example_noise_multiplier=3.0
        )
    assert len(set(map(id, strategy.locals_for([ClientId(0), ClientId(1)])))) == 1
    assert strategy.lanes == inner.lanes
    assert strategy.aggregation == inner.aggregation


class Rule(LocalWork):
    """A user's own rule."""

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Do nothing."""


def lengthen(local: LocalUpdate) -> Strategy:
    """Return an algorithm in which one client's local update differs."""
    inner = FedAvg(SGD, weight_by_examples=False)
    return PerClient(inner, lambda client: local if client == 1 else SGD)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (FedAvg(SGD), "weighted by their numbers of examples"),
        (FedAvg(OwnTraining(epochs=1), weight_by_examples=False), "OwnTraining may use the"),
        (FedAvg(Rule(epochs=1, batch_size=2), weight_by_examples=False), "Rule may use the"),
    ],
)
def test_training_that_is_not_known_is_refused(inner: Strategy, reason: str) -> None:
    """So are weights that reveal numbers of examples; control: the strategies above."""
    with pytest.raises(ValueError, match=reason):
        plan().wrap_strategy(inner)


def test_a_client_that_would_do_more_than_is_accounted_for_is_refused() -> None:
    """Control: a client that does less is accepted."""
    longer = LocalSgd(epochs=5, batch_size=8, learning_rate=0.5)
    with pytest.raises(ValueError, match="5 epochs, but 4 are accounted for"):
        plan().wrap_strategy(lengthen(longer)).locals_for([ClientId(0), ClientId(1)])
    shorter = LocalSgd(epochs=1, batch_size=8, learning_rate=0.5)
    strategy = plan().wrap_strategy(lengthen(shorter))
    (local,) = strategy.locals_for([ClientId(1)])
    assert isinstance(local, NoisedGradients)
    assert local.inner == shorter
