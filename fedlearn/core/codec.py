"""Messages to bytes and back; the only place that knows the wire format.

Layout: ``b"FL"``, one version byte, a little-endian ``uint32`` length, a JSON header of
that length, then the message's tensors as one safetensors file. Nothing is unpickled:
decoding bytes from a peer never runs code.
"""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedlearn.core.messages import (
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    Request,
    TrainReply,
    TrainRequest,
)
from fedlearn.errors import ProtocolError

_PREFIX = struct.Struct("<2sBI")
_MAGIC = b"FL"
VERSION = 1


def encode(message: Request | Reply) -> bytes:
    """Return the wire form of ``message``.

    Example:
        >>> decode(encode(Failure(reason="battery low")))
        Failure(reason='battery low')
    """
    kind, fields, tensors = _take_apart(message)
    header = json.dumps({"kind": kind, "fields": fields}).encode()
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    body = safetensors.torch.save(contiguous)
    return _PREFIX.pack(_MAGIC, VERSION, len(header)) + header + body


def decode(data: bytes) -> Request | Reply:
    """Return the message in ``data``.

    Guarantees:
        For any bytes whatever this returns a message or raises :class:`ProtocolError`. The
        types of all fields are those of the message; tensor names, shapes and values are
        the peer's and must be checked before arithmetic.

    Raises:
        ProtocolError: ``data`` is truncated, of another version, or not a message.
    """
    if len(data) < _PREFIX.size:
        raise ProtocolError(f"{len(data)} bytes are no message; the prefix alone has 7")
    magic, version, header_size = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError(f"the message begins with {magic!r}, not {_MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(
            f"message version {version}, this side speaks {VERSION}; upgrade the older side"
        )
    start = _PREFIX.size + header_size
    if start > len(data):
        raise ProtocolError(f"a header of {header_size} bytes in a message of {len(data)}")
    try:
        header = json.loads(data[_PREFIX.size : start])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
    return _put_together(header, _tensors(data[start:]))


def _tensors(body: bytes) -> Mapping[str, Tensor]:
    try:
        return safetensors.torch.load(body)
    # safetensors checks sizes, but not that torch can hold the shape of an empty tensor.
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ProtocolError(f"malformed tensors: {error}") from error


def _take_apart(
    message: Request | Reply,
) -> tuple[str, dict[str, object], Mapping[str, Tensor]]:
    match message:
        case TrainRequest():
            fields: dict[str, object] = {
                "round_num": message.round_num,
                "attempt": message.attempt,
                "settings": dict(message.settings),
                "seed": message.seed,
            }
            return "train_request", fields, message.tensors
        case EvaluateRequest():
            return "evaluate_request", {"round_num": message.round_num}, message.tensors
        case TrainReply():
            return "train_reply", _reply_fields(message), message.delta
        case EvaluateReply():
            return "evaluate_reply", _reply_fields(message), {}
        case Failure():
            return "failure", {"reason": message.reason}, {}


def _reply_fields(message: TrainReply | EvaluateReply) -> dict[str, object]:
    return {
        "round_num": message.round_num,
        "num_examples": message.num_examples,
        "metrics": dict(message.metrics),
    }


# The header is JSON from a peer: any shape is possible until each field has been read.
def _put_together(header: Any, tensors: Mapping[str, Tensor]) -> Request | Reply:
    if not (isinstance(header, dict) and isinstance(header.get("fields"), dict)):
        raise ProtocolError("malformed message: the header has no fields")
    fields = _Fields(header["fields"])
    match header.get("kind"):
        case "train_request":
            message: Request | Reply = TrainRequest(
                round_num=fields.integer("round_num"),
                attempt=fields.integer("attempt"),
                tensors=tensors,
                settings=fields.mapping("settings", _is_scalar),
                seed=fields.integer("seed"),
            )
        case "evaluate_request":
            message = EvaluateRequest(round_num=fields.integer("round_num"), tensors=tensors)
        case "train_reply":
            message = TrainReply(
                round_num=fields.integer("round_num"),
                delta=tensors,
                num_examples=fields.integer("num_examples"),
                metrics=fields.numbers("metrics"),
            )
        case "evaluate_reply":
            message = EvaluateReply(
                round_num=fields.integer("round_num"),
                num_examples=fields.integer("num_examples"),
                metrics=fields.numbers("metrics"),
            )
        case "failure":
            message = Failure(reason=fields.text("reason"))
        case kind:
            raise ProtocolError(f"unknown message kind {kind!r}")
    fields.finish()
    return message


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, int | float | str | bool)


class _Fields:
    """Reads each field once, by type; what is left over is a protocol error."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._left = dict(fields)

    def integer(self, name: str) -> int:
        value = self._left.pop(name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise ProtocolError(f"malformed message: {name} is not an integer in [0, 2**63)")
        return value

    def text(self, name: str) -> str:
        value = self._left.pop(name, None)
        if not isinstance(value, str):
            raise ProtocolError(f"malformed message: {name} is not text")
        return value

    def mapping(self, name: str, accepts: Callable[[object], bool]) -> dict[str, Any]:
        value = self._left.pop(name, None)
        if not isinstance(value, dict) or not all(accepts(v) for v in value.values()):
            raise ProtocolError(f"malformed message: {name} is not a table of plain values")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        try:
            return {key: float(value) for key, value in self.mapping(name, _is_number).items()}
        except OverflowError as error:
            raise ProtocolError(f"malformed message: a number in {name} is too large") from error

    def finish(self) -> None:
        if self._left:
            raise ProtocolError(f"malformed message: unknown fields {sorted(self._left)}")
