"""Sampling schemes of users as privacy accounting models them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from fedlearn.core.ranges import Count, Ranged


class Adjacency(StrEnum):
    """Neighboring data sets of a privacy guarantee: how they differ in one user or one example."""

    ADD_OR_REMOVE = "add_or_remove"
    REPLACE = "replace"
    ZERO_OUT = "zero_out"


@dataclass(frozen=True)
class PoissonCohorts(Ranged):
    """Poisson sampling: each user is in a cohort independently, with the same probability.

    Attributes:
        population: Number of users, N.
        expected: Mean size of a cohort, m <= N: the sampling rate is m / N.
        largest: A larger cohort is cut to this size, >= m.

    Raises:
        ValueError: The numbers contradict each other.
    """

    population: Count
    expected: Count
    largest: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.expected <= self.population:
            raise ValueError(f"expected is {self.expected}, above the population {self.population}")
        if not self.expected <= self.largest:
            raise ValueError(f"largest is {self.largest}, below what is expected: {self.expected}")

    @property
    def adjacency(self) -> Adjacency:
        """Neighbors differ by the presence of one user."""
        return Adjacency.ADD_OR_REMOVE

    @property
    def rate(self) -> float:
        """Probability that a user is asked in a round."""
        return self.expected / self.population

    def participations(self, num_rounds: int) -> int:
        """Return the most rounds that one user can be in: all of them."""
        return num_rounds


@dataclass(frozen=True)
class FixedCohorts(Ranged):
    """Cohorts of a fixed size, drawn uniformly without replacement.

    Attributes:
        population: Number of users, N.
        size: Users in a cohort, <= N.

    Raises:
        ValueError: The numbers contradict each other.
    """

    population: Count
    size: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.size <= self.population:
            raise ValueError(f"size is {self.size}, above the population {self.population}")

    @property
    def largest(self) -> int:
        """Size of the largest cohort: all have the same size."""
        return self.size

    @property
    def rate(self) -> float:
        """Probability that a user is asked in a round."""
        return self.size / self.population

    @property
    def adjacency(self) -> Adjacency:
        """Neighbors differ in the data of one user: the number of users is public."""
        return Adjacency.REPLACE

    def participations(self, num_rounds: int) -> int:
        """Return the most rounds that one user can be in: all of them."""
        return num_rounds


@dataclass(frozen=True)
class CyclicCohorts(Ranged):
    """Groups of users that take turns. Without random sampling there is no privacy amplification.

    Attributes:
        population: Number of users, N.
        expected: Wanted size of a cohort, m: there are floor(N / m) groups.
        largest: Most users in a group, >= m.

    Raises:
        ValueError: The numbers contradict each other, or there are fewer than two groups.
    """

    population: Count
    expected: Count
    largest: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_groups < 2:  # noqa: PLR2004 - one group alone would be asked every round
            raise ValueError(
                f"expected is {self.expected}, too many for two groups of {self.population} "
                f"users; lower cohort.num_wanted to {max(1, self.population // 2)}, or add users"
            )
        if not self.expected <= self.largest:
            raise ValueError(f"largest is {self.largest}, below what is expected: {self.expected}")

    @property
    def num_groups(self) -> int:
        """Number of groups, G: a user takes part in one of G consecutive rounds."""
        return self.population // self.expected

    @property
    def adjacency(self) -> Adjacency:
        """Neighbors differ by the presence of one user, which moves no other to another group."""
        return Adjacency.ADD_OR_REMOVE

    @property
    def rate(self) -> float:
        """Probability that a user is asked when its turn comes."""
        return 1.0

    def participations(self, num_rounds: int) -> int:
        """Return the most rounds that one user can be in, out of ``num_rounds`` consecutive ones.

        Example:
            >>> cohorts = CyclicCohorts(population=60, expected=15, largest=15)
            >>> [cohorts.participations(each) for each in (1, 4, 5, 8, 9)]
            [1, 1, 2, 2, 3]
        """
        # Rounded up: the user's turn may come first.
        return -(-num_rounds // self.num_groups)


#: Any sampling scheme that privacy can account for.
UserCohorts: TypeAlias = PoissonCohorts | FixedCohorts | CyclicCohorts
