"""The digest that identifies bytes on the wire."""

import io

import pytest

from fedlearn.transport.content import DIGEST_BYTES, compute_digest, hash_stream


def pattern(size: int) -> bytes:
    """Return the input of BLAKE3's published test vectors: 0, 1 … 250, repeated."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
        (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
    ],
)
def test_the_digest_is_blake3(size: int, expected: str) -> None:
    """The first 32 bytes match the test vectors of BLAKE3's authors."""
    assert compute_digest(pattern(size)) == bytes.fromhex(expected)
    assert len(compute_digest(pattern(size))) == DIGEST_BYTES


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 2_500_000])
def test_bytes_have_one_digest_however_they_come(size: int) -> None:
    """Whole, in chunks and as a stream, for inputs shorter and longer than a stride."""
    data = pattern(size)
    pieces = hash_stream(io.BytesIO(data[:100]))
    pieces.update(memoryview(data)[100:300])
    pieces.update(data[300:])
    assert pieces.digest() == hash_stream(io.BytesIO(data)).digest() == compute_digest(data)
