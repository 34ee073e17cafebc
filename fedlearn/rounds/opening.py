"""Who takes part in a round: the one step between two rounds that asks nobody.

A simulation only samples. A deployment writes down whom it will ask
(:class:`fedlearn.deployment.opening.DurableOpening`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedlearn.algorithms.flight import Draw
from fedlearn.algorithms.sampling import CohortSampler, without
from fedlearn.algorithms.stragglers import StragglerPolicy
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed


class Opening(Protocol):
    """Opens rounds: when it returns, the clients of the cohort may be asked."""

    def open(self, round_num: int, *, attempt: int) -> tuple[ClientId, ...]:
        """Return the cohort of an attempt at a round.

        Args:
            round_num: Index, from 0.
            attempt: 0, or how often this round was tried before; another attempt asks others.

        Raises:
            CohortTooSmall: Fewer clients are available than are asked.
        """


@dataclass(frozen=True, kw_only=True)
class SampledOpening:
    """An opening that samples among the clients that are available, and no more.

    Attributes:
        sampler: Chooses.
        available: Returns the clients that can be asked now.
        policy: How many are asked.
        seed: Of the choice.
    """

    sampler: CohortSampler
    available: Callable[[], Sequence[ClientId]]
    policy: StragglerPolicy
    seed: Seed

    def open(self, round_num: int, *, attempt: int) -> tuple[ClientId, ...]:
        """Return the cohort: a function of its arguments and of who is available."""
        return self.sampler.sample(
            self.available(),
            num_asked=self.policy.num_asked,
            round_num=round_num,
            attempt=attempt,
            seed=self.seed,
        )

    def draw(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Return some of the available clients that are not busy: as :meth:`open` does."""
        there = without(self.available(), busy)
        if not there:
            return ()
        return self.sampler.sample(
            there,
            num_asked=min(num, len(there)),
            round_num=round_num,
            attempt=attempt,
            seed=self.seed,
        )


class Charge(Protocol):
    """Writes down what a round costs, durably, before anybody is asked."""

    def __call__(self, *, round_num: int, attempt: int) -> None:
        """Charge an attempt at a round; raises BudgetExhausted if it cannot be afforded."""


@dataclass(frozen=True, kw_only=True)
class ChargedOpening:
    """An opening that charges a privacy ledger: after the cohort is known, before it is asked.

    Attributes:
        inner: The opening otherwise.
        charge: Charges.
    """

    inner: Opening
    charge: Charge

    def open(self, round_num: int, *, attempt: int) -> tuple[ClientId, ...]:
        """Return the inner cohort, charged.

        Raises:
            BudgetExhausted: The round cannot be afforded; nobody was asked.
            StoreError: It could not be written down.
        """
        cohort = self.inner.open(round_num, attempt=attempt)
        self.charge(round_num=round_num, attempt=attempt)
        return cohort


@dataclass(kw_only=True, eq=False)
class ChargedDraw:
    """What draws the clients of asynchronous rounds, and charges each before it asks anybody.

    Attributes:
        inner: Draws them.
        charge: Charges.
    """

    inner: Draw
    charge: Charge
    _charged: int = -1  # the last round that is

    def __call__(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Return whom the inner one draws, charged.

        Raises:
            BudgetExhausted: The round cannot be afforded; nobody was asked on its model.
            StoreError: It could not be written down.
        """
        drawn = self.inner(num, round_num=round_num, attempt=attempt, busy=busy)
        if round_num != self._charged:  # be there nobody to ask: others are in flight
            self.charge(round_num=round_num, attempt=attempt)
            self._charged = round_num
        return drawn
