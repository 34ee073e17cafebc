"""A Flower federation as a channel: our messages through a stock SuperLink and stock SuperNodes.

The coordinator's side is :class:`FlowerChannel`, made by :class:`Federation` inside
:func:`server_app`; the client's side is :func:`client_app`. Flower moves bytes: a message is a
small record of headers and one array, the encoded request or reply.

Flower answers each message in a fresh process, so what a client remembers lies in its
``Context.state``, its private key included, unless its node is configured with a folder for it
(``identity="/path"``).

Guarantees:
    A reply counts only if it is signed, for this run, round, attempt and exchange, by the key
    that the client showed first in this run. Who controls the SuperLink, or takes part under
    a client id before its owner does, can show a key of his own: on first use there is nothing
    to compare with. A node that was restarted without an identity folder has lost its key and
    is refused for the rest of the run.

References:
    `Flower 1.41 <https://flower.ai/docs/framework/>`_; its public names only.
"""

import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import httpx
import structlog
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedlearn.core.clock import Clock
from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, EvaluateRequest, Failure, Reply, Request, Settings
from fedlearn.errors import DeploymentError, ProtocolError
from fedlearn.transport.base import Arrival, as_reply
from fedlearn.transport.identity import IDENTITY_FILE, Identity, signed_bytes, verify
from fedlearn.transport.memory import Handler
from fedlearn.transport.wire_pb2 import TaskKey

__all__ = [
    "ClientApp",
    "Counts",
    "Federation",
    "FlowerChannel",
    "MessageGrid",
    "Node",
    "ServerApp",
    "client_app",
    "in_a_thread",
    "server_app",
]

#: Runs a function on the side; the default is a thread that does not keep the process alive.
Start = Callable[[Callable[[], None]], None]

#: Names of our records in a message and in a client's state.
_HEADER, _PAYLOAD, _STATE = "fedlearn", "fedlearn.payload", "fedlearn.state"
_ARRAY, _ARRAY_TYPE = "message", "fedlearn.message"

#: The kind of the first exchange with a node, in which it says which client it is.
_HELLO = "Hello"
_NODE_ID_BYTES = 8
_KEY_BYTES = 32
_MAX_INTEGER = (1 << 63) - 1

#: Seconds between two looks at what has arrived, and between two questions for one reply.
_TICK_S = 0.1
_PULL_EVERY_S = 0.25
#: Seconds between two looks at which nodes there are, while too few are.
_WAIT_S = 0.5
#: As above, for replies that are late and only to be cleared away.
_PULL_LATE_EVERY_S = 3.0
#: A pull that takes longer waits for a client's upload; another takes its place.
_STALLED_S = 2.0
_MAX_SWEEPERS = 4
#: Replies that are pulled ahead of who folds them: memory does not grow with the cohort.
_MAX_HELD = 8
#: Flower's clock and ours are read at different moments: it shall not end a round before we do.
_TTL_MARGIN_S = 1.0
_HELLO_TTL_S = 600.0
#: Times that a message is handed to a SuperLink that answers with errors, and the pauses between.
_MAX_PUSHES = 5
_PUSH_AGAIN_S = 1.0
#: What a reply may be larger than twice its request.
_REPLY_ALLOWANCE_BYTES = 1 << 20

#: Flower's error codes in our words: its own quote the client's traceback.
_ERRORS: Mapping[int, str] = {
    1: "the ClientApp could not be loaded",
    2: "the ClientApp raised an exception",
    3: "the message expired before it was answered",
    4: "the reply expired before it was fetched",
    5: "the node is gone",
    6: "a mod refused the message",
    7: "the app bundle is invalid",
    8: "the ClientApp's process died",
}


def in_a_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread that ends with the process: a pull may hang for hours."""
    threading.Thread(target=work, name="flower", daemon=True).start()


class MessageGrid(Protocol):
    """All that is used of Flower's :class:`flwr.serverapp.Grid`."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages over and return their ids, empty where the node is unknown."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""


@dataclass
class Counts:
    """What happened on a channel, for telemetry.

    Attributes:
        late: Replies that came after their exchange had ended.
        refused: Replies and introductions whose signature, form or size is wrong.
        grid_errors: Requests that the SuperLink answered with an error; most are repeated.
    """

    late: int = 0
    refused: int = 0
    grid_errors: int = 0


