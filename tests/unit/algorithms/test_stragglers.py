"""The straggler policy: the number of clients to ask, and values that it refuses."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from fedlearn.algorithms.stragglers import BelowMinimum, StragglerPolicy

GOOD: Mapping[str, Any] = {  # Any: the fields' types differ
    "num_wanted": 10,
    "over_selection": 1.3,
    "deadline_s": 60.0,
    "min_reports": 5,
    "below_minimum": BelowMinimum.RETRY,
    "max_retries": 2,
}


@pytest.mark.parametrize(
    ("num_wanted", "over_selection", "cohort_size"),
    [(10, 1.3, 13), (10, 1.0, 10), (10, 1.31, 14), (100, 1.1, 110), (7, 1.5, 11), (1, 1.0, 1)],
)
def test_the_number_asked_is_rounded_up(
    num_wanted: int, over_selection: float, cohort_size: int
) -> None:
    """Rounding up must not count the float error of 1.3 or 1.1."""
    changes = {"num_wanted": num_wanted, "over_selection": over_selection, "min_reports": 1}
    assert StragglerPolicy(**{**GOOD, **changes}).cohort_size == cohort_size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_wanted", 0),
        ("over_selection", 0.99),
        ("over_selection", math.nan),
        ("over_selection", math.inf),
        ("deadline_s", 0.0),
        ("deadline_s", math.nan),
        ("min_reports", -1),
        ("min_reports", 11),
        ("max_retries", -1),
    ],
)
def test_values_without_meaning_are_refused(name: str, value: float) -> None:
    """The message names the field. Control: the unchanged policy is valid."""
    StragglerPolicy(**GOOD)
    with pytest.raises(ValueError, match=name):
        StragglerPolicy(**{**GOOD, name: value})


def test_a_round_may_wait_for_ever() -> None:
    """The deadline may be infinite."""
    assert StragglerPolicy(**{**GOOD, "deadline_s": math.inf}).deadline_s == math.inf
