"""Keys are bound to their session, their purpose and their pair of clients."""

from itertools import combinations

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys

A, B = ClientId(3), ClientId(8)


def test_both_sides_of_a_pair_derive_one_mask_key() -> None:
    ours, theirs = (keys.KeyAgreement(SecretBytes.generate(32)) for _ in range(2))
    first = keys.derive_pair_mask_key(ours, theirs.public_key, session=b"s", pair=(A, B))
    second = keys.derive_pair_mask_key(theirs, ours.public_key, session=b"s", pair=(B, A))
    assert first == second
    assert len(first.reveal()) == 32


def test_every_pair_session_and_purpose_has_its_own_key() -> None:
    """No key serves two masks, not even for the same two clients in another session."""
    secret = SecretBytes.generate(32)
    found = [
        keys.derive(secret, session=session, label=label, ids=ids)
        for session in (b"one", b"two")
        for label in (b"pair mask", b"self mask", b"packet")
        for ids in ((3, 8), (8, 3), (3, 9))
    ]
    assert not any(one == other for one, other in combinations(found, 2))
    again = keys.derive(secret, session=b"one", label=b"pair mask", ids=(3, 8))
    assert again == found[0]
    one, other = (
        keys.derive_self_mask_key(secret, session=s, client_id=A) for s in (b"one", b"two")
    )
    assert one != other
    assert one != keys.derive_self_mask_key(secret, session=b"one", client_id=B)


def test_a_low_order_key_is_refused() -> None:
    """The agreed secret would be zero, which everyone knows."""
    ours = keys.KeyAgreement(SecretBytes.generate(32))
    for weak in (bytes(32), b"\x01" + bytes(31)):
        with pytest.raises(ProtocolError, match="low order"):
            ours.agree(weak, owner=ClientId(3))
    ours.agree(keys.KeyAgreement(SecretBytes.generate(32)).public_key, owner=ClientId(3))


def test_a_packet_opens_only_where_it_was_sent() -> None:
    key = SecretBytes.generate(32)
    packet = keys.seal(key, b"shares", session=b"s", way=(A, B))
    assert keys.unseal(key, packet, session=b"s", way=(A, B)) == b"shares"
    flipped = packet[:-1] + bytes([packet[-1] ^ 1])
    for data, session, way in (
        (flipped, b"s", (A, B)),
        (packet, b"t", (A, B)),
        (packet, b"s", (B, A)),
        (packet[:3], b"s", (A, B)),
    ):
        with pytest.raises(ProtocolError, match="cannot be decrypted"):
            keys.unseal(key, data, session=session, way=way)


def test_digests_of_shifted_parts_differ() -> None:
    """Each part is prefixed by its length, so no byte can move from one part into the next."""
    assert keys.digest(b"x", b"ab", b"c") != keys.digest(b"x", b"a", b"bc")
    assert keys.digest(b"x", b"ab") != keys.digest(b"y", b"ab")
    assert keys.digest(b"x", b"ab") == keys.digest(b"x", b"ab")


def test_a_signature_serves_one_purpose() -> None:
    signer, public = keys.create_signer()
    signature = signer.sign(keys.build_signed_text(b"advert", b"body"))
    assert keys.verify(public, signature, keys.build_signed_text(b"advert", b"body"))
    assert not keys.verify(public, signature, keys.build_signed_text(b"survivors", b"body"))
    assert not keys.verify(public, signature[:-1], keys.build_signed_text(b"advert", b"body"))
    assert not keys.verify(b"no key", signature, keys.build_signed_text(b"advert", b"body"))
    assert not keys.verify(
        keys.create_signer()[1], signature, keys.build_signed_text(b"advert", b"body")
    )


def test_a_commitment_holds_one_seed_of_one_client_in_one_session() -> None:
    seed = SecretBytes.generate(32)
    made = keys.commit_to_seed(seed, session=b"s", client_id=A)
    assert made == keys.commit_to_seed(seed, session=b"s", client_id=A)
    assert made != keys.commit_to_seed(SecretBytes.generate(32), session=b"s", client_id=A)
    assert made != keys.commit_to_seed(seed, session=b"t", client_id=A)
    assert made != keys.commit_to_seed(seed, session=b"s", client_id=B)
