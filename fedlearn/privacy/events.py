"""What is accounted for: releases of noisy sums, and how the users in them were drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from fedlearn.core.ranges import Count, Positive, Ranged


class Adjacency(StrEnum):
    """Which data sets a guarantee cannot tell apart: by the one user that is in it or not."""

    ADD_OR_REMOVE = "add_or_remove"
    REPLACE = "replace"


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


Cohorts: TypeAlias = PoissonCohorts | FixedCohorts


@dataclass(frozen=True)
class Event(Ranged):
    """One release of the sum over a cohort with Gaussian noise.

    Attributes:
        cohorts: How the cohort was drawn.
        noise_multiplier: Standard deviation of the noise by the largest norm of one user's
            contribution, z > 0.
    """

    cohorts: Cohorts
    noise_multiplier: Positive

    @property
    def distance(self) -> float:
        """How far one user moves the sum, in standard deviations of the noise: 1/z or 2/z."""
        moved = 2.0 if self.cohorts.adjacency is Adjacency.REPLACE else 1.0
        return moved / self.noise_multiplier


#: By event how often.
Spent: TypeAlias = Mapping[Event, int]
