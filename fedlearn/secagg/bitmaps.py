"""Sets of clients as bitmaps: one bit for each position in the roster."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedlearn.errors import ProtocolError


def pack_bitmap(places: Iterable[int], *, size: int) -> bytes:
    """Pack a set of places among ``size`` into bits: one each, the first in the lowest bit.

    Example:
        >>> pack_bitmap([0, 3, 9], size=10).hex()
        '0902'
    """
    bits = np.zeros(size, bool)
    bits[list(places)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bitmap(data: bytes, *, size: int, what: str) -> NDArray[np.int64]:
    """Return the places in a bitmap, ascending.

    Raises:
        ProtocolError: It is longer or shorter than ``size`` places need, or has bits beyond them.
    """
    if len(data) != -(-size // 8):
        raise ProtocolError(f"{what} has {len(data)} bytes, not the {-(-size // 8)} of {size} bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[size:].any():
        raise ProtocolError(f"{what} has bits beyond the {size} in the roster")
    return np.flatnonzero(bits)
