"""Messages have the sizes stated in the protocol, and exactly one encoding each."""

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg.merkle import Proof
from fedlearn.secagg.messages import (
    HEADER_BYTES,
    Advert,
    MaskedVector,
    Member,
    Message,
    Packets,
    Roster,
    ShareRelease,
    Shares,
    Signatures,
    Survivors,
    SurvivorSignature,
    build_packet,
    decode,
    encode,
    open_packet,
)

A, B = ClientId(1), ClientId(4)


def advert(client_id: ClientId) -> Advert:
    return Advert(
        client_id=client_id,
        packet_key=b"c" * 32,
        mask_key=b"m" * 32,
        nonce=b"n" * 16,
        signature=b"s" * 64,
    )


PROOF = Proof(hashes=b"h" * 64, splits=b"s" * 8)
MESSAGES: list[tuple[Message, int]] = [
    (advert(A), 152),
    (
        Roster(root=b"r" * 32, size=9, rank=3, adverts=(advert(A), advert(B)), proof=PROOF),
        32 + 4 + 4 + (4 + 2 * 152) + (4 + 64 + 4 + 8),
    ),
    (Shares(session=b"s" * 32, commitment=b"c" * 32, packets=(b"p" * 92,) * 3), 68 + 3 * 92),
    (Packets(packets={A: b"p" * 92, B: b"q" * 92}), 4 + 2 * 100),
    (MaskedVector(session=b"s" * 32, packed=b"v" * 7), 39),
    (Survivors(ranks=b"\x05\x01"), 4 + 2),
    (SurvivorSignature(signature=b"s" * 64), 64),
    (
        Signatures(
            signed=b"\x05",
            root=b"r" * 32,
            signatures=(b"s" * 64,) * 2,
            signers=(Member(client_id=A, advert_hash=b"h" * 32),),
            of_signatures=Proof(hashes=b"h" * 32, splits=b""),
            of_signers=PROOF,
        ),
        (4 + 1) + 32 + (4 + 2 * 64) + (4 + 40) + (4 + 32 + 4) + (4 + 64 + 4 + 8),
    ),
    (ShareRelease(session=b"s" * 32, shares={A: SecretBytes(b"h" * 36)}), 36 + 44),
]


@pytest.mark.parametrize(("message", "num_bytes"), MESSAGES)
def test_a_message_has_its_size_and_comes_back(message: Message, num_bytes: int) -> None:
    data = encode(message)
    assert len(data) == HEADER_BYTES + num_bytes
    assert decode(data) == message


@pytest.mark.parametrize(("message", "num_bytes"), MESSAGES)
def test_a_message_cut_or_extended_is_refused(message: Message, num_bytes: int) -> None:
    """Only a vector may be longer: the terms' lanes, not the encoding, determine its length."""
    data = encode(message)
    with pytest.raises(ProtocolError, match=r"early|at most"):
        decode(data[: HEADER_BYTES + min(num_bytes, 32) - 1])
    if not isinstance(message, MaskedVector):
        with pytest.raises(ProtocolError, match="1 bytes too many"):
            decode(data + b"\x00")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends 4 bytes early"),
        (b"FLSB\x01\x00", "not a message of secure aggregation"),
        (b"FLSA\x01\x00", "version 1 of secure aggregation, this side has 3"),
        (b"FLSA\x03\x0a", "says 10 where at most 9"),
        (b"FLSA\x03\x04\xff\xff\xff\xff", "at most 0"),
        (b"FLSA\x03\x04\x01\x00\x00\x00" + b"\xff" * 100, "above 2\\*\\*63 - 1"),
        (b"FLSA\x03\x04\x02\x00\x00\x00" + bytes(200), "strictly ascending"),
        (b"FLSA\x03\x06\x01\x40\x00\x00", "says 16385 where at most 16384"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, reason: str) -> None:
    """A list that claims more entries than there are bytes allocates no memory."""
    with pytest.raises(ProtocolError, match=reason):
        decode(data)


def test_a_packet_holds_the_shares_of_one_holder() -> None:
    pair = SecretBytes(b"h" * 72)
    plain = build_packet(5, pair)
    assert len(plain) + 16 == 92
    assert open_packet(plain, point=5, sender=A) == pair
    with pytest.raises(ProtocolError, match="another holder's shares"):
        open_packet(plain, point=6, sender=A)
    with pytest.raises(ProtocolError, match="early"):
        open_packet(plain[:-1], point=5, sender=A)


def test_a_packet_holds_elements_of_the_field() -> None:
    """A client that passed other values on would be refused later, and be taken for the liar."""
    largest = ((1 << 31) - 2).to_bytes(4, "little")
    pair = SecretBytes(largest * 18)
    assert open_packet(build_packet(7, pair), point=7, sender=A).reveal() == pair.reveal(), (
        "control"
    )
    for number in ((1 << 31) - 1, 1 << 31):
        wrong = SecretBytes(largest * 17 + number.to_bytes(4, "little"))
        with pytest.raises(ProtocolError, match="packet of client 1 holds invalid shares"):
            open_packet(build_packet(7, wrong), point=7, sender=A)
