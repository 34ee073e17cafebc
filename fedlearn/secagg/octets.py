"""Encoding of values as little-endian bytes; decoding never reads past the end.

A :class:`Form` writes and reads the values of one type. A dataclass declares the form of each field
in its annotation, so each layout of secure aggregation is defined once: :func:`record` reads it off
the class.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, pairwise
from typing import Any, Generic, TypeAlias, TypeVar, get_type_hints

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg.parameters import MAX_CLIENTS

T = TypeVar("T")
U = TypeVar("U")
Buffer: TypeAlias = bytes | memoryview

_FLOAT = struct.Struct("<d")
_MAX_ID = (1 << 63) - 1


class Reader:
    r"""Reads fields from the front of a peer's bytes; too few bytes are a :class:`ProtocolError`.

    Example:
        >>> reader = Reader(b"\x07\x00ab", what="a note")
        >>> reader.integer(2), reader.take(2), reader.finish()
        (7, b'ab', None)
    """

    def __init__(self, data: Buffer, *, what: str) -> None:
        self._data = memoryview(data)
        self.what = what

    @property
    def left(self) -> int:
        """Number of bytes not read yet."""
        return len(self._data)

    def rest(self) -> memoryview:
        """Return all bytes that are left, without a copy."""
        taken, self._data = self._data, self._data[:0]
        return taken

    def take(self, num_bytes: int) -> bytes:
        """Return the next ``num_bytes``."""
        if num_bytes > self.left:
            raise ProtocolError(f"{self.what} ends {num_bytes - self.left} bytes early")
        taken, self._data = self._data[:num_bytes], self._data[num_bytes:]
        # Copy: a view of a few bytes would keep the whole message in memory.
        return bytes(taken)

    def integer(self, num_bytes: int, *, largest: int | None = None) -> int:
        """Return the next unsigned integer; one above ``largest`` is a ProtocolError."""
        value = int.from_bytes(self.take(num_bytes), "little")
        if largest is not None and value > largest:
            raise ProtocolError(f"{self.what} says {value} where at most {largest} is allowed")
        return value

    def finish(self) -> None:
        """Raise ProtocolError if bytes are left."""
        if self.left:
            raise ProtocolError(f"{self.what} has {self.left} bytes too many")


@dataclass(frozen=True)
class Form(Generic[T]):
    """How to encode and decode values of one type; malformed bytes are a ProtocolError.

    Attributes:
        parts: Returns a value's bytes in parts, so that large ones are copied once.
        read: Reads a value from a reader.
        num_bytes: Size of every value; 0 if sizes differ.
    """

    parts: Callable[[T], Iterable[Buffer]]
    read: Callable[[Reader], T]
    num_bytes: int = 0

    def to_bytes(self, value: T) -> bytes:
        """Encode ``value``; each value has exactly one encoding."""
        return b"".join(self.parts(value))

    def from_bytes(self, data: Buffer, *, what: str) -> T:
        """Decode ``data``, which errors call ``what``."""
        reader = Reader(data, what=what)
        value = self.read(reader)
        reader.finish()
        return value

    def map(self, to: Callable[[U], T], back: Callable[[T], U]) -> "Form[U]":
        """Return the form of another type: convert with ``to`` to write, with ``back`` to read."""
        return Form(
            lambda value: self.parts(to(value)),
            lambda reader: back(self.read(reader)),
            self.num_bytes,
        )


def integer(num_bytes: int, *, largest: int | None = None) -> Form[int]:
    """Return the form of unsigned integers up to ``largest``."""
    return Form(
        lambda value: (value.to_bytes(num_bytes, "little"),),
        lambda reader: reader.integer(num_bytes, largest=largest),
        num_bytes,
    )


def raw_bytes(num_bytes: int) -> Form[bytes]:
    """Return the form of ``num_bytes`` raw bytes."""
    return Form(lambda value: (value,), lambda reader: reader.take(num_bytes), num_bytes)


def secret(num_bytes: int) -> Form[SecretBytes]:
    """Return the form of ``num_bytes`` bytes that are never printed."""
    return raw_bytes(num_bytes).map(SecretBytes.reveal, SecretBytes)


def byte_string(length_bytes: int, *, most: int | None = None) -> Form[bytes]:
    """Return the form of at most ``most`` bytes, prefixed by their length."""
    return Form(
        lambda value: (len(value).to_bytes(length_bytes, "little"), value),
        lambda reader: reader.take(reader.integer(length_bytes, largest=most)),
    )


def text(length_bytes: int, *, most: int) -> Form[str]:
    """Return the form of text of at most ``most`` bytes in UTF-8, prefixed by their length."""

    def decode(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("a text is not UTF-8") from error

    return byte_string(length_bytes, most=most).map(str.encode, decode)


def sequence(
    item: Form[T], *, most: int, count_bytes: int = 4, by: Callable[[T], int] | None = None
) -> Form[tuple[T, ...]]:
    """Return the form of a list, prefixed by its length, whose items strictly ascend ``by`` a key.

    If items have a fixed size, the length is checked against the bytes that are left.
    """

    def read(reader: Reader) -> tuple[T, ...]:
        # Checked before anything is allocated: a peer may claim any number.
        size = _read_count(reader, count_bytes, most=most, item_bytes=item.num_bytes)
        items = tuple(item.read(reader) for _ in range(size))
        if by is not None:
            _require_ascending(map(by, items), what=reader.what)
        return items

    count = integer(count_bytes)
    return Form(lambda items: chain(count.parts(len(items)), *map(item.parts, items)), read)


def table(num_bytes: int) -> Form[Mapping[ClientId, bytes]]:
    """Return the form of a table of ``num_bytes`` bytes per client, by ascending id."""
    row = struct.Struct(f"<Q{num_bytes}s")

    def parts(rows: Mapping[ClientId, bytes]) -> Iterable[Buffer]:
        count = len(rows).to_bytes(4, "little")
        return count, *(row.pack(each, rows[each]) for each in sorted(rows))

    def read(reader: Reader) -> Mapping[ClientId, bytes]:
        size = _read_count(reader, 4, most=MAX_CLIENTS, item_bytes=row.size)
        # All rows in one call: a coordinator reads one per client and neighbor.
        found = list(row.iter_unpack(reader.take(size * row.size)))
        _require_ascending((each for each, _ in found), what=reader.what)
        # Ids ascend, so the last is the largest.
        if found and found[-1][0] > _MAX_ID:
            raise ProtocolError(f"{reader.what} has a client {found[-1][0]}, above 2**63 - 1")
        return dict(found)

    return Form(parts, read)


def secret_table(num_bytes: int) -> Form[Mapping[ClientId, SecretBytes]]:
    """Return the form of such a table whose values are never printed."""
    return table(num_bytes).map(
        lambda rows: {each: value.reveal() for each, value in rows.items()},
        lambda rows: {each: SecretBytes(data) for each, data in rows.items()},
    )


def record(kind: type[T]) -> Form[T]:
    """Return the form of a dataclass: its fields end to end, each in the form in its annotation.

    Without one, an int takes four bytes, and a dataclass or an enumeration has the form of its
    type.
    """
    hints = get_type_hints(kind, include_extras=True)
    # In the order of declaration, which is thus part of the encoding.
    fields = {name: _find_form(hint) for name, hint in hints.items()}
    sizes = [form.num_bytes for form in fields.values()]
    return Form(
        lambda value: chain(*(form.parts(getattr(value, name)) for name, form in fields.items())),
        lambda reader: kind(**{name: form.read(reader) for name, form in fields.items()}),
        sum(sizes) if all(sizes) else 0,
    )


def _find_form(hint: Any) -> Form[Any]:  # Any, here and below: each field and kind has its own
    for form in getattr(hint, "__metadata__", ()):
        if isinstance(form, Form):
            return form
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        # The limit turns an unknown value into a ProtocolError. So the values of an enumeration
        # must have no gaps: its constructor would raise ValueError there.
        return integer(1, largest=max(hint)).map(int, hint)
    return _OF_TYPES.get(hint) or record(hint)


def one_of(*kinds: type) -> Form[Any]:
    """Return the form of a value of one of ``kinds``: one byte for its place there, then the value.

    Kinds may only be appended, since their places are part of the encoding.
    """
    forms: list[Form[Any]] = [record(kind) for kind in kinds]
    place = integer(1, largest=len(kinds) - 1)

    def parts(value: object) -> Iterable[Buffer]:
        at = kinds.index(type(value))
        return chain(place.parts(at), forms[at].parts(value))

    return Form(parts, lambda reader: forms[place.read(reader)].read(reader))


CLIENT_ID = integer(8, largest=_MAX_ID).map(int, ClientId)
#: All bytes that are left, without a copy.
REST: Form[Buffer] = Form(lambda value: (value,), Reader.rest)
FLAG = integer(1, largest=1).map(int, bool)
_OF_TYPES: Mapping[object, Form[Any]] = {
    int: integer(4),
    float: raw_bytes(_FLOAT.size).map(_FLOAT.pack, lambda data: float(_FLOAT.unpack(data)[0])),
    bool: FLAG,
    ClientId: CLIENT_ID,
}


def _read_count(reader: Reader, count_bytes: int, *, most: int, item_bytes: int) -> int:
    # No more than the bytes left can hold, so that a false count cannot allocate memory.
    fitting = min(most, reader.left // item_bytes) if item_bytes else most
    return reader.integer(count_bytes, largest=fitting)


def _require_ascending(ids: Iterable[int], *, what: str) -> None:
    if any(after <= before for before, after in pairwise(ids)):
        raise ProtocolError(f"ids in {what} are not strictly ascending")
