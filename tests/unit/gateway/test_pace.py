"""The pace of check-ins: the rate follows their measured cost, and clients return spread out."""

from collections import Counter

import pytest

from fedlearn.core.clock import VirtualClock
from fedlearn.core.messages import ClientId
from fedlearn.gateway.pace import Pace


def test_the_rate_takes_half_a_core_whatever_a_check_in_costs() -> None:
    """Old measurements count little, and too few check-ins do not count."""
    clock = VirtualClock()
    pace = Pace(clock, share=0.5)
    assert pace.rate_per_s == 100.0  # nothing measured yet
    pace.record_cost(cpu_s=1.0, num_check_ins=9)  # too few
    assert pace.rate_per_s == 100.0
    clock.sleep(200.0)
    pace.record_cost(cpu_s=0.1, num_check_ins=50)
    assert pace.rate_per_s == pytest.approx(250.0, rel=1e-3)
    for _ in range(60):
        clock.sleep(1.0)
        pace.record_cost(cpu_s=0.5, num_check_ins=50)
    assert pace.rate_per_s == pytest.approx(50.0, rel=0.02)


def test_all_of_a_rush_counts_also_what_came_before_the_first_hello() -> None:
    """Two thousand clients connect during four seconds, then all say hello within two."""
    clock = VirtualClock()
    pace = Pace(clock, share=0.5)
    for num_check_ins in (0, 0, 0, 0, 1000, 1000):
        clock.sleep(1.0)
        pace.record_cost(cpu_s=1.0, num_check_ins=num_check_ins)
    assert 6.0 / 2000 * 0.8 < pace.cost_s < 6.0 / 2000


def test_a_rate_at_its_least_is_measured_all_the_same() -> None:
    """After other work took the processor, few check-ins are measured, but the rate recovers."""
    clock = VirtualClock()
    pace = Pace(clock, share=0.5)
    for _ in range(30):
        clock.sleep(1.0)
        pace.record_cost(cpu_s=40.0, num_check_ins=12)
    assert pace.rate_per_s == 1.0
    for _ in range(300):
        clock.sleep(1.0)
        pace.record_cost(cpu_s=0.002 * int(pace.rate_per_s), num_check_ins=int(pace.rate_per_s))
    assert pace.rate_per_s == pytest.approx(250.0, rel=0.01)


def test_what_costs_nothing_that_can_be_measured_changes_nothing() -> None:
    pace = Pace(VirtualClock(), share=0.5)
    pace.record_cost(cpu_s=0.0, num_check_ins=50)
    assert pace.rate_per_s == 100.0


def test_a_late_event_loop_slows_check_ins_down_and_they_recover() -> None:
    """The rate never falls below one per second."""
    pace = Pace(VirtualClock(), share=0.5)
    for rate in (50.0, 25.0, 12.5):
        pace.record_lateness(late_s=0.5)
        assert pace.rate_per_s == rate
    for _ in range(20):
        pace.record_lateness(late_s=0.5)
    assert pace.rate_per_s == pytest.approx(100.0 / 64)
    for _ in range(20):
        pace.record_lateness(late_s=0.01)
    assert pace.rate_per_s == 100.0


def test_as_many_are_admitted_as_the_rate_says() -> None:
    """Up to two seconds' worth at once, then evenly."""
    clock = VirtualClock()
    pace = Pace(clock, share=0.5)
    assert sum(pace.admits() for _ in range(1000)) == 200
    clock.sleep(1.0)
    assert sum(pace.admits() for _ in range(1000)) == 100


def test_those_who_come_back_are_spread_evenly() -> None:
    """A thousand clients take ten seconds; those with a short absence fill the gaps.

    A third of the rate is left for clients that come unannounced.
    """
    clock = VirtualClock(7.3)
    pace = Pace(clock, share=0.5)
    pace.record_cost(cpu_s=1.0, num_check_ins=300)
    assert pace.rate_per_s == pytest.approx(150.0)
    later = [clock.now_s() + pace.book_return_s(5.0) for _ in range(300)]
    soon = [clock.now_s() + pace.book_return_s(0.5) for _ in range(700)]
    seconds = Counter(int(each) for each in [*later, *soon])
    assert max(seconds.values()) == 100
    assert sorted(seconds) == list(range(8, 18))
    assert min(later) >= 12.3
    assert len(set(soon)) == 700


def test_who_comes_before_its_time_takes_no_second_place() -> None:
    """A client that restarts over and over does not take other clients' places."""
    clock = VirtualClock()
    pace = Pace(clock, share=0.5)
    for _ in range(10_000):
        clock.sleep(0.01)
        pace.book_return_s(5.0, client_id=ClientId(7))
    others = [pace.book_return_s(5.0, client_id=ClientId(number)) for number in range(100, 160)]
    assert max(others) < 7.0
    unknown = [pace.book_return_s(5.0) for _ in range(200)]
    assert max(unknown) > 8.0


def test_one_client_comes_back_as_soon_as_it_may() -> None:
    """With few clients, there is no reason to wait longer."""
    pace = Pace(VirtualClock(), share=0.5)
    assert 0.5 <= pace.book_return_s(0.5) < 2.0


@pytest.mark.slow
def test_a_slow_coordinator_has_clients_within_the_hour_all_the_same() -> None:
    """Clients do not stay away longer than an hour, whatever they are told."""
    pace = Pace(VirtualClock(), share=0.5)
    for _ in range(20):
        pace.record_cost(cpu_s=60.0, num_check_ins=10)
        pace.record_lateness(late_s=9.0)
    assert pace.rate_per_s == 1.0
    after_s = [pace.book_return_s(0.5) for _ in range(5000)]
    assert max(after_s) <= 3602.0
    assert sorted(after_s[:3600]) == pytest.approx(range(1, 3601), abs=1.1)


def test_what_is_past_is_forgotten() -> None:
    """Only future bookings are kept."""
    clock = VirtualClock()
    pace = Pace(clock, share=0.5)
    for _ in range(5):
        for _ in range(100):
            pace.book_return_s(0.5)
        clock.sleep(10.0)
        pace.record_lateness(late_s=0.0)
    assert 0.5 <= pace.book_return_s(0.5) < 2.5
