"""Buffered rounds over a channel: models sent ahead, clients that keep failing, and restarts."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedlearn.algorithms.asynchronous import Asynchrony
from fedlearn.algorithms.collector import CollectedRound
from fedlearn.algorithms.pending_tasks import PendingTask, PendingTasks
from fedlearn.algorithms.staleness import StalenessWeight
from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import ClientId, Failure, Request, TrainReply, TrainRequest
from fedlearn.core.participations import Status
from fedlearn.rounds.congestion import InFlightLimit
from fedlearn.rounds.plain import PlainCollector
from fedlearn.transport.memory import Handler, MemoryChannel, MemoryExchange
from tests.unit.rounds.test_plain import POLICY, REQUEST, ResumedChannel

ROUND = REQUEST.round_num
LIMITS = Asynchrony(
    buffer_size=2,
    concurrency=3,
    max_staleness=3,
    staleness_weight=StalenessWeight.POLYNOMIAL,
    staleness_exponent=1.0,
    staleness_hinge=0,
)


@dataclass
class RecordedPrefetches:
    """Records what was sent ahead."""

    sent: list[tuple[list[int], int, int]] = field(default_factory=list)
    num_calls_off: int = 0

    def send_prefetch(
        self, client_ids: Sequence[ClientId], request: TrainRequest, *, last_round_num: int
    ) -> None:
        self.sent.append((list(client_ids), request.round_num, last_round_num))

    def cancel_prefetches(self) -> None:
        self.num_calls_off += 1


def client(age: int) -> Handler:
    """Create a client that trains a model ``age`` rounds older than the one it is asked for."""

    def answer(data: bytes, state: bytes) -> tuple[bytes, bytes]:
        request = decode(data)
        assert isinstance(request, TrainRequest)
        lanes = {"delta": torch.ones(2)}
        reply = TrainReply(
            round_num=request.round_num - age, lanes=lanes, num_examples=1, metrics={}
        )
        return encode(reply), state

    return answer


def failing(data: bytes, state: bytes) -> tuple[bytes, bytes]:
    """A client whose training fails."""
    return encode(Failure("RuntimeError")), state


def collector(
    ages: Mapping[int, int], *, limits: Asynchrony = LIMITS, num_there: int = 3
) -> PlainCollector:
    """Create a collector whose client k takes 1 + k seconds."""
    handlers = {ClientId(each): client(ages.get(each, 0)) for each in range(num_there)}

    def latency(clients: Sequence[ClientId], _: Request) -> NDArray[np.float64]:
        return np.array([1.0 + each for each in clients])

    channel = MemoryChannel(handlers, latency, VirtualClock())
    return PlainCollector(
        channel=channel,
        policy=POLICY,
        round_mode=limits,
        slab_bytes=0,
        wait=None,
        prefetcher=RecordedPrefetches(),
    )


def list_prefetches(collecting: PlainCollector) -> list[tuple[list[int], int, int]]:
    assert isinstance(collecting.prefetcher, RecordedPrefetches)
    return collecting.prefetcher.sent


def collect(collecting: PlainCollector, *in_flight: int) -> CollectedRound:
    """Collect a buffered round that begins with clients in flight on the previous model."""

    def draw(
        num: int, *, round_num: int, attempt: int, busy: Collection[ClientId]
    ) -> Sequence[ClientId]:
        return [each for each in collecting.available() if each not in busy][:num]

    pending: PendingTasks = tuple(
        PendingTask(ClientId(each), ROUND - 1, 0, each, -1.0) for each in in_flight
    )
    requests = {ROUND: REQUEST, ROUND - 1: replace(REQUEST, round_num=ROUND - 1)}
    return collecting.collect(pending, requests, round_num=ROUND, draw=draw)


def test_who_works_on_an_older_model_is_sent_the_newest_ahead() -> None:
    """Once per round, with the last round whose request may be answered with that model."""
    collecting = collector({})
    collect(collecting, 1, 2)
    assert list_prefetches(collecting) == [([1, 2, 0], ROUND, ROUND + LIMITS.max_staleness - 1)]


@pytest.mark.parametrize(
    ("in_flight", "num_there", "limits"),
    [
        ((), 3, LIMITS),  # no client works on an older model
        ((1, 2), 4, LIMITS),  # client 3 would be asked first
        ((1, 2), 3, replace(LIMITS, max_staleness=1)),  # the update would be too stale by then
    ],
)
def test_nobody_is_sent_ahead_what_it_is_not_asked_about_next(
    in_flight: Sequence[int], num_there: int, limits: Asynchrony
) -> None:
    """The same holds for a synchronous round, and for a client that has the model already."""
    collecting = collector({}, limits=limits, num_there=num_there)
    collect(collecting, *in_flight)
    assert list_prefetches(collecting) == []


def test_an_update_that_was_begun_ahead_counts_as_old_as_it_is() -> None:
    """Client 0 was asked to train this round's model, but had begun on one of two rounds ago."""
    collected = collect(collector({0: 2}), 1)
    assert collected.staleness == {1: 1, 2: 1}
    assert collected.aggregate is not None
    assert collected.aggregate.lanes["delta"].tolist() == pytest.approx([(1 / 2 + 1 / 3) / 2] * 2)


