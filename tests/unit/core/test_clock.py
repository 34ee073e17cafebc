"""Time as a dependency."""

import re

from fedlearn.core.clock import SystemClock, VirtualClock, utc_now


def test_virtual_time_passes_only_by_sleeping() -> None:
    """Sleeping for a day takes no real time."""
    clock = VirtualClock()
    clock.sleep(86_400.0)
    clock.sleep(0.5)
    assert clock.now_s() == 86_400.5


def test_the_system_clock_never_goes_back() -> None:
    """It is monotonic, and advances while sleeping."""
    clock = SystemClock()
    before = clock.now_s()
    clock.sleep(0.0)
    assert clock.now_s() >= before


def test_dates_are_utc_in_iso_8601() -> None:
    """They have seconds and end in Z."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", utc_now())
