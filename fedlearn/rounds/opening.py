"""Draws the clients of a round from those that are available.

A simulation only samples. A deployment also waits for clients and writes down which ones it will
ask (:class:`fedlearn.deployment.opening.DurableOpening`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedlearn.algorithms.flight import Draw
from fedlearn.algorithms.sampling import CohortSampler, without
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class SampledOpening:
    """Samples among the available clients; either method is a round's ``draw``.

    Attributes:
        sampler: Chooses.
        available: Returns the clients that can be asked now.
        seed: Of the choice.
    """

    sampler: CohortSampler
    available: Callable[[], Sequence[ClientId]]
    seed: Seed

    def draw_cohort(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Return ``num`` clients: a function of the arguments and of who is available.

        Raises:
            CohortTooSmall: Fewer are available.
        """
        return self._sample(without(self.available(), busy), num, round_num, attempt)

    def draw(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Return up to ``num`` clients; otherwise as :meth:`draw_cohort`."""
        idle = without(self.available(), busy)
        return self._sample(idle, min(num, len(idle)), round_num, attempt) if idle else ()

    def _sample(
        self, idle: Sequence[ClientId], num: int, round_num: int, attempt: int
    ) -> Sequence[ClientId]:
        return self.sampler.sample(
            idle, num_asked=num, round_num=round_num, attempt=attempt, seed=self.seed
        )


class Charges(Protocol):
    """What the rounds of a run cost: written down durably, before anybody is asked."""

    def charge(self, *, round_num: int, attempt: int) -> None:
        """Charge an attempt at a round; raises BudgetExhausted if it cannot be afforded."""

    def standing(self) -> Mapping[str, float]:
        """Return the spending so far by name; empty where it is not known."""


@dataclass(kw_only=True, eq=False)
class ChargedDraw:
    """Charges a privacy ledger when clients are drawn, before they are asked.

    Attributes:
        inner: Draws them.
        charges: Charges each round.
        each_attempt: Whether each attempt at a round is charged. An asynchronous round draws many
            times, and is charged once.
    """

    inner: Draw
    charges: Charges
    each_attempt: bool
    _charged: tuple[int, int] | None = None  # what was charged last

    def __call__(
        self, num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        """Return the clients that the inner one draws, charged even if there are none.

        Raises:
            BudgetExhausted: The round cannot be afforded; nobody was asked on its model.
            StoreError: It could not be written down.
        """
        drawn = self.inner(num, round_num=round_num, attempt=attempt, busy=busy)
        key = round_num, attempt if self.each_attempt else 0
        if key != self._charged:
            self.charges.charge(round_num=round_num, attempt=attempt)
            self._charged = key
        return drawn
