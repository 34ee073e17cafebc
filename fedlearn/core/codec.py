"""Messages to bytes and back; the only place that knows the wire format.

Layout: ``b"FL"``, one version byte, a little-endian ``uint32`` length, a JSON header of
that length (ended by spaces, so that what follows is aligned), then the message's tensors
as one safetensors file. Nothing is unpickled: decoding bytes from a peer never runs code.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fedlearn.core.messages import (
    ClientId,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    Reply,
    Request,
    SecureReply,
    SecureRequest,
    TrainingNotice,
    TrainReply,
    TrainRequest,
)
from fedlearn.errors import ProtocolError

_PREFIX = struct.Struct("<2sBI")
_MAGIC = b"FL"
VERSION = 1

_TABLE_SIZE = struct.Struct("<Q")
#: Among the tensors: a message of secure aggregation, and what stands before a model's names.
_MESSAGE = "message"
_MODEL = "model/"
#: Bytes to which tensors are aligned: the widest element.
_ALIGNMENT = 8
#: Dimensions that torch's operations can handle.
_MAX_DIMENSIONS = 64
_DTYPES: Mapping[object, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_NAMES = {dtype: str(name) for name, dtype in _DTYPES.items()}


def encode(message: Request | Reply) -> bytes:
    """Return the wire form of ``message``.

    Example:
        >>> decode(encode(Failure(reason="battery low")))
        Failure(reason='battery low')
    """
    kind, fields, tensors = _take_apart(message)
    header = json.dumps({"kind": kind, "fields": fields}).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    prefix = _PREFIX.pack(_MAGIC, VERSION, len(header))
    return b"".join((prefix, header, *_file(tensors)))


def _file(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file, its tensors in the order given.

    The library would sort them by name; in a model's own order they are one vector, which
    the receiver can fold in where it lies. Those with wide elements come first, for alignment.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    table, end = {}, 0
    for name, value in ordered:
        begin, end = end, end + value.nbytes
        dtype, shape = _NAMES[value.dtype], list(value.shape)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    yield _TABLE_SIZE.pack(len(head))
    yield head
    for _, value in ordered:
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def decode(data: bytes | mmap) -> Request | Reply:
    """Return the message in ``data``.

    A request's tensors are the receiver's own, to train in place. Those of a reply are views
    of ``data``, only to be read: what is folded into an aggregate need not be copied first.

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
    return _put_together(header, _tensors(data, start))


