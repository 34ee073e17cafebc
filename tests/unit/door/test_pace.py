"""Pace: the rate of check-ins follows from what is measured, and nobody comes in a herd."""

from collections import Counter

import pytest

from fedlearn.core.clock import VirtualClock
from fedlearn.door.pace import Pace


def test_the_rate_takes_half_a_core_whatever_a_check_in_costs() -> None:
    """The median of the last looks counts: in some of them something else was computed, too."""
    pace = Pace(VirtualClock(), share=0.5)
    assert pace.rate_per_s == 100.0  # nothing is known
    pace.look(cpu_s=0.1, num_check_ins=50, late_s=0.0)
    assert pace.rate_per_s == pytest.approx(250.0)
    pace.look(cpu_s=0.1, num_check_ins=50, late_s=0.0)
    pace.look(cpu_s=2.0, num_check_ins=50, late_s=0.0)
    assert pace.rate_per_s == pytest.approx(250.0)
    pace.look(cpu_s=0.5, num_check_ins=3, late_s=0.0)  # too few to tell
    assert pace.rate_per_s == pytest.approx(250.0)
    for _ in range(10):
        pace.look(cpu_s=0.5, num_check_ins=50, late_s=0.0)
    assert pace.rate_per_s == pytest.approx(50.0)


def test_a_late_event_loop_slows_check_ins_down_and_they_recover() -> None:
    """To one a second at the least."""
    pace = Pace(VirtualClock(), share=0.5)
    for rate in (50.0, 25.0, 12.5):
        pace.look(cpu_s=0.0, num_check_ins=0, late_s=0.5)
        assert pace.rate_per_s == rate
    for _ in range(20):
        pace.look(cpu_s=0.0, num_check_ins=0, late_s=0.5)
    assert pace.rate_per_s == pytest.approx(100.0 / 64)
    for _ in range(20):
        pace.look(cpu_s=0.0, num_check_ins=0, late_s=0.01)
    assert pace.rate_per_s == 100.0


def test_as_many_are_admitted_as_the_rate_says() -> None:
    """Two seconds' worth at once, and then evenly."""
    clock = VirtualClock()
    pace = Pace(clock, share=0.5)
    assert sum(pace.admits() for _ in range(1000)) == 200
    clock.sleep(1.0)
    assert sum(pace.admits() for _ in range(1000)) == 100


def test_those_who_come_back_are_spread_evenly() -> None:
    """A thousand at a hundred a second take ten; those that may stay away longer fill the gaps."""
    clock = VirtualClock(7.3)
    pace = Pace(clock, share=0.5)
    later = [clock.now_s() + pace.after_s(5.0) for _ in range(300)]
    soon = [clock.now_s() + pace.after_s(0.5) for _ in range(700)]
    seconds = Counter(int(each) for each in [*later, *soon])
    assert max(seconds.values()) == 100
    assert sorted(seconds) == list(range(8, 18))
    assert min(later) >= 12.3
    assert len(set(soon)) == 700


def test_one_client_comes_back_as_soon_as_it_may() -> None:
    """Where there are few, nobody waits for the others."""
    pace = Pace(VirtualClock(), share=0.5)
    assert 0.5 <= pace.after_s(0.5) < 2.0


def test_a_slow_coordinator_has_clients_within_the_hour_all_the_same() -> None:
    """Longer they would not stay away, whatever they are told."""
    pace = Pace(VirtualClock(), share=0.5)
    for _ in range(20):
        pace.look(cpu_s=60.0, num_check_ins=10, late_s=9.0)
    assert pace.rate_per_s == 1.0
    after_s = [pace.after_s(0.5) for _ in range(5000)]
    assert max(after_s) <= 3602.0
    assert sorted(after_s[:3600]) == pytest.approx(range(1, 3601), abs=1.1)


def test_what_is_past_is_forgotten() -> None:
    """Bookings are as many as are still to come."""
    clock = VirtualClock()
    pace = Pace(clock, share=0.5)
    for _ in range(5):
        for _ in range(100):
            pace.after_s(0.5)
        clock.sleep(10.0)
        pace.look(cpu_s=0.0, num_check_ins=0, late_s=0.0)
    assert 0.5 <= pace.after_s(0.5) < 2.5
