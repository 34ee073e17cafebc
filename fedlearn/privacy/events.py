"""Privacy events: the releases of noisy sums to account for, and how their cohorts were drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from fedlearn.algorithms.cohorts import Adjacency, CyclicCohorts, UserCohorts
from fedlearn.core.ranges import Count, Positive, Ranged


@dataclass(frozen=True)
class ExampleCohorts(Ranged):
    """Cohorts of a guarantee that hides one example of a user, but not that the user took part.

    A user's other examples show in the release, and reveal that the user was sampled. So sampling
    users does not hide an example that was used; it only makes the use of an example less likely.

    Attributes:
        population: Number of users, N.
        expected: Mean size of a cohort, m <= N: in each round, each user is sampled independently
            with probability m / N.

    Raises:
        ValueError: ``expected`` is above ``population``.
    """

    population: Count
    expected: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.expected <= self.population:
            raise ValueError(f"expected is {self.expected}, above the population {self.population}")

    @property
    def adjacency(self) -> Adjacency:
        """Neighbors differ by one example's contribution, which is zero in one of them."""
        return Adjacency.ZERO_OUT

    @property
    def rate(self) -> float:
        """The probability that a user is sampled in a round."""
        return self.expected / self.population

    def participations(self, num_rounds: int) -> int:
        """Return the most rounds out of ``num_rounds`` that one example can be in: all."""
        return num_rounds


Cohorts: TypeAlias = UserCohorts | ExampleCohorts


@dataclass(frozen=True)
class Event(Ranged):
    """One release, with Gaussian noise, of a sum over users or their examples.

    Attributes:
        cohorts: How the cohort was drawn, and what is hidden in it.
        noise_multiplier: Standard deviation of the noise relative to the largest norm of one
            contribution, z > 0. A contribution that is spread over several rounds counts as a
            whole.
        run: Name of the run, where users take turns; otherwise empty.
    """

    cohorts: Cohorts
    noise_multiplier: Positive
    run: str = ""

    @property
    def distance(self) -> float:
        """How far one contribution moves the sum, in standard deviations of noise: 1/z or 2/z."""
        moved = 2.0 if self.cohorts.adjacency is Adjacency.REPLACE else 1.0
        return moved / self.noise_multiplier

    def squared_distance(self, count: int) -> float:
        """Return the largest squared distance that one user moves ``count`` releases by."""
        return self.cohorts.participations(count) * self.distance**2

    def for_run(self, run: str) -> "Event":
        """Return the event as charged by a run: where users take turns, each run has its own event.

        Turns start over with each run, so a user may be in the first round of each.

        Example:
            >>> event = Event(CyclicCohorts(population=60, expected=15, largest=15), 1.0)
            >>> event.for_run("a") == event.for_run("b")
            False
        """
        return replace(self, run=run) if isinstance(self.cohorts, CyclicCohorts) else self


#: Number of releases by event.
Spent: TypeAlias = Mapping[Event, int]
