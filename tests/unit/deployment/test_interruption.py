"""Reasons that end a coordinator's waiting."""

import os
import signal
import threading

import pytest

from fedlearn.core.clock import SystemClock
from fedlearn.deployment.interruption import Interruption, stop_signals
from fedlearn.errors import Aborted, Parked

LONG_S = 120.0


def test_the_first_reason_counts() -> None:
    """An abort after a stop does not replace the first reason."""
    interruption = Interruption()
    interruption.check()
    interruption.give(Parked("first"))
    interruption.give(Aborted("second"))
    with pytest.raises(Parked, match="first"):
        interruption.check()


def test_a_sleep_ends_when_there_is_a_reason() -> None:
    """At once, even if another thread gives the reason."""
    interruption, clock = Interruption(), SystemClock()
    started_s = clock.now_s()
    threading.Timer(0.05, interruption.give, [Aborted("by the operator")]).start()
    with pytest.raises(Aborted):
        interruption.sleep(LONG_S)
    assert clock.now_s() - started_s < LONG_S / 2


def test_a_sleep_without_a_reason_passes() -> None:
    Interruption().sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_parks_the_run(number: signal.Signals) -> None:
    """The process does not end; afterwards the previous signal handlers are restored."""
    interruption, before = Interruption(), signal.getsignal(number)
    with stop_signals(interruption):
        os.kill(os.getpid(), number)
        with pytest.raises(Parked, match=number.name):
            interruption.sleep(LONG_S)
    assert signal.getsignal(number) is before
