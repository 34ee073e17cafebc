"""The coordinator's side: a Flower grid as a channel to fedlearn's clients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import structlog
from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedlearn.core.codec import encode, encode_constants, split
from fedlearn.core.messages import (
    ClientId,
    EvaluateRequest,
    Reply,
    Request,
    Settings,
)
from fedlearn.errors import ProtocolError
from fedlearn.transport.base import CohortRequests, are_same, decode_reply_or_failure
from fedlearn.transport.content import compute_digest
from fedlearn.transport.flower.grid_channel import GridChannel, Question
from fedlearn.transport.flower.postbox import MessageGrid, SentMessage
from fedlearn.transport.flower.records import (
    HELLO,
    build_content,
    build_key_header,
    build_payload,
    format_run_id,
    read_card,
    read_number,
    require_signed,
    unpack,
)
from fedlearn.transport.wire_pb2 import TaskKey

_HELLO_TTL_S = 600.0
#: Most reasons that are listed for nodes that are not clients.
_MAX_REASONS = 3


class _Constants(NamedTuple):
    """A model's tensors that stay the same in a run, encoded for sending."""

    tensors: Mapping[str, Tensor]
    digest: bytes
    payload: ArrayRecord


class _EncodedRequest(NamedTuple):
    """A request, encoded for a cohort."""

    key: TaskKey
    payload: ArrayRecord
    constants: _Constants | None


