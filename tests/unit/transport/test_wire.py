"""The fast path for chunks produces the same bytes as protobuf."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlearn.transport import wire, wire_pb2

DATA = wire_pb2.UploadPart.DATA_FIELD_NUMBER


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21])
def test_a_chunk_is_what_protobuf_makes_of_it(size: int) -> None:
    """In both directions, for each size of the length field."""
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    message = wire_pb2.UploadPart(data=data).SerializeToString()
    assert wire.encode_bytes_field(DATA, data) == message
    found = wire.parse_bytes_field(DATA, message)
    assert found is not None
    assert bytes(found) == data


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x12",
        wire.encode_bytes_field(wire_pb2.Chunk.DATA_FIELD_NUMBER, b"abc"),  # another field
        wire.encode_bytes_field(DATA, b"abc")[:-1],  # cut
        wire.encode_bytes_field(DATA, b"abc") + b"\x00",  # more follows
        wire.encode_bytes_field(DATA, b"abc") * 2,
        b"\x12\x83\x00abc",  # a length with a byte that it does not need
        wire_pb2.UploadPart(envelope=wire_pb2.Envelope(num_bytes=3)).SerializeToString(),
    ],
)
def test_anything_else_is_left_to_protobuf(message: bytes) -> None:
    """The fast path declines whatever protobuf might read differently."""
    assert wire.parse_bytes_field(DATA, message) is None


@given(beat_s=st.floats(min_value=4.0 / wire.MISSED_BEATS, max_value=1e6))
def test_a_chunk_arrives_before_its_coordinator_is_taken_for_dead(beat_s: float) -> None:
    """On the slowest connection too; and no chunk is so small that its overhead matters."""
    num_bytes = wire.download_chunk_bytes(beat_s)
    assert num_bytes / wire.SLOWEST_BYTES_PER_S <= wire.MISSED_BEATS * beat_s
    assert wire.CHUNK_BYTES / 8 <= num_bytes <= wire.CHUNK_BYTES
