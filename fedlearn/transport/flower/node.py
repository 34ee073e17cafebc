"""The client's side: a ClientApp that answers messages, with state stored at its node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

import structlog
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedlearn.core.codec import encode
from fedlearn.core.messages import ClientId, EvaluateReply, Failure, Settings, TrainReply
from fedlearn.errors import DeploymentError, ProtocolError, SettingsRefused
from fedlearn.identity.identity import Identity
from fedlearn.transport.base import decode_reply
from fedlearn.transport.content import compute_digest
from fedlearn.transport.flower.node_store import NodeStore, find_folder, open_node_store, read_key
from fedlearn.transport.flower.records import (
    HELLO,
    KEY_BYTES,
    MAX_INTEGER,
    build_card,
    build_constants_request,
    build_refusal,
    format_run_id,
    is_foreign,
    read_bytes,
    read_constants,
    read_signable_key,
    sign_reply,
    unpack,
)
from fedlearn.transport.flower.stock_records import (
    SettingsOf,
    build_evaluate_records,
    build_train_records,
    parse_evaluate_request,
    parse_train_request,
)
from fedlearn.transport.wire_pb2 import TaskKey

_ReplyT = TypeVar("_ReplyT", TrainReply, EvaluateReply)

#: A Flower mod: wraps the app, which is its third argument.
Mod: TypeAlias = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


@dataclass(frozen=True, kw_only=True)
class Node:
    """The node that a client runs on.

    Attributes:
        client_id: The node's ``partition-id``; without one, a number derived from its node id.
        node_config: The configuration given to ``flower-supernode --node-config``.
        run_config: The configuration given to ``flwr run``.
    """

    client_id: ClientId
    node_config: Settings
    run_config: Settings


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A client's identity, and its coordinator's key.

    Attributes:
        coordinator_key: The key in the node's configuration (``coordinator-key``), else the first
            one that a coordinator showed; empty: none yet.
        folder: Where keys and all that outlives a run are stored; ``None``: in the node's memory.
    """

    identity: Identity
    coordinator_key: bytes
    folder: Path | None


class Answer(Protocol):
    """Answers one message, with the client's state before and after."""

    def __call__(
        self, data: bytes, state: bytes, *, personal: bytes, constants: bytes
    ) -> tuple[bytes, bytes]:
        """Return the encoded reply to a request in three parts, and the new state.

        Args:
            data: The part shared by the whole cohort.
            state: The client's state before.
            personal: The part for this client alone.
            constants: The model's tensors that stay the same in a run; empty: ``data`` has them.
        """


