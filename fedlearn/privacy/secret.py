"""Secret cohorts and noise, on which a privacy guarantee rests.

They never come from a run's public seed. A run that is configured as reproducible draws the same
way, but from keys derived from its seed, and has no guarantee.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedlearn.algorithms.cohorts import FixedCohorts, PoissonCohorts
from fedlearn.core.messages import ClientId
from fedlearn.core.noise import SecretStream, sample_discrete_gaussian
from fedlearn.core.randomness import Seed
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ConfigError


class Streams(Protocol):
    """A source of random streams."""

    def stream(self, *labels: str | int) -> SecretStream:
        """Return the stream for one purpose, named by ``labels``."""


class SecretStreams:
    """Streams with fresh keys from the operating system's generator, which cannot be repeated."""

    def stream(self, *labels: str | int) -> SecretStream:  # noqa: ARG002 - each stream is new anyway
        """Return a fresh stream."""
        return SecretStream.fresh()


@dataclass(frozen=True)
class ReproducibleStreams:
    """Streams that can be repeated with the seed: for experiments, without a guarantee."""

    seed: Seed

    def stream(self, *labels: str | int) -> SecretStream:
        """Return the stream of these labels."""
        text = repr((self.seed.value, *labels)).encode()
        return SecretStream(SecretBytes(hashlib.blake2b(text, digest_size=32).digest()))


@dataclass(frozen=True)
class DiscreteGaussianNoise:
    """Discrete Gaussian noise from ``streams``."""

    streams: Streams

    def draw(self, sigma: float, size: int, *, labels: tuple[str | int, ...]) -> Tensor:
        """Draw samples; see :class:`fedlearn.privacy.bounded_sum.Noise`."""
        samples = sample_discrete_gaussian(
            sigma, size, source=self.streams.stream("noise", *labels)
        )
        return torch.from_numpy(samples.astype(np.float64))


@dataclass(frozen=True)
class SecretPoissonSampler:
    """Poisson sampling: draws each available client with its own coin, independent of the others.

    Attributes:
        cohorts: The coin's rate, and the largest cohort, to which a larger one is cut at random.
        streams: Source of the coins.

    Example:
        >>> cohorts = PoissonCohorts(population=100, expected=10, largest=20)
        >>> sampler = SecretPoissonSampler(cohorts, ReproducibleStreams(Seed(0)))
        >>> at = {"cohort_size": 20, "round_num": 0, "attempt": 0, "seed": Seed(0)}
        >>> len(sampler.sample(range(100), **at))
        11

    References:
        Mironov, Talwar and Zhang, 2019, `Rényi Differential Privacy of the Sampled Gaussian
        Mechanism <https://arxiv.org/abs/1908.10530>`_.
    """

    cohorts: PoissonCohorts
    streams: Streams

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,  # noqa: ARG002 - the rate does not depend on what a round would ask
        round_num: int,
        attempt: int,
        seed: Seed,  # noqa: ARG002 - it is public
    ) -> tuple[ClientId, ...]:
        """Draw the cohort, which may be empty.

        Raises:
            ConfigError: More clients are available than were accounted for.
        """
        _require_counted(available, self.cohorts.population)
        stream = self.streams.stream("cohort", round_num, attempt)
        words = stream.words(np.uint64, len(available))
        threshold = round(self.cohorts.rate * 2.0**64)
        # A rate of 1 gives a threshold of 2**64, which does not fit a uint64: take all.
        chosen = np.flatnonzero(words < threshold if threshold < 1 << 64 else words >= 0)
        # Words below the threshold are uniform there, so the smallest are a uniform choice.
        if len(chosen) > self.cohorts.largest:
            chosen = np.sort(chosen[np.argsort(words[chosen])[: self.cohorts.largest]])
        return tuple(available[index] for index in chosen.tolist())


@dataclass(frozen=True)
class SecretUniformSampler:
    """Draws ``cohort_size`` of the available clients, uniformly without replacement.

    Attributes:
        cohorts: The population.
        streams: Source of the choice.
    """

    cohorts: FixedCohorts
    streams: Streams

    def sample(
        self,
        available: Sequence[ClientId],
        *,
        cohort_size: int,
        round_num: int,
        attempt: int,
        seed: Seed,  # noqa: ARG002 - it is public
    ) -> tuple[ClientId, ...]:
        """Draw the cohort: all available clients if there are fewer than ``cohort_size``.

        Raises:
            ConfigError: More clients are available than were accounted for.
        """
        _require_counted(available, self.cohorts.population)
        words = self.streams.stream("cohort", round_num, attempt).words(np.uint64, len(available))
        # The order of random words is a uniform permutation.
        chosen = np.sort(np.argsort(words, kind="stable")[:cohort_size])
        return tuple(available[index] for index in chosen.tolist())


def _require_counted(available: Sequence[ClientId], population: int) -> None:
    if len(available) > population:
        raise ConfigError(
            f"privacy.num_users is {population}, but {len(available)} clients are "
            "available; ε depends on the number of users that may enrol: revoke some, or start "
            "another run"
        )
