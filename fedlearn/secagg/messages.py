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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.parameters import MAX_CLIENTS
from fedlearn.secagg.shamir import SHARE_BYTES, is_canonical
from fedlearn.secagg.terms import Terms

_MAGIC = b"FLSA"
VERSION = 2
HEADER_BYTES = 6

NONCE_BYTES = 16
SESSION_BYTES = 32
#: A share of the self-seed and one of the mask key.
PAIR_BYTES = 2 * SHARE_BYTES
_POINT_BYTES = 4
PACKET_BYTES = _POINT_BYTES + PAIR_BYTES + keys.TAG_BYTES

_Session: TypeAlias = Annotated[bytes, octets.fixed(SESSION_BYTES)]
_Key: TypeAlias = Annotated[bytes, octets.fixed(keys.KEY_BYTES)]
_Signature: TypeAlias = Annotated[bytes, octets.fixed(keys.SIGNATURE_BYTES)]
ClientIds: TypeAlias = Annotated[
    tuple[ClientId, ...], octets.listed(octets.CLIENT_ID, most=MAX_CLIENTS, by=int)
]


@dataclass(frozen=True, kw_only=True)
class SignedTerms:
    """R0 down: the terms and the coordinator's signature."""

    signature: _Signature
    terms: Annotated[Terms, octets.REST.mapped(Terms.to_bytes, Terms.from_bytes)]


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
    packet_key: _Key
    mask_key: _Key
    nonce: Annotated[bytes, octets.fixed(NONCE_BYTES)]
    signature: _Signature

    def unsigned(self) -> bytes:
        """Return what is signed, 88 bytes."""
        return ADVERT.to_bytes(self)[: ADVERT.num_bytes - keys.SIGNATURE_BYTES]


ADVERT = octets.record(Advert)
Adverts: TypeAlias = Annotated[
    tuple[Advert, ...],
    octets.listed(ADVERT, most=MAX_CLIENTS, by=lambda advert: advert.client_id),
]


@dataclass(frozen=True, kw_only=True)
class Roster:
    """R1 down: the adverts of all that take part, by ascending id."""

    adverts: Adverts


@dataclass(frozen=True, kw_only=True)
class Shares:
    """R1 up: shares of a client's two secrets, sealed for its neighbours.

    Attributes:
        session: The hash of terms and roster.
        commitment: To the self-seed.
        packets: One a neighbour, by ascending id; 92 bytes each.
    """

    session: _Session
    commitment: _Key
    packets: Annotated[
        tuple[bytes, ...], octets.listed(octets.fixed(PACKET_BYTES), most=MAX_CLIENTS)
    ]


@dataclass(frozen=True, kw_only=True)
class Packets:
    """R2 down: the packets addressed to a client, by sender."""

    packets: Annotated[Mapping[ClientId, bytes], octets.table(PACKET_BYTES)]


@dataclass(frozen=True, kw_only=True)
class MaskedVector:
    """R2 up: a client's levels, masked and packed."""

    session: _Session
    packed: Annotated[bytes | memoryview, octets.REST]


@dataclass(frozen=True, kw_only=True)
class Survivors:
    """R3 down: whose vectors are in the sum. Everyone else dropped: there is no second list."""

    client_ids: ClientIds


@dataclass(frozen=True, kw_only=True)
class SurvivorSignature:
    """R3 up: a client's signature of the survivors it was told."""

    signature: _Signature


@dataclass(frozen=True, kw_only=True)
class Signatures:
    """R4 down: survivors' signatures of the survivors."""

    signatures: Annotated[Mapping[ClientId, bytes], octets.table(keys.SIGNATURE_BYTES)]


@dataclass(frozen=True, kw_only=True)
class Release:
    """R4 up: one share for each owner: of a survivor's self-seed, of a dropped one's mask key.

    Which of the two it is follows from the survivors; there is no field that could ask for both.
    """

    session: _Session
    shares: Annotated[Mapping[ClientId, SecretBytes], octets.secret_table(SHARE_BYTES)]


Down: TypeAlias = SignedTerms | Roster | Packets | Survivors | Signatures
Up: TypeAlias = Advert | Shares | MaskedVector | SurvivorSignature | Release
Message: TypeAlias = Down | Up

_MESSAGE: octets.Form[Message] = octets.one_of(
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
    return b"".join((_MAGIC, bytes([VERSION]), *_MESSAGE.parts(message)))


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
    message = _MESSAGE.read(reader)
    reader.finish()
    return message


def packet_of(point: int, pair: SecretBytes) -> bytes:
    """Return the plain text of a packet: where the shares were evaluated, and the shares."""
    return point.to_bytes(_POINT_BYTES, "little") + pair.reveal()


def open_packet(plain: bytes, *, point: int, sender: ClientId) -> SecretBytes:
    """Return the shares in a packet; ProtocolError if they are none, or not those at ``point``."""
    reader = octets.Reader(plain, what=f"the packet of client {sender}")
    if reader.integer(_POINT_BYTES) != point:
        raise ProtocolError(f"the packet of client {sender} holds another holder's shares")
    pair = SecretBytes(reader.take(PAIR_BYTES))
    reader.finish()
    if not is_canonical(pair.reveal()):
        raise ProtocolError(f"the packet of client {sender} holds shares that are none")
    return pair
