"""Encodes messages to bytes and decodes them; the only module that knows the wire format.

Layout: ``b"FL"``, one version byte, a little-endian ``uint32`` length, a JSON header of
that length (padded with spaces, so that what follows is aligned), then the message's tensors
as one safetensors file. Nothing is unpickled: decoding bytes from a peer never runs code.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from mmap import mmap
from types import UnionType
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fedlearn.core.messages import (
    Accusation,
    ClientId,
    CompressedModel,
    EvaluateReply,
    EvaluateRequest,
    EvaluationNotice,
    Failure,
    Reply,
    Request,
    Scalar,
    SecureEvaluateRequest,
    SecureReply,
    SecureStageRequest,
    SecureTermsRequest,
    SecureTrainRequest,
    Settings,
    TrainingNotice,
    TrainReply,
    TrainRequest,
    split_sent_once,
)
from fedlearn.errors import OtherVersion, ProtocolError

_PREFIX = struct.Struct("<2sBI")
_MAGIC = b"FL"
#: The newest and the oldest version of the format that this side reads and writes.
VERSION = 5
OLDEST = 4

_TABLE_SIZE = struct.Struct("<Q")
#: Names in the file of tensors: a message of secure aggregation, and the prefixes of the tensors
#: of the model and of the strategy's broadcast.
_MESSAGE = "message"
_MODEL, _BROADCAST = "model/", "told/"  # "told": the broadcast, under the name it has on the wire
#: The same of the parts of a compressed model, and the name of its field.
_PARTS, _COMPRESSED = "compressed/", "compressed"
#: Tensors are aligned to this many bytes, the size of the widest element.
_ALIGNMENT = 8
#: The most dimensions that torch's operations can handle.
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

#: A request with a model.
WorkT = TypeVar("WorkT", TrainRequest, EvaluateRequest)

_NAMES = {dtype: str(name) for name, dtype in _DTYPES.items()}

_TRAINING = ("round_num", "attempt", "settings", "seed", "order")

#: A field that is left out of the header if it is false.
_LACKS_CONSTANTS = "lacks_constants"
#: A field that is left out of the header if it is empty.
_LOCAL = "local"
_FINE_TUNING = "fine_tuning"

#: The kind of each message in its header, and the names of its fields there.
_FORMS: Mapping[type[Request | Reply], tuple[str, tuple[str, ...]]] = {
    TrainRequest: ("train_request", _TRAINING),
    EvaluateRequest: ("evaluate_request", ("round_num",)),
    SecureTermsRequest: (
        "secure_terms_request",
        ("round_num", "attempt", "settings", "rest_hash"),
    ),
    SecureTrainRequest: ("secure_train_request", _TRAINING),
    SecureEvaluateRequest: ("secure_evaluate_request", ("round_num",)),
    SecureStageRequest: ("secure_stage_request", ("round_num", "attempt", "directory")),
    TrainReply: ("train_reply", ("round_num", "num_examples", "metrics")),
    EvaluateReply: ("evaluate_reply", ("round_num", "num_examples", "metrics")),
    SecureReply: ("secure_reply", ("round_num",)),
    Failure: ("failure", ("reason",)),
    Accusation: ("accusation", ("reason", "client_id")),
}
_FIELDS = dict(_FORMS.values())
#: Kinds of messages that contain a model.
_MODELS = {
    _FORMS[each][0]
    for each in (TrainRequest, EvaluateRequest, SecureTrainRequest, SecureEvaluateRequest)
}
#: Fields that are in a header only if they differ from these values. Version 4 has none of them.
_OPTIONAL: Mapping[str, Mapping[str, object]] = {
    **{
        _FORMS[each][0]: {"counted": None, "num_statistics": 0, _LOCAL: (), _COMPRESSED: None}
        for each in (TrainRequest, SecureTrainRequest)
    },
    **{
        _FORMS[each][0]: {
            _LOCAL: (),
            "settings": {},
            "trained": (),
            "counted": None,
            _FINE_TUNING: {},
            "seed": 0,
        }
        for each in (EvaluateRequest, SecureEvaluateRequest)
    },
    _FORMS[TrainReply][0]: {"encoding": ""},
}
#: Settings that version 4 does not have, each with the value that leaves training unchanged.
_NEW_SETTINGS: Mapping[str, Scalar] = {"drop_last": False, "max_steps": None}
_WITHOUT_TENSORS: Mapping[str, type[Reply]] = {
    _FORMS[each][0]: each for each in (EvaluateReply, Failure, Accusation)
}


def encode(message: Request | Reply, *, newest: int = VERSION) -> bytes:
    """Encode ``message`` in the oldest version of the wire format that has all of its fields.

    This way, an older coordinator can read the replies.

    Args:
        message: The message.
        newest: The newest version that the receiver reads. For version 4, the fields that
            version 5 added are left out (which clients' updates counted, and which names are
            running statistics), since a client of that version does not know them.

    Raises:
        ValueError: A receiver of version 4 would misread the request: it lacks its constants, has
            a setting that version 4 does not know, names tensors that clients keep, or has a
            compressed model.

    Example:
        >>> decode(encode(Failure(reason="battery low")))
        Failure(reason='battery low')
    """
    kind, names = _FORMS[type(message)]
    values = _get_values(message)
    fields = {name: _to_json(values[name]) for name in names}
    added = {
        name: _to_json(values[name])
        for name, usual in _OPTIONAL.get(kind, {}).items()
        if values[name] != usual
    }
    if values.get(_LACKS_CONSTANTS):
        added[_LACKS_CONSTANTS] = True
    settings = fields.get("settings")
    if newest < VERSION:
        if _LACKS_CONSTANTS in added:
            raise ValueError(
                f"a request of version {newest} must include its constants; encode it whole"
            )
        if not added.keys().isdisjoint({_LOCAL, "trained", _FINE_TUNING}):
            raise ValueError(f"a client of version {newest} has no model of its own; upgrade it")
        if _COMPRESSED in added:
            raise ValueError(f"a client of version {newest} cannot restore a model; upgrade it")
        added = {}
        if isinstance(settings, Mapping):
            fields["settings"] = settings = _drop_newer_settings(settings, version=newest)
    fields |= added
    # The oldest version that has all fields, so that older peers can read as much as possible.
    is_new = bool(added) or (
        isinstance(settings, Mapping) and not settings.keys().isdisjoint(_NEW_SETTINGS)
    )
    header = json.dumps({"kind": kind, "fields": fields}).encode()
    # Spaces are no part of a JSON value, so the parser skips the padding.
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    prefix = _PREFIX.pack(_MAGIC, VERSION if is_new else OLDEST, len(header))
    return b"".join((prefix, header, *_encode_tensors(_get_tensors(message))))


def _drop_newer_settings(settings: Settings, *, version: int) -> Settings:
    """Remove the settings that ``version`` does not have, if they leave training unchanged."""
    for name, usual in _NEW_SETTINGS.items():
        if settings.get(name, usual) != usual:
            raise ValueError(f"version {version} has no setting {name!r}; leave it at {usual!r}")
    return {name: value for name, value in settings.items() if name not in _NEW_SETTINGS}


def _encode_tensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file, its tensors in the order given.

    The safetensors library would sort them by name. In the model's own order they form one
    contiguous vector, which the receiver can aggregate without a copy.
    """
    # Wide elements first, so that every tensor is aligned. The sort is stable.
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
        # As bytes, since NumPy has no bfloat16.
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def split(request: Request) -> tuple[Request, Mapping[str, Tensor]]:
    """Split a request into one without constants, and those constants.

    Constants stay the same in a run; frozen parameters can be most of a model. Broadcast values
    that are sent once are among them. A client is sent
    them once, encoded by :func:`encode_constants`, and :func:`decode` puts the two together
    again. If they are too small to be worth it, the request is returned whole.

    Example:
        >>> model = {"head": torch.ones(2), "base": torch.zeros(1 << 20)}
        >>> whole = EvaluateRequest(round_num=1, tensors=model, order=["head"])
        >>> bare, constants = split(whole)
        >>> list(bare.tensors), list(constants)
        (['head'], ['base'])
        >>> list(decode(encode(bare), constants=encode_constants(constants)).tensors)
        ['head', 'base']
    """
    match request:
        case SecureTrainRequest(train=train):
            training, constants = _split(train)
            return replace(request, train=training), constants
        case SecureEvaluateRequest(evaluate=evaluate):
            evaluation, constants = _split(evaluate)
            return replace(request, evaluate=evaluation), constants
        case TrainRequest():
            return _split(request)
        case EvaluateRequest():
            return _split(request)
        case _:
            return request, {}


