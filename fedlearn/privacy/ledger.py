"""The privacy ledger: releases are charged before their round starts.

A round that began is never refunded; only charges for rounds that never began are taken back.

A ledger belongs to a population, not to a run: a second run on the same clients continues it. A
charge is durable before the first client is sent a task, so no release is missing whichever process
is killed, and when. A round that was charged but not released still counts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fedlearn.core.clock import Clock
from fedlearn.core.ranges import Positive, Ranged
from fedlearn.errors import BudgetExhausted
from fedlearn.privacy.events import Event, Spent

#: ε of releases, as :func:`fedlearn.privacy.accounting.epsilon_of_release` returns it.
EpsilonOf = Callable[[Spent], float]

#: Rounds that take this many seconds in total are charged together.
_TOGETHER_S = 0.3
#: Seconds until ε is first computed for the metrics; a shorter run has it only in its last round.
_FIRST_LOOK_S = 5.0
#: Share of the run's time that may be spent on computing ε for the metrics.
_LOOKING = 0.05


@dataclass(frozen=True, kw_only=True)
class Charge:
    """A ledger entry for upcoming releases.

    Attributes:
        event: The event that each release is accounted as.
        count: Number of releases, >= 1.
        clip_norm: Largest norm of one client's update.
        round_num: Index of the first round, from 0.
        attempt: Retry number of that round, from 0.
    """

    event: Event
    count: int
    clip_norm: float
    round_num: int
    attempt: int


class Ledger(Protocol):
    """Durable record of one population's charges."""

    def load_spent(self) -> dict[Event, int]:
        """Return the number of charges by event, over all runs.

        Raises:
            StoreError: The ledger cannot be read.
        """

    def charge(self, charge: Charge, *, known: Spent) -> bool:
        """Record a charge, durable on return, unless another run has charged in the meantime.

        Args:
            charge: Upcoming releases.
            known: Spending on which the decision that they are affordable was based.

        Returns:
            Whether the charge was recorded, that is, whether the spending was still ``known``.

        Raises:
            StoreError: Writing failed; the charge may have been recorded all the same.
        """

    def take_back(self, count: int) -> None:
        """Take back the ``count`` releases of this process's last charge that never began.

        Raises:
            StoreError: The ledger cannot be written.
        """


@dataclass(frozen=True, kw_only=True)
class Budget(Ranged):
    """The privacy budget of a population.

    Attributes:
        epsilon: Largest ε of the release, > 0.
        target_delta: The δ of that ε.
        study: Name of the study whose budget it is; empty: the population is of no study.
    """

    epsilon: Positive
    target_delta: Positive
    study: str = ""


class Charging:
    """Charges the rounds of one run, as long as the budget lasts.

    Computing ε takes a second, so it is computed for many rounds at once, and again after a charge
    that was not planned: a retried round, or another run's. Making a charge durable takes
    milliseconds, so short rounds are charged together, some tenths of a second of them. Rounds that
    never began are taken back at the end of the run; after a crash they stay charged.
    """

    def __init__(
        self,
        ledger: Ledger,
        event: Event,
        *,
        clip_norm: float,
        budget: Budget | None,
        epsilon_of: EpsilonOf,
        clock: Clock,
    ) -> None:
        self._ledger, self._event, self._clip_norm = ledger, event, clip_norm
        self._budget, self._epsilon_of, self._clock = budget, epsilon_of, clock
        self._known = ledger.load_spent()
        self._num_covered = 0  # further rounds known to be affordable
        self._num_prepaid = 0  # rounds charged but not begun
        # The first charge is for one round, since nothing is known of its duration.
        self._together, self._charged_s = 1, -math.inf
        self._next_look_s = clock.now_s() + _FIRST_LOOK_S

    def count_affordable(self, num_rounds: int) -> int:
        """Return the number of rounds, up to ``num_rounds``, that the budget is enough for."""
        enough, too_many = 0, num_rounds + 1
        if self._is_enough_for(num_rounds):
            enough = num_rounds
        while too_many - enough > 1 and enough < num_rounds:
            # Bisection works because ε never falls with the number of rounds.
            middle = (enough + too_many) // 2
            if self._is_enough_for(middle):
                enough = middle
            else:
                too_many = middle
        self._num_covered = enough
        return enough

    def charge(self, *, round_num: int, attempt: int) -> None:
        """Charge a round that is about to open, and return once the charge is durable.

        Raises:
            BudgetExhausted: The charge would exceed the budget; nothing was written.
            StoreError: The charge could not be written.
        """
        # Compare and swap: `charge` fails if another run has spent since `_known` was read; then
        # decide again from what is spent now.
        while self._num_prepaid == 0:
            if not self.can_afford_round():
                assert self._budget is not None  # without one, every round can be afforded
                raise self._build_error(self._budget)
            count = min(self._num_covered, self._choose_count())
            charge = Charge(
                event=self._event,
                count=count,
                clip_norm=self._clip_norm,
                round_num=round_num,
                attempt=attempt,
            )
            if self._ledger.charge(charge, known=self._known):
                self._known = self._add_rounds(count)
                self._num_prepaid, self._num_covered = count, self._num_covered - count
            else:
                self._known, self._num_covered = (
                    self._ledger.load_spent(),
                    0,
                )  # another run has spent
        self._num_prepaid -= 1

    def can_afford_round(self) -> bool:
        """Whether the budget is enough for another round, by what was spent when last looked."""
        if self._num_prepaid == 0 and self._num_covered == 0 and self._is_enough_for(1):
            self._num_covered = 1
        return self._num_prepaid > 0 or self._num_covered > 0

    def report_spending(self, *, is_last: bool) -> Mapping[str, float]:
        """Return the ε spent so far as the metric ``epsilon``, or nothing if it is too soon.

        Computing ε may take a second, so it is limited to a twentieth of the run's time. After the
        last round of a run it is always computed.
        """
        begin_s = self._clock.now_s()
        if begin_s < self._next_look_s and not is_last:
            return {}
        # Prepaid rounds have not begun, so they have cost nothing yet.
        epsilon = self._epsilon_of(self._add_rounds(-self._num_prepaid))
        now_s = self._clock.now_s()
        self._next_look_s = now_s + (now_s - begin_s) / _LOOKING
        return {"epsilon": epsilon}

    def close(self) -> None:
        """Take back the rounds that were charged but never began."""
        if self._num_prepaid:
            self._ledger.take_back(self._num_prepaid)
            self._num_prepaid = 0

    def _choose_count(self) -> int:
        now_s = self._clock.now_s()
        lasted_s, self._charged_s = now_s - self._charged_s, now_s
        # At most doubled, so that one fast round does not prepay hundreds: a crash would lose them.
        fitting = self._together * _TOGETHER_S / max(lasted_s, 1e-6)
        self._together = max(1, min(2 * self._together, int(fitting)))
        return self._together

    def _is_enough_for(self, num_rounds: int) -> bool:
        if self._budget is None:
            return True
        return self._epsilon_of(self._add_rounds(num_rounds)) <= self._budget.epsilon

    def _add_rounds(self, num_rounds: int) -> dict[Event, int]:
        return {**self._known, self._event: self._known.get(self._event, 0) + num_rounds}

    def _build_error(self, budget: Budget) -> BudgetExhausted:
        return BudgetExhausted(
            epsilon=budget.epsilon,
            target_delta=budget.target_delta,
            spent=self._epsilon_of(self._known),
            next_epsilon=self._epsilon_of(self._add_rounds(1)),
            num_charged=sum(self._known.values()),
            study=budget.study,
        )
