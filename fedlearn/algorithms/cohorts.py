"""How the users in a cohort are drawn: what privacy accounts for."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from fedlearn.core.ranges import Count, Ranged


class Adjacency(StrEnum):
    """Which data sets a guarantee cannot tell apart: by one user, or by one example of a user."""

    ADD_OR_REMOVE = "add_or_remove"
    REPLACE = "replace"
    ZERO_OUT = "zero_out"


@dataclass(frozen=True)
class PoissonCohorts(Ranged):
    """Each user is asked in a round or not, by a coin of its own.

    Attributes:
        population: Users there are, N.
        expected: Mean size of a cohort, m <= N: the coin's rate is m / N.
        largest: A larger cohort is cut to this size, >= m.

    Raises:
        ValueError: They contradict each other.
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
        """A user is there or not."""
        return Adjacency.ADD_OR_REMOVE

    @property
    def rate(self) -> float:
        """How probable it is that a user is asked in a round."""
        return self.expected / self.population

    def participations(self, num_rounds: int) -> int:
        """Return in how many of so many rounds one user may be: all."""
        return num_rounds


@dataclass(frozen=True)
class FixedCohorts(Ranged):
    """So many users are asked in each round, uniformly without replacement.

    Attributes:
        population: Users there are, N.
        size: Users in a cohort, <= N.

    Raises:
        ValueError: They contradict each other.
    """

    population: Count
    size: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.size <= self.population:
            raise ValueError(f"size is {self.size}, above the population {self.population}")

    @property
    def largest(self) -> int:
        """The largest cohort: there is one size."""
        return self.size

    @property
    def rate(self) -> float:
        """How probable it is that a user is asked in a round."""
        return self.size / self.population

    @property
    def adjacency(self) -> Adjacency:
        """One user's data are others': the number of users is public."""
        return Adjacency.REPLACE

    def participations(self, num_rounds: int) -> int:
        """Return in how many of so many rounds one user may be: all."""
        return num_rounds


@dataclass(frozen=True)
class CyclicCohorts(Ranged):
    """Users are in groups, which are asked in turn: nobody is hidden by not being asked.

    Attributes:
        population: Users there are, N.
        expected: Users that a cohort shall have, m: there are as many groups as have so many.
        largest: Users in a group at the most, >= m.

    Raises:
        ValueError: They contradict each other, or there is one group.
    """

    population: Count
    expected: Count
    largest: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_groups < 2:  # noqa: PLR2004 - it takes two to take turns
            raise ValueError(
                f"expected is {self.expected}, and of {self.population} users not two groups can "
                f"be made that large; lower cohort.num_wanted to {max(1, self.population // 2)}, "
                "or have more users"
            )
        if not self.expected <= self.largest:
            raise ValueError(f"largest is {self.largest}, below what is expected: {self.expected}")

    @property
    def num_groups(self) -> int:
        """Groups, G: a user is in one of so many consecutive rounds."""
        return self.population // self.expected

    @property
    def adjacency(self) -> Adjacency:
        """A user is there or not: what the others' groups are does not depend on it."""
        return Adjacency.ADD_OR_REMOVE

    @property
    def rate(self) -> float:
        """How probable it is that a user is asked when its turn comes."""
        return 1.0

    def participations(self, num_rounds: int) -> int:
        """Return in how many of so many consecutive rounds one user may be.

        Example:
            >>> cohorts = CyclicCohorts(population=60, expected=15, largest=15)
            >>> [cohorts.participations(each) for each in (1, 4, 5, 8, 9)]
            [1, 1, 2, 2, 3]
        """
        return -(-num_rounds // self.num_groups)


#: How users are asked.
UserCohorts: TypeAlias = PoissonCohorts | FixedCohorts | CyclicCohorts
