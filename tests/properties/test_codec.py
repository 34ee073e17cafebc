"""For any bytes at all, the codec returns a message or raises a ProtocolError."""

import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlearn.core.codec import OLDEST, VERSION, decode, encode
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

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
numbers = st.integers(0, 2**63 - 1)
metrics = st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=4)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@st.composite
def tensor(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    made = torch.randint(-100, 100, shape, generator=values)
    return made.to(draw(st.sampled_from(DTYPES)))


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
tensors = st.dictionaries(names, tensor(), max_size=3)
messages: st.SearchStrategy[Request | Reply] = st.one_of(
    st.builds(
        TrainRequest,
        round_num=numbers,
        attempt=numbers,
        tensors=tensors,
        order=st.lists(names, max_size=3).map(tuple),
        broadcast=tensors,
        settings=st.dictionaries(st.text(), scalars, max_size=4),
        seed=numbers,
    ),
    st.builds(EvaluateRequest, round_num=numbers, tensors=tensors),
    st.builds(
        TrainReply,
        round_num=numbers,
        lanes=tensors,
        num_examples=numbers,
        metrics=metrics,
        encoding=st.sampled_from(["", "top_k"]),
    ),
    st.builds(EvaluateReply, round_num=numbers, num_examples=numbers, metrics=metrics),
    st.builds(Failure, reason=st.text()),
)


def parts(message: Request | Reply) -> dict[str, object]:
    """Return the fields in a form that can be compared: tensors as dtype, shape and bytes."""
    fields: dict[str, object] = {}
    for name, value in vars(message).items():
        if name in ("tensors", "broadcast", "lanes"):
            fields[name] = {
                key: (t.dtype, t.shape, t.contiguous().view(-1).view(torch.uint8).tolist())
                for key, t in value.items()
            }
        else:
            fields[name] = value
    return {"type": type(message), **fields}


def decode_or_refuse(data: bytes) -> Request | Reply | None:
    """Return the message, or ``None`` for a ProtocolError; any other exception fails the test."""
    try:
        return decode(data)
    except ProtocolError:
        return None


@settings(max_examples=200)
@given(message=messages)
def test_every_message_survives_the_wire(message: Request | Reply) -> None:
    """Decoding inverts encoding bit for bit, for all kinds of messages."""
    assert parts(decode(encode(message))) == parts(message)


@settings(max_examples=200)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    """Without the magic bytes they cannot be a message."""
    assert decode_or_refuse(data) is None


@settings(max_examples=300)
@given(header=st.binary(max_size=60), body=st.binary(max_size=60))
def test_random_headers_and_bodies_are_refused(header: bytes, body: bytes) -> None:
    """They follow a valid prefix, so that the parsers are reached."""
    decode_or_refuse(struct.pack("<2sBI", b"FL", VERSION, len(header)) + header + body)


@pytest.mark.slow
@settings(max_examples=120)
@given(
    kind=st.sampled_from(
        ["train_request", "evaluate_request", "train_reply", "evaluate_reply", "failure"]
    ),
    fields=st.dictionaries(
        st.sampled_from(
            ["round_num", "attempt", "settings", "seed", "num_examples", "metrics", "reason"]
        )
        | st.text(max_size=5),
        st.recursive(scalars, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=5),
    ),
)
def test_fields_of_wrong_types_are_refused(kind: str, fields: dict[str, object]) -> None:
    """For any JSON in the fields, a decoded message has fields of the declared types."""
    header = json.dumps({"kind": kind, "fields": fields}).encode()
    prefix = struct.pack("<2sBI", b"FL", VERSION, len(header))
    message = decode_or_refuse(prefix + header + safetensors.torch.save({}))
    if isinstance(message, TrainReply | EvaluateReply):
        assert type(message.round_num) is int
        assert all(type(value) is float for value in message.metrics.values())


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(0, 2**64), max_size=4),
    offsets=st.tuples(st.integers(0, 2**64), st.integers(0, 2**64)) | st.just((0, 0)),
    dtype=st.sampled_from(["F32", "F64", "BF16", "I64", "BOOL", "F4", "F8_E4M3", "C64", "X"]),
    data=st.binary(max_size=16),
)
def test_lying_tensor_headers_are_refused(
    shape: list[int], offsets: tuple[int, int], dtype: str, data: bytes
) -> None:
    """Shapes and offsets do not fit the bytes, or do not fit any memory."""
    entry = {"w": {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}}
    table = json.dumps(entry).encode()
    header = json.dumps({"kind": "evaluate_request", "fields": {"round_num": 0}}).encode()
    prefix = struct.pack("<2sBI", b"FL", VERSION, len(header))
    message = decode_or_refuse(prefix + header + struct.pack("<Q", len(table)) + table + data)
    if isinstance(message, EvaluateRequest):
        assert all(t.nbytes == len(data) for t in message.tensors.values())


def wire() -> bytes:
    delta = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    return encode(TrainReply(round_num=1, lanes=delta, num_examples=5, metrics={"loss": 0.5}))


def test_a_message_cut_anywhere_is_refused() -> None:
    """At every length, and with an extra byte. Control: the whole message is accepted."""
    data = wire()
    assert isinstance(decode(data), TrainReply)
    for length in range(len(data)):
        assert decode_or_refuse(data[:length]) is None, length
    assert decode_or_refuse(data + b"\x00") is None


def test_a_message_with_any_bit_flipped_is_a_message_or_refused() -> None:
    """No other exception is raised; a flip in the magic bytes is always noticed."""
    data = wire()
    for position in range(len(data)):
        for bit in (0, 3, 6, 7):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            message = decode_or_refuse(bytes(flipped))
            is_version = position == 2 and OLDEST <= flipped[2] <= VERSION
            checked = "the magic and the version are checked"
            assert message is None or position > 2 or is_version, checked
