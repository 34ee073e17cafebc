"""The messages of secure aggregation, and their encoding.

===== ================ ====================================== =========================
step  down             up                                     bytes up
===== ================ ====================================== =========================
R0    SignedTerms      Advert                                 152
R1    Roster           Shares                                 32 + 32 + 92 k
R2    Packets          MaskedVector                           32 + Σ size b / 8
R3    Survivors        SurvivorSignature (active server)      64
R4    Signatures       ShareRelease                           32 + 44 (k + 1)
===== ================ ====================================== =========================

A client receives only the part of the roster that it needs, with a proof that it belongs to the
roster (:mod:`fedlearn.secagg.merkle`): of m clients, its own advert and those of its k neighbors,
and later a sample of the clients that signed the survivors (:mod:`fedlearn.secagg.audit`). In the
complete graph that part is the whole roster, and nothing is left to prove.

Against an honest-but-curious server R3 is left out: ShareRelease answers Survivors. Each message
begins with ``FLSA``, a version byte and a byte for its kind; lists have a count and strictly
ascending ids. Decoding refuses everything else: each message has exactly one encoding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.merkle import HASH_BYTES, Proof
from fedlearn.secagg.parameters import MAX_CLIENTS
from fedlearn.secagg.shamir import SHARE_BYTES, is_canonical
from fedlearn.secagg.terms import Terms

_MAGIC = b"FLSA"
#: Raise it if the layout of a message changes.
VERSION = 3
HEADER_BYTES = 6

NONCE_BYTES = 16
SESSION_BYTES = 32
#: A share of the self-seed and one of the mask key.
PAIR_BYTES = 2 * SHARE_BYTES
_POINT_BYTES = 4
PACKET_BYTES = _POINT_BYTES + PAIR_BYTES + keys.TAG_BYTES

_Session: TypeAlias = Annotated[bytes, octets.raw_bytes(SESSION_BYTES)]
_Key: TypeAlias = Annotated[bytes, octets.raw_bytes(keys.KEY_BYTES)]
_Signature: TypeAlias = Annotated[bytes, octets.raw_bytes(keys.SIGNATURE_BYTES)]
_Hash: TypeAlias = Annotated[bytes, octets.raw_bytes(HASH_BYTES)]
Bitmap: TypeAlias = Annotated[bytes, octets.byte_string(4, most=MAX_CLIENTS // 8)]
ClientIds: TypeAlias = Annotated[
    tuple[ClientId, ...], octets.sequence(octets.CLIENT_ID, most=MAX_CLIENTS, by=int)
]


@dataclass(frozen=True, kw_only=True)
class SignedTerms:
    """R0 down: the terms and the coordinator's signature."""

    signature: _Signature
    # Must stay the last field: it takes all bytes that are left.
    terms: Annotated[Terms, octets.REST.map(Terms.to_bytes, Terms.from_bytes)]


@dataclass(frozen=True, kw_only=True)
class Advert:
    """R0 up: a client's public keys for this session, signed by its identity.

    Attributes:
        client_id: The client.
        packet_key: X25519 key for the packets to it.
        mask_key: X25519 key for the masks it shares.
        nonce: Fresh random bytes, so that no two sessions have the same roster.
        signature: Over all the rest, and the terms.
    """

    client_id: ClientId
    packet_key: _Key
    mask_key: _Key
    nonce: Annotated[bytes, octets.raw_bytes(NONCE_BYTES)]
    # Must stay the last field: encode_signed_part cuts it off.
    signature: _Signature

    def encode_signed_part(self) -> bytes:
        """Return the part of the advert that is signed, 88 bytes."""
        return ADVERT.to_bytes(self)[: ADVERT.num_bytes - keys.SIGNATURE_BYTES]


ADVERT = octets.record(Advert)
Adverts: TypeAlias = Annotated[
    tuple[Advert, ...],
    octets.sequence(ADVERT, most=MAX_CLIENTS, by=lambda advert: advert.client_id),
]


@dataclass(frozen=True, kw_only=True)
class Roster:
    """R1 down: one client's view of the roster: its own advert, its neighbors', and a proof.

    Attributes:
        root: Root of the tree over the roster: the same for all clients of a session.
        size: m, the number of clients in the roster.
        rank: Position of the receiving client, from 0; it determines those of its neighbors.
        adverts: Its own and those of its neighbors, by ascending id.
        proof: Proof that these adverts belong to the roster.
    """

    root: _Hash
    size: Annotated[int, octets.integer(4, largest=MAX_CLIENTS)]
    rank: Annotated[int, octets.integer(4, largest=MAX_CLIENTS - 1)]
    adverts: Adverts
    proof: Proof


