"""Draws the clients of a round from those that are available.

A simulation only samples. A deployment also waits for clients and records durably which ones it
will ask (:class:`fedlearn.deployment.opening.DurableOpening`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedlearn.algorithms.informed_sampling import (
    NO_PROPERTIES,
    NO_STATE,
    ClientProperties,
    Sampler,
    SamplerState,
    SamplingDraw,
    as_informed,
)
from fedlearn.algorithms.sampling import without
from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class SampledOpening:
    """Samples among the available clients; either public method serves as a round's ``draw``.

    Attributes:
        sampler: Draws the clients.
        available: Returns the clients that can be asked now.
        seed: Seed of the draw.
        properties: What is known of the clients.
    """

    sampler: Sampler
    available: Callable[[], Sequence[ClientId]]
    seed: Seed
    properties: ClientProperties = NO_PROPERTIES

    def draw_cohort(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState = NO_STATE,
    ) -> Sequence[ClientId]:
        """Draw exactly ``num`` clients; the draw depends on the arguments and who is available.

        Raises:
            CohortTooSmall: Fewer clients are available.
        """
        idle = without(self.available(), busy)
        return self._sample(idle, num, round_num, attempt, state)

    def draw(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState = NO_STATE,
    ) -> Sequence[ClientId]:
        """Draw up to ``num`` clients; otherwise like :meth:`draw_cohort`."""
        idle = without(self.available(), busy)
        return self._sample(idle, min(num, len(idle)), round_num, attempt, state) if idle else ()

    def _sample(
        self,
        idle: Sequence[ClientId],
        num: int,
        round_num: int,
        attempt: int,
        state: SamplerState,
    ) -> Sequence[ClientId]:
        return as_informed(self.sampler).sample(
            idle,
            cohort_size=num,
            round_num=round_num,
            attempt=attempt,
            seed=self.seed,
            state=state,
            properties=self.properties,
        )


class Charges(Protocol):
    """A ledger that records the cost of a run's rounds durably, before any client is asked."""

    def charge(self, *, round_num: int, attempt: int) -> None:
        """Charge an attempt at a round; raises BudgetExhausted if it cannot be afforded."""

    def can_afford_round(self) -> bool:
        """Whether another round can be charged, unless another run spends before it."""

    def report_spending(self, *, is_last: bool) -> Mapping[str, float]:
        """Return the spending so far by name; empty if it is not known and a round follows."""


@dataclass(frozen=True, kw_only=True)
class CohortSource:
    """Where a run's rounds get their clients from.

    Attributes:
        draw: Draws the clients to ask.
        sampler: The sampler that ``draw`` uses, which observes the rounds.
        charging: Charges each round to the privacy ledger before its clients are asked; ``None``
            if there is no budget.
    """

    draw: SamplingDraw
    sampler: Sampler
    charging: Charges | None = None


@dataclass(kw_only=True, eq=False)
class ChargedDraw:
    """Charges a privacy ledger when clients are drawn, before they are asked.

    Attributes:
        inner: Draws them.
        charges: The ledger.
        each_attempt: Whether each attempt at a round is charged. An asynchronous round draws many
            times, and is charged once.
    """

    inner: SamplingDraw
    charges: Charges
    each_attempt: bool
    _charged: tuple[int, int] | None = None  # last charged round and attempt

    def __call__(
        self,
        num: int,
        *,
        round_num: int,
        attempt: int,
        busy: Collection[ClientId],
        state: SamplerState = NO_STATE,
    ) -> Sequence[ClientId]:
        """Draw clients and charge the round, even if there are none.

        Raises:
            BudgetExhausted: The round cannot be afforded; no client was sent its model.
            StoreError: The charge could not be recorded.
        """
        # Draw first: a draw that fails costs nothing. The charge is durable before any client is
        # asked.
        drawn = self.inner(num, round_num=round_num, attempt=attempt, busy=busy, state=state)
        key = round_num, attempt if self.each_attempt else 0
        if key != self._charged:
            self.charges.charge(round_num=round_num, attempt=attempt)
            self._charged = key
        return drawn