# ---- The coordinator ----------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _Sent:
    """A message on its way to a node and back; threads set what it comes to.

    Attributes:
        node_id: To whom.
        content: What, shared by all that are sent the same.
        message_type: Flower's.
        expires_s: When it is worthless, by our clock; infinite for Flower's default.
        message_id: What its reply is asked for by; empty until the SuperLink has it.
        outcome: The reply, or why there is none.
        arrived_s: When the outcome came.
        next_pull_s: When to ask for the reply again; infinite while somebody does.
        is_dropped: Nobody waits for it.
    """

    node_id: int
    content: RecordDict
    message_type: str
    expires_s: float
    message_id: str = ""
    outcome: Message | Failure | None = None
    arrived_s: float = math.nan
    next_pull_s: float = -math.inf
    is_dropped: bool = False

    def settle(self, outcome: Message | Failure, now_s: float) -> None:
        """Take the outcome."""
        self.arrived_s = now_s
        self.outcome = outcome

    def message(self, now_s: float) -> Message:
        """Return a new message: one that is sent again is another to Flower."""
        ttl_s = None if math.isinf(self.expires_s) else max(_TICK_S, self.expires_s - now_s)
        return Message(self.content, self.node_id, self.message_type, ttl=ttl_s)


@dataclass(eq=False)
class _Postbox:
    """Pushes messages and pulls replies on the side, so that no peer can hold up its caller.

    Replies are pulled one at a time, since a pull waits for the upload of what it finds. A
    pull that hangs does so in a thread of its own.
    """

    grid: MessageGrid
    clock: Clock
    start: Start
    counts: Counts
    _due: deque[_Sent] = field(default_factory=deque)
    _pulling_since_s: dict[int, float] = field(default_factory=dict)
    _held: set[_Sent] = field(default_factory=set)
    _num_sweepers: int = 0
    _is_broken: bool = False

    def send(self, messages: Sequence[_Sent]) -> None:
        """Push the messages in order, on the side."""
        self.start(partial(self._watched, partial(self._push_all, messages)))

    def look(self, waiting: Iterable[_Sent]) -> None:
        """Ask for the replies to ``waiting``, on the side, those that are due.

        Raises:
            DeploymentError: The SuperLink no longer serves this run.
        """
        if self._is_broken:
            raise DeploymentError(
                "the SuperLink no longer serves this run: it was stopped, or an error stands in "
                "the log above; start it again with `flwr run`"
            )
        now_s = self.clock.now_s()
        for sent in waiting:
            if sent.message_id and sent.outcome is None and sent.next_pull_s <= now_s:
                sent.next_pull_s = math.inf
                self._due.append(sent)
        while self._may_pull() and self._num_awake(now_s) < _MAX_SWEEPERS:
            self._num_sweepers += 1
            self._pulling_since_s[self._num_sweepers] = now_s
            sweep = partial(self._sweep, self._num_sweepers)
            self.start(partial(self._watched, sweep))

    def take(self, sent: _Sent) -> Message | Failure | None:
        """Return the outcome if there is one, and make room for another's."""
        outcome = sent.outcome
        if outcome is not None:
            self._held.discard(sent)
        return outcome

    def _num_awake(self, now_s: float) -> int:
        since_s = list(self._pulling_since_s.values())
        return sum(now_s - began_s < _STALLED_S for began_s in since_s)

    def _may_pull(self) -> bool:
        return bool(self._due) and len(self._held) < _MAX_HELD

    def _watched(self, work: Callable[[], None]) -> None:
        """Run ``work``; what it raises ends the run, not a thread that nobody looks at."""
        is_done = False
        try:
            work()
            is_done = True
        finally:
            self._is_broken |= not is_done

    def _push_all(self, messages: Sequence[_Sent]) -> None:
        for sent in messages:
            problem = self._push(sent)
            if problem:
                sent.settle(Failure(problem), self.clock.now_s())

    def _push(self, sent: _Sent) -> str:
        """Hand one message over and return why not, or nothing."""
        problem = ""
        for tried in range(_MAX_PUSHES):
            if tried:
                self.clock.sleep(_PUSH_AGAIN_S)
            if sent.is_dropped:
                return "the exchange ended before the message was sent"
            try:
                message_ids = list(self.grid.push_messages([sent.message(self.clock.now_s())]))
            except httpx.HTTPError as error:
                self.counts.grid_errors += 1
                problem = f"the SuperLink did not take the message: {type(error).__name__}"
                continue
            sent.message_id = (message_ids or [""])[0] or ""
            return "" if sent.message_id else "the SuperLink has no such node, or refused its size"
        return problem

    def _sweep(self, number: int) -> None:
        """Pull what is due until nothing is, or too much waits to be taken."""
        try:
            while self._may_pull():
                try:
                    sent = self._due.popleft()
                except IndexError:  # another was faster
                    return
                self._pulling_since_s[number] = self.clock.now_s()
                self._pull(sent)
                every_s = _PULL_LATE_EVERY_S if sent.is_dropped else _PULL_EVERY_S
                sent.next_pull_s = self.clock.now_s() + every_s
        finally:
            del self._pulling_since_s[number]

    def _pull(self, sent: _Sent) -> None:
        try:
            replies = list(self.grid.pull_messages([sent.message_id]))
        except httpx.HTTPError:
            self.counts.grid_errors += 1
            return
        if replies:
            if not sent.is_dropped:  # else nobody takes it
                self._held.add(sent)
            sent.settle(replies[0], self.clock.now_s())


