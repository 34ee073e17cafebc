"""Charging: never less than was opened, never more than the budget."""

import math
from dataclasses import replace

import pytest

from fedlearn.algorithms.cohorts import CyclicCohorts, PoissonCohorts
from fedlearn.core.clock import VirtualClock
from fedlearn.errors import BudgetExhausted
from fedlearn.privacy.events import Event, Spent
from fedlearn.privacy.ledger import Budget, Charge, Charging

EVENT = Event(PoissonCohorts(100, 10, 20), 1.0)
OTHER = Event(PoissonCohorts(100, 10, 20), 3.0)


class InMemory:
    """A ledger in memory; ``elsewhere`` holds what another run charges before the next charge."""

    def __init__(self, spent: Spent = {}) -> None:  # noqa: B006 - it is only read
        self.counts = dict(spent)
        self.charges: list[Charge] = []
        self.elsewhere: list[Event] = []

    def load_spent(self) -> dict[Event, int]:
        return dict(self.counts)

    def charge(self, charge: Charge, *, known: Spent) -> bool:
        while self.elsewhere:
            event = self.elsewhere.pop()
            self.counts[event] = self.counts.get(event, 0) + 1
        if sum(self.counts.values()) != sum(known.values()):
            return False
        self.charges.append(charge)
        self.counts[charge.event] = self.counts.get(charge.event, 0) + charge.count
        return True

    def take_back(self, count: int) -> None:
        last = self.charges[-1]
        self.charges[-1] = replace(last, count=last.count - count)
        self.counts[last.event] -= count


def charging(
    ledger: InMemory, *, epsilon: float | None, clock: VirtualClock | None = None
) -> Charging:
    """Return a charger whose EVENT costs 1 a round, and OTHER 2."""
    budget = None if epsilon is None else Budget(epsilon=epsilon, target_delta=1e-5)
    return Charging(
        ledger,
        EVENT,
        clip_norm=0.5,
        budget=budget,
        epsilon_of=lambda spent: sum(n * (2.0 if e == OTHER else 1.0) for e, n in spent.items()),
        clock=clock or VirtualClock(),
    )


def open_rounds(charges: Charging, clock: VirtualClock, *, count: int, lasting_s: float) -> int:
    """Open up to ``count`` rounds; return how many the budget allowed."""
    for round_num in range(count):
        try:
            charges.charge(round_num=round_num, attempt=0)
        except BudgetExhausted:
            return round_num
        clock.sleep(lasting_s)
    return count


@pytest.mark.parametrize("lasting_s", [0.0, 0.003, 10.0])
@pytest.mark.parametrize(
    ("epsilon", "before", "affordable"), [(7.0, 0, 7), (7.5, 3, 4), (3.0, 3, 0), (None, 3, 12)]
)
def test_a_run_stops_before_its_budget_is_exceeded(
    lasting_s: float, epsilon: float | None, before: int, affordable: int
) -> None:
    """Whatever was spent before, and however many rounds are charged together."""
    clock, ledger = VirtualClock(), InMemory({EVENT: before})
    charges = charging(ledger, epsilon=epsilon, clock=clock)
    assert charges.count_affordable(12) == affordable
    assert open_rounds(charges, clock, count=12, lasting_s=lasting_s) == affordable
    charges.close()
    assert ledger.counts[EVENT] == before + affordable


def test_it_is_known_before_a_round_whether_it_can_be_afforded() -> None:
    """Also after another run has spent, and without charging anything."""
    clock, ledger = VirtualClock(), InMemory()
    charges = charging(ledger, epsilon=4.0, clock=clock)
    for round_num in range(3):
        assert charges.can_afford_round()
        if round_num == 2:
            ledger.elsewhere.append(EVENT)
        charges.charge(round_num=round_num, attempt=0)
        clock.sleep(10.0)
    assert ledger.counts[EVENT] == 4
    assert not charges.can_afford_round()
    assert ledger.counts[EVENT] == 4
    assert charging(InMemory({EVENT: 99}), epsilon=None).can_afford_round()


@pytest.mark.parametrize("lasting_s", [0.0, 0.003, 10.0])
@pytest.mark.parametrize(("mine", "others", "affordable"), [(0, 0, 12), (2, 0, 10), (0, 1, 8)])
def test_users_that_take_turns_are_charged_to_the_end_of_a_turn(
    lasting_s: float, mine: int, others: int, affordable: int
) -> None:
    """Each 4 rounds cost 1, of a budget of 3; rounds of another run are rounded up separately."""
    own, other = (Event(CyclicCohorts(60, 15, 15), 1.0).for_run(run) for run in ("a", "b"))
    clock, ledger = VirtualClock(), InMemory({own: mine, other: others})
    charges = Charging(
        ledger,
        own,
        clip_norm=0.5,
        budget=Budget(epsilon=3.0, target_delta=1e-5),
        epsilon_of=lambda spent: sum(e.squared_distance(n) for e, n in spent.items()),
        clock=clock,
    )
    assert charges.count_affordable(20) == affordable
    assert open_rounds(charges, clock, count=3, lasting_s=lasting_s) == 3
    charges.close()
    assert ledger.counts == {own: mine + 3, other: others}
    assert open_rounds(charges, clock, count=20, lasting_s=lasting_s) == affordable - 3
    charges.close()
    assert ledger.counts == {own: mine + affordable, other: others}


