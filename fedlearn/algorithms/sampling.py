"""Which clients are asked in a round. Public: sampling alone hides nobody."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Gt

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.core.ranges import Ranged
from fedlearn.errors import CohortTooSmall


class CohortSampler(Protocol):
    """Chooses the cohort of a round from the clients that are available."""

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the cohort; the same arguments give the same cohort.

        Raises:
            CohortTooSmall: Fewer are available than the sampler must ask.
        """


class _Drawn:
    """Draws so many clients as a rule of its own says, uniformly without replacement."""

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return the cohort; see :class:`CohortSampler`."""
        population = len(available)
        if num_asked > population:
            raise CohortTooSmall(available=population, asked=num_asked)
        rng = seed.derive("cohort", round_num, attempt).numpy()
        chosen = rng.choice(population, self._size(num_asked, population, rng), replace=False)
        return tuple(available[index] for index in chosen.tolist())

    def _size(self, num_asked: int, population: int, rng: np.random.Generator) -> int:
        """Return how many clients to ask."""
        return num_asked


@dataclass(frozen=True)
class UniformSampler(_Drawn):
    """A fixed number of clients, uniformly without replacement.

    Example:
        >>> cohorts = [
        ...     UniformSampler().sample(range(9), num_asked=3, round_num=7, attempt=0, seed=Seed(0))
        ...     for _ in range(2)
        ... ]
        >>> cohorts[0] == cohorts[1]
        True
    """


@dataclass(frozen=True)
class PoissonSampler(Ranged, _Drawn):
    """Each client independently with rate ``num_asked / len(available)``, capped.

    The size of the cohort varies; a cohort above ``cap`` times its expectation is cut to
    the cap, uniformly. This is the sampling that the tightest privacy accounting assumes.

    Attributes:
        cap: Largest cohort as a multiple of the expected one, > 1.

    References:
        Mironov, Talwar and Zhang, 2019, `Rényi Differential Privacy of the Sampled
        Gaussian Mechanism <https://arxiv.org/abs/1908.10530>`_.
    """

    cap: Annotated[float, Gt(1)]

    def _size(self, num_asked: int, population: int, rng: np.random.Generator) -> int:
        largest = int(np.ceil(self.cap * num_asked))
        return min(int(rng.binomial(population, num_asked / population)), largest, population)