@dataclass(frozen=True)
class _Member:
    """A client of this run: the node it is reached at, and the key that it showed first."""

    node_id: int
    public_key: bytes


@dataclass(eq=False, kw_only=True)
class FlowerChannel:
    """Reaches clients through a Flower grid.

    Attributes:
        grid: Flower's way to the nodes.
        run_id: Unique to the run for ever; part of what clients sign.
        clock: Real time.
        min_clients: :meth:`available` waits until so many clients have introduced themselves.
        patience_s: The longest it waits.
        start: How to do something on the side.
        counts: What happened.
    """

    grid: MessageGrid
    run_id: str
    clock: Clock
    min_clients: int
    patience_s: float
    start: Start = in_a_thread
    counts: Counts = field(default_factory=Counts)
    _postbox: _Postbox = field(init=False, repr=False)
    _members: dict[ClientId, _Member] = field(default_factory=dict, init=False)
    _hellos: dict[int, _Sent] = field(default_factory=dict, init=False)
    _settled_nodes: set[int] = field(default_factory=set, init=False)
    _num_exchanges: dict[tuple[str, int, int], int] = field(default_factory=dict, init=False)
    _late: list[_Sent] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._postbox = _Postbox(self.grid, self.clock, self.start, self.counts)

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
        prepared: dict[int, tuple[TaskKey, RecordDict, int]] = {}
        tasks: dict[ClientId, _Task] = {}
        for client, request in requests.items():
            if (member := self._members.get(client)) is None:
                continue
            if id(request) not in prepared:
                key, data = self._key(request), encode(request)
                prepared[id(request)] = (key, _content(_key_header(key), data), len(data))
            key, content, num_bytes = prepared[id(request)]
            evaluates = isinstance(request, EvaluateRequest)
            sent = _Sent(
                node_id=member.node_id,
                content=content,
                message_type=MessageType.EVALUATE if evaluates else MessageType.TRAIN,
                expires_s=expires_s,
            )
            tasks[client] = _Task(key, sent, 2 * num_bytes + _REPLY_ALLOWANCE_BYTES)
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
            return Failure(_error(outcome))
        try:
            header, data = _unpacked(outcome.content)
            if len(data) > task.max_reply_bytes:
                raise ProtocolError(
                    f"a reply of {len(data)} bytes, at most {task.max_reply_bytes} are taken"
                )
            _require_signed(
                header, data, key=task.key, client=client, by=self._members[client].public_key
            )
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
                self.clock.sleep(_PUSH_AGAIN_S)

    def _introduced(self, nodes: set[int]) -> list[ClientId]:
        """Ask new nodes who they are, take in the answers, and return the clients at ``nodes``."""
        strangers = [
            _Sent(
                node_id=node_id,
                content=_content(_key_header(self._hello_key()), b""),
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
        return sorted(client for client, member in self._members.items() if member.node_id in nodes)

    def _take_in(self, sent: _Sent) -> None:
        """Pin the key of a node that says who it is; one that could not is asked again."""
        outcome, log = self._postbox.take(sent), _log().bind(node_id=sent.node_id)
        if not isinstance(outcome, Message):
            log.warning("introduction_failed", error=outcome and outcome.reason)
            return
        if not outcome.has_content():
            log.warning("introduction_failed", error=_error(outcome))
            return
        self._settled_nodes.add(sent.node_id)
        try:
            client, public_key = self._hello(outcome, sent.node_id)
        except ProtocolError as error:
            self.counts.refused += 1
            log.warning("introduction_refused", error=str(error))
            return
        self._members[client] = _Member(sent.node_id, public_key)
        log.info("client_joined", client_id=client, key=public_key.hex()[:12])

    def _hello(self, reply: Message, node_id: int) -> tuple[ClientId, bytes]:
        """Return the client at a node and its key; ProtocolError if it is not to be believed."""
        header, data = _unpacked(reply.content)
        client, public_key = ClientId(_number(header, "client_id")), data[_NODE_ID_BYTES:]
        if len(public_key) != _KEY_BYTES or data != _card(node_id, public_key):
            raise ProtocolError("an introduction that is not of this node")
        _require_signed(header, data, key=self._hello_key(), client=client, by=public_key)
        pinned = self._members.get(client)
        if pinned is not None and pinned.public_key != public_key:
            raise ProtocolError(
                f"another key than client {client} showed first in this run; give its node an "
                "identity folder, or start the run again"
            )
        return client, public_key

    def _hello_key(self) -> TaskKey:
        return TaskKey(run_id=self.run_id, kind=_HELLO)


@dataclass(frozen=True, eq=False)
class _Task:
    """One client's part of an exchange."""

    key: TaskKey
    sent: _Sent
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

    def channel(self, *, clock: Clock, min_clients: int, patience_s: float) -> FlowerChannel:
        """Return the channel of this run."""
        return FlowerChannel(
            grid=self.grid,
            run_id=self.run_id,
            clock=clock,
            min_clients=min_clients,
            patience_s=patience_s,
        )


def server_app(main: Callable[[Federation], None]) -> ServerApp:
    """Return a Flower ServerApp that runs ``main``."""
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        main(Federation(grid=grid, run_id=_run_id(context), run_config=dict(context.run_config)))

    return app


# ---- The client ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Node:
    """Where a client runs.

    Attributes:
        client_id: The node's ``partition-id``; without one, a number made of its node id.
        node_config: What ``flower-supernode --node-config`` was given.
        run_config: What ``flwr run`` was given.
    """

    client_id: ClientId
    node_config: Settings
    run_config: Settings


def client_app(make_handler: Callable[[Node], Handler]) -> ClientApp:
    """Return a Flower ClientApp that answers every message with what ``make_handler`` returns.

    Args:
        make_handler: Called once a message: Flower starts a process for each. What it raises
            goes to the coordinator with its traceback.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        header, data = _unpacked(message.content)
        node, identity, state = _node(context), _identity(context), _state(context)
        key = _signable_key(header, context)
        reply, after = make_handler(node)(data, state)
        _keep(context, identity, after)
        signed = _signed_header(identity, key, node.client_id, reply)
        return Message(_content(signed, reply), reply_to=message)

    def introduce(message: Message, context: Context) -> Message:
        node, identity = _node(context), _identity(context)
        _keep(context, identity, _state(context))
        card = _card(context.node_id, identity.public_key)
        key = TaskKey(run_id=_run_id(context), kind=_HELLO)
        signed = _signed_header(identity, key, node.client_id, card)
        return Message(_content(signed, card), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    app.query()(introduce)
    return app


def _node(context: Context) -> Node:
    partition = context.node_config.get("partition-id", context.node_id & _MAX_INTEGER)
    if type(partition) is not int or not 0 <= partition <= _MAX_INTEGER:
        raise DeploymentError(
            f"partition-id is {partition!r} in this node's configuration; it is the number of "
            "the client, from 0 (`flower-supernode --node-config partition-id=0`)"
        )
    return Node(
        client_id=ClientId(partition),
        node_config=dict(context.node_config),
        run_config=dict(context.run_config),
    )


def _identity(context: Context) -> Identity:
    """Return this client's keys: those of its folder, of its state, or new ones."""
    folder = context.node_config.get("identity")
    if folder is not None:
        place = Path(str(folder))
        if not (place / IDENTITY_FILE).exists():
            Identity.create().save(place)
        return Identity.load(place)
    kept = _kept(context).get("identity")
    return Identity.from_pem(kept) if isinstance(kept, bytes) and kept else Identity.create()


def _state(context: Context) -> bytes:
    kept = _kept(context).get("state")
    return kept if isinstance(kept, bytes) else b""


def _kept(context: Context) -> ConfigRecord:
    return context.state.config_records.get(_STATE, ConfigRecord())


def _keep(context: Context, identity: Identity, state: bytes) -> None:
    """Leave the session's state, and the keys unless they lie in a folder, for the next message."""
    in_folder = "identity" in context.node_config
    context.state[_STATE] = ConfigRecord(
        {"state": state, "identity": b"" if in_folder else identity.pem}
    )


# ---- The messages -------------------------------------------------------------------------


def _content(header: ConfigRecord, data: bytes) -> RecordDict:
    # An array travels in chunks, a record as a whole.
    array = Array(dtype="uint8", shape=(len(data),), stype=_ARRAY_TYPE, data=data)
    return RecordDict({_HEADER: header, _PAYLOAD: ArrayRecord({_ARRAY: array})})


def _unpacked(content: RecordDict) -> tuple[ConfigRecord, bytes]:
    """Return the header and the payload; ProtocolError if they are not there."""
    header = content.config_records.get(_HEADER)
    payload = content.array_records.get(_PAYLOAD, ArrayRecord()).get(_ARRAY)
    if header is None or payload is None or payload.stype != _ARRAY_TYPE:
        raise ProtocolError(
            "a Flower message without fedlearn's records; both sides must run fedlearn's apps"
        )
    return header, payload.data


def _key_header(key: TaskKey) -> ConfigRecord:
    return ConfigRecord(
        {
            "kind": key.kind,
            "round_num": key.round_num,
            "attempt": key.attempt,
            "exchange": key.exchange,
        }
    )


def _signable_key(header: ConfigRecord, context: Context) -> TaskKey:
    """Return the key of a request; the run is what this client's own node says it is."""
    kind = header.get("kind")
    if not isinstance(kind, str) or kind == _HELLO:
        raise ProtocolError(f"a request cannot be of kind {kind!r}")
    numbers = {name: _number(header, name) for name in ("round_num", "attempt", "exchange")}
    return TaskKey(run_id=_run_id(context), kind=kind, **numbers)


def _number(header: ConfigRecord, name: str) -> int:
    """Return an integer in [0, 2**63) of the header; ProtocolError if there is none."""
    value = header.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        raise ProtocolError(f"a message whose {name} is not an integer in [0, 2**63)")
    return value


def _signed_header(identity: Identity, key: TaskKey, client: ClientId, data: bytes) -> ConfigRecord:
    signed = signed_bytes(key, client_id=client, sha256=hashlib.sha256(data).digest())
    return ConfigRecord({"client_id": client, "signature": identity.sign(signed)})


def _require_signed(
    header: ConfigRecord, data: bytes, *, key: TaskKey, client: ClientId, by: bytes
) -> None:
    """Refuse what ``client`` has not signed as the answer to the task ``key`` with its key ``by``.

    Raises:
        ProtocolError: The signature is missing or of something else.
    """
    signature = header.get("signature")
    signed = signed_bytes(key, client_id=client, sha256=hashlib.sha256(data).digest())
    if not isinstance(signature, bytes) or not verify(by, signature, signed):
        raise ProtocolError("the reply is not signed by this client for this task")


def _error(reply: Message) -> str:
    """Return Flower's error in our words."""
    code = reply.error.code if reply.has_error() else 0
    return f"Flower error {code}: {_ERRORS.get(code, 'unknown')}"


def _card(node_id: int, public_key: bytes) -> bytes:
    """Return what a client shows of itself: its key, at this node and no other."""
    return node_id.to_bytes(_NODE_ID_BYTES, "big") + public_key


def _run_id(context: Context) -> str:
    return f"flower-{context.run_id}"


def _log() -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)
    return logger
