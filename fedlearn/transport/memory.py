"""Clients in this process: real sessions through the real wire format.

The channel of tests and of users' own tests: bytes in, bytes out, arrivals in virtual
time, and a drawer per client for the state it keeps between messages.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.clock import VirtualClock
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, Reply, Request
from fedlearn.transport.base import Arrival, as_reply

#: One message in, one out, with the client's state before and after.
Handler = Callable[[bytes, bytes], tuple[bytes, bytes]]

#: Seconds until the replies of these clients to this request; infinite: never.
Latency = Callable[[Sequence[ClientId], Request], NDArray[np.float64]]


@dataclass
class MemoryChannel:
    """Calls each client's handler in order of virtual arrival, through the wire format.

    Attributes:
        handlers: One byte-level handler per client.
        latency: When each reply arrives.
        clock: Advanced to each arrival.
        states: Per client the state that its last message left behind; empty at first.
    """

    handlers: Mapping[ClientId, Handler]
    latency: Latency
    clock: VirtualClock
    states: dict[ClientId, bytes] = field(default_factory=dict)

    def available(self) -> Sequence[ClientId]:
        """Return all clients."""
        return tuple(self.handlers)

    def exchange(
        self, requests: Mapping[ClientId, Request], *, deadline_s: float
    ) -> Iterator[Arrival]:
        """Yield replies in order of virtual arrival (then of asking), until the deadline."""
        start_s = self.clock.now_s()
        clients = list(requests)
        latencies_s = self._latencies_s(requests)
        encoded: dict[int, bytes] = {}  # one serialised copy for all that are sent the same
        uses = Counter(map(id, requests.values()))
        for index in np.argsort(latencies_s, kind="stable").tolist():
            arrival_s = float(latencies_s[index])
            if not arrival_s <= deadline_s or math.isinf(arrival_s):
                break
            self.clock.sleep(start_s + arrival_s - self.clock.now_s())
            request = requests[clients[index]]
            data = encoded.get(id(request)) or encode(request)
            if uses[id(request)] > 1:
                encoded[id(request)] = data
            reply = self._ask(clients[index], data)
            yield Arrival(clients[index], reply, arrival_s)

    def _latencies_s(self, requests: Mapping[ClientId, Request]) -> NDArray[np.float64]:
        """Return when each reply arrives, asking the model once per distinct request."""
        latencies_s = np.zeros(len(requests))
        places: dict[int, list[int]] = {}
        for place, request in enumerate(requests.values()):
            places.setdefault(id(request), []).append(place)
        clients, messages = list(requests), list(requests.values())
        for group in places.values():
            latencies_s[group] = self.latency([clients[p] for p in group], messages[group[0]])
        return latencies_s

    def _ask(self, client_id: ClientId, data: bytes) -> Reply:
        state = self.states.get(client_id, b"")
        reply, self.states[client_id] = self.handlers[client_id](data, state)
        return as_reply(reply)
