"""Cohorts are reproducible, and have the distribution that their sampler claims."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from fedlearn.algorithms.sampling import (
    CohortSampler,
    CyclicSampler,
    PoissonSampler,
    SeededSampler,
    UniformSampler,
)
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.errors import CohortTooSmall

SAMPLERS: list[CohortSampler] = [UniformSampler(), PoissonSampler(cap=2.0), CyclicSampler()]


def clients(count: int) -> list[ClientId]:
    return [ClientId(i) for i in range(count)]


def cohorts(
    sampler: CohortSampler, *, num_rounds: int, population: int = 20, cohort_size: int = 5
) -> list[tuple[ClientId, ...]]:
    available = clients(population)
    return [
        sampler.sample(available, cohort_size=cohort_size, round_num=r, attempt=0, seed=Seed(11))
        for r in range(num_rounds)
    ]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_seed_round_and_attempt_give_the_cohort(sampler: CohortSampler) -> None:
    """The same three give the same cohort, also after a resume; changing one changes it."""

    def cohort(seed: int, round_num: int, attempt: int) -> tuple[ClientId, ...]:
        return sampler.sample(
            clients(1000), cohort_size=50, round_num=round_num, attempt=attempt, seed=Seed(seed)
        )

    assert cohort(0, 3, 1) == cohort(0, 3, 1)
    others = [cohort(1, 3, 1), cohort(0, 4, 1), cohort(0, 3, 2)]
    assert all(other != cohort(0, 3, 1) for other in others)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_nobody_is_asked_twice(sampler: CohortSampler) -> None:
    """A cohort is a set of available clients."""
    for cohort in cohorts(sampler, num_rounds=50):
        assert len(set(cohort)) == len(cohort)
        assert set(cohort) <= set(clients(20))


def sample_with_bias(round_num: int) -> tuple[int, ...]:
    """Control: client 0 is asked more often than the others."""
    rng = Seed(5).derive("biased", round_num).numpy()
    chosen = rng.choice(20, 5, replace=False, p=[0.08, *[0.92 / 19] * 19])
    return tuple(chosen.tolist())


def uniform(round_num: int) -> tuple[int, ...]:
    return UniformSampler().sample(
        clients(20), cohort_size=5, round_num=round_num, attempt=0, seed=Seed(5)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "is_uniform"), [(uniform, True), (sample_with_bias, False)])
def test_uniform_sampling_asks_all_clients_alike(
    draw: Callable[[int], tuple[int, ...]], *, is_uniform: bool
) -> None:
    """A chi-square test over 4,000 rounds accepts the sampler and rejects the biased control."""
    num_rounds = 4000
    counts = np.bincount(np.concatenate([draw(r) for r in range(num_rounds)]), minlength=20)
    rate = 5 / 20
    # The counts have a fixed sum: the factor n / (n - 1) leaves n - 1 degrees of freedom.
    variance = num_rounds * rate * (1 - rate) * 20 / 19
    statistic = float(((counts - num_rounds * rate) ** 2).sum() / variance)
    assert (statistic < 43.8) is is_uniform  # 99.9 % quantile of chi-square with 19 degrees


@dataclass(frozen=True)
class Labeled(UniformSampler):
    """A sampler of one's own that has no hash."""

    labels: list[str]


@pytest.mark.parametrize("sampler", [UniformSampler(), PoissonSampler(cap=1.5), Labeled(["a"])])
def test_cohorts_that_are_drawn_together_are_those_of_each_round(sampler: SeededSampler) -> None:
    """All clients are available as a range; a list is drawn from by itself."""
    everyone = cast("Sequence[ClientId]", range(40))
    for round_num in (0, 5, 300):
        how: dict[str, Any] = {"round_num": round_num, "attempt": 0, "seed": Seed(3)}
        together = sampler.sample(everyone, cohort_size=10, **how)
        assert together == sampler.sample(list(everyone), cohort_size=10, **how)


def test_poisson_cohorts_have_the_mean_and_spread_of_a_binomial() -> None:
    """Sizes vary like sums of independent coin flips; the cap is far away."""
    sampler = PoissonSampler(cap=10.0)
    sizes = np.array([len(c) for c in cohorts(sampler, num_rounds=4000, population=100)])
    assert abs(sizes.mean() - 5.0) < 4 * np.sqrt(4.75 / 4000)
    assert abs(sizes.var() - 4.75) < 0.5
    assert sizes.min() < 2
    assert sizes.max() > 9


def test_the_cap_cuts_large_poisson_cohorts() -> None:
    """No cohort exceeds the cap, although without one some would."""
    sizes = [len(c) for c in cohorts(PoissonSampler(cap=1.2), num_rounds=500, population=100)]
    assert max(sizes) == 6


def test_cyclic_cohorts_ask_everybody_before_anybody_again() -> None:
    """Groups have the wanted size or one client more. A retry asks the next group."""
    drawn = cohorts(CyclicSampler(), num_rounds=8, population=23)
    assert sorted(client for cohort in drawn[:4] for client in cohort) == clients(23)
    assert drawn[:4] == drawn[4:]
    assert {len(cohort) for cohort in drawn} == {5, 6}
    again = CyclicSampler().sample(
        clients(23), cohort_size=5, round_num=0, attempt=1, seed=Seed(11)
    )
    assert again == drawn[1]


def test_no_group_is_made_of_neighbors() -> None:
    """Ids often correlate with data, so each group has clients from all parts of the range."""
    first, *_ = cohorts(CyclicSampler(), num_rounds=1, population=1000, cohort_size=100)
    assert [client // 10 for client in first] == list(range(100))
    assert {client % 10 for client in first} == set(range(10))


@pytest.mark.parametrize("cap", [1.0, 0.0, float("nan"), float("inf")])
def test_a_cap_at_or_below_the_expectation_is_refused(cap: float) -> None:
    """The cap would bias every round."""
    with pytest.raises(ValueError, match="cap"):
        PoissonSampler(cap=cap)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_population_below_the_cohort_is_an_error(sampler: CohortSampler) -> None:
    """The error contains both numbers. Control: a population of exactly the cohort's size."""
    with pytest.raises(CohortTooSmall, match=r"5 clients are asked .* has 4") as caught:
        cohorts(sampler, num_rounds=1, population=4)
    assert (caught.value.available, caught.value.cohort_size) == (4, 5)
    cohorts(sampler, num_rounds=1, population=5)


class CountedRange(Sequence[ClientId]):
    """A lazy population that counts lookups."""

    def __init__(self, count: int) -> None:
        self.size, self.looked_up = count, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:  # Any: one body for both overloads
        self.looked_up += 1
        return ClientId(range(self.size)[index])


@pytest.mark.parametrize("sampler", SAMPLERS[:2])
def test_a_million_clients_cost_as_much_as_the_cohort(sampler: CohortSampler) -> None:
    """Only the drawn clients are looked up."""
    population = CountedRange(1_000_000)
    cohort = sampler.sample(population, cohort_size=100, round_num=0, attempt=0, seed=Seed(0))
    assert population.looked_up == len(cohort) <= 200