@pytest.mark.parametrize(("age", "status"), [(3, Status.REPORTED), (4, Status.STALE)])
def test_one_that_is_too_old_by_then_does_not_count(age: int, status: Status) -> None:
    """Its client is notified and may be asked again."""
    collecting = collector({1: age - 1})
    collected = collect(collecting, 1)
    told = [each.status for each in collected.participations if each.client_id == 1]
    assert told[0] is status
    assert collected.aggregate is not None


def test_no_client_may_say_that_its_model_is_newer_than_what_it_was_asked() -> None:
    """Nor one older than the limit: it fails, like a client that answers another round."""
    for age in (-1, LIMITS.max_staleness + 1):
        collected = collect(collector({0: age}), 1)
        failed = [each for each in collected.participations if each.client_id == 0]
        assert failed[0].status is Status.FAILED, age
        assert "reply to round" in failed[0].reason


def test_a_buffer_that_nobody_is_left_to_fill_closes_as_it_is() -> None:
    """A client with an unusable update is not asked again; a third client would fill the buffer."""
    collected = collect(collector({0: -1}, num_there=2))
    told = [(each.client_id, each.status) for each in collected.participations]
    assert told == [(0, Status.FAILED), (1, Status.REPORTED)]
    assert collected.aggregate is not None
    assert collected.staleness == {0: 1}
    assert collect(collector({0: -1}, num_there=3)).staleness == {0: 2}


def num_calls_off(collecting: PlainCollector) -> int:
    assert isinstance(collecting.prefetcher, RecordedPrefetches)
    return collecting.prefetcher.num_calls_off


def test_what_was_sent_ahead_is_called_off_where_another_ones_turn_comes_first() -> None:
    """Client 3 is available, so the others may be asked much later, when their update is stale."""
    collecting = collector({}, num_there=4)
    collect(collecting, 1, 2)
    assert num_calls_off(collecting) == 1


@pytest.mark.parametrize(("most", "expected"), [(3, 0), (2, 1)])
def test_what_was_sent_ahead_is_called_off_where_fewer_may_be_in_flight(
    most: int, expected: int
) -> None:
    """A client that lands is then not the next to be asked."""
    collecting = collector({})
    collecting.congestion = InFlightLimit(most, 2, num_waiting=lambda: 0)
    collect(collecting, 0, 1, 2)
    assert num_calls_off(collecting) == expected
    assert len(list_prefetches(collecting)) == 1 - expected


def test_a_client_that_fails_whenever_it_is_asked_does_not_end_the_round() -> None:
    """It is asked again up to ``max_retries`` times, and the others fill the buffer."""
    collecting = collector({}, limits=replace(LIMITS, buffer_size=3), num_there=3)
    collecting.policy = replace(POLICY, max_retries=2)
    assert isinstance(collecting.channel, MemoryChannel)
    collecting.channel = replace(
        collecting.channel,
        handlers={**collecting.channel.handlers, ClientId(0): failing},
        latency=lambda clients, _: np.array([0.01 if each == 0 else 1.0 for each in clients]),
    )
    collected = collect(collecting)
    told = Counter((each.client_id, each.status) for each in collected.participations)
    assert told == {
        (0, Status.FAILED): 1 + 2,
        (1, Status.REPORTED): 1,
        (2, Status.REPORTED): 1,
    }
    assert collected.aggregate is not None


