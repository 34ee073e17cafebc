"""The limit of clients in flight follows the number of replies that wait."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import pytest
import structlog
from numpy.random import Generator

from fedlearn.core.randomness import Seed
from fedlearn.rounds.congestion import InFlightLimit
from tests.unit.rounds.test_buffered import LIMITS, collect, collector


def limits(waiting: Iterable[int], *, most: int = 16, least: int = 2) -> list[int]:
    """Return the limit after each reply, given the queue length then; it is always used up."""
    queue, in_flight = deque(waiting), most
    limit, found = InFlightLimit(most, least, num_waiting=queue.popleft), list[int]()
    while queue:
        limit.measure_queue()
        found.append(limit.update_limit(num_in_flight=in_flight))
        in_flight = max(in_flight - 1, found[-1])
    return found


def test_it_is_the_concurrency_where_no_more_than_a_buffers_worth_waits() -> None:
    assert limits([0, 1, 2, 0, 1, 2] * 20) == [16] * 120


def test_it_falls_by_those_beyond_a_buffers_worth_that_waited_while_all_in_flight_landed() -> None:
    """By the shortest queue: nine of the sixteen clients in flight were of no use."""
    found = limits([13, 12, 11, *[12] * 13])
    assert found == [16] * 15 + [7]


def test_replies_that_come_together_and_are_folded_in_before_the_next_change_nothing() -> None:
    assert limits([*range(15, -1, -1)] * 5) == [16] * 80


def test_what_it_does_is_seen_once_all_that_were_in_flight_have_landed() -> None:
    """Replies that were queued before the drop do not show that the limit is still too high."""
    found = limits([*[12] * 16, *range(12, 2, -1), *[3] * 6, *[2] * 20])
    assert found[15:31] == [6] * 16
    assert found[31:] == [5] * 21  # then one of the waiting replies was of no use


def test_it_grows_by_one_with_each_that_is_waited_for() -> None:
    """Up to the concurrency, and no further."""
    found = limits([*[16] * 16, *[0] * 20])
    assert found[15:] == [2, *range(3, 17), *[16] * 6]


def test_a_buffer_that_is_more_than_the_concurrency_bounds_nothing() -> None:
    """The same few clients can fill a buffer, one after another."""
    assert limits([50] * 99, most=4, least=10) == [4] * 99


def test_whoever_watches_is_told_of_changes_alone() -> None:
    """Also of the initial limit. The log has each new low, and the end of the congestion."""
    told, waiting = list[int](), iter([*[6] * 8, 0, 0, *[4] * 6, 0, 0, 0, 0])
    limit = InFlightLimit(8, 2, num_waiting=lambda: next(waiting), on_change=told.append)
    with structlog.testing.capture_logs() as logs:
        for in_flight in [*[8] * 8, *[4] * 12]:
            limit.measure_queue()
            limit.update_limit(num_in_flight=in_flight)
    assert told == [8, 4, 5, 6, 2, 3, 4, 5, 6]
    assert [(each["event"], each["limit"]) for each in logs] == [
        ("in_flight_limited", 4),
        ("in_flight_limited", 2),
    ]


def test_the_log_says_when_all_may_be_in_flight_again() -> None:
    waiting = iter([*[3] * 4, 0, 0])
    limit = InFlightLimit(4, 2, num_waiting=lambda: next(waiting))
    with structlog.testing.capture_logs() as logs:
        for _ in range(6):
            limit.measure_queue()
            limit.update_limit(num_in_flight=4)
    assert [each["event"] for each in logs] == ["in_flight_limited", "in_flight_unlimited"]


# ---- A coordinator and its clients in virtual time ----------------------------------------------


class Unlimited(InFlightLimit):
    """Control: a limit that never drops."""

    def update_limit(self, *, num_in_flight: int) -> int:
        """Return the concurrency."""
        return self.limit


class Halving(InFlightLimit):
    """Another rule: halve the limit for a standing queue, once per as many replies."""

    num_landed = 0

    def update_limit(self, *, num_in_flight: int) -> int:
        """Update and return the limit."""
        self.num_landed += 1
        if self._found >= self.least and self.num_landed >= self.limit:
            self.limit, self.num_landed = max(self.least, self.limit // 2), 0
        elif self._found == 0:
            self.limit = min(self.most, self.limit + 1)
        return self.limit


@dataclass(frozen=True)
class Course:
    """Statistics of a simulated run.

    Attributes:
        updates_per_s: Aggregated updates per second.
        staleness: Mean staleness of these updates.
        limits: The limit after each reply.
    """

    updates_per_s: float
    staleness: float
    limits: Sequence[int]


def course(
    rule: type[InFlightLimit],
    *,
    concurrency: int,
    buffer_size: int,
    training_s: Callable[[float, Generator], float],
    commit_s: float,
    until_s: float,
) -> Course:
    """Simulate a coordinator that aggregates replies one by one and commits each full buffer."""
    rng, numbers = Seed(0).derive("trainings").numpy(), count()
    flying, waiting = list[tuple[float, int, int]](), deque[int]()
    ages, landed = list[int](), list[int]()
    now_s, round_num, in_flight, buffer = 0.0, 0, 0, 0
    limit = rule(concurrency, buffer_size, num_waiting=lambda: len(waiting))
    while now_s < until_s:
        while in_flight < limit.limit:
            lands_s = now_s + training_s(now_s, rng)
            heapq.heappush(flying, (lands_s, next(numbers), round_num))
            in_flight += 1
        while flying and flying[0][0] <= now_s:
            waiting.append(heapq.heappop(flying)[2])
        limit.measure_queue()
        if not waiting:
            now_s = flying[0][0]
            waiting.append(heapq.heappop(flying)[2])
        landed.append(limit.update_limit(num_in_flight=in_flight))
        ages.append(round_num - waiting.popleft())
        in_flight, buffer = in_flight - 1, buffer + 1
        if buffer == buffer_size:
            round_num, buffer, now_s = round_num + 1, 0, now_s + commit_s
    return Course(len(ages) / now_s, sum(ages) / len(ages), landed)


def around(mean_s: float) -> Callable[[float, Generator], float]:
    """Training times distributed uniformly between half and one and a half times ``mean_s``."""
    return lambda _, rng: rng.uniform(0.5, 1.5) * mean_s


def chance(mean_s: float) -> Callable[[float, Generator], float]:
    """Training times with an exponential distribution."""
    return lambda _, rng: rng.exponential(mean_s)


@pytest.mark.parametrize("training_s", [around(0.2), around(6.0), chance(6.0)])
def test_of_a_coordinator_that_falls_behind_updates_come_as_fast_and_younger(
    training_s: Callable[[float, Generator], float],
) -> None:
    free, limited = (
        course(
            rule, concurrency=60, buffer_size=2, training_s=training_s, commit_s=0.5, until_s=900
        )
        for rule in (Unlimited, InFlightLimit)
    )
    assert limited.updates_per_s > 0.95 * free.updates_per_s
    assert limited.staleness < 0.7 * free.staleness


@pytest.mark.parametrize("training_s", [around(6.0), chance(6.0)])
def test_to_halve_the_limit_would_leave_the_coordinator_idle(
    training_s: Callable[[float, Generator], float],
) -> None:
    """The control of the test above."""
    free, halved = (
        course(
            rule, concurrency=60, buffer_size=2, training_s=training_s, commit_s=0.5, until_s=900
        )
        for rule in (Unlimited, Halving)
    )
    assert halved.updates_per_s < 0.85 * free.updates_per_s


@pytest.mark.parametrize(
    "training_s", [around(120.0), chance(120.0), lambda _, rng: rng.uniform(119.0, 121.0)]
)
def test_a_slow_commit_limits_nobody_where_clients_are_slower(
    training_s: Callable[[float, Generator], float],
) -> None:
    """Also if all clients reply at the same time."""
    found = course(
        InFlightLimit,
        concurrency=20,
        buffer_size=2,
        training_s=training_s,
        commit_s=9.0,
        until_s=20_000,
    )
    assert sum(found.limits) / len(found.limits) > 19.5


def test_it_grows_back_when_the_load_ends() -> None:
    """It doubles in each time that a client trains."""

    def ebbing(now_s: float, rng: Generator) -> float:
        return rng.uniform(0.5, 1.5) * (0.2 if now_s < 100.0 else 30.0)

    found = course(
        InFlightLimit,
        concurrency=32,
        buffer_size=2,
        training_s=ebbing,
        commit_s=0.5,
        until_s=280.0,
    )
    assert min(found.limits) <= 5
    assert found.limits[-1] == 32


@pytest.mark.parametrize(("num_waiting", "num_in_flight"), [(0, 2), (9, 1)])
def test_a_round_asks_nobody_beyond_the_limit(num_waiting: int, num_in_flight: int) -> None:
    """Three of five clients are asked at first, and no further ones while replies wait."""
    collecting = collector({}, num_there=5)
    collecting.congestion = limit = InFlightLimit(
        LIMITS.concurrency, LIMITS.buffer_size, num_waiting=lambda: num_waiting
    )
    for _ in range(LIMITS.concurrency - 1):  # an earlier round
        limit.measure_queue()
        limit.update_limit(num_in_flight=LIMITS.concurrency)
    assert len(collect(collecting).pending) == num_in_flight
