"""The content of our messages in Flower: a record of headers, and one array of bytes."""

import re
from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import MAX_REASON
from fedlearn.core.words import replace_unprintable
from fedlearn.errors import ProtocolError
from fedlearn.identity.identity import Identity
from fedlearn.secagg.keys import verify
from fedlearn.transport.content import compute_digest, encode_signed_reply
from fedlearn.transport.wire_pb2 import TaskKey

#: Names of our records in a message.
_HEADER, _PAYLOAD = "fedlearn", "fedlearn.payload"
_ARRAY, _ARRAY_TYPE = "message", "fedlearn.message"
#: The record of a model's constants; included while a node may lack them.
_CONSTANTS = "fedlearn.constants"

#: The kind of the first exchange with a node: the coordinator shows its key, and the node its
#: client id and key.
HELLO = "Hello"
KEY_BYTES = 32
MAX_INTEGER = (1 << 63) - 1
_NODE_ID_BYTES = 8
#: The integer fields of an exchange's key that are in a header.
_NUMBERS = ("round_num", "attempt", "exchange")

#: Our own error code, which Flower does not use: a client refuses or has failed, with the reason.
REFUSED = 100
#: Flower's code for an exception in the ClientApp; the reason is the exception.
_RAISED = 2
_EXCEPTION = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*)'>", re.DOTALL)
#: Flower's other error codes in our words.
_ERRORS: Mapping[int, str] = {
    1: "the ClientApp could not be loaded",
    3: "the message expired before it was answered",
    4: "the reply expired before it was fetched",
    5: "the node is gone",
    6: "a mod refused the message",
    7: "the app bundle is invalid",
    8: "the ClientApp's process died",
}
_SET_LEGACY = (
    'it is a legacy app (client_fn, NumPyClient); set flower.client_apps to "flower-legacy"'
)
#: By name of a record that a ClientApp of an earlier API misses in our messages, the remedy.
_LEGACY: Mapping[str, str] = {
    "fitins.": _SET_LEGACY,
    "evaluateins.": _SET_LEGACY,
    "secaggplus_configs": (
        "its secaggplus_mod supports Flower's own secure aggregation only; remove the mod, or use "
        "fedlearn's ClientApp, which has its own secure aggregation"
    ),
}


def build_payload(data: bytes) -> ArrayRecord:
    """Wrap bytes in an array, since Flower sends arrays in chunks, but other records whole."""
    array = Array(dtype="uint8", shape=(len(data),), stype=_ARRAY_TYPE, data=data)
    return ArrayRecord({_ARRAY: array})


def build_content(
    header: ConfigRecord, payload: ArrayRecord, *, constants: ArrayRecord | None = None
) -> RecordDict:
    """Build the content of a message, with the model's constants if they are sent."""
    content = RecordDict({_HEADER: header, _PAYLOAD: payload})
    if constants is not None:
        content[_CONSTANTS] = constants
    return content


def read_constants(content: RecordDict) -> bytes:
    """Return the constants in a message; empty if there are none."""
    array = content.array_records.get(_CONSTANTS, ArrayRecord()).get(_ARRAY)
    return b"" if array is None else array.data


def is_foreign(content: RecordDict) -> bool:
    """Whether a message may be from one of Flower's own strategies: arrays without our header."""
    return _HEADER not in content.config_records and bool(content.array_records)


def unpack(content: RecordDict) -> tuple[ConfigRecord, bytes]:
    """Return the header and the payload.

    Raises:
        ProtocolError: One of them is missing.
    """
    header = content.config_records.get(_HEADER)
    payload = content.array_records.get(_PAYLOAD, ArrayRecord()).get(_ARRAY)
    if header is None or payload is None or payload.stype != _ARRAY_TYPE:
        raise ProtocolError(
            "the Flower message has no fedlearn records; both sides must run fedlearn's apps"
        )
    return header, payload.data


def num_bytes(content: RecordDict) -> int:
    """Return the total size of the arrays in a message."""
    records = content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def build_key_header(
    key: TaskKey, *, personal: bytes = b"", constants_digest: bytes = b""
) -> ConfigRecord:
    """Build the header of a request.

    Args:
        key: Of the request.
        personal: The part for one client alone, in addition to the payload.
        constants_digest: Of the constants that the request lacks; empty: none.
    """
    numbers = {name: getattr(key, name) for name in _NUMBERS}
    parts = {"personal": personal, "constants_digest": constants_digest}
    return ConfigRecord({"kind": key.kind, **numbers, **parts})


