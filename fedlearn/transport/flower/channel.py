"""The coordinator's side: a Flower grid as a channel to clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import httpx
import structlog
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
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
    apart,
)
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.transport.base import Arrival, as_reply
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
    error_of,
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
#: Seconds between two looks at which nodes there are, while too few are.
_WAIT_S = 0.5
#: Flower's clock and ours are read at different moments: it shall not end a round before we do.
_TTL_MARGIN_S = 1.0
_HELLO_TTL_S = 600.0
#: What a reply may be larger than twice its request.
_REPLY_ALLOWANCE_BYTES = 1 << 20


@dataclass(eq=False, kw_only=True)
class FlowerChannel:
    """Reaches clients through a Flower grid.

    Attributes:
        grid: Flower's way to the nodes.
        run_id: Unique to the run for ever; part of what clients sign.
        clock: Real time.
        min_clients: :meth:`available` waits until so many clients have introduced themselves.
        patience_s: The longest it waits.
        coordinator_key: What the coordinator signs the terms of secure aggregation with, 32 bytes,
            shown to each node when it introduces itself; empty: there is none.
        start: How to do something on the side.
        counts: What happened.
    """

    grid: MessageGrid
    run_id: str
    clock: Clock
    min_clients: int
    patience_s: float
    coordinator_key: bytes
    start: Start = in_a_thread
    counts: Counts = field(default_factory=Counts)
    _postbox: Postbox = field(init=False, repr=False)
    _node_ids: dict[ClientId, int] = field(default_factory=dict, init=False)
    _keys: dict[ClientId, bytes] = field(default_factory=dict, init=False)
    _hellos: dict[int, Sent] = field(default_factory=dict, init=False)
    _settled_nodes: set[int] = field(default_factory=set, init=False)
    _num_exchanges: dict[tuple[str, int, int], int] = field(default_factory=dict, init=False)
    _late: list[Sent] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._postbox = Postbox(self.grid, self.clock, self.start, self.counts)

    @property
    def identity_keys(self) -> Mapping[ClientId, bytes]:
        """By client the key that it showed first in this run; it grows as clients come."""
        return MappingProxyType(self._keys)

    def available(self) -> Sequence[ClientId]:
        """Return the clients whose nodes are connected, in ascending order.

        Nodes that are new are asked who they are first. Waits up to :attr:`patience_s` seconds
        for :attr:`min_clients` of them.

        Raises:
            DeploymentError: The SuperLink does not answer, or no longer serves this run.
        """
        end_s = self.clock.now_s() + self.patience_s
        while True:
            clients = self._introduced(self._nodes(end_s))
            remaining_s = end_s - self.clock.now_s()
            if len(clients) >= self.min_clients or remaining_s <= 0:
                return clients
            self.clock.sleep(min(_WAIT_S, remaining_s))

    def exchange(
        self, requests: Mapping[ClientId, Request], *, deadline_s: float
    ) -> Iterator[Arrival]:
        """Send every request and yield replies as they arrive, until the deadline.

        As :class:`~fedlearn.transport.base.Channel` says; replies that are late are dropped,
        and counted when they are there.

        Raises:
            DeploymentError: The SuperLink no longer serves this run.
        """
        start_s = self.clock.now_s()
        end_s = start_s + deadline_s
        waiting = self._tasks(requests, expires_s=end_s + _TTL_MARGIN_S)
        strangers = [client for client in requests if client not in waiting]
        try:
            self._postbox.send([task.sent for task in waiting.values()])
            for client in strangers:
                yield Arrival(client, Failure("the client is not in this federation"), 0.0)
            while waiting:
                arrived = self._arrived(waiting, before_s=end_s)
                for client in arrived:
                    task = waiting.pop(client)
                    elapsed_s = task.sent.arrived_s - start_s
                    yield Arrival(client, self._reply(client, task), elapsed_s)
                remaining_s = end_s - self.clock.now_s()
                if remaining_s <= 0:
                    break
                if not arrived:
                    self.clock.sleep(min(_TICK_S, remaining_s))
        finally:
            for task in waiting.values():
                task.sent.is_dropped = True
                self._late.append(task.sent)

    # -- one exchange --

    def _tasks(
        self, requests: Mapping[ClientId, Request], *, expires_s: float
    ) -> dict[ClientId, "_Task"]:
        """Return what is sent to each client that is known; equal requests are encoded once."""
        prepared: dict[tuple[int, ...], _Prepared] = {}
        tasks: dict[ClientId, _Task] = {}
        for client, request in requests.items():
            if (node_id := self._node_ids.get(client)) is None:
                continue
            shared, personal = apart(request)
            # A part that is for one client alone stands in the header, beside what all have.
            same = _objects(shared) if personal else (id(request),)
            if same not in prepared:
                prepared[same] = _Prepared.of(shared, key=self._key(request))
            common = prepared[same]
            evaluates = isinstance(request, EvaluateRequest)
            sent = Sent(
                node_id=node_id,
                content=common.with_personal(personal) if personal else common.content,
                message_type=MessageType.EVALUATE if evaluates else MessageType.TRAIN,
                expires_s=expires_s,
            )
            tasks[client] = _Task(common.key, sent, common.max_reply_bytes)
        return tasks

    def _key(self, request: Request) -> TaskKey:
        """Return the key of the next exchange of such requests."""
        kind, round_num = type(request).__name__, request.round_num
        attempt = 0 if isinstance(request, EvaluateRequest) else request.attempt
        counted = (kind, round_num, attempt)
        exchange = self._num_exchanges.get(counted, 0)
        stale = [key for key in self._num_exchanges if key[0] == kind and key != counted]
        for key in stale:
            del self._num_exchanges[key]
        self._num_exchanges[counted] = exchange + 1
        return TaskKey(
            run_id=self.run_id, kind=kind, round_num=round_num, attempt=attempt, exchange=exchange
        )

    def _arrived(self, waiting: Mapping[ClientId, "_Task"], *, before_s: float) -> list[ClientId]:
        """Return whose outcome has come in time since the last look, earliest first."""
        self._clear_late()
        self._postbox.look(task.sent for task in waiting.values())
        arrived_s = {
            client: task.sent.arrived_s
            for client, task in waiting.items()
            if task.sent.outcome is not None and task.sent.arrived_s <= before_s
        }
        return sorted(arrived_s, key=arrived_s.__getitem__)

    def _clear_late(self) -> None:
        """Fetch and drop replies to exchanges that have ended: the SuperLink holds them."""
        now_s = self.clock.now_s()
        self._postbox.look(self._late)
        still_out = []
        for sent in self._late:
            outcome = self._postbox.take(sent)
            self.counts.late += isinstance(outcome, Message) and outcome.has_content()
            if outcome is None and now_s <= sent.expires_s:
                still_out.append(sent)
        self._late = still_out

    def _reply(self, client: ClientId, task: "_Task") -> Reply:
        """Return what a client answered, once it is certain that it did."""
        outcome = self._postbox.take(task.sent)
        if not isinstance(outcome, Message):
            assert outcome is not None  # it has arrived
            return outcome
        if not outcome.has_content():
            return Failure(error_of(outcome))
        try:
            header, data = unpacked(outcome.content)
            if len(data) > task.max_reply_bytes:
                raise ProtocolError(
                    f"a reply of {len(data)} bytes, at most {task.max_reply_bytes} are taken"
                )
            require_signed(header, data, key=task.key, client=client, by=self._keys[client])
        except ProtocolError as error:
            self.counts.refused += 1
            _log().warning("reply_refused", client_id=client, error=str(error))
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
        greeting = content_of(key_header(self._hello_key()), payload_of(self.coordinator_key))
        strangers = [
            Sent(
                node_id=node_id,
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
        outcome, log = self._postbox.take(sent), _log().bind(node_id=sent.node_id)
        if not isinstance(outcome, Message):
            log.warning("introduction_failed", error=outcome and outcome.reason)
            return
        if not outcome.has_content():
            log.warning("introduction_failed", error=error_of(outcome))
            return
        self._settled_nodes.add(sent.node_id)
        try:
            client, public_key = self._hello(outcome, sent.node_id)
        except ProtocolError as error:
            self.counts.refused += 1
            log.warning("introduction_refused", error=str(error))
            return
        self._node_ids[client], self._keys[client] = sent.node_id, public_key
        log.info("client_joined", client_id=client, key=public_key.hex()[:12])

    def _hello(self, reply: Message, node_id: int) -> tuple[ClientId, bytes]:
        """Return the client at a node and its key; ProtocolError if it is not to be believed."""
        header, data = unpacked(reply.content)
        client, public_key = ClientId(number_in(header, "client_id")), key_on(data, node_id)
        require_signed(header, data, key=self._hello_key(), client=client, by=public_key)
        if self._keys.get(client, public_key) != public_key:
            raise ProtocolError(
                f"another key than client {client} showed first in this run; give its node an "
                "identity folder, or start the run again"
            )
        return client, public_key

    def _hello_key(self) -> TaskKey:
        return TaskKey(run_id=self.run_id, kind=HELLO)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What several clients are sent alike, encoded once."""

    key: TaskKey
    payload: ArrayRecord
    content: RecordDict
    max_reply_bytes: int

    @classmethod
    def of(cls, request: Request, *, key: TaskKey) -> "_Prepared":
        data = encode(request)
        payload = payload_of(data)
        content = content_of(key_header(key), payload)
        return cls(key, payload, content, 2 * len(data) + _REPLY_ALLOWANCE_BYTES)

    def with_personal(self, personal: bytes) -> RecordDict:
        """Return the content for one client: the SuperLink keeps the payload of all once."""
        return content_of(key_header(self.key, personal=personal), self.payload)


