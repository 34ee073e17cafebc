"""The memory channel: virtual arrivals, deadlines and state per client."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import decode, encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Request,
    TrainRequest,
)
from fedlearn.transport.base import Arrival, ask_once
from fedlearn.transport.memory import Handler, MemoryChannel

LATENCIES_S = {ClientId(1): 3.0, ClientId(2): 1.0, ClientId(3): 2.0, ClientId(4): math.inf}
REQUEST = EvaluateRequest(round_num=0, tensors={"w": torch.ones(2)})


def counting(data: bytes, state: bytes) -> tuple[bytes, bytes]:
    """A handler that replies how often it was asked before."""
    reply = EvaluateReply(round_num=0, num_examples=len(state) + 1, metrics={})
    return encode(reply), state + b"x"


def by_table(clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
    return np.array([LATENCIES_S[client] for client in clients])


def channel(handlers: Mapping[ClientId, Handler] | None = None) -> MemoryChannel:
    return MemoryChannel(handlers or dict.fromkeys(LATENCIES_S, counting), by_table, VirtualClock())


def ask(channel: MemoryChannel, deadline_s: float = 10.0) -> list[Arrival]:
    requests = dict.fromkeys(LATENCIES_S, REQUEST)
    return list(ask_once(channel, requests, deadline_s=deadline_s))


def test_replies_come_in_order_of_arrival() -> None:
    """Each has its virtual time; a client that never answers is absent."""
    arrivals = ask(channel(), deadline_s=math.inf)
    assert [(a.client_id, a.elapsed_s) for a in arrivals] == [(2, 1.0), (3, 2.0), (1, 3.0)]


@pytest.mark.parametrize(
    ("deadline_s", "in_time"), [(0.5, []), (1.0, [2]), (1.99, [2]), (2.0, [2, 3])]
)
def test_the_deadline_itself_is_in_time(deadline_s: float, in_time: list[int]) -> None:
    """A reply exactly at the deadline counts, any later one does not."""
    assert [arrival.client_id for arrival in ask(channel(), deadline_s)] == in_time


def test_clients_that_arrive_together_come_in_the_order_of_asking() -> None:
    """So that runs are reproducible."""
    clients = [ClientId(i) for i in (5, 2, 9, 1)]
    tied = MemoryChannel(
        dict.fromkeys(clients, counting), lambda c, _: np.zeros(len(c)), VirtualClock()
    )
    arrivals = ask_once(tied, dict.fromkeys(clients, REQUEST), deadline_s=1.0)
    assert [arrival.client_id for arrival in arrivals] == clients


def test_the_clock_advances_to_each_arrival() -> None:
    """A second exchange starts at the time at which the first ended."""
    memory = channel()
    seen = []
    for _ in ask_once(memory, dict.fromkeys(LATENCIES_S, REQUEST), deadline_s=10.0):
        seen.append(memory.clock.now_s())
        if len(seen) == 2:
            break
    assert seen == [1.0, 2.0]
    ask(memory)
    assert memory.clock.now_s() == 5.0


def test_who_is_not_waited_for_is_not_asked() -> None:
    """Closing the round early leaves the state of the others unchanged."""
    memory = channel()
    next(iter(ask_once(memory, dict.fromkeys(LATENCIES_S, REQUEST), deadline_s=10.0)))
    assert memory.states == {ClientId(2): b"x"}


def test_state_is_kept_per_client_between_messages() -> None:
    """The state that a handler returns is passed to its next call."""
    memory = channel()
    ask(memory, deadline_s=1.0)
    replies = {arrival.client_id: arrival.reply for arrival in ask(memory)}
    counts = {c: r.num_examples for c, r in replies.items() if isinstance(r, EvaluateReply)}
    assert counts == {1: 1, 2: 2, 3: 1}


@pytest.mark.parametrize("answer", [b"", b"garbage", encode(REQUEST), encode(Failure("battery"))])
def test_what_is_not_a_reply_is_a_failure(answer: bytes) -> None:
    """Garbage, a request, and a failure that the client itself reports."""
    arrivals = ask(channel(dict.fromkeys(LATENCIES_S, lambda _, state: (answer, state))))
    assert len(arrivals) == 3
    assert all(isinstance(arrival.reply, Failure) for arrival in arrivals)


def test_different_requests_reach_different_clients() -> None:
    """Each client gets its own; the latency model sees each request once."""
    received: dict[int, int] = {}
    asked: list[list[ClientId]] = []

    def remember(client: ClientId) -> Handler:
        def handle(data: bytes, state: bytes) -> tuple[bytes, bytes]:
            request = decode(data)
            assert isinstance(request, EvaluateRequest | TrainRequest)
            received[client] = request.round_num
            return counting(data, state)

        return handle

    def latency(clients: Sequence[ClientId], request: Request) -> NDArray[np.float64]:
        asked.append(list(clients))
        return np.zeros(len(clients))

    memory = MemoryChannel({c: remember(c) for c in LATENCIES_S}, latency, VirtualClock())
    other = EvaluateRequest(round_num=7, tensors={})
    requests = {c: other if c == 3 else REQUEST for c in LATENCIES_S}
    assert len(list(ask_once(memory, requests, deadline_s=1.0))) == 4
    assert received == {1: 0, 2: 0, 3: 7, 4: 0}
    assert asked == [[1, 2, 4], [3]]


def test_an_exchange_is_asked_again_while_it_is_open() -> None:
    """From the time of the request: others, or clients that answered; ties keep their order."""
    memory = channel()
    exchange = memory.open(deadline_s=math.inf)
    exchange.ask(dict.fromkeys([ClientId(1), ClientId(3)], REQUEST))
    first = exchange.next(until_s=math.inf)
    assert first is not None
    assert (first.client_id, first.elapsed_s) == (3, 2.0)
    exchange.ask(dict.fromkeys([ClientId(2), ClientId(3)], REQUEST))
    arrivals = list(iter(partial(exchange.next, until_s=math.inf), None))
    assert [(a.client_id, a.elapsed_s) for a in arrivals] == [(1, 3.0), (2, 3.0), (3, 4.0)]
    assert memory.clock.now_s() == 4.0
    assert memory.states == {1: b"x", 2: b"x", 3: b"xx"}


def test_a_client_that_has_not_answered_is_not_asked_again() -> None:
    """Nor is any other client in that call; control: after its reply was returned, it is."""
    memory = channel()
    exchange = memory.open(deadline_s=math.inf)
    exchange.ask({ClientId(2): REQUEST, ClientId(4): REQUEST})
    both = dict.fromkeys([ClientId(1), ClientId(2)], REQUEST)
    with pytest.raises(ValueError, match="client 2 is asked again before its reply"):
        exchange.ask(both)
    assert exchange.next(until_s=math.inf) is not None
    assert exchange.next(until_s=math.inf) is None
    exchange.ask(both)
    arrivals = iter(partial(exchange.next, until_s=math.inf), None)
    assert [arrival.client_id for arrival in arrivals] == [2, 1]


def test_waiting_for_a_reply_ends_when_it_is_told_to() -> None:
    """Virtual time advances; a later request arrives that much later, or misses the deadline."""
    memory = channel()
    exchange = memory.open(deadline_s=4.0)
    exchange.ask({ClientId(1): REQUEST})
    assert exchange.next(until_s=2.5) is None
    assert memory.clock.now_s() == 2.5
    exchange.ask({ClientId(2): REQUEST, ClientId(3): REQUEST})
    arrivals = [exchange.next(until_s=3.5), exchange.next(until_s=3.5)]
    assert [each and (each.client_id, each.elapsed_s) for each in arrivals] == [(1, 3.0), (2, 3.5)]
    assert exchange.next(until_s=math.inf) is None
    assert ClientId(3) not in memory.states


def test_who_has_not_been_read_when_an_exchange_closes_is_late() -> None:
    """Its state does not change, and another exchange may ask it."""
    memory = channel()
    exchange = memory.open(deadline_s=math.inf)
    exchange.ask(dict.fromkeys([ClientId(1), ClientId(2)], REQUEST))
    assert exchange.next(until_s=math.inf) is not None
    exchange.close()
    exchange.close()
    assert exchange.next(until_s=math.inf) is None
    with pytest.raises(ValueError, match="closed; open another one"):
        exchange.ask({ClientId(3): REQUEST})
    assert memory.states == {ClientId(2): b"x"}
    again = list(ask_once(memory, {ClientId(1): REQUEST}, deadline_s=10.0))
    assert [(arrival.client_id, arrival.elapsed_s) for arrival in again] == [(1, 3.0)]


def test_time_that_passes_beside_an_exchange_is_not_taken_back() -> None:
    """Two exchanges share one clock, which never goes backwards."""
    memory = channel()
    exchange = memory.open(deadline_s=math.inf)
    exchange.ask({ClientId(2): REQUEST})
    memory.clock.sleep(5.0)
    assert exchange.next(until_s=math.inf) is not None
    assert memory.clock.now_s() == 5.0


def test_everybody_is_available() -> None:
    """A simulated client is always available, even if it may not answer."""
    assert set(channel().available()) == set(LATENCIES_S)