@dataclass(eq=False, kw_only=True)
class FlowerChannel(GridChannel):
    """Reaches fedlearn's clients, which introduce themselves and sign their replies.

    Attributes:
        run_id: Unique to the run for ever; part of what clients sign.
        coordinator_key: Verifies the coordinator's signature of the terms of secure aggregation, 32
            bytes; shown to each node when it introduces itself. Empty: there is none.
    """

    run_id: str
    coordinator_key: bytes
    _keys: dict[ClientId, bytes] = field(default_factory=dict, init=False)
    _hellos: dict[int, SentMessage] = field(default_factory=dict, init=False)
    _settled_nodes: set[int] = field(default_factory=set, init=False)
    _strangers: dict[int, str] = field(default_factory=dict, init=False)  # reasons, by node
    _last_keys: dict[str, TaskKey] = field(default_factory=dict, init=False)
    _constants: "_Constants | None" = field(default=None, init=False)  # the last sent
    _holders: dict[ClientId, bytes] = field(default_factory=dict, init=False)  # by digest

    @property
    def identity_keys(self) -> Mapping[ClientId, bytes]:
        """By client the key that it showed first in this run; grows as clients join."""
        return MappingProxyType(self._keys)

    def describe_attendance(self) -> str:
        """Describe how many nodes were last connected, and why some are not clients.

        For example "3 nodes are connected, 2 did not introduce themselves (the ClientApp raised
        ValueError)".
        """
        text = super().describe_attendance()
        strangers = self._connected - set(self._node_ids.values())
        reasons = sorted({self._strangers[node] for node in strangers & self._strangers.keys()})
        if strangers:
            why = f" ({'; '.join(reasons[:_MAX_REASONS])})" if reasons else ""
            text += f", {len(strangers)} did not introduce themselves{why}"
        return text

    def _build_questions(
        self, requests: Mapping[ClientId, Request], *, expires_s: float
    ) -> dict[ClientId, Question]:
        cohort, questions = CohortRequests.of(requests), dict[ClientId, Question]()
        alike = [self._encode(request) for request in cohort.shared]
        for client, place in cohort.places.items():
            # The personal part goes into the header; all clients share the payload.
            request, personal = alike[place], cohort.personal.get(client, b"")
            evaluates = isinstance(cohort.shared[place], EvaluateRequest)
            digest = b"" if request.constants is None else request.constants.digest
            content = partial(
                build_content,
                build_key_header(request.key, personal=personal, constants_digest=digest),
                request.payload,
            )
            whole = None
            if request.constants is not None:
                whole = content(constants=request.constants.payload)
            # A node that has replied to a request with these constants has stored them.
            has_constants = self._holders.get(client) == digest
            questions[client] = Question(
                node_id=self._node_ids.get(client, 0),
                content=content() if whole is None or has_constants else whole,
                whole=whole,
                message_type=MessageType.EVALUATE if evaluates else MessageType.TRAIN,
                expires_s=expires_s,
                read=partial(self._read_signed, request, client),
            )
        return questions

    def _encode(self, request: Request) -> "_EncodedRequest":
        """Encode a request in the parts of a message; the SuperLink stores each part once."""
        bare, constants = split(request)
        return _EncodedRequest(
            self._next_key(request), build_payload(encode(bare)), self._encode_constants(constants)
        )

    def _encode_constants(self, constants: Mapping[str, Tensor]) -> "_Constants | None":
        if not constants:
            return None
        known = self._constants
        # The same tensors are encoded only once in a run.
        if known is None or not are_same(known.tensors, constants):
            data = encode_constants(constants)
            self._constants = known = _Constants(
                constants, compute_digest(data), build_payload(data)
            )
        return known

    def _next_key(self, request: Request) -> TaskKey:
        attempt = 0 if isinstance(request, EvaluateRequest) else request.attempt
        key = TaskKey(
            run_id=self.run_id, kind=request.kind, round_num=request.round_num, attempt=attempt
        )
        last = self._last_keys.get(key.kind)
        if last is not None and (last.round_num, last.attempt) == (key.round_num, attempt):
            key.exchange = last.exchange + 1
        self._last_keys[key.kind] = key
        return key

    def _read_signed(self, request: "_EncodedRequest", client: ClientId, message: Message) -> Reply:
        header, data = unpack(message.content)
        require_signed(header, data, key=request.key, client=client, by=self._keys[client])
        if request.constants is not None:
            # Only after the signature is verified: the client itself has read this request.
            self._holders[client] = request.constants.digest
        return decode_reply_or_failure(data)

    # -- introductions --

    def _identify_nodes(self, nodes: set[int]) -> None:
        """Ask new nodes to introduce themselves, and admit those that have answered."""
        greeting = build_content(
            build_key_header(self._introduction), build_payload(self.coordinator_key)
        )
        strangers = [
            SentMessage(
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
        self._postbox.poll(self._hellos.values())
        for sent in [each for each in self._hellos.values() if each.outcome is not None]:
            del self._hellos[sent.node_id]
            self._admit_node(sent)

    @property
    def _introduction(self) -> TaskKey:
        return TaskKey(run_id=self.run_id, kind=HELLO)

    def _admit_node(self, sent: SentMessage) -> None:
        """Pin the key of a node that introduced itself; ask one that failed again."""
        outcome = self._postbox.take(sent)
        log = structlog.get_logger(__name__).bind(node_id=sent.node_id)
        if not isinstance(outcome, Message):
            reason = "no answer" if outcome is None else outcome.reason
            if self._strangers.get(sent.node_id) != reason:  # each look asks again: log once
                log.warning("introduction_failed", error=reason)
            self._strangers[sent.node_id] = reason
            return
        # Settled even if it is refused below: asking it again would give the same answer.
        self._settled_nodes.add(sent.node_id)
        try:
            client, public_key = self._read_hello(outcome, sent)
        except ProtocolError as error:
            self.counts.refused += 1
            self._strangers[sent.node_id] = str(error)
            log.warning("introduction_refused", error=str(error))
            return
        self._node_ids[client], self._keys[client] = sent.node_id, public_key
        log.info("client_joined", client_id=client, key=public_key.hex()[:12])

    def _read_hello(self, reply: Message, sent: SentMessage) -> tuple[ClientId, bytes]:
        """Return the client at a node and its key; ProtocolError if the introduction is invalid."""
        header, data = unpack(reply.content)
        client = ClientId(read_number(header, "client_id"))
        public_key = read_card(data, sent.node_id)
        require_signed(header, data, key=self._introduction, client=client, by=public_key)
        # Trust on first use: the key that a client shows first is its key for the whole run.
        if self._keys.get(client, public_key) != public_key:
            raise ProtocolError(
                f"client {client} showed another key first in this run; give its node an "
                "identity folder, or restart the run"
            )
        return client, public_key


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The coordinator's access to a Flower run, whose id is unique for ever.

    ``run_config`` is the configuration given to ``flwr run``: ``[tool.flwr.app.config]`` and
    overrides.
    """

    grid: MessageGrid
    run_id: str
    run_config: Settings


def server_app(main: Callable[[Federation], None]) -> ServerApp:
    """Return a Flower ServerApp that runs ``main``."""
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        main(
            Federation(
                grid=grid, run_id=format_run_id(context), run_config=dict(context.run_config)
            )
        )

    return app
