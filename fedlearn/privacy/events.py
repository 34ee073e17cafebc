"""What is accounted for: releases of noisy sums, and how the users in them were drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from fedlearn.algorithms.cohorts import Adjacency, CyclicCohorts, UserCohorts
from fedlearn.core.ranges import Count, Positive, Ranged


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
