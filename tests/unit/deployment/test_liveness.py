"""Detection of threads that hang."""

import pytest

from fedlearn.core.clock import VirtualClock
from fedlearn.deployment.interruption import Interruption
from fedlearn.deployment.liveness import SignsOfLife
from fedlearn.deployment.round_times import RoundTimes
from fedlearn.errors import Parked


def test_every_thread_that_is_stuck_is_named() -> None:
    """A thread that sleeps as announced is not stuck, nor is one that never showed itself."""
    clock = VirtualClock()
    signs = SignsOfLife(stuck_after_s=10.0, clock=clock)
    assert signs.describe_stuck() == ""
    signs.show("rounds")
    signs.show("database", sleeps_s=100.0)
    clock.sleep(10.0)
    assert signs.describe_stuck() == ""
    clock.sleep(1.0)
    assert signs.describe_stuck() == "the thread of the rounds has shown no sign of life for 11 s"
    clock.sleep(100.0)
    assert signs.describe_stuck().count("no sign of life") == 2
    signs.show("rounds")
    signs.show("database")
    assert signs.describe_stuck() == ""


def test_a_run_loop_that_looks_or_sleeps_shows_that_it_goes_on() -> None:
    """Also with a check that ends the run, which then still has to shut down."""
    shown = list[float]()
    interruption = Interruption(shown.append)
    interruption.check()
    interruption.sleep(0.001)
    interruption.give(Parked("told to stop"))
    with pytest.raises(Parked):
        interruption.check()
    assert shown[:2] == [0.0, 0.001]
    assert len(shown) > 2


def test_the_attempts_at_a_round_are_one_round() -> None:
    """Time after the last commit belongs to no round."""
    clock = VirtualClock()
    times = RoundTimes(clock=clock)
    for _ in range(2):
        times.begin()
        clock.sleep(1.0)
        with times.waiting():
            clock.sleep(50.0)
    times.finish()
    clock.sleep(7.0)
    times.finish()
    assert (times.histogram.cumulate()[-1], times.histogram.total) == (1, 2.0)
