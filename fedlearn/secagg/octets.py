"""Fields as bytes and back: little-endian, of fixed width, and never more than is there."""

import struct

from fedlearn.errors import ProtocolError

_FLOAT = struct.Struct("<d")


class Reader:
    r"""Takes fields off the front of bytes from a peer.

    Example:
        >>> reader = Reader(b"\x07\x00ab", what="a note")
        >>> reader.integer(2), reader.take(2), reader.finish()
        (7, b'ab', None)
    """

    def __init__(self, data: bytes, *, what: str) -> None:
        self._data = data
        self._at = 0
        self._what = what

    @property
    def left(self) -> int:
        """Bytes not taken yet."""
        return len(self._data) - self._at

    def take(self, num_bytes: int) -> bytes:
        """Return the next ``num_bytes``.

        Raises:
            ProtocolError: Fewer are left.
        """
        if num_bytes > self.left:
            raise ProtocolError(f"{self._what} ends {num_bytes - self.left} bytes early")
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def rest(self) -> memoryview:
        """Return all that is left, without a copy."""
        begin, self._at = self._at, len(self._data)
        return memoryview(self._data)[begin:]

    def integer(self, num_bytes: int, *, largest: int | None = None) -> int:
        """Return the next unsigned integer.

        Raises:
            ProtocolError: It is above ``largest``, or bytes are missing.
        """
        value = int.from_bytes(self.take(num_bytes), "little")
        if largest is not None and value > largest:
            raise ProtocolError(f"{self._what} says {value} where at most {largest} is allowed")
        return value

    def number(self) -> float:
        """Return the next float64."""
        return float(_FLOAT.unpack(self.take(_FLOAT.size))[0])

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            ProtocolError: Something is.
        """
        if self.left:
            raise ProtocolError(f"{self._what} has {self.left} bytes too many")


def integer(value: int, num_bytes: int) -> bytes:
    """Return an unsigned integer, little-endian."""
    return value.to_bytes(num_bytes, "little")


def number(value: float) -> bytes:
    """Return a float64."""
    return _FLOAT.pack(value)
