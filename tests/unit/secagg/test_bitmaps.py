"""Bitmaps of roster positions: each set has one encoding, of the length that its size requires."""

import pytest

from fedlearn.errors import ProtocolError
from fedlearn.secagg.bitmaps import pack_bitmap, unpack_bitmap


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 21])
def test_places_come_back(size: int) -> None:
    for places in ([], [0], [size - 1], list(range(0, size, 2))):
        data = pack_bitmap(places, size=size)
        assert unpack_bitmap(data, size=size, what="a set").tolist() == places


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x09", "a set has 1 bytes, not the 2 of 10 bits"),
        (b"\x09\x02\x00", "a set has 3 bytes, not the 2"),
        (b"\x09\x06", "a set has bits beyond the 10 in the roster"),
        (b"\x09\x82", "a set has bits beyond the 10 in the roster"),
    ],
)
def test_other_bits_are_no_set(data: bytes, reason: str) -> None:
    """Control: without the extra bit or byte, the bitmap is accepted."""
    assert unpack_bitmap(b"\x09\x02", size=10, what="a set").tolist() == [0, 3, 9]
    with pytest.raises(ProtocolError, match=reason):
        unpack_bitmap(data, size=10, what="a set")
