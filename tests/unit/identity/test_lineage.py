"""Lineages: how a client's identity key succeeds the one before it."""

from itertools import pairwise

import pytest

from fedlearn.core.messages import ClientId
from fedlearn.errors import ProtocolError
from fedlearn.identity.lineage import (
    MAX_SUCCESSIONS,
    Lineage,
    Succession,
    fingerprint,
    newest_key,
)
from fedlearn.secagg import keys

CLIENT = ClientId(7)
Identities = list[tuple[keys.Signer, bytes]]


@pytest.fixture(scope="module")
def identities() -> Identities:
    """Five identities of one client, oldest first."""
    return [keys.create_signer() for _ in range(5)]


def lineage_of(identities: Identities) -> Lineage:
    lineage = Lineage(identities[0][1])
    for (old, _), (new, key) in pairwise(identities):
        lineage = lineage.extend(key, client_id=CLIENT, old=old, new=new)
    return lineage


def test_a_lineage_is_the_same_after_its_bytes(identities: Identities) -> None:
    """Round trip through bytes. A single key is a lineage too; the newest key comes last."""
    for num in range(1, len(identities) + 1):
        lineage = lineage_of(identities[:num])
        data = lineage.to_bytes()
        assert Lineage.from_bytes(data) == lineage
        assert (lineage.num_rotations, lineage.key) == (num - 1, identities[num - 1][1])
        assert newest_key(data) == lineage.key
        lineage.check(CLIENT)
    assert lineage_of(identities[:1]).to_bytes() == identities[0][1]


def test_each_key_has_its_place(identities: Identities) -> None:
    """Past the newest key there is none."""
    lineage = lineage_of(identities[:3])
    assert [lineage.key_after(place) for place in range(4)] == [
        *(key for _, key in identities[:3]),
        None,
    ]


def test_a_lineage_only_grows(identities: Identities) -> None:
    """The old lineage is a prefix of the new one, so peers that stored it recognize the new one."""
    assert lineage_of(identities).to_bytes().startswith(lineage_of(identities[:3]).to_bytes())


@pytest.mark.parametrize("which", ["old", "new"])
def test_both_keys_must_sign(identities: Identities, which: str) -> None:
    """A single signature lacks either the owner's consent or proof of the private key."""
    (_, first), (_, second) = identities[:2]
    stranger, _ = keys.create_signer()
    signers = {"old": identities[0][0], "new": identities[1][0], which: stranger}
    forged = Lineage(first).extend(second, client_id=CLIENT, **signers)
    with pytest.raises(ProtocolError, match=r"statement 1 .* not signed by both"):
        forged.check(CLIENT)


def test_a_statement_is_of_one_client(identities: Identities) -> None:
    """Another client's number is refused."""
    with pytest.raises(ProtocolError, match="client 8's"):
        lineage_of(identities[:2]).check(ClientId(8))


def test_no_key_comes_back(identities: Identities) -> None:
    """It may have been replaced because it was stolen."""
    (old, first), (new, second) = identities[:2]
    back = Lineage(first).extend(second, client_id=CLIENT, old=old, new=new)
    back = back.extend(first, client_id=CLIENT, old=new, new=old)
    with pytest.raises(ProtocolError, match="occurs twice"):
        back.check(CLIENT)


@pytest.mark.parametrize("size", [0, 31, 33, 32 + 159, 32 + 160 * (MAX_SUCCESSIONS + 1)])
def test_bytes_of_an_impossible_length_are_refused(size: int) -> None:
    """Control: the longest possible lineage is read."""
    with pytest.raises(ProtocolError, match="not a chain of identity keys"):
        Lineage.from_bytes(bytes(size))
    assert len(Lineage.from_bytes(bytes(32 + 160 * MAX_SUCCESSIONS)).successions) == MAX_SUCCESSIONS


def test_a_signature_for_another_purpose_is_none(identities: Identities) -> None:
    """The signed text has its own domain."""
    (old, first), (new, second) = identities[:2]
    plain = first + second
    forged = Lineage(first, (Succession(old.sign(plain), new.sign(plain), second),))
    with pytest.raises(ProtocolError, match="not signed by both"):
        forged.check(CLIENT)


def test_fingerprints_tell_keys_apart(identities: Identities) -> None:
    """A fingerprint has eight groups of four digits."""
    prints = {fingerprint(key) for _, key in identities}
    assert len(prints) == len(identities)
    assert {len(each.split("-")) for each in prints} == {8}