def client_app(
    make_answer: Callable[[Node, Keys], Answer],
    *,
    settings_of: SettingsOf,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Create a Flower ClientApp that answers every message with the result of ``make_answer``.

    It is called once a message, since Flower starts a process for each. Its exceptions go to the
    coordinator with their traceback. A message of one of Flower's own strategies gets the reply
    that the strategy expects, or an error with the reason if it cannot be answered.

    Args:
        make_answer: Creates the function that answers at a node.
        settings_of: Converts the config of one of Flower's strategies to training settings; raises
            SettingsRefused if it cannot.
        mods: Flower's, around the app in their order: they see signed replies.
    """
    node = _Answerer(make_answer, settings_of)
    app = ClientApp(mods=list(mods))
    app.train()(node.train)
    app.evaluate()(node.evaluate)
    app.query()(_introduce)
    return app


@dataclass(frozen=True)
class _Answerer:
    """Answers fedlearn's coordinator, and Flower's own strategies."""

    make_answer: Callable[[Node, Keys], Answer]
    settings_of: SettingsOf

    def train(self, message: Message, context: Context) -> Message:
        if not is_foreign(message.content):
            return self._answer_signed(message, context)
        try:
            # Flower's run and node ids are unsigned 64-bit numbers; ours end at 2^63 - 1.
            seed = context.run_id & MAX_INTEGER
            request = parse_train_request(message.content, settings_of=self.settings_of, seed=seed)
            reply = _decode_reply(self._run_answer(context, encode(request))[0], TrainReply)
        except (ProtocolError, SettingsRefused) as error:
            return build_refusal(message, str(error))
        return Message(build_train_records(reply, request, message.content), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        if not is_foreign(message.content):
            return self._answer_signed(message, context)
        try:
            request = parse_evaluate_request(message.content)
            reply = _decode_reply(self._run_answer(context, encode(request))[0], EvaluateReply)
        except ProtocolError as error:
            return build_refusal(message, str(error))
        return Message(build_evaluate_records(reply), reply_to=message)

    def _answer_signed(self, message: Message, context: Context) -> Message:
        header, data = unpack(message.content)
        key, personal = read_signable_key(header, context), read_bytes(header, "personal")
        constants = b""
        if digest := read_bytes(header, "constants_digest"):
            constants = _load_constants(message, context, digest)
            if not constants:
                return build_constants_request(message)
        reply, identity = self._run_answer(context, data, personal=personal, constants=constants)
        client = _read_node(context).client_id
        return sign_reply(message, reply, key=key, client=client, by=identity)

    def _run_answer(
        self, context: Context, data: bytes, *, personal: bytes = b"", constants: bytes = b""
    ) -> tuple[bytes, Identity]:
        """Return the encoded reply and the identity that signs it; store the client's new state."""
        node = _read_node(context)
        with open_node_store(context) as store:
            before, keys = store.state, _load_keys(context, store)
            answer = self.make_answer(node, keys)
            reply, after = answer(data, before, personal=personal, constants=constants)
            if after != before:
                store.keep(after)
        return reply, keys.identity


def _load_constants(message: Message, context: Context, digest: bytes) -> bytes:
    """Return a model's constants, from the message or the store; empty if neither has them.

    Raises:
        ProtocolError: Those in the message have another digest.
    """
    with open_node_store(context) as store:
        if not (received := read_constants(message.content)):
            stored = store.constants
            return stored if compute_digest(stored) == digest else b""
        if compute_digest(received) != digest:
            raise ProtocolError("the model's constants do not match the digest in the header")
        store.keep_constants(received)
    return received


def _introduce(message: Message, context: Context) -> Message:
    node = _read_node(context)
    _, coordinator_key = unpack(message.content)
    with open_node_store(context) as store:
        _pin_coordinator(coordinator_key, context, store)
        identity = store.identity
    card = build_card(context.node_id, identity.public_key)
    key = TaskKey(run_id=format_run_id(context), kind=HELLO)
    return sign_reply(message, card, key=key, client=node.client_id, by=identity)


def _decode_reply(data: bytes, kind: type[_ReplyT]) -> _ReplyT:
    """Decode a reply; raise ProtocolError if it is a failure, with its reason."""
    reply = decode_reply(data)
    if not isinstance(reply, kind):
        raise ProtocolError(
            reply.reason
            if isinstance(reply, Failure)
            else f"a {type(reply).__name__} does not answer this message"
        )
    return reply


def _read_node(context: Context) -> Node:
    partition = context.node_config.get("partition-id", context.node_id & MAX_INTEGER)
    # Not `isinstance`: True and False are ints.
    if type(partition) is not int or not 0 <= partition <= MAX_INTEGER:
        raise DeploymentError(
            f"partition-id is {partition!r} in this node's configuration; it must be the client's "
            "number, 0 or higher (`flower-supernode --node-config partition-id=0`)"
        )
    return Node(
        client_id=ClientId(partition),
        node_config=dict(context.node_config),
        run_config=dict(context.run_config),
    )


def _load_keys(context: Context, store: NodeStore) -> Keys:
    known = _load_configured_key(context) or store.coordinator_key
    return Keys(identity=store.identity, coordinator_key=known, folder=find_folder(context))


def _load_configured_key(context: Context) -> bytes:
    """Return the coordinator's key of the node's configuration; empty if it has none."""
    value = context.node_config.get("coordinator-key")
    if value is None:
        return b""
    text, source = str(value), "coordinator-key in this node's configuration"
    if len(text) == 2 * KEY_BYTES:
        return read_key(text, source=source)
    try:
        return read_key(Path(text).read_text(), source=text)
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(
            f"{source} is {text!r}, which is neither a key ({2 * KEY_BYTES} hexadecimal digits) "
            f"nor a file that can be read ({type(error).__name__})"
        ) from error


def _pin_coordinator(coordinator_key: bytes, context: Context, store: NodeStore) -> None:
    """Pin the coordinator's key, if it shows one and none is known.

    A coordinator that shows another key causes no error here: this client later refuses its terms,
    and the coordinator receives the reason.
    """
    if not coordinator_key:
        return  # a run without secure aggregation
    if len(coordinator_key) != KEY_BYTES:
        raise ProtocolError(
            f"the coordinator shows a key of {len(coordinator_key)} bytes, not {KEY_BYTES}"
        )
    log, known = structlog.get_logger(__name__), _load_keys(context, store).coordinator_key
    if not known:
        store.pin(coordinator_key)
        advice = "configure the key at this node: --node-config coordinator-key"
        log.warning("coordinator_key_taken_on_first_use", key=coordinator_key.hex(), advice=advice)
    elif known != coordinator_key:
        log.warning("coordinator_shows_another_key", key=coordinator_key.hex(), pinned=known.hex())
    if find_folder(context) is None:
        advice = "configure a folder for the keys: --node-config identity"
        log.warning("keys_lost_with_the_node", advice=advice)