def test_rounds_that_were_not_foreseen_are_charged_too() -> None:
    """For example those of a failed attempt; the budget holds for them too."""
    clock, ledger = VirtualClock(), InMemory()
    charges = charging(ledger, epsilon=5.0, clock=clock)
    assert charges.count_affordable(2) == 2
    assert open_rounds(charges, clock, count=9, lasting_s=1.0) == 5
    assert ledger.counts == {EVENT: 5}


def test_what_another_run_spends_meanwhile_counts() -> None:
    """It could not be planned for, so the charge is checked again."""
    clock, ledger = VirtualClock(), InMemory()
    charges = charging(ledger, epsilon=6.0, clock=clock)
    assert charges.count_affordable(6) == 6
    charges.charge(round_num=0, attempt=0)
    ledger.elsewhere = [OTHER, OTHER]  # 4 of the 6
    clock.sleep(10.0)
    charges.charge(round_num=1, attempt=0)
    with pytest.raises(BudgetExhausted, match=r"4 rounds are charged.*epsilon 6 at delta 1e-05"):
        charges.charge(round_num=2, attempt=0)
    assert ledger.counts == {EVENT: 2, OTHER: 2}


def test_short_rounds_are_charged_together_and_never_late() -> None:
    """At any moment the ledger holds at least the opened rounds; at the end, exactly those."""
    clock, ledger = VirtualClock(), InMemory()
    charges = charging(ledger, epsilon=None, clock=clock)
    charges.count_affordable(1000)
    for round_num in range(777):
        charges.charge(round_num=round_num, attempt=0)
        assert ledger.counts[EVENT] > round_num
        clock.sleep(0.002)
    assert len(ledger.charges) < 20
    assert ledger.counts[EVENT] - 777 < 300  # of 150 a charge
    charges.close()
    assert ledger.counts == {EVENT: 777}
    charges.close()  # closing twice takes nothing back twice
    assert ledger.counts == {EVENT: 777}


def test_long_rounds_are_charged_one_by_one() -> None:
    """So that a crash costs one round, even if rounds only become long later."""
    clock, ledger = VirtualClock(), InMemory()
    charges = charging(ledger, epsilon=None, clock=clock)
    charges.count_affordable(200)
    open_rounds(charges, clock, count=100, lasting_s=0.001)
    charges.close()
    for round_num in range(100, 110):
        charges.charge(round_num=round_num, attempt=0)
        clock.sleep(60.0)
    assert [each.count for each in ledger.charges[-5:]] == [1] * 5
    assert ledger.charges[-1] == Charge(
        event=EVENT, count=1, clip_norm=0.5, round_num=109, attempt=0
    )


def test_an_error_names_what_was_spent_and_the_remedy() -> None:
    """Its attributes hold them as well."""
    charges = charging(InMemory({EVENT: 3}), epsilon=3.5)
    with pytest.raises(BudgetExhausted, match=r"another would make it 4.*above.*\(3.5\)") as caught:
        charges.charge(round_num=0, attempt=0)
    assert (caught.value.epsilon, caught.value.spent, caught.value.num_charged) == (
        3.5,
        3.0,
        3,
    )
    assert math.isfinite(caught.value.spent)


@pytest.mark.parametrize("looking_s", [0.0, 0.2, 3.0])
def test_what_is_spent_is_told_now_and_then(looking_s: float) -> None:
    """For the rounds begun so far; computing it takes at most a twentieth of the time."""
    clock, ledger = VirtualClock(), InMemory({OTHER: 2})

    def epsilon_of(spent: Spent) -> float:
        clock.sleep(looking_s)
        return sum(n * (2.0 if e == OTHER else 1.0) for e, n in spent.items())

    charges = Charging(
        ledger, EVENT, clip_norm=0.5, budget=None, epsilon_of=epsilon_of, clock=clock
    )
    told = dict[int, float]()
    for round_num in range(1000):
        charges.charge(round_num=round_num, attempt=0)
        clock.sleep(0.1)
        if found := charges.report_spending(is_last=False):
            told[round_num] = found["epsilon"]
    assert min(told) * 0.1 >= 4.5  # a run that ends sooner reports in its last round
    assert told == {round_num: 4.0 + round_num + 1 for round_num in told}
    assert looking_s * len(told) <= 0.05 * clock.now_s() + looking_s
    assert len(told) > (900 if looking_s == 0.0 else 1)


def test_what_is_spent_is_always_told_after_the_last_round() -> None:
    """However short the run; rounds that were charged and have not begun cost nothing."""
    clock = VirtualClock()
    charges = charging(InMemory(), epsilon=9.0, clock=clock)
    assert charges.count_affordable(4) == 4
    assert open_rounds(charges, clock, count=2, lasting_s=0.0) == 2
    assert charges.report_spending(is_last=False) == {}
    assert charges.report_spending(is_last=True) == {"epsilon": 2.0}