def _split(work: WorkT) -> tuple[WorkT, Mapping[str, Tensor]]:
    constants = work.constants
    if not constants:
        return work, {}
    model, broadcast = split_sent_once(constants)
    tensors = {name: value for name, value in work.tensors.items() if name not in model}
    if isinstance(work, TrainRequest):
        sent = {name: value for name, value in work.broadcast.items() if name not in broadcast}
        work = replace(work, broadcast=sent, sent_once=())
    return replace(work, tensors=tensors, lacks_constants=True), constants


def encode_constants(constants: Mapping[str, Tensor]) -> bytes:
    """Encode tensors that are sent separately from a request, as a safetensors file."""
    return b"".join(_encode_tensors(constants))


def decode(
    data: bytes | mmap, *, personal: bytes = b"", constants: bytes | mmap = b""
) -> Request | Reply:
    """Decode the message in ``data``.

    A request's tensors are copies, which the receiver may train in place. A reply's tensors are
    read-only views of ``data``, since aggregating them needs no copy.

    Args:
        data: The message, or the part of it that is the same for the whole cohort.
        personal: The part for one client, if it was sent separately from ``data``: the packets of
            a :class:`~fedlearn.core.messages.SecureTrainRequest` or
            :class:`~fedlearn.core.messages.SecureEvaluateRequest` that has none.
        constants: The result of :func:`encode_constants`, for a request that lacks its constants;
            ignored otherwise.

    Guarantees:
        For any bytes at all this returns a message or raises :class:`ProtocolError`. All fields
        have the types of the message. Tensor names, shapes and values are the peer's and must be
        checked before arithmetic.

    Raises:
        ProtocolError: ``data`` is truncated, of another version, or not a message; or it has no
            place for ``personal``, or lacks its constants and none are given.
    """
    message = peek(data)
    if personal:
        if not isinstance(message, SecureTrainRequest | SecureEvaluateRequest) or message.message:
            raise ProtocolError(
                f"{len(personal)} bytes for this client alone with a {type(message).__name__}, "
                "which cannot carry them"
            )
        message = replace(message, message=personal)
    match message:
        case TrainRequest() as request:
            return _copy_request(request, constants)
        case EvaluateRequest() as request:
            return _copy_model(request, constants)
        case SecureTrainRequest() as request:
            return replace(request, train=_copy_request(request.train, constants))
        case SecureEvaluateRequest() as request:
            return replace(request, evaluate=_copy_model(request.evaluate, constants))
        case _:
            return message


