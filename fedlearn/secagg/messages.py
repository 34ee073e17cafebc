"""What the parties of secure aggregation say to each other, and its bytes.

===== ================ ====================================== =========================
step  down             up                                     bytes up
===== ================ ====================================== =========================
R0    SignedTerms      Advert                                 152
R1    Roster           Shares                                 32 + 32 + 92 k
R2    Packets          MaskedVector                           32 + Σ size b / 8
R3    Survivors        SurvivorSignature (active server)      64
R4    Signatures       Release                                32 + 44 (k + 1)
===== ================ ====================================== =========================

Against an honest-but-curious server R3 is left out: Release answers Survivors. Each message
begins with ``FLSA``, a version byte and a byte that tells its kind; lists have a count and
strictly ascending ids. Nothing else is accepted: any message has one encoding.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.parameters import MAX_CLIENTS
from fedlearn.secagg.shamir import SHARE_BYTES
from fedlearn.secagg.terms import Terms

_MAGIC = b"FLSA"
VERSION = 1
HEADER_BYTES = 6

_ID_BYTES = 8
_MAX_ID = (1 << 63) - 1
NONCE_BYTES = 16
SESSION_BYTES = 32
#: Before its signature.
_ADVERT_BODY_BYTES = _ID_BYTES + 2 * keys.KEY_BYTES + NONCE_BYTES
ADVERT_BYTES = _ADVERT_BODY_BYTES + keys.SIGNATURE_BYTES
#: A share of the self-seed and one of the mask key.
PAIR_BYTES = 2 * SHARE_BYTES
_POINT_BYTES = 4
PACKET_BYTES = _POINT_BYTES + PAIR_BYTES + keys.TAG_BYTES


@dataclass(frozen=True, kw_only=True)
class SignedTerms:
    """R0 down: the terms and the coordinator's signature."""

    terms: Terms
    signature: bytes

    def body(self) -> bytes:
        """Return the fields as bytes."""
        return self.signature + self.terms.to_bytes()

    @classmethod
    def read(cls, reader: octets.Reader) -> "SignedTerms":
        """Return the message that begins there."""
        signature = reader.take(keys.SIGNATURE_BYTES)
        return cls(signature=signature, terms=Terms.from_bytes(reader.take(reader.left)))


@dataclass(frozen=True, kw_only=True)
class Advert:
    """R0 up: a client's public keys for this session, signed by its identity.

    Attributes:
        client_id: Who.
        packet_key: X25519, for the packets to it.
        mask_key: X25519, for the masks it shares.
        nonce: Fresh: no two sessions have one roster.
        signature: Of the rest and the terms.
    """

    client_id: ClientId
    packet_key: bytes
    mask_key: bytes
    nonce: bytes
    signature: bytes

    def unsigned(self) -> bytes:
        """Return what is signed, 88 bytes."""
        ident = octets.integer(self.client_id, _ID_BYTES)
        return ident + self.packet_key + self.mask_key + self.nonce

    def body(self) -> bytes:
        """Return the fields as bytes, 152."""
        return self.unsigned() + self.signature

    @classmethod
    def read(cls, reader: octets.Reader) -> "Advert":
        """Return the message that begins there."""
        return cls(
            client_id=_read_id(reader),
            packet_key=reader.take(keys.KEY_BYTES),
            mask_key=reader.take(keys.KEY_BYTES),
            nonce=reader.take(NONCE_BYTES),
            signature=reader.take(keys.SIGNATURE_BYTES),
        )