@dataclass(frozen=True, eq=False)
class _Task:
    """One client's part of an exchange."""

    key: TaskKey
    sent: Sent
    max_reply_bytes: int


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What a coordinator finds in a Flower run.

    Attributes:
        grid: Flower's way to the nodes.
        run_id: Unique to the run for ever.
        run_config: What ``flwr run`` was given: ``[tool.flwr.app.config]`` and overrides.
    """

    grid: MessageGrid
    run_id: str
    run_config: Settings

    def channel(
        self, *, clock: Clock, min_clients: int, patience_s: float, coordinator_key: bytes
    ) -> FlowerChannel:
        """Return the channel of this run; the arguments are those of :class:`FlowerChannel`."""
        return FlowerChannel(
            grid=self.grid,
            run_id=self.run_id,
            clock=clock,
            min_clients=min_clients,
            patience_s=patience_s,
            coordinator_key=coordinator_key,
        )


def server_app(main: Callable[[Federation], None]) -> ServerApp:
    """Return a Flower ServerApp that runs ``main``."""
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        main(Federation(grid=grid, run_id=run_id_of(context), run_config=dict(context.run_config)))

    return app


def _objects(request: Request) -> tuple[int, ...]:
    """Return which objects a request holds: two that hold the same have the same bytes."""
    return tuple(id(value) for value in vars(request).values())


def _log() -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)
    return logger
