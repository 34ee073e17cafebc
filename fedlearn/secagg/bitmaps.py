"""Sets of positions in a roster as bits: the least that says who, in the order of the roster."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedlearn.errors import ProtocolError


def bitmap(places: Iterable[int], *, size: int) -> bytes:
    """Return a set of places among ``size``, one bit each, the first in the lowest bit.

    Example:
        >>> bitmap([0, 3, 9], size=10).hex()
        '0902'
    """
    bits = np.zeros(size, bool)
    bits[list(places)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def places_in(data: bytes, *, size: int, what: str) -> NDArray[np.int64]:
    """Return the places in a bitmap, ascending.

    Raises:
        ProtocolError: It is not as long as ``size`` places need, or has bits beyond them.
    """
    if len(data) != -(-size // 8):
        raise ProtocolError(f"{what} has {len(data)} bytes, not the {-(-size // 8)} of {size} bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[size:].any():
        raise ProtocolError(f"{what} has bits beyond the {size} in the roster")
    return np.flatnonzero(bits)