def test_what_was_sent_ahead_is_called_off_with_the_run() -> None:
    """No later round will ask for it."""
    collecting = collector({})
    collect(collecting, 1, 2)
    before = collecting.prefetcher
    assert isinstance(before, RecordedPrefetches)
    assert before.num_calls_off == 0
    collecting.close()
    assert before.num_calls_off == 1


def failing_at_once(*failing: int) -> tuple[PlainCollector, VirtualClock]:
    """Create a collector of three clients that take 5 s, or fail at once."""
    handlers = {ClientId(each): client(0) for each in range(3)}
    handlers |= dict.fromkeys(map(ClientId, failing), no_number)

    def latency(clients: Sequence[ClientId], _: Request) -> NDArray[np.float64]:
        return np.array([0.01 if each in failing else 5.0 for each in clients])

    clock = VirtualClock()
    collecting = PlainCollector(
        channel=MemoryChannel(handlers, latency, clock),
        policy=POLICY,
        round_mode=LIMITS,
        slab_bytes=0,
        wait=None,
    )
    return collecting, clock


def no_number(_: bytes, state: bytes) -> tuple[bytes, bytes]:
    return encode(Failure("the delta is not finite")), state


def test_a_client_that_always_fails_is_asked_once_while_others_work() -> None:
    """Otherwise its failures alone would end the round within a second."""
    collecting, clock = failing_at_once(0)
    collected = collect(collecting)
    assert collected.aggregate is not None
    assert collected.count(Status.FAILED) == 1
    assert clock.now_s() == pytest.approx(5.0)


def test_where_all_fail_the_round_is_given_up() -> None:
    """Each has been retried ``max_retries`` times, and the round does not wait for new clients."""
    collecting, clock = failing_at_once(0, 1, 2)
    collecting.policy = replace(POLICY, max_retries=2)
    collecting.wait = pytest.fail
    collected = collect(collecting)
    assert collected.aggregate is None
    assert collected.count(Status.FAILED) == (1 + 2) * 3
    assert clock.now_s() < 1.0


@pytest.mark.parametrize(("grace_s", "num_late"), [(0.0, 1), (30.0, 0)])
def test_a_client_in_flight_has_time_to_return_after_a_restart(
    grace_s: float, num_late: int
) -> None:
    """It answers 2 s after the restart and 3 s after it was asked; the deadline is 1.5 s."""
    collecting = collector({}, num_there=2)
    collecting.policy = replace(POLICY, deadline_s=1.5)
    channel = collecting.channel
    assert isinstance(channel, MemoryChannel)
    collecting.channel = ResumedChannel(
        channel.handlers, channel.latency, channel.clock, grace_s=grace_s
    )
    collected = collect(collecting, 1)
    assert collected.count(Status.LATE) == num_late
    assert collected.count(Status.REPORTED) == 2 - num_late


def test_who_sends_what_does_not_count_is_not_waited_for_without_end() -> None:
    """As for a client that was late, the round closes with the others after a deadline."""
    collecting = collector({0: -1}, limits=replace(LIMITS, buffer_size=3))
    num_waits = 0

    def wait() -> None:
        nonlocal num_waits
        num_waits += 1
        assert num_waits < 1000
        exchange = collecting._exchange  # noqa: SLF001 - to let time pass on its clock
        assert isinstance(exchange, MemoryExchange)
        exchange._advance_to(exchange.elapsed_s() + 1.0)  # noqa: SLF001

    collecting.wait = wait
    collected = collect(collecting)
    assert collected.count(Status.FAILED) == 1
    assert collected.staleness == {0: 2}
    assert collected.aggregate is not None
    assert num_waits == POLICY.deadline_s
