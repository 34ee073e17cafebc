"""Secret cohorts: their distribution, and their source of randomness."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest

from fedlearn.algorithms.cohorts import FixedCohorts, PoissonCohorts
from fedlearn.algorithms.sampling import CohortSampler
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import ConfigError
from fedlearn.privacy.secret import (
    DiscreteGaussianNoise,
    ReproducibleStreams,
    SecretPoissonSampler,
    SecretStreams,
    SecretUniformSampler,
)

ROUNDS = 2000


def cohorts(sampler: CohortSampler, population: int, *, cohort_size: int) -> list[Sequence[int]]:
    """Return the cohorts of many rounds."""
    available = cast("Sequence[ClientId]", range(population))
    return [
        sampler.sample(
            available, cohort_size=cohort_size, round_num=round_num, attempt=0, seed=Seed(0)
        )
        for round_num in range(ROUNDS)
    ]


def within(count: float, expected: float, variance: float) -> bool:
    """Tell whether a count is within 5 standard deviations of its expectation."""
    return abs(count - expected) < 5.0 * math.sqrt(variance)


def test_each_client_is_asked_by_a_coin_of_its_own() -> None:
    """At the given rate, and pairs as often as two coins agree."""
    sampler = SecretPoissonSampler(PoissonCohorts(40, 10, 40), ReproducibleStreams(Seed(1)))
    drawn = cohorts(sampler, 40, cohort_size=1)
    counts = Counter(client for cohort in drawn for client in cohort)
    assert all(within(counts[each], ROUNDS / 4, ROUNDS * 3 / 16) for each in range(40))
    both = sum({3, 17} <= set(cohort) for cohort in drawn)
    assert within(both, ROUNDS / 16, ROUNDS * 15 / 256)
    sizes = [len(cohort) for cohort in drawn]
    spread = sum((size - 10) ** 2 for size in sizes) / ROUNDS
    assert spread == pytest.approx(40 * 3 / 16, rel=0.2)


def test_who_is_there_changes_nobodys_chance() -> None:
    """With half of the clients away, the others are asked as often as before, not twice."""
    sampler = SecretPoissonSampler(PoissonCohorts(40, 10, 40), ReproducibleStreams(Seed(2)))
    counts = Counter(client for cohort in cohorts(sampler, 20, cohort_size=10) for client in cohort)
    assert all(within(counts[each], ROUNDS / 4, ROUNDS * 3 / 16) for each in range(20))


def test_a_large_cohort_is_cut_uniformly() -> None:
    """To the maximum; each client loses its place equally often."""
    sampler = SecretPoissonSampler(PoissonCohorts(12, 6, 6), ReproducibleStreams(Seed(3)))
    drawn = cohorts(sampler, 12, cohort_size=1)
    assert max(map(len, drawn)) == 6
    counts = Counter(client for cohort in drawn for client in cohort)
    mean = sum(counts.values()) / 12
    assert all(within(counts[each], mean, mean) for each in range(12))
    assert all(list(cohort) == sorted(set(cohort)) for cohort in drawn)


def test_all_are_asked_at_rate_one_and_cohorts_may_be_empty() -> None:
    """The ends of the range."""
    everyone = SecretPoissonSampler(PoissonCohorts(5, 5, 5), ReproducibleStreams(Seed(4)))
    assert all(len(cohort) == 5 for cohort in cohorts(everyone, 5, cohort_size=1))
    few = SecretPoissonSampler(PoissonCohorts(5, 1, 2), ReproducibleStreams(Seed(4)))
    assert min(map(len, cohorts(few, 5, cohort_size=1))) == 0


def test_cohorts_of_a_fixed_size_are_uniform() -> None:
    """Each client is equally likely; with fewer than the size available, all are asked."""
    sampler = SecretUniformSampler(FixedCohorts(20, 5), ReproducibleStreams(Seed(5)))
    drawn = cohorts(sampler, 20, cohort_size=5)
    assert all(len(set(cohort)) == 5 for cohort in drawn)
    counts = Counter(client for cohort in drawn for client in cohort)
    assert all(within(counts[each], ROUNDS / 4, ROUNDS * 3 / 16) for each in range(20))
    assert all(list(cohort) == [0, 1, 2] for cohort in cohorts(sampler, 3, cohort_size=5)[:5])


@pytest.mark.parametrize(
    "sampler",
    [
        SecretPoissonSampler(PoissonCohorts(12, 6, 6), SecretStreams()),
        SecretUniformSampler(FixedCohorts(12, 6), SecretStreams()),
    ],
)
def test_more_clients_than_were_counted_are_refused(sampler: CohortSampler) -> None:
    """ε was computed for fewer; control: that number itself is accepted."""
    cohorts(sampler, 12, cohort_size=6)
    with pytest.raises(ConfigError, match="num_users is 12, but 13 clients are available"):
        cohorts(sampler, 13, cohort_size=6)


@pytest.mark.parametrize("attempt", [0, 1])
def test_secret_draws_are_never_the_same(attempt: int) -> None:
    """Whatever the labels and the public seed; reproducible draws depend on both."""
    labels = ("delta", 0, attempt)
    one, two = (
        DiscreteGaussianNoise(SecretStreams()).draw(50.0, 64, labels=labels) for _ in range(2)
    )
    assert one.tolist() != two.tolist()
    streams = ReproducibleStreams(Seed(7))
    again = [
        DiscreteGaussianNoise(streams).draw(50.0, 64, labels=labels).tolist() for _ in range(2)
    ]
    assert again[0] == again[1]
    for other in (("delta", 1, attempt), ("control", 0, attempt), ("delta", 0, attempt + 1)):
        assert DiscreteGaussianNoise(streams).draw(50.0, 64, labels=other).tolist() != again[0]
    other_seed = DiscreteGaussianNoise(ReproducibleStreams(Seed(8))).draw(50.0, 64, labels=labels)
    assert other_seed.tolist() != again[0]
