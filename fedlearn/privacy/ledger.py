"""What users' data have been in already: charged before a round, and never given back.

A ledger belongs to a population, not to a run: a second run on the same clients goes on from it. A
charge is durable before anybody is asked, so whatever is killed when, no release is missing; a
round that was charged and never released counts all the same.
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

#: Seconds of rounds that are charged together.
_TOGETHER_S = 0.3
#: Seconds until it is first told what is spent: a run that is over sooner tells at its end.
_FIRST_LOOK_S = 5.0
#: Of the time, the part that is used to tell it.
_LOOKING = 0.05


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Releases to come, as they are written down.

    Attributes:
        event: What is accounted for, each time.
        count: How many releases, >= 1.
        clip_norm: Largest norm of one client's update.
        round_num: Index of the first round, from 0.
        attempt: 0, or how often that round was tried before.
    """

    event: Event
    count: int
    clip_norm: float
    round_num: int
    attempt: int


class Ledger(Protocol):
    """Durable record of one population's charges."""

    def spent(self) -> dict[Event, int]:
        """Return by event how often it was charged, by whatever run.

        Raises:
            StoreError: It cannot be read.
        """

    def charge(self, charge: Charge, *, known: Spent) -> bool:
        """Write a charge down, durable on return, unless another run's has come in between.

        Args:
            charge: Releases to come.
            known: What was spent when they were found to be affordable.

        Returns:
            Whether it was written: what is spent was what is ``known``.

        Raises:
            StoreError: It cannot be written; it may stand all the same.
        """

    def reduce(self, count: int) -> None:
        """Take so many releases of this process's last charge back, which never began.

        Raises:
            StoreError: It cannot be written.
        """


@dataclass(frozen=True, kw_only=True)
class Budget(Ranged):
    """What a population may spend.

    Attributes:
        epsilon: Largest ε of the release, > 0.
        target_delta: δ that goes with it.
    """

    epsilon: Positive
    target_delta: Positive


class Charging:
    """Charges the rounds of one run, as long as the budget lasts.

    To find ε takes a second, so it is found for many rounds at once, and again where a charge was
    not foreseen: of a round that is tried again, or of another run. And to make a charge durable
    takes milliseconds, so short rounds are charged together, some tenths of a second of them: what
    of it never began is taken back at the end, and stays charged after a crash.
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
        self._known = ledger.spent()
        self._num_covered = 0  # further charges that are known to be affordable
        self._num_ahead = 0  # charged, and not begun
        self._together, self._charged_s = 1, -math.inf
        self._next_look_s = clock.now_s() + _FIRST_LOOK_S

    def foresee(self, num_rounds: int) -> int:
        """Return how many of so many rounds to come the budget is enough for."""
        enough, too_many = 0, num_rounds + 1
        if self._is_enough_for(num_rounds):
            enough = num_rounds
        while too_many - enough > 1 and enough < num_rounds:
            middle = (enough + too_many) // 2
            if self._is_enough_for(middle):
                enough = middle
            else:
                too_many = middle
        self._num_covered = enough
        return enough

    def charge(self, *, round_num: int, attempt: int) -> None:
        """Return when the charge of a round that is about to be opened is durable.

        Raises:
            BudgetExhausted: With it the budget would be exceeded; nothing was written.
            StoreError: It could not be written down.
        """
        while self._num_ahead == 0:
            if self._num_covered == 0:
                if self._budget is not None and not self._is_enough_for(1):
                    raise self._exhausted(self._budget)
                self._num_covered = 1
            count = min(self._num_covered, self._worthwhile())
            charge = Charge(
                event=self._event,
                count=count,
                clip_norm=self._clip_norm,
                round_num=round_num,
                attempt=attempt,
            )
            if self._ledger.charge(charge, known=self._known):
                self._known = self._after(count)
                self._num_ahead, self._num_covered = count, self._num_covered - count
            else:
                self._known, self._num_covered = self._ledger.spent(), 0  # another run has spent
        self._num_ahead -= 1

    def standing(self) -> Mapping[str, float]:
        """Return the ε of the release so far as ``epsilon``; nothing where it was found just now.

        To find it may take a second: it is done for a twentieth of the time at the most.
        """
        begin_s = self._clock.now_s()
        if begin_s < self._next_look_s:
            return {}
        epsilon = self._epsilon_of(self._after(-self._num_ahead))
        now_s = self._clock.now_s()
        self._next_look_s = now_s + (now_s - begin_s) / _LOOKING
        return {"epsilon": epsilon}

    def close(self) -> None:
        """Take back what was charged ahead and never began."""
        if self._num_ahead:
            self._ledger.reduce(self._num_ahead)
            self._num_ahead = 0

    def _worthwhile(self) -> int:
        """Return how many rounds to charge together, by how long the last ones took."""
        now_s = self._clock.now_s()
        lasted_s, self._charged_s = now_s - self._charged_s, now_s
        fitting = self._together * _TOGETHER_S / max(lasted_s, 1e-6)
        self._together = max(1, min(2 * self._together, int(fitting)))
        return self._together

    def _is_enough_for(self, num_rounds: int) -> bool:
        if self._budget is None:
            return True
        return self._epsilon_of(self._after(num_rounds)) <= self._budget.epsilon

    def _after(self, num_rounds: int) -> dict[Event, int]:
        return {**self._known, self._event: self._known.get(self._event, 0) + num_rounds}

    def _exhausted(self, budget: Budget) -> BudgetExhausted:
        return BudgetExhausted(
            epsilon=budget.epsilon,
            target_delta=budget.target_delta,
            spent=self._epsilon_of(self._known),
            next_epsilon=self._epsilon_of(self._after(1)),
            num_charged=sum(self._known.values()),
        )
