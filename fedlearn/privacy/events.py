"""What is accounted for: releases of noisy sums, and how the users in them were drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from fedlearn.core.ranges import Count, Positive, Ranged


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


@dataclass(frozen=True)
class ExampleCohorts(Ranged):
    """What is hidden of a user is one example; that the user was asked is not.

    A user's other examples show in the release, and by them who was asked. So sampling users hides
    no example that was used: an example is used as seldom as its user is asked, and that is all.

    Attributes:
        population: Users there are, N.
        expected: Mean size of a cohort, m <= N: each user is asked with probability m / N, in each
            round anew.

    Raises:
        ValueError: They contradict each other.
    """

    population: Count
    expected: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.expected <= self.population:
            raise ValueError(f"expected is {self.expected}, above the population {self.population}")

    @property
    def adjacency(self) -> Adjacency:
        """What one example adds is there or not; all else stays in its place."""
        return Adjacency.ZERO_OUT

    @property
    def rate(self) -> float:
        """How probable it is that a user is asked in a round."""
        return self.expected / self.population

    def participations(self, num_rounds: int) -> int:
        """Return in how many of so many rounds one example may be: all."""
        return num_rounds


Cohorts: TypeAlias = UserCohorts | ExampleCohorts


@dataclass(frozen=True)
class Event(Ranged):
    """One release with Gaussian noise of what users, or their examples, add.

    Attributes:
        cohorts: How the cohort was drawn, and what is hidden in it.
        noise_multiplier: Standard deviation of the noise by the largest norm of one contribution,
            z > 0; of all that one taking part adds to, where that is several rounds.
        run: Name of the run whose turns these are, where users take turns; else empty.
    """

    cohorts: Cohorts
    noise_multiplier: Positive
    run: str = ""

    @property
    def distance(self) -> float:
        """How far one contribution moves it, in standard deviations of the noise: 1/z or 2/z."""
        moved = 2.0 if self.cohorts.adjacency is Adjacency.REPLACE else 1.0
        return moved / self.noise_multiplier

    def squared_distance(self, count: int) -> float:
        """Return how far one user moves so many releases, squared: at most."""
        return self.cohorts.participations(count) * self.distance**2

    def charged_by(self, run: str) -> "Event":
        """Return the event of a run: where users take turns, those of two runs are apart.

        Each run begins with turns of its own, so a user may be in the first round of each.

        Example:
            >>> event = Event(CyclicCohorts(population=60, expected=15, largest=15), 1.0)
            >>> event.charged_by("a") == event.charged_by("b")
            False
        """
        return replace(self, run=run) if isinstance(self.cohorts, CyclicCohorts) else self


#: By event how often.
Spent: TypeAlias = Mapping[Event, int]