@dataclass(frozen=True, kw_only=True)
class Roster:
    """R1 down: the adverts of all that take part, by ascending id."""

    adverts: tuple[Advert, ...]

    def body(self) -> bytes:
        """Return the fields as bytes."""
        return _count(self.adverts) + b"".join(advert.body() for advert in self.adverts)

    @classmethod
    def read(cls, reader: octets.Reader) -> "Roster":
        """Return the message that begins there."""
        size = _read_count(reader, ADVERT_BYTES)
        adverts = tuple(Advert.read(reader) for _ in range(size))
        _require_ascending([advert.client_id for advert in adverts])
        return cls(adverts=adverts)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """R1 up: shares of a client's two secrets, sealed for its neighbours.

    Attributes:
        session: The hash of terms and roster.
        commitment: To the self-seed.
        packets: One a neighbour, by ascending id; 92 bytes each.
    """

    session: bytes
    commitment: bytes
    packets: tuple[bytes, ...]

    def body(self) -> bytes:
        """Return the fields as bytes."""
        head = self.session + self.commitment
        return head + _count(self.packets) + b"".join(self.packets)

    @classmethod
    def read(cls, reader: octets.Reader) -> "Shares":
        """Return the message that begins there."""
        session, commitment = reader.take(SESSION_BYTES), reader.take(keys.KEY_BYTES)
        size = _read_count(reader, PACKET_BYTES)
        joined = reader.take(size * PACKET_BYTES)
        begins = range(0, len(joined), PACKET_BYTES)
        packets = tuple(joined[begin : begin + PACKET_BYTES] for begin in begins)
        return cls(session=session, commitment=commitment, packets=packets)


@dataclass(frozen=True, kw_only=True)
class Packets:
    """R2 down: the packets addressed to a client, by sender."""

    packets: Mapping[ClientId, bytes]

    def body(self) -> bytes:
        """Return the fields as bytes."""
        return _table(self.packets)

    @classmethod
    def read(cls, reader: octets.Reader) -> "Packets":
        """Return the message that begins there."""
        return cls(packets=_read_table(reader, PACKET_BYTES))


@dataclass(frozen=True, kw_only=True)
class MaskedVector:
    """R2 up: a client's levels, masked and packed."""

    session: bytes
    packed: bytes | memoryview

    def body(self) -> bytes:
        """Return the fields as bytes."""
        return self.session + self.packed

    @classmethod
    def read(cls, reader: octets.Reader) -> "MaskedVector":
        """Return the message that begins there."""
        return cls(session=reader.take(SESSION_BYTES), packed=reader.rest())


@dataclass(frozen=True, kw_only=True)
class Survivors:
    """R3 down: whose vectors are in the sum. Everyone else dropped: there is no second list."""

    client_ids: tuple[ClientId, ...]

    def body(self) -> bytes:
        """Return the fields as bytes."""
        ids = b"".join(octets.integer(client_id, _ID_BYTES) for client_id in self.client_ids)
        return _count(self.client_ids) + ids

    @classmethod
    def read(cls, reader: octets.Reader) -> "Survivors":
        """Return the message that begins there."""
        ids = tuple(_read_id(reader) for _ in range(_read_count(reader, _ID_BYTES)))
        _require_ascending(ids)
        return cls(client_ids=ids)


@dataclass(frozen=True, kw_only=True)
class SurvivorSignature:
    """R3 up: a client's signature of the survivors it was told."""

    signature: bytes

    def body(self) -> bytes:
        """Return the fields as bytes."""
        return self.signature

    @classmethod
    def read(cls, reader: octets.Reader) -> "SurvivorSignature":
        """Return the message that begins there."""
        return cls(signature=reader.take(keys.SIGNATURE_BYTES))


@dataclass(frozen=True, kw_only=True)
class Signatures:
    """R4 down: survivors' signatures of the survivors."""

    signatures: Mapping[ClientId, bytes]

    def body(self) -> bytes:
        """Return the fields as bytes."""
        return _table(self.signatures)

    @classmethod
    def read(cls, reader: octets.Reader) -> "Signatures":
        """Return the message that begins there."""
        return cls(signatures=_read_table(reader, keys.SIGNATURE_BYTES))


@dataclass(frozen=True, kw_only=True)
class Release:
    """R4 up: one share for each owner: of a survivor's self-seed, of a dropped one's mask key.

    Which of the two it is follows from the survivors; there is no field that could ask for both.
    """

    session: bytes
    shares: Mapping[ClientId, SecretBytes]

    def body(self) -> bytes:
        """Return the fields as bytes."""
        return self.session + _table({i: share.reveal() for i, share in self.shares.items()})

    @classmethod
    def read(cls, reader: octets.Reader) -> "Release":
        """Return the message that begins there."""
        session, rows = reader.take(SESSION_BYTES), _read_table(reader, SHARE_BYTES)
        return cls(session=session, shares={i: SecretBytes(share) for i, share in rows.items()})