def _tensors(data: bytes | mmap, start: int) -> Mapping[str, Tensor]:
    """Return views of the tensors in the safetensors file at ``data[start:]``.

    They must tile the rest of ``data``: no gap, no overlap, nothing left over. So all the
    lengths that a peer claims are held against those of ``data``.
    """
    begin = start + _TABLE_SIZE.size
    if begin > len(data):
        raise ProtocolError(f"malformed tensors: {len(data) - start} bytes are no table of them")
    begin += int(_TABLE_SIZE.unpack_from(data, start)[0])
    if begin > len(data):
        raise ProtocolError(f"malformed tensors: a table up to byte {begin} of {len(data)}")
    try:
        table = json.loads(data[start + _TABLE_SIZE.size : begin], object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed tensors: {error}") from error
    if not isinstance(table, dict):
        raise ProtocolError("malformed tensors: the table is not a JSON object")
    table.pop("__metadata__", None)
    slots = sorted((_Slot.of(entry, name=name) for name, entry in table.items()), key=_Slot.span)
    end = 0
    for slot in slots:
        if slot.begin != end:
            raise ProtocolError(f"malformed tensors: {slot.name!r} is not at byte {end}")
        end = slot.end
    if end != len(data) - begin:
        raise ProtocolError(f"malformed tensors: {end} bytes in a body of {len(data) - begin}")
    body = _view(data, begin)
    return {slot.name: slot.view(body) for slot in slots}


def _view(data: bytes | mmap, begin: int) -> Tensor:
    """Return ``data[begin:]`` as uint8, without a copy if it is aligned."""
    # Through DLPack, because torch's own door to a buffer warns about one that is read-only.
    body = from_dlpack(np.frombuffer(data, np.uint8, offset=begin))
    return body if body.data_ptr() % _ALIGNMENT == 0 else body.clone()


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


@dataclass(frozen=True)
class _Slot:
    """Where a tensor lies in a safetensors file, checked in itself.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape, one that torch can hold.
        begin: Its first byte, counted from the end of the table.
        end: The byte after its last.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    # Any: JSON from a peer.
    def of(cls, entry: Any, *, name: str) -> "_Slot":
        """Read an entry of the table."""
        if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
            raise ProtocolError(f"malformed tensors: {name!r} is not dtype, shape, data_offsets")
        shape, offsets = entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise ProtocolError(f"malformed tensors: {name!r} has no dtype that is known")
        if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):  # noqa: PLR2004 - begin, end
            raise ProtocolError(f"malformed tensors: {name!r} has no shape or no offsets")
        # An empty tensor may claim any size in its other dimensions.
        if len(shape) > _MAX_DIMENSIONS or math.prod(max(size, 1) for size in shape) >= 1 << 60:
            raise ProtocolError(f"malformed tensors: {name!r} has a shape too large for torch")
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ProtocolError(f"malformed tensors: {name!r} is not as long as its shape")
        return cls(name, dtype, tuple(shape), begin, end)

    def span(self) -> tuple[int, int]:
        """Return its place; an empty tensor comes before what begins there."""
        return self.begin, self.end

    def view(self, body: Tensor) -> Tensor:
        """Return the tensor as a view of ``body``, or as a copy if it is not aligned there."""
        part = body[self.begin : self.end]
        aligned = part if self.begin % self.dtype.itemsize == 0 else part.clone()
        return aligned.view(self.dtype).reshape(self.shape)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


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
        case SecureRequest():
            return _take_secure_apart(message)
        case SecureReply():
            body = {_MESSAGE: _octets(message.message)}
            return "secure_reply", {"round_num": message.round_num}, body
        case EvaluateRequest():
            return "evaluate_request", {"round_num": message.round_num}, message.tensors
        case TrainReply():
            return "train_reply", _reply_fields(message), message.delta
        case EvaluateReply():
            return "evaluate_reply", _reply_fields(message), {}
        case Failure():
            return "failure", {"reason": message.reason}, {}


def _take_secure_apart(
    message: SecureRequest,
) -> tuple[str, dict[str, object], Mapping[str, Tensor]]:
    tensors, train = {_MESSAGE: _octets(message.message)}, message.train
    fields: dict[str, object] = {
        "round_num": message.round_num,
        "attempt": message.attempt,
        "lanes": {lane: list(names) for lane, names in message.lanes.items()},
        "directory": {str(client): key.hex() for client, key in message.directory.items()},
        "train": {} if train is None else {"settings": dict(train.settings), "seed": train.seed},
        "notice": _notice_fields(message.notice),
    }
    if train is not None:
        tensors |= {_MODEL + name: tensor for name, tensor in train.tensors.items()}
    return "secure_request", fields, tensors


def _notice_fields(notice: TrainingNotice | None) -> dict[str, object]:
    if notice is None:
        return {}
    return {"settings": dict(notice.settings), "rest_hash": notice.rest_hash.hex()}


def _octets(data: bytes) -> Tensor:
    return _view(data, 0) if data else torch.empty(0, dtype=torch.uint8)


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
                tensors=_owned(tensors),
                settings=fields.mapping("settings", _is_scalar),
                seed=fields.integer("seed"),
            )
        case "evaluate_request":
            message = EvaluateRequest(
                round_num=fields.integer("round_num"), tensors=_owned(tensors)
            )
        case "train_reply":
            message = TrainReply(
                round_num=fields.integer("round_num"),
                delta=tensors,
                num_examples=fields.integer("num_examples"),
                metrics=fields.numbers("metrics"),
            )
        case "secure_request":
            message = _secure_request(fields, tensors)
        case "secure_reply":
            _require_names(tensors, {_MESSAGE})
            message = SecureReply(
                round_num=fields.integer("round_num"), message=_bytes_of(tensors[_MESSAGE])
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


def _secure_request(fields: "_Fields", tensors: Mapping[str, Tensor]) -> SecureRequest:
    round_num, attempt = fields.integer("round_num"), fields.integer("attempt")
    lanes = fields.mapping("lanes", _is_names)
    directory = _directory(fields.mapping("directory", lambda key: isinstance(key, str)))
    notice = _notice(_Fields(fields.mapping("notice", lambda _: True)))
    inner = _Fields(fields.mapping("train", lambda _: True))
    message = _bytes_of(tensors.get(_MESSAGE, torch.empty(0)))
    model = {name: value for name, value in tensors.items() if name != _MESSAGE}
    train = None
    if not inner.is_empty:
        named = _owned({name.removeprefix(_MODEL): value for name, value in model.items()})
        _require_names(model, {_MODEL + name for name in named})
        train = TrainRequest(
            round_num=round_num,
            attempt=attempt,
            tensors=named,
            settings=inner.mapping("settings", _is_scalar),
            seed=inner.integer("seed"),
        )
        inner.finish()
    elif model:
        raise ProtocolError("malformed message: a model without a request to train")
    return SecureRequest(
        round_num=round_num,
        attempt=attempt,
        message=message,
        train=train,
        lanes=lanes,
        directory=directory,
        notice=notice,
    )


def _notice(fields: "_Fields") -> TrainingNotice | None:
    if fields.is_empty:
        return None
    settings, text = fields.mapping("settings", _is_scalar), fields.text("rest_hash")
    fields.finish()
    try:
        return TrainingNotice(settings=settings, rest_hash=bytes.fromhex(text))
    except ValueError as error:
        raise ProtocolError(f"malformed message: rest_hash: {error}") from error


def _directory(keys: Mapping[str, str]) -> dict[ClientId, bytes]:
    try:
        found = {ClientId(int(client)): bytes.fromhex(key) for client, key in keys.items()}
    except ValueError as error:
        raise ProtocolError(f"malformed message: an identity key: {error}") from error
    if len(found) != len(keys) or not all(0 <= client < 1 << 63 for client in found):
        raise ProtocolError("malformed message: the directory has impossible clients")
    return found


def _require_names(tensors: Mapping[str, Tensor], names: set[str]) -> None:
    if tensors.keys() != names:
        wrong = sorted(tensors.keys() ^ names)[:3]
        raise ProtocolError(f"malformed message: it lacks or adds tensors: {wrong}")


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ProtocolError("malformed message: its bytes are missing")
    return tensor.numpy().tobytes()


def _owned(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, int | float | str | bool)


class _Fields:
    """Reads each field once, by type; what is left over is a protocol error."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._left = dict(fields)

    @property
    def is_empty(self) -> bool:
        return not self._left

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