@dataclass(frozen=True, kw_only=True)
class Shares:
    """R1 up: shares of a client's two secrets, sealed for its neighbors.

    Attributes:
        session: The hash of terms and roster.
        commitment: Commitment to the self-seed.
        packets: One per neighbor, by ascending id; 92 bytes each.
    """

    session: _Session
    commitment: _Key
    packets: Annotated[
        tuple[bytes, ...], octets.sequence(octets.raw_bytes(PACKET_BYTES), most=MAX_CLIENTS)
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
    """R3 down: the clients whose vectors are in the sum.

    All other clients dropped: there is no second list.

    Attributes:
        ranks: Bitmap of their positions in the roster.
    """

    ranks: Bitmap


@dataclass(frozen=True, kw_only=True)
class SurvivorSignature:
    """R3 up: a client's signature over the survivors that it received."""

    signature: _Signature


@dataclass(frozen=True, kw_only=True)
class Member:
    """A client of the roster, reduced to what is needed to verify its signature.

    Attributes:
        client_id: The client; its identity key is in the directory.
        advert_hash: SHA-256 of the rest of its advert.
    """

    client_id: ClientId
    advert_hash: _Hash


@dataclass(frozen=True, kw_only=True)
class Signatures:
    """R4 down: which clients signed the survivors, with a sample of signatures; the same for all.

    Attributes:
        signed: Bitmap of the signers' positions in the roster; all are survivors.
        root: Root of the tree over their signatures.
        signatures: The signatures of the sample, in order.
        signers: The signers of the sample; empty in the complete graph, where clients know them.
        of_signatures: Proof that the signatures belong to the tree.
        of_signers: Proof that the signers belong to the roster.
    """

    signed: Bitmap
    root: _Hash
    signatures: Annotated[
        tuple[bytes, ...], octets.sequence(octets.raw_bytes(keys.SIGNATURE_BYTES), most=MAX_CLIENTS)
    ]
    signers: Annotated[
        tuple[Member, ...],
        octets.sequence(octets.record(Member), most=MAX_CLIENTS, by=lambda each: each.client_id),
    ]
    of_signatures: Proof
    of_signers: Proof


@dataclass(frozen=True, kw_only=True)
class ShareRelease:
    """R4 up: one share per owner: of a survivor's self-seed, or of a dropped client's mask key.

    Which of the two it is follows from the survivors; no field could ask for both.
    """

    session: _Session
    shares: Annotated[Mapping[ClientId, SecretBytes], octets.secret_table(SHARE_BYTES)]


Down: TypeAlias = SignedTerms | Roster | Packets | Survivors | Signatures
Up: TypeAlias = Advert | Shares | MaskedVector | SurvivorSignature | ShareRelease
Message: TypeAlias = Down | Up

# Append only: the place of a kind in this list is its byte on the wire.
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
    ShareRelease,
)


def encode(message: Message) -> bytes:
    r"""Encode ``message``; each message has exactly one encoding.

    Example:
        >>> decode(encode(Survivors(ranks=b"\x05")))
        Survivors(ranks=b'\x05')
    """
    return b"".join((_MAGIC, bytes([VERSION]), *_MESSAGE.parts(message)))


def decode(data: bytes) -> Message:
    """Decode the message in ``data``.

    Guarantees:
        For any bytes at all this returns a message or raises :class:`ProtocolError`; a returned
        message encodes to ``data`` again. Memory is bounded by the size of ``data``.

    Raises:
        ProtocolError: ``data`` is truncated, too long, of another version or no message.
    """
    reader = octets.Reader(data, what="a message of secure aggregation")
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise ProtocolError("this is not a message of secure aggregation")
    if (version := reader.integer(1)) != VERSION:
        raise ProtocolError(
            f"the message has version {version} of secure aggregation, this side has {VERSION}; "
            "upgrade the older side"
        )
    message = _MESSAGE.read(reader)
    reader.finish()
    return message


def build_packet(point: int, pair: SecretBytes) -> bytes:
    """Build the plaintext of a packet: the holder's evaluation point, and its shares."""
    return point.to_bytes(_POINT_BYTES, "little") + pair.reveal()


def open_packet(plain: bytes, *, point: int, sender: ClientId) -> SecretBytes:
    """Return the shares in a packet; ProtocolError if they are malformed or not for ``point``."""
    reader = octets.Reader(plain, what=f"the packet of client {sender}")
    if reader.integer(_POINT_BYTES) != point:
        raise ProtocolError(f"the packet of client {sender} holds another holder's shares")
    pair = SecretBytes(reader.take(PAIR_BYTES))
    reader.finish()
    if not is_canonical(pair.reveal()):
        raise ProtocolError(
            f"the packet of client {sender} holds invalid shares: a number is not below p"
        )
    return pair
