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

Of a roster a client is sent what it needs, and a proof that it is of that roster
(:mod:`fedlearn.secagg.merkle`): of m clients its own advert and those of its k neighbours, and of
those that signed the survivors a sample (:mod:`fedlearn.secagg.audit`). In the complete graph these
are all, and nothing is left to prove.

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
from fedlearn.secagg.merkle import HASH_BYTES, Proof
from fedlearn.secagg.parameters import MAX_CLIENTS
from fedlearn.secagg.shamir import SHARE_BYTES, is_canonical
from fedlearn.secagg.terms import Terms

_MAGIC = b"FLSA"
VERSION = 3
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
_Hash: TypeAlias = Annotated[bytes, octets.fixed(HASH_BYTES)]
Bitmap: TypeAlias = Annotated[bytes, octets.sized(4, most=MAX_CLIENTS // 8)]
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
    """R1 down: the roster of all that take part, opened where a client looks at it.

    Attributes:
        root: Of the tree over the roster: all that are in one session have the same.
        size: m, how many are in it.
        rank: The position of the client that is told, from 0; those of its neighbours follow.
        adverts: Its own and those of its neighbours, by ascending id.
        proof: That they are of this roster.
    """

    root: _Hash
    size: Annotated[int, octets.integer(4, largest=MAX_CLIENTS)]
    rank: Annotated[int, octets.integer(4, largest=MAX_CLIENTS - 1)]
    adverts: Adverts
    proof: Proof


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
    """R3 down: whose vectors are in the sum. Everyone else dropped: there is no second list.

    Attributes:
        ranks: By position in the roster, one bit each.
    """

    ranks: Bitmap


@dataclass(frozen=True, kw_only=True)
class SurvivorSignature:
    """R3 up: a client's signature of the survivors it was told."""

    signature: _Signature


@dataclass(frozen=True, kw_only=True)
class Member:
    """A client of the roster of whom only the signature matters.

    Attributes:
        client_id: Who; its identity key is in the directory.
        advert_hash: Of the rest of its advert.
    """

    client_id: ClientId
    advert_hash: _Hash


@dataclass(frozen=True, kw_only=True)
class Signatures:
    """R4 down: who signed the survivors, and a sample of their signatures; the same for all.

    Attributes:
        signed: By position in the roster, one bit each; all are survivors.
        root: Of the tree over their signatures.
        signatures: Those of the sample, in order.
        signers: Who they are of; none in the complete graph, where that is known.
        of_signatures: That the signatures are of the tree.
        of_signers: That the signers are of the roster.
    """

    signed: Bitmap
    root: _Hash
    signatures: Annotated[
        tuple[bytes, ...], octets.listed(octets.fixed(keys.SIGNATURE_BYTES), most=MAX_CLIENTS)
    ]
    signers: Annotated[
        tuple[Member, ...],
        octets.listed(octets.record(Member), most=MAX_CLIENTS, by=lambda each: each.client_id),
    ]
    of_signatures: Proof
    of_signers: Proof


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
    r"""Return the one encoding of ``message``.

    Example:
        >>> decode(encode(Survivors(ranks=b"\x05")))
        Survivors(ranks=b'\x05')
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
