"""Which clients are asked in a round. Public: sampling alone hides nobody."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
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


@dataclass(frozen=True)
class UniformSampler:
    """A fixed number of clients, uniformly without replacement.

    Example:
        >>> UniformSampler().sample(
        ...     range(1_000_000), num_asked=3, round_num=7, attempt=0, seed=Seed(0)
        ... ) == UniformSampler().sample(
        ...     range(1_000_000), num_asked=3, round_num=7, attempt=0, seed=Seed(0)
        ... )
        True
    """

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return ``num_asked`` distinct clients."""
        if num_asked > len(available):
            raise CohortTooSmall(available=len(available), asked=num_asked)
        rng = seed.derive("cohort", round_num, attempt).numpy()
        chosen = rng.choice(len(available), num_asked, replace=False)
        return tuple(available[index] for index in chosen.tolist())


@dataclass(frozen=True)
class PoissonSampler:
    """Each client independently with rate ``num_asked / len(available)``, capped.

    The size of the cohort varies; a cohort above ``cap`` times its expectation is cut to
    the cap, uniformly. This is the sampling that the tightest privacy accounting assumes.

    Attributes:
        cap: Largest cohort as a multiple of the expected one, > 1.

    References:
        Mironov, Talwar and Zhang, 2019, `Rényi Differential Privacy of the Sampled
        Gaussian Mechanism <https://arxiv.org/abs/1908.10530>`_.
    """

    cap: float

    def __post_init__(self) -> None:
        if not 1.0 < self.cap < float("inf"):
            raise ValueError(f"cap is {self.cap}; it is finite and above 1")

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        num_asked: int,
        round_num: int,
        attempt: int,
        seed: Seed,
    ) -> tuple[ClientId, ...]:
        """Return a cohort of random size with expectation ``num_asked``."""
        population = len(available)
        if num_asked > population:
            raise CohortTooSmall(available=population, asked=num_asked)
        rng = seed.derive("cohort", round_num, attempt).numpy()
        size = min(int(rng.binomial(population, num_asked / population)), self._largest(num_asked))
        chosen = rng.choice(population, min(size, population), replace=False)
        return tuple(available[index] for index in chosen.tolist())

    def _largest(self, num_asked: int) -> int:
        return int(np.ceil(self.cap * num_asked))
