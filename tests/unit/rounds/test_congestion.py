"""How many clients are in flight, by how many replies wait."""

import pytest

from fedlearn.rounds.congestion import InFlightLimit
from tests.unit.rounds.test_buffered import LIMITS, collect, collector


def limits(waiting: list[int], *, most: int = 16, least: int = 2) -> list[int]:
    """Return the limit after each of some that landed, of which so many found so many waiting."""
    queue = iter(waiting)
    limit = InFlightLimit(most, least, num_waiting=lambda: next(queue))
    return [limit.landed() for _ in waiting]


def test_it_is_the_concurrency_where_nothing_waits() -> None:
    """Nor does what is less than a buffer's worth change it."""
    assert limits([0, 1, 0, 1]) == [16] * 4


def test_it_is_halved_once_for_as_many_as_may_be_in_flight() -> None:
    """Those that were in flight before come yet: they are no sign that it is still too high."""
    found = limits([5] * 40)
    assert found[:8] == [8] * 8
    assert found[8:12] == [4] * 4
    assert found[12:] == [2] * 28


def test_it_grows_by_one_with_each_that_finds_nothing_waiting() -> None:
    """To the concurrency again, and not more."""
    found = limits([5, *[0] * 20])
    assert found == [8, *range(9, 17), *[16] * 12]


def test_a_buffer_that_is_more_than_the_concurrency_bounds_nothing() -> None:
    """A round may be filled by the same few, one after the other."""
    assert limits([50] * 9, most=4, least=10) == [4] * 9


def test_whoever_watches_is_told_of_changes_alone() -> None:
    """And of the limit at the beginning."""
    told, waiting = list[int](), iter([9, 9, 0])
    limit = InFlightLimit(8, 2, num_waiting=lambda: next(waiting), told=told.append)
    for _ in range(3):
        limit.landed()
    assert told == [8, 4, 5]


@pytest.mark.parametrize(("num_waiting", "num_in_flight"), [(0, 2), (9, 1)])
def test_a_round_asks_nobody_beyond_the_limit(num_waiting: int, num_in_flight: int) -> None:
    """Of five that are there, three are asked at first, and fewer follow where replies wait."""
    collecting = collector({}, num_there=5)
    collecting.congestion = InFlightLimit(
        LIMITS.concurrency, LIMITS.buffer_size, num_waiting=lambda: num_waiting
    )
    assert len(collect(collecting).flight) == num_in_flight