def read_bytes(header: ConfigRecord, name: str) -> bytes:
    """Return a bytes field of a header; empty if it is missing.

    Raises:
        ProtocolError: It has another type.
    """
    value = header.get(name, b"")
    if not isinstance(value, bytes):
        raise ProtocolError(f"{name} in a message is not bytes")
    return value


def read_signable_key(header: ConfigRecord, context: Context) -> TaskKey:
    """Return the key of a request; its run id comes from this client's own node.

    Raises:
        ProtocolError: There is none, or it is that of an introduction: otherwise a coordinator
            could have any bytes signed as a card.
    """
    kind = header.get("kind")
    if not isinstance(kind, str) or kind == HELLO:
        raise ProtocolError(f"a request cannot be of kind {kind!r}")
    numbers = {name: read_number(header, name) for name in _NUMBERS}
    return TaskKey(run_id=format_run_id(context), kind=kind, **numbers)


def read_number(header: ConfigRecord, name: str) -> int:
    """Return an integer field of a header.

    Raises:
        ProtocolError: It is missing, or not an integer in [0, 2**63).
    """
    value = header.get(name)
    # Not `isinstance`: True and False are ints.
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ProtocolError(f"{name} in a message is not an integer in [0, 2**63)")
    return value


def build_constants_request(message: Message) -> Message:
    """Ask for the constants that a request lacks and this node does not have."""
    return Message(RecordDict({_CONSTANTS: ConfigRecord()}), reply_to=message)


def asks_for_constants(reply: Message) -> bool:
    """Return whether a reply is a :func:`build_constants_request`."""
    return _CONSTANTS in reply.content.config_records


def sign_reply(
    message: Message, data: bytes, *, key: TaskKey, client: ClientId, by: Identity
) -> Message:
    """Sign ``data`` as the reply to a message, for :func:`require_signed` to check."""
    signature = by.sign(encode_signed_reply(key, client_id=client, digest=compute_digest(data)))
    header = ConfigRecord({"client_id": client, "signature": signature})
    return Message(build_content(header, build_payload(data)), reply_to=message)


def require_signed(
    header: ConfigRecord, data: bytes, *, key: TaskKey, client: ClientId, by: bytes
) -> None:
    """Check that ``client`` signed ``data`` for the task ``key`` with its public key ``by``.

    Raises:
        ProtocolError: The signature is missing or does not match.
    """
    signature = header.get("signature")
    signed = encode_signed_reply(key, client_id=client, digest=compute_digest(data))
    if not isinstance(signature, bytes) or not verify(by, signature, signed):
        raise ProtocolError("the reply is not signed by this client for this task")


def build_card(node_id: int, public_key: bytes) -> bytes:
    """Build a client's introduction: its public key, bound to this node."""
    return node_id.to_bytes(_NODE_ID_BYTES, "big") + public_key


def read_card(card: bytes, node_id: int) -> bytes:
    """Return the key on a card.

    Raises:
        ProtocolError: The card is not of this node.
    """
    public_key = card[_NODE_ID_BYTES:]
    if len(public_key) != KEY_BYTES or card != build_card(node_id, public_key):
        raise ProtocolError("the introduction belongs to another node")
    return public_key


def build_refusal(message: Message, reason: str) -> Message:
    """Build an error that gives one of Flower's own strategies the reason for a missing reply."""
    return Message(Error(REFUSED, reason), reply_to=message)


def describe_error_reply(reply: Message) -> str:
    """Describe why a node has no reply, in its own words if it gives a reason."""
    code, reason = (reply.error.code, reply.error.reason) if reply.has_error() else (0, None)
    if code == REFUSED and reason:
        return reason[:MAX_REASON]
    if code == _RAISED and reason:
        return _describe_exception(reason)[:MAX_REASON]
    return f"Flower error {code}: {_ERRORS.get(code, 'unknown')}"


def _describe_exception(reason: str) -> str:
    """Describe the exception that Flower reports, with a remedy if its cause is known."""
    found = _EXCEPTION.fullmatch(reason)
    words = f"{found[1]}: {found[2]}" if found else reason
    advice = next((advice for missed, advice in _LEGACY.items() if missed in words), "")
    text = f"the ClientApp raised {replace_unprintable(' '.join(words.split()))}"
    return f"{text}; {advice}" if advice else text


def format_run_id(context: Context) -> str:
    """Return the id of the run, unique for ever."""
    return f"flower-{context.run_id}"