def peek(data: bytes | mmap) -> Request | Reply:
    """Decode the message in ``data`` as :func:`decode` does, with its tensors as views of ``data``.

    Of a memory-mapped file, only the headers are read. So a caller can look at a request's fields
    without loading the model.

    Raises:
        ProtocolError: As :func:`decode`.
    """
    if len(data) < _PREFIX.size:
        raise ProtocolError(f"{len(data)} bytes are too few for a message; the prefix alone has 7")
    magic, version, header_size = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError(f"the message begins with {magic!r}, not {_MAGIC!r}")
    if not OLDEST <= version <= VERSION:
        raise OtherVersion(
            f"message version {version}, this side speaks {OLDEST} and {VERSION}; upgrade the "
            "older side"
        )
    start = _PREFIX.size + header_size
    if start > len(data):
        raise ProtocolError(f"a header of {header_size} bytes in a message of {len(data)}")
    try:
        header = json.loads(data[_PREFIX.size : start])
    # Deeply nested JSON exhausts the parser's recursion.
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
    return _put_together(*_read(header), _view_tensors(data, start))


def _view_tensors(data: bytes | mmap, start: int) -> Mapping[str, Tensor]:
    """Return views of the tensors in the safetensors file at ``data[start:]``.

    They must tile the rest of ``data``: no gap, no overlap, nothing left over. So every length
    that a peer claims is checked against the actual size of ``data``.
    """
    begin = start + _TABLE_SIZE.size
    if begin > len(data):
        raise ProtocolError(
            f"malformed tensors: {len(data) - start} bytes are too few for a table of them"
        )
    begin += int(_TABLE_SIZE.unpack_from(data, start)[0])
    if begin > len(data):
        raise ProtocolError(
            f"malformed tensors: the table would end at byte {begin} of {len(data)}"
        )
    try:
        table = json.loads(
            data[start + _TABLE_SIZE.size : begin], object_pairs_hook=_require_unique_keys
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed tensors: {error}") from error
    if not isinstance(table, dict):
        raise ProtocolError("malformed tensors: the table is not a JSON object")
    # The safetensors library may add an entry for metadata, which is not a tensor.
    table.pop("__metadata__", None)
    slots = sorted((_Slot.of(entry, name=name) for name, entry in table.items()), key=_Slot.span)
    end = 0
    for slot in slots:
        if slot.begin != end:
            raise ProtocolError(f"malformed tensors: {slot.name!r} is not at byte {end}")
        end = slot.end
    if end != len(data) - begin:
        raise ProtocolError(
            f"malformed tensors: they take {end} bytes in a body of {len(data) - begin}"
        )
    body = _view(data, begin)
    return {slot.name: slot.view(body) for slot in slots}


def _view(data: bytes | mmap, begin: int) -> Tensor:
    """Return ``data[begin:]`` as uint8, without a copy if it is aligned."""
    # Through DLPack, because torch.frombuffer warns about a read-only buffer.
    body = from_dlpack(np.frombuffer(data, np.uint8, offset=begin))
    return body if body.data_ptr() % _ALIGNMENT == 0 else body.clone()


def _require_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # JSON allows repeated keys, of which parsers keep different ones.
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


@dataclass(frozen=True)
class _Slot:
    """Position of a tensor in a safetensors file, in bytes from the end of the table."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    # Any: JSON from a peer.
    def of(cls, entry: Any, *, name: str) -> "_Slot":
        """Check an entry of the table, including that torch can represent its shape."""
        if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
            raise ProtocolError(
                f"malformed tensors: {name!r} does not have exactly dtype, shape and data_offsets"
            )
        shape, offsets = entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise ProtocolError(f"malformed tensors: {name!r} has no known dtype")
        if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):  # noqa: PLR2004 - begin, end
            raise ProtocolError(f"malformed tensors: {name!r} has no shape or no offsets")
        if _is_too_large(shape):
            raise ProtocolError(f"malformed tensors: {name!r} has a shape too large for torch")
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ProtocolError(
                f"malformed tensors: the length of {name!r} does not match its shape"
            )
        return cls(name, dtype, tuple(shape), begin, end)

    def span(self) -> tuple[int, int]:
        # Sorted by both ends, an empty tensor precedes the one at the same place.
        return self.begin, self.end

    def view(self, body: Tensor) -> Tensor:
        part = body[self.begin : self.end]
        # A foreign file may not have its widest elements first.
        aligned = part if self.begin % self.dtype.itemsize == 0 else part.clone()
        return aligned.view(self.dtype).reshape(self.shape)


def _is_too_large(shape: list[int]) -> bool:
    """Return whether torch cannot represent a shape."""
    # An empty tensor may claim any size in its other dimensions.
    return len(shape) > _MAX_DIMENSIONS or math.prod(max(size, 1) for size in shape) >= 1 << 60


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _get_values(message: Request | Reply) -> Mapping[str, object]:
    """Return the field values of a message and of the request or notice in it, by name."""
    match message:
        case SecureTrainRequest():
            return vars(message.train)
        case SecureEvaluateRequest():
            return vars(message.evaluate)
        case SecureTermsRequest():
            return vars(message) | {"settings": None} | vars(message.notice)
        case _:
            return vars(message)


def _to_json(value: object) -> object:
    match value:
        case bytes():
            return value.hex()
        case Mapping():
            return {str(key): _to_json(each) for key, each in value.items()}
        case CompressedModel(settings=settings, shapes=shapes, dtypes=dtypes):
            names = [_NAMES[each] for each in dtypes]
            return {"settings": _to_json(settings), "shapes": list(shapes), "dtypes": names}
        case _:
            return value


def _get_tensors(message: Request | Reply) -> Mapping[str, Tensor]:
    match message:
        case TrainRequest():
            return _get_training_tensors(message)
        case SecureTrainRequest():
            return _wrap_message(message.message) | _get_training_tensors(message.train)
        case SecureEvaluateRequest():
            return _wrap_message(message.message) | _prefix_model(message.evaluate.tensors)
        case EvaluateRequest():
            return message.tensors
        case TrainReply():
            return message.lanes
        case SecureTermsRequest() | SecureStageRequest() | SecureReply():
            return _wrap_message(message.message)
        case EvaluateReply() | Failure():
            return {}


def _get_training_tensors(train: TrainRequest) -> dict[str, Tensor]:
    broadcast = {_BROADCAST + name: tensor for name, tensor in train.broadcast.items()}
    if train.compressed is None:
        return _prefix_model(train.tensors) | broadcast
    parts = {_PARTS + name: tensor for name, tensor in train.compressed.parts.items()}
    return _prefix_model(train.sent_tensors) | parts | broadcast


def _prefix_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_MODEL + name: tensor for name, tensor in tensors.items()}


def _wrap_message(message: bytes) -> dict[str, Tensor]:
    return {_MESSAGE: _view(message, 0) if message else torch.empty(0, dtype=torch.uint8)}


# The header is JSON from a peer: any shape is possible until each field has been read.
def _read(header: Any) -> tuple[str, dict[str, Any]]:
    if not (isinstance(header, dict) and isinstance(header.get("fields"), dict)):
        raise _explain_malformed("the header has no fields")
    kind, fields = header.get("kind"), header["fields"]
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ProtocolError(f"unknown message kind {kind!r}")
    if missing := [name for name in _FIELDS[kind] if name not in fields]:
        raise _explain_malformed(f"the fields {missing} are missing")
    there = [name for name in _OPTIONAL.get(kind, {}) if name in fields]
    values = {name: _READERS[name](fields[name], name) for name in (*_FIELDS[kind], *there)}
    if fields.get(_LACKS_CONSTANTS) is True and kind in _MODELS:
        values[_LACKS_CONSTANTS] = True
    if unknown := sorted(fields.keys() - values.keys()):
        raise _explain_malformed(f"unknown fields {unknown}")
    return kind, values


def _put_together(
    kind: str, values: dict[str, Any], tensors: Mapping[str, Tensor]
) -> Request | Reply:
    match kind:
        case "train_request":
            message: Request | Reply = _build_train_request(values, tensors)
        case "evaluate_request":
            message = EvaluateRequest(tensors=tensors, **values)
        case "train_reply":
            message = TrainReply(lanes=tensors, **values)
        case "secure_terms_request":
            values["notice"] = _build_notice(values.pop("settings"), values.pop("rest_hash"))
            message = SecureTermsRequest(message=_get_only_message(tensors), **values)
        case "secure_train_request":
            model = {name: value for name, value in tensors.items() if name != _MESSAGE}
            train = _build_train_request(values, model)
            message = SecureTrainRequest(message=_get_message(tensors), train=train)
        case "secure_evaluate_request":
            own = _select_prefix(_MODEL, tensors)
            _require_names(tensors, {_MESSAGE} | {_MODEL + name for name in own})
            evaluate = EvaluateRequest(tensors=own, **values)
            message = SecureEvaluateRequest(message=_get_message(tensors), evaluate=evaluate)
        case "secure_stage_request":
            message = SecureStageRequest(message=_get_only_message(tensors), **values)
        case "secure_reply":
            message = SecureReply(message=_get_only_message(tensors), **values)
        case _:
            message = _WITHOUT_TENSORS[kind](**values)
    return message


def _build_notice(
    settings: dict[str, Scalar] | None, rest_hash: bytes
) -> TrainingNotice | EvaluationNotice:
    """Build the notice that announces a session; without settings, it is an evaluation."""
    if settings is None:
        return EvaluationNotice(rest_hash=rest_hash)
    return TrainingNotice(settings=settings, rest_hash=rest_hash)


def _build_train_request(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TrainRequest:
    if values["settings"] is None:
        raise _explain_malformed("settings is not a table of plain values")
    if values.get("num_statistics", 0) > len(values["order"]):
        raise _explain_malformed("num_statistics is larger than the number of names in order")
    model, broadcast = _select_prefix(_MODEL, tensors), _select_prefix(_BROADCAST, tensors)
    names = {_MODEL + name for name in model} | {_BROADCAST + name for name in broadcast}
    request = TrainRequest(tensors=model, broadcast=broadcast, **values)
    if request.compressed is None:
        _require_names(tensors, names)
        return request
    parts = _select_prefix(_PARTS, tensors)
    _require_names(tensors, names | {_PARTS + name for name in parts})
    if len(request.compressed.shapes) != len(request.trained):
        raise _explain_malformed("a compressed model has not one shape for each trained tensor")
    if absent := sorted(set(request.order) - set(request.trained) - model.keys())[:3]:
        raise _explain_malformed(f"it lacks the running statistics {absent}")
    if twice := sorted(model.keys() & set(request.trained))[:3]:
        raise _explain_malformed(f"the tensors {twice} are both compressed and whole")
    return replace(request, compressed=replace(request.compressed, parts=parts))


def _select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _require_names(tensors: Mapping[str, Tensor], names: set[str]) -> None:
    if tensors.keys() != names:
        wrong = sorted(tensors.keys() ^ names)[:3]
        raise _explain_malformed(f"it has missing or extra tensors: {wrong}")


def _get_message(tensors: Mapping[str, Tensor]) -> bytes:
    tensor = tensors.get(_MESSAGE)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise _explain_malformed("its bytes are missing")
    return tensor.numpy().tobytes()


def _get_only_message(tensors: Mapping[str, Tensor]) -> bytes:
    _require_names(tensors, {_MESSAGE})
    return _get_message(tensors)


def _copy_request(train: TrainRequest, constants: bytes | mmap) -> TrainRequest:
    """Complete and copy a training request, the strategy's broadcast included."""
    _, once = _load_constants(train, constants)
    broadcast = _merge(train.broadcast, once)
    return _copy_model(replace(train, broadcast=_copy_tensors(broadcast)), constants)


def _copy_model(work: WorkT, constants: bytes | mmap) -> WorkT:
    """Add the constants to a request that lacks them, and copy all tensors of its model."""
    apart, _ = _load_constants(work, constants)
    tensors = _copy_tensors(_merge(work.tensors, apart))
    return replace(work, tensors=tensors, lacks_constants=False)


def _load_constants(
    work: TrainRequest | EvaluateRequest, constants: bytes | mmap
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the missing tensors of a request: of its model, and of the strategy's broadcast."""
    if not work.lacks_constants:
        return {}, {}
    if not constants:
        raise ProtocolError("the request lacks the constants of its model, and none are here")
    return split_sent_once(_view_tensors(constants, 0))


def _merge(tensors: Mapping[str, Tensor], apart: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if twice := sorted(tensors.keys() & apart.keys())[:3]:
        raise _explain_malformed(f"the tensors {twice} are in the request and in its constants")
    return {**tensors, **apart}


def _copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def _explain_malformed(what: str) -> ProtocolError:
    return ProtocolError(f"malformed message: {what}")


# Each reader checks and converts one field, given its JSON value (anything) and its name.
def _read_integer(value: Any, name: str) -> int:
    # `type`, not isinstance: JSON's true is an int in Python.
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _explain_malformed(f"{name} is not an integer in [0, 2**63)")
    return value


def _read_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _explain_malformed(f"{name} is not text")
    return value


def _read_octets(value: Any, name: str) -> bytes:
    try:
        return bytes.fromhex(_read_text(value, name))
    except ValueError as error:
        raise _explain_malformed(f"{name}: {error}") from error


def _read_texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _explain_malformed(f"{name} is not a list of names")
    return tuple(value)


def _read_table(value: Any, name: str, *, of: type | UnionType) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(each, of) for each in value.values()):
        raise _explain_malformed(f"{name} is not a table of plain values")
    return value


def _read_settings(value: Any, name: str) -> dict[str, Scalar] | None:
    return None if value is None else _read_scalars(value, name)


def _read_scalars(value: Any, name: str) -> dict[str, Scalar]:
    return _read_table(value, name, of=int | float | str | bool | None)


def _read_numbers(value: Any, name: str) -> dict[str, float]:
    found = _read_table(value, name, of=int | float)
    if any(isinstance(each, bool) for each in found.values()):
        raise _explain_malformed(f"{name} is not a table of numbers")
    try:
        # JSON integers are unbounded.
        return {key: float(each) for key, each in found.items()}
    except OverflowError as error:
        raise _explain_malformed(f"a number in {name} is too large") from error


def _read_directory(value: Any, name: str) -> dict[ClientId, bytes]:
    keys = _read_table(value, name, of=str)
    try:
        found = {ClientId(int(client)): _read_octets(key, name) for client, key in keys.items()}
    except ValueError as error:
        raise _explain_malformed(f"{name}: {error}") from error
    # int() reads "1" and "01" as one client.
    if len(found) != len(keys) or not all(0 <= client < 1 << 63 for client in found):
        raise _explain_malformed(f"{name} has impossible clients")
    return found


def _read_compressed(value: Any, name: str) -> CompressedModel:
    if not (isinstance(value, dict) and value.keys() == {"settings", "shapes", "dtypes"}):
        raise _explain_malformed(f"{name} does not have exactly settings, shapes and dtypes")
    shapes, dtypes = value["shapes"], _read_texts(value["dtypes"], f"dtypes of {name}")
    if not isinstance(shapes, list) or len(shapes) != len(dtypes):
        raise _explain_malformed(f"{name} has not one shape for each dtype")
    for shape in shapes:
        if not _are_sizes(shape) or _is_too_large(shape):
            raise _explain_malformed(f"{name} has a shape that no tensor has")
    if unknown := [each for each in dtypes if each not in _DTYPES]:
        raise _explain_malformed(f"{name} has the unknown dtype {unknown[0]!r}")
    return CompressedModel(
        settings=_read_scalars(value["settings"], name),
        parts={},
        shapes=[tuple(shape) for shape in shapes],
        dtypes=[_DTYPES[each] for each in dtypes],
    )


def _read_rounds(value: Any, name: str) -> dict[ClientId, int]:
    table = _read_table(value, name, of=int)
    try:
        found = {ClientId(int(client)): _read_integer(each, name) for client, each in table.items()}
    except ValueError as error:
        raise _explain_malformed(f"{name}: {error}") from error
    # As in `_read_directory`.
    if len(found) != len(table) or not all(0 <= client < 1 << 63 for client in found):
        raise _explain_malformed(f"{name} has impossible clients")
    return found


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "counted": _read_rounds,
    _COMPRESSED: _read_compressed,
    "encoding": _read_text,
    "num_statistics": _read_integer,
    "round_num": _read_integer,
    "attempt": _read_integer,
    "seed": _read_integer,
    "num_examples": _read_integer,
    "order": _read_texts,
    _LOCAL: _read_texts,
    "trained": _read_texts,
    _FINE_TUNING: _read_settings,
    "settings": _read_settings,  # null: there is no training
    "metrics": _read_numbers,
    "reason": _read_text,
    "client_id": _read_integer,
    "rest_hash": _read_octets,
    "directory": _read_directory,
}
