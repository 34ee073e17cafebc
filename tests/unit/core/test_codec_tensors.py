"""Tensors of a message are views of its bytes where that is safe, and never reach beyond them."""

import json
import struct
from collections.abc import Mapping

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedlearn.core.codec import VERSION, decode, encode
from fedlearn.core.messages import EvaluateRequest, TrainReply
from fedlearn.errors import ProtocolError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.float64)}


def reply(body: bytes, *, spaces: int = 0) -> bytes:
    fields = {"round_num": 0, "num_examples": 1, "metrics": {}}
    header = json.dumps({"kind": "train_reply", "fields": fields}).encode() + b" " * spaces
    return struct.pack("<2sBI", b"FL", VERSION, len(header)) + header + body


def body_of(table: object, data: bytes) -> bytes:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def slot(begin: int, end: int, *, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    found = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": found, "data_offsets": [begin, end]}


def delta_of(data: bytes) -> Mapping[str, Tensor]:
    message = decode(data)
    assert isinstance(message, TrainReply)
    return message.lanes


def test_a_reply_is_not_copied_and_a_request_is() -> None:
    """Two reads of a reply share memory; a request is copied, since it may be trained in place."""
    data = encode(TrainReply(round_num=0, lanes=TENSORS, num_examples=1, metrics={}))
    left, right = delta_of(data), delta_of(data)
    assert all(left[name].data_ptr() == right[name].data_ptr() for name in TENSORS)
    request = encode(EvaluateRequest(round_num=0, tensors=TENSORS))
    first, second = decode(request), decode(request)
    assert isinstance(first, EvaluateRequest)
    assert isinstance(second, EvaluateRequest)
    first.tensors["a"].zero_()
    assert torch.equal(second.tensors["a"], TENSORS["a"])


@pytest.mark.parametrize("spaces", range(8))
def test_a_body_at_any_address_is_read(spaces: int) -> None:
    """Senders need not align it; an unaligned body is copied."""
    found = delta_of(reply(safetensors.torch.save(TENSORS), spaces=spaces))
    for name, value in TENSORS.items():
        assert torch.equal(found[name], value)
        assert found[name].data_ptr() % value.itemsize == 0


def test_a_tensor_at_any_place_of_a_body_is_read() -> None:
    """One byte before it moves a float off its alignment."""
    data = b"x" + struct.pack("<f", 2.5)
    found = delta_of(
        reply(body_of({"u": slot(0, 1), "f": slot(1, 5, dtype="F32", shape=[])}, data))
    )
    assert found["f"].item() == 2.5


def test_a_message_outlives_the_bytes_it_was_read_from() -> None:
    """Views keep the bytes alive."""
    data = bytearray(encode(TrainReply(round_num=0, lanes=TENSORS, num_examples=1, metrics={})))
    found = delta_of(bytes(data))
    del data
    assert torch.equal(found["a"], TENSORS["a"])


@pytest.mark.parametrize(
    ("table", "data"),
    [
        ({"a": slot(0, 4), "b": slot(2, 6)}, b"123456"),  # overlap
        ({"a": slot(0, 4), "b": slot(0, 4)}, b"1234"),  # twice the same bytes
        ({"a": slot(0, 2), "b": slot(4, 6)}, b"123456"),  # a gap
        ({"a": slot(2, 4)}, b"1234"),  # a gap before
        ({"a": slot(0, 2)}, b"1234"),  # left over
        ({"a": slot(0, 8)}, b"1234"),  # beyond the end
        ({"a": slot(4, 0, shape=[0])}, b"1234"),  # backwards
        ({"a": slot(0, 4, shape=[-4])}, b"1234"),
        ({"a": slot(0, 4, shape=[-2, -2])}, b"1234"),
        ({"a": slot(0, 4, shape=[4.0])}, b"1234"),
        ({"a": slot(0, 1, shape=[True])}, b"1"),
        ({"a": slot(0, 4, shape="4")}, b"1234"),
        ({"a": slot(0, 4, shape=[1] * 64 + [4])}, b"1234"),
        ({"a": slot(0, 0, shape=[0, 2**60])}, b""),
        ({"a": slot(0, 4, shape=[2], dtype="F32")}, b"1234"),
        ({"a": slot(0, 4, dtype="object")}, b"1234"),
        ({"a": {**slot(0, 4), "dtype": ["U8"]}}, b"1234"),
        ({"a": {**slot(0, 4), "data_offsets": [0]}}, b"1234"),
        ({"a": {**slot(0, 4), "data_offsets": [False, 4]}}, b"1234"),
        ({"a": {**slot(0, 4), "more": 1}}, b"1234"),
        ({"a": [0, 4]}, b"1234"),
        ([slot(0, 4)], b"1234"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', b""),
        (b"[" * 100_000, b""),
        (b"\xff", b""),
        (b"", b""),
    ],
)
def test_lengths_that_do_not_fit_the_message_are_refused(table: object, data: bytes) -> None:
    """Each claim is checked against the bytes received; four bytes in one slot are accepted."""
    assert delta_of(reply(body_of({"a": slot(0, 4)}, b"1234")))["a"].tolist() == list(b"1234")
    with pytest.raises(ProtocolError, match="malformed tensors"):
        decode(reply(body_of(table, data)))
