"""In-process clients that use real sessions and the real wire format.

This channel is for tests, including users' own: it encodes and decodes every message, replies
arrive in virtual time, and it stores the state of each client between messages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, Failure, Reply, Request
from fedlearn.errors import ProtocolError
from fedlearn.transport.base import Arrival, decode_reply, require_free

#: A reply that is due exactly at the end of a wait has arrived, despite rounding errors.
_ROUNDING_S = 1e-9

#: (request, client state) -> (reply, new client state), all encoded.
Handler = Callable[[bytes, bytes], tuple[bytes, bytes]]

#: Returns the seconds until each client's reply to the request; infinite: it never replies.
Latency = Callable[[Sequence[ClientId], Request], NDArray[np.float64]]


@dataclass
class MemoryChannel:
    """Calls each client's handler in order of virtual arrival, through the wire format.

    Attributes:
        clock: Advanced to each arrival.
        states: By client the state after its last message; empty at first.
        refused: By client why its last refused reply did not count.
    """

    handlers: Mapping[ClientId, Handler]
    latency: Latency
    clock: VirtualClock
    states: dict[ClientId, bytes] = field(default_factory=dict)
    refused: dict[ClientId, str] = field(default_factory=dict)

    def available(self) -> Sequence[ClientId]:
        """Return all clients."""
        return tuple(self.handlers)

    def open(self, *, deadline_s: float) -> "MemoryExchange":
        """Open an exchange; a client's handler is called when its reply is read."""
        return MemoryExchange(self, deadline_s)

    def reply(self, client_id: ClientId, data: bytes) -> Reply:
        """Call a client's handler, keep its new state, and decode its reply."""
        state = self.states.get(client_id, b"")
        reply, self.states[client_id] = self.handlers[client_id](data, state)
        try:
            return decode_reply(reply)
        except ProtocolError as error:
            self.refused[client_id] = str(error)
            return Failure(str(error))


class MemoryExchange:
    """An :class:`fedlearn.transport.base.Exchange` in virtual time.

    Replies come in order of arrival, ties in order of asking; the clock moves to the last arrival.
    The handler of a client that is late is never called: its state does not change.
    """

    def __init__(self, channel: MemoryChannel, deadline_s: float) -> None:
        self._channel = channel
        self._deadline_s = deadline_s
        self._start_s = channel.clock.now_s()
        self._elapsed_s = 0.0
        self._awaited: set[ClientId] = set()
        #: A heap: arrival time, index of the request, client, and a function that encodes it.
        self._due: list[tuple[float, int, ClientId, Callable[[], bytes]]] = []
        self._num_sent = 0
        self._is_open = True

    def ask(
        self,
        requests: Mapping[ClientId, Request],
        *,
        number: int | None = None,  # noqa: ARG002 - never resumed
    ) -> None:
        """Send every request at the current virtual time; raises as the protocol says."""
        require_free(self._awaited, requests, is_open=self._is_open)
        if self._num_sent == 0:
            self._start_s = self._channel.clock.now_s()
        alike: dict[int, list[ClientId]] = {}
        for client_id, request in requests.items():
            alike.setdefault(id(request), []).append(client_id)
        places = {client_id: self._num_sent + place for place, client_id in enumerate(requests)}
        for clients in alike.values():
            request = requests[clients[0]]
            # Encoded at most once, and freed once no client needs it any more.
            encoded: Callable[[], bytes] = cache(partial(encode, request))
            latencies_s = self._channel.latency(clients, request).tolist()
            for client_id, latency_s in zip(clients, latencies_s, strict=True):
                arrival_s = self._elapsed_s + latency_s
                if math.isfinite(arrival_s):
                    # The index breaks ties, so the functions are never compared.
                    heappush(self._due, (arrival_s, places[client_id], client_id, encoded))
        self._awaited |= requests.keys()
        self._num_sent += len(requests)

    def next(self, *, until_s: float) -> Arrival | None:
        """Return the next reply; without one, advance to ``until_s`` if the deadline is later."""
        if not self._awaited:
            return None
        if not self._due or self._due[0][0] > min(until_s + _ROUNDING_S, self._deadline_s):
            if until_s < self._deadline_s:
                self._advance_to(max(until_s, self._elapsed_s))
            return None
        arrival_s, _, client_id, encoded = heappop(self._due)
        self._advance_to(arrival_s)
        self._awaited.discard(client_id)
        reply = self._channel.reply(client_id, encoded())
        refuse = partial(self._channel.refused.__setitem__, client_id)
        return Arrival(client_id, reply, self._elapsed_s, refuse)

    def elapsed_s(self) -> float:
        """Return the virtual time of the exchange: that of its last reply or wait."""
        return self._elapsed_s

    def grace_until_s(self) -> float:
        """Return 0, since an in-memory channel never restarts."""
        return 0.0

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        """Stop waiting for these clients."""
        gone = set(client_ids)
        self._awaited -= gone
        self._due = [each for each in self._due if each[2] not in gone]
        heapify(self._due)

    def close(self) -> None:
        """Stop waiting for all clients."""
        self._is_open = False
        self._awaited.clear()
        self._due.clear()

    def _advance_to(self, elapsed_s: float) -> None:
        clock = self._channel.clock
        clock.sleep(max(0.0, self._start_s + elapsed_s - clock.now_s()))
        self._elapsed_s = elapsed_s