Down: TypeAlias = SignedTerms | Roster | Packets | Survivors | Signatures
Up: TypeAlias = Advert | Shares | MaskedVector | SurvivorSignature | Release
Message: TypeAlias = Down | Up

#: A message's kind on the wire is its index here. May only be appended to.
_KINDS: Sequence[type[Message]] = (
    SignedTerms,
    Advert,
    Roster,
    Shares,
    Packets,
    MaskedVector,
    Survivors,
    SurvivorSignature,
    Signatures,
    Release,
)


def encode(message: Message) -> bytes:
    """Return the one encoding of ``message``.

    Example:
        >>> decode(encode(Survivors(client_ids=(ClientId(1), ClientId(4)))))
        Survivors(client_ids=(1, 4))
    """
    header = _MAGIC + bytes((VERSION, _KINDS.index(type(message))))
    if isinstance(message, MaskedVector):  # it is large: one copy is enough
        return b"".join((header, message.session, message.packed))
    return header + message.body()


def decode(data: bytes) -> Message:
    """Return the message in ``data``.

    Guarantees:
        For any bytes whatever this returns a message or raises :class:`ProtocolError`; what it
        returns encodes to ``data`` again. Memory is bounded by the size of ``data``.

    Raises:
        ProtocolError: ``data`` is truncated, too long, of another version or no message.
    """
    reader = octets.Reader(data, what="a message of secure aggregation")
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise ProtocolError("this is no message of secure aggregation")
    if (version := reader.integer(1)) != VERSION:
        raise ProtocolError(
            f"secure aggregation version {version}, this side speaks {VERSION}; upgrade the "
            "older side"
        )
    message = _KINDS[reader.integer(1, largest=len(_KINDS) - 1)].read(reader)
    reader.finish()
    return message


def packet_of(point: int, pair: SecretBytes) -> bytes:
    """Return the plain text of a packet: where the shares were evaluated, and the shares."""
    return octets.integer(point, _POINT_BYTES) + pair.reveal()


def open_packet(plain: bytes, *, point: int, sender: ClientId) -> SecretBytes:
    """Return the shares in a packet.

    Raises:
        ProtocolError: They were evaluated elsewhere than at ``point``.
    """
    reader = octets.Reader(plain, what=f"the packet of client {sender}")
    if reader.integer(_POINT_BYTES) != point:
        raise ProtocolError(f"the packet of client {sender} holds another holder's shares")
    pair = SecretBytes(reader.take(PAIR_BYTES))
    reader.finish()
    return pair


def _count(items: Sequence[object] | Mapping[ClientId, bytes]) -> bytes:
    return octets.integer(len(items), 4)


def _read_count(reader: octets.Reader, item_bytes: int) -> int:
    """Return how many items follow, no more than there are bytes for."""
    return reader.integer(4, largest=min(MAX_CLIENTS, reader.left // item_bytes))


def _table(rows: Mapping[ClientId, bytes]) -> bytes:
    return _count(rows) + b"".join(octets.integer(i, _ID_BYTES) + rows[i] for i in sorted(rows))


def _read_table(reader: octets.Reader, row_bytes: int) -> dict[ClientId, bytes]:
    row = struct.Struct(f"<Q{row_bytes}s")
    size = _read_count(reader, row.size)
    ids, rows = [], []
    for number, data in row.iter_unpack(reader.take(size * row.size)):
        ids.append(ClientId(number))
        rows.append(data)
    _require_ascending(ids)
    if ids and ids[-1] > _MAX_ID:
        raise ProtocolError(f"client {ids[-1]} in a list of secure aggregation is above 2**63 - 1")
    return dict(zip(ids, rows, strict=True))


def _read_id(reader: octets.Reader) -> ClientId:
    return ClientId(reader.integer(_ID_BYTES, largest=_MAX_ID))


def _require_ascending(ids: Sequence[ClientId]) -> None:
    if any(after <= before for before, after in pairwise(ids)):
        raise ProtocolError("ids in a list of secure aggregation are not strictly ascending")
