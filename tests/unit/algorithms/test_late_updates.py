"""The adaptive deadline of semi-synchronous rounds."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedlearn.algorithms.late_updates import Durations, LateUpdates
from fedlearn.algorithms.staleness import StalenessWeight

LATE = LateUpdates(
    max_staleness=3,
    staleness_weight=StalenessWeight.POLYNOMIAL,
    staleness_exponent=0.5,
    staleness_hinge=0,
    deadline_quantile=0.8,
    deadline_window=3,
    least_deadline_s=0.0,
)


def test_the_deadline_is_a_duration_that_so_many_did_not_exceed() -> None:
    """Quantile 0.8 of ten durations is exactly the 8th, cut to the allowed range."""
    ten = (tuple(float(each) for each in range(1, 11)),)
    assert LATE.deadline_s(ten, [], longest_s=60.0) == 8.0
    assert replace(LATE, deadline_quantile=0.9).deadline_s(ten, [], longest_s=60.0) == 9.0
    assert replace(LATE, deadline_quantile=1.0).deadline_s(ten, [], longest_s=60.0) == 10.0
    assert LATE.deadline_s(ten, [], longest_s=5.0) == 5.0
    assert replace(LATE, least_deadline_s=8.5).deadline_s(ten, [], longest_s=60.0) == 8.5


def test_before_anybody_has_answered_it_is_the_longest() -> None:
    """The same holds without a quantile: the deadline is then fixed."""
    assert LATE.deadline_s((), [], longest_s=math.inf) == math.inf
    fixed = replace(LATE, deadline_quantile=None)
    assert fixed.deadline_s(((1.0,),), [], longest_s=7.0) == 7.0
    assert fixed.window(((1.0,),), [2.0]) == ()


def test_only_the_last_rounds_count() -> None:
    """The window keeps three rounds."""
    durations: Durations = ()
    for each in range(5):
        durations = LATE.window(durations, [float(each)])
    assert durations == ((2.0,), (3.0,), (4.0,))


def adapt_deadline(heard_s: Callable[[float, Any], list[float]]) -> float:
    """Return the deadline after 60 rounds that see only the durations from ``heard_s``."""
    durations: Durations = ()
    rng, deadline_s = np.random.default_rng(0), 10.0
    for _ in range(60):
        took_s = rng.uniform(1.0, 10.0, 20)
        durations = LATE.window(durations, heard_s(deadline_s, took_s))
        deadline_s = LATE.deadline_s(durations, [], longest_s=10.0)
    return deadline_s


def test_durations_of_those_in_time_alone_would_draw_the_deadline_down() -> None:
    """Control: without the durations of late clients, the deadline would keep shrinking."""
    assert 7.0 < adapt_deadline(lambda _, took_s: took_s.tolist()) < 9.5
    assert adapt_deadline(lambda deadline_s, took_s: took_s[took_s <= deadline_s].tolist()) < 2.0


def test_who_is_awaited_has_taken_as_long_as_that() -> None:
    """So a deadline that is too short grows even if no client replies."""
    assert LATE.deadline_s(((1.0,) * 4,), [30.0] * 2, longest_s=60.0) == 30.0
    assert LATE.deadline_s(((1.0,) * 4,), [0.5] * 2, longest_s=60.0) == 1.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"deadline_quantile": 0.0}, "deadline_quantile"),
        ({"deadline_quantile": 1.1}, "deadline_quantile"),
        ({"deadline_window": 0}, "deadline_window"),
        ({"least_deadline_s": -1.0}, "least_deadline_s"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_values_without_meaning_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(LATE, **changes)
