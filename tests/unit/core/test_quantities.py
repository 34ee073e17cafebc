"""Durations in a readable form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlearn.core.quantities import choose_time_unit, format_duration


@given(st.floats(0, 86400.0 * 99))
def test_a_duration_fits_its_column(seconds: float) -> None:
    """Eight characters suffice for runs of up to a hundred days."""
    assert len(format_duration(seconds)) <= 8


@pytest.mark.parametrize(
    ("longest_s", "unit"),
    [(0.0, "seconds"), (119.0, "seconds"), (120.0, "minutes"), (7200.0, "hours"), (1e6, "days")],
)
def test_time_is_in_a_unit_a_person_reads(longest_s: float, unit: str) -> None:
    """No axis should read 86,400 seconds."""
    assert choose_time_unit(longest_s)[0] == unit
