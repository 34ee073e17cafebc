"""The coordinator's side: a Flower grid as a channel to clients."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import httpx
import structlog
from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from fedlearn.core.clock import Clock
from fedlearn.core.codec import encode
from fedlearn.core.messages import (
    ClientId,
    EvaluateRequest,
    Failure,
    Reply,
    Request,
    Settings,
)
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.transport.base import Arrival, Asked, as_reply, require_free
from fedlearn.transport.flower.postbox import (
    PUSH_AGAIN_S,
    Counts,
    MessageGrid,
    Postbox,
    Sent,
    Start,
    in_a_thread,
)
from fedlearn.transport.flower.records import (
    HELLO,
    content_of,
    key_header,
    key_on,
    number_in,
    payload_of,
    require_signed,
    run_id_of,
    unpacked,
)
from fedlearn.transport.wire_pb2 import TaskKey

#: Seconds between two looks at what has arrived.
_TICK_S = 0.1
#: Flower's clock and ours are read at different moments: it shall not end a round before we do.
_TTL_MARGIN_S = 1.0
_HELLO_TTL_S = 600.0
#: Of the reasons why nodes are no clients, how many are told.
_TOLD_REASONS = 3
#: What a reply may be larger than twice its request.
_REPLY_ALLOWANCE_BYTES = 1 << 20


@dataclass(eq=False, kw_only=True)
class FlowerChannel:
    """Reaches clients through a Flower grid.

    Attributes:
        run_id: Unique to the run for ever; part of what clients sign.
        patience_s: How long :meth:`available` waits for a SuperLink that does not answer.
        coordinator_key: What the coordinator signs the terms of secure aggregation with, 32 bytes,
            shown to each node when it introduces itself; empty: there is none.
        start: How to do something on the side.
    """

    grid: MessageGrid
    run_id: str
    clock: Clock
    patience_s: float
    coordinator_key: bytes
    start: Start = in_a_thread
    counts: Counts = field(default_factory=Counts)
    _postbox: Postbox = field(init=False, repr=False)
    _node_ids: dict[ClientId, int] = field(default_factory=dict, init=False)
    _keys: dict[ClientId, bytes] = field(default_factory=dict, init=False)
    _hellos: dict[int, Sent] = field(default_factory=dict, init=False)
    _settled_nodes: set[int] = field(default_factory=set, init=False)
    _strangers: dict[int, str] = field(default_factory=dict, init=False)  # why, by node
    _connected: set[int] = field(default_factory=set, init=False)
    _last_keys: dict[str, TaskKey] = field(default_factory=dict, init=False)
    _late: list[Sent] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._postbox = Postbox(self.grid, self.clock, self.start, self.counts)

    @property
    def identity_keys(self) -> Mapping[ClientId, bytes]:
        """By client the key that it showed first in this run; it grows as clients come."""
        return MappingProxyType(self._keys)

    def available(self) -> Sequence[ClientId]:
        """Return the clients whose nodes are connected now, in ascending order.

        Nodes that are new are asked who they are, and are clients once they have answered.

        Raises:
            DeploymentError: The SuperLink does not answer, or no longer serves this run.
        """
        self._connected = self._nodes(self.clock.now_s() + self.patience_s)
        return self._introduced(self._connected)

    @property
    def num_nodes(self) -> int:
        """How many nodes were connected at the last look."""
        return len(self._connected)

    @property
    def num_clients(self) -> int:
        """How many of them are clients."""
        return len(self._connected & set(self._node_ids.values()))

    def attendance(self) -> str:
        """Return in words how many nodes were connected at the last look, and who is no client.

        As in "3 nodes are connected, 2 did not introduce themselves (Flower error 2: ...)".
        """
        noun = "node is" if self.num_nodes == 1 else "nodes are"
        told = f"{self.num_nodes} {noun} connected"
        strangers = self._connected - set(self._node_ids.values())
        reasons = sorted({self._strangers[node] for node in strangers & self._strangers.keys()})
        if strangers:
            why = f" ({'; '.join(reasons[:_TOLD_REASONS])})" if reasons else ""
            told += f", {len(strangers)} did not introduce themselves{why}"
        return told

    def open(self, *, deadline_s: float) -> "FlowerExchange":
        """Open an exchange, none of it durable; late replies are dropped, and counted."""
        return FlowerExchange(self, deadline_s)

    def send(
        self, requests: Mapping[ClientId, Request], *, expires_s: float
    ) -> dict[ClientId, Sent]:
        """Send to each client, on the side; one that is not known has failed at once."""
        asked, sent = Asked.of(requests), dict[ClientId, Sent]()
        alike = [(self._key(request), encode(request)) for request in asked.shared]
        payloads = [payload_of(data) for _, data in alike]  # the SuperLink keeps each once
        for client, place in asked.places.items():
            # A part that is for one client alone stands in the header, beside what all have.
            (key, data), personal = alike[place], asked.personal.get(client, b"")
            evaluates = isinstance(asked.shared[place], EvaluateRequest)
            sent[client] = Sent(
                node_id=self._node_ids.get(client, 0),
                key=key,
                content=content_of(key_header(key, personal=personal), payloads[place]),
                message_type=MessageType.EVALUATE if evaluates else MessageType.TRAIN,
                expires_s=expires_s,
                max_reply_bytes=2 * len(data) + _REPLY_ALLOWANCE_BYTES,
            )
            if client not in self._node_ids:
                stranger = Failure("the client is not in this federation")
                sent[client].settle(stranger, self.clock.now_s())
        self._postbox.send([each for each in sent.values() if each.outcome is None])
        return sent

    def _key(self, request: Request) -> TaskKey:
        """Return the key of the next exchange of such requests."""
        attempt = 0 if isinstance(request, EvaluateRequest) else request.attempt
        key = TaskKey(
            run_id=self.run_id, kind=request.kind, round_num=request.round_num, attempt=attempt
        )
        last = self._last_keys.get(key.kind)
        if last is not None and (last.round_num, last.attempt) == (key.round_num, attempt):
            key.exchange = last.exchange + 1
        self._last_keys[key.kind] = key
        return key

    def arrived(self, waiting: Mapping[ClientId, Sent], *, before_s: float) -> list[ClientId]:
        """Return whose outcome has come in time since the last look, earliest first."""
        self._clear_late()
        self._postbox.look(waiting.values())
        arrived_s = {
            client: sent.arrived_s
            for client, sent in waiting.items()
            if sent.outcome is not None and sent.arrived_s <= before_s
        }
        return sorted(arrived_s, key=arrived_s.__getitem__)

    def drop(self, waiting: Iterable[Sent]) -> None:
        """Have nobody wait for these replies any more."""
        for sent in waiting:
            sent.is_dropped = True
            self._late.append(sent)

    def _clear_late(self) -> None:
        """Fetch and drop replies to exchanges that have ended: the SuperLink holds them."""
        now_s = self.clock.now_s()
        self._postbox.look(self._late)
        still_out = []
        for sent in self._late:
            outcome = self._postbox.take(sent)
            self.counts.late += isinstance(outcome, Message)
            if outcome is None and now_s <= sent.expires_s:
                still_out.append(sent)
        self._late = still_out

    def reply(self, client: ClientId, sent: Sent) -> Reply:
        """Return what a client answered, once it is certain that it did."""
        outcome = self._postbox.take(sent)
        if not isinstance(outcome, Message):
            assert outcome is not None  # it has arrived
            return outcome
        try:
            header, data = unpacked(outcome.content)
            if len(data) > sent.max_reply_bytes:
                raise ProtocolError(
                    f"a reply of {len(data)} bytes, at most {sent.max_reply_bytes} are taken"
                )
            require_signed(header, data, key=sent.key, client=client, by=self._keys[client])
        except ProtocolError as error:
            self.counts.refused += 1
            structlog.get_logger(__name__).warning(
                "reply_refused", client_id=client, error=str(error)
            )
            return Failure(str(error))
        return as_reply(data)

    # -- who is there --

    def _nodes(self, end_s: float) -> set[int]:
        """Return the connected nodes; an error is one that passes until ``end_s``."""
        while True:
            try:
                return set(self.grid.get_node_ids())
            except httpx.HTTPError as error:
                self.counts.grid_errors += 1
                if self.clock.now_s() >= end_s:
                    raise DeploymentError(
                        f"the SuperLink does not say which nodes there are ({error}); look into "
                        "its log, then start the run again with `flwr run`"
                    ) from error
                self.clock.sleep(PUSH_AGAIN_S)

    def _introduced(self, nodes: set[int]) -> list[ClientId]:
        """Ask new nodes who they are, take in the answers, and return the clients at ``nodes``."""
        key = TaskKey(run_id=self.run_id, kind=HELLO)
        greeting = content_of(key_header(key), payload_of(self.coordinator_key))
        strangers = [
            Sent(
                node_id=node_id,
                key=key,
                content=greeting,
                message_type=MessageType.QUERY,
                expires_s=self.clock.now_s() + _HELLO_TTL_S,
            )
            for node_id in sorted(nodes - self._settled_nodes - self._hellos.keys())
        ]
        if strangers:
            self._hellos |= {sent.node_id: sent for sent in strangers}
            self._postbox.send(strangers)
        self._postbox.look(self._hellos.values())
        for sent in [each for each in self._hellos.values() if each.outcome is not None]:
            del self._hellos[sent.node_id]
            self._take_in(sent)
        return sorted(client for client, node_id in self._node_ids.items() if node_id in nodes)

    def _take_in(self, sent: Sent) -> None:
        """Pin the key of a node that says who it is; one that could not is asked again."""
        outcome = self._postbox.take(sent)
        log = structlog.get_logger(__name__).bind(node_id=sent.node_id)
        if not isinstance(outcome, Message):
            reason = "no answer" if outcome is None else outcome.reason
            if self._strangers.get(sent.node_id) != reason:  # each look asks again
                log.warning("introduction_failed", error=reason)
            self._strangers[sent.node_id] = reason
            return
        self._settled_nodes.add(sent.node_id)
        try:
            client, public_key = self._hello(outcome, sent)
        except ProtocolError as error:
            self.counts.refused += 1
            self._strangers[sent.node_id] = str(error)
            log.warning("introduction_refused", error=str(error))
            return
        self._node_ids[client], self._keys[client] = sent.node_id, public_key
        log.info("client_joined", client_id=client, key=public_key.hex()[:12])

    def _hello(self, reply: Message, sent: Sent) -> tuple[ClientId, bytes]:
        """Return the client at a node and its key; ProtocolError if it is not to be believed."""
        header, data = unpacked(reply.content)
        client, public_key = ClientId(number_in(header, "client_id")), key_on(data, sent.node_id)
        require_signed(header, data, key=sent.key, client=client, by=public_key)
        if self._keys.get(client, public_key) != public_key:
            raise ProtocolError(
                f"another key than client {client} showed first in this run; give its node an "
                "identity folder, or start the run again"
            )
        return client, public_key


class FlowerExchange:
    """An :class:`fedlearn.transport.base.Exchange` through a Flower grid.

    Each question lives in the SuperLink until the deadline; each answer is pulled on the side.
    """

    def __init__(self, channel: FlowerChannel, deadline_s: float) -> None:
        self._channel = channel
        self._deadline_s = deadline_s
        self._start_s = math.nan
        self._waiting: dict[ClientId, Sent] = {}
        self._arrived: deque[ClientId] = deque()
        self._is_open = True

    def ask(
        self,
        requests: Mapping[ClientId, Request],
        *,
        number: int | None = None,  # noqa: ARG002 - nobody goes on with a question
    ) -> None:
        """Push every request; raises as the protocol says."""
        require_free(self._waiting, requests, is_open=self._is_open)
        if math.isnan(self._start_s):
            self._start_s = self._channel.clock.now_s()
        expires_s = self._start_s + self._deadline_s + _TTL_MARGIN_S
        self._waiting |= self._channel.send(requests, expires_s=expires_s)

    def next(self, *, until_s: float) -> Arrival | None:
        """Return the next reply; a client that is not there has failed at once.

        Raises:
            DeploymentError: The SuperLink no longer serves this run.
        """
        clock, before_s = self._channel.clock, self._start_s + min(until_s, self._deadline_s)
        while self._waiting:
            if not self._arrived:
                self._arrived.extend(self._channel.arrived(self._waiting, before_s=before_s))
            if self._arrived:
                client = self._arrived.popleft()
                sent = self._waiting.pop(client)
                elapsed_s = sent.arrived_s - self._start_s
                return Arrival(client, self._channel.reply(client, sent), elapsed_s)
            remaining_s = before_s - clock.now_s()
            if remaining_s <= 0:
                return None
            clock.sleep(min(_TICK_S, remaining_s))
        return None

    def give_up(self, client_ids: Sequence[ClientId]) -> None:
        """Drop the replies of these."""
        gone = [self._waiting.pop(each) for each in client_ids if each in self._waiting]
        self._channel.drop(gone)
        self._arrived = deque(each for each in self._arrived if each in self._waiting)

    def close(self) -> None:
        """Drop the replies that have not been read."""
        self._is_open = False
        self._channel.drop(self._waiting.values())
        self._waiting.clear()
        self._arrived.clear()


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What a coordinator finds in a Flower run, of an id that is unique for ever.

    ``run_config`` is what ``flwr run`` was given: ``[tool.flwr.app.config]`` and overrides.
    """

    grid: MessageGrid
    run_id: str
    run_config: Settings


def server_app(main: Callable[[Federation], None]) -> ServerApp:
    """Return a Flower ServerApp that runs ``main``."""
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        main(Federation(grid=grid, run_id=run_id_of(context), run_config=dict(context.run_config)))

    return app
