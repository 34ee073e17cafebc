"""Rosters, survivor lists and signatures that a dishonest coordinator may forge.

The trees under them are real, so that a lie reaches the check that is meant to catch it.
"""

from collections.abc import Iterable, Mapping, Sequence

from fedlearn.core.messages import ClientId
from fedlearn.secagg.bitmaps import pack_bitmap
from fedlearn.secagg.merkle import MerkleTree, Proof, hash_leaf
from fedlearn.secagg.messages import Advert, Roster, Signatures, Survivors
from fedlearn.secagg.session import Session
from fedlearn.secagg.terms import Terms

NO_PROOF = Proof(hashes=b"", splits=b"")


def whole(
    terms: Terms, adverts: Sequence[Advert], *, directory: Mapping[ClientId, bytes]
) -> tuple[Session, MerkleTree]:
    """Build the session and tree of a roster; clients outside the directory get a key of zeros."""
    known = {each.client_id: directory.get(each.client_id, bytes(32)) for each in adverts}
    return Session.of(terms, adverts, directory=known)


def roster_for(
    client_id: ClientId,
    terms: Terms,
    adverts: Iterable[Advert],
    *,
    directory: Mapping[ClientId, bytes],
) -> Roster:
    """Build a client's roster message; a client outside the roster gets its first member's."""
    every = tuple(adverts)
    session, tree = whole(terms, every, directory=directory)
    told = client_id if client_id in session.points else every[0].client_id
    return session.roster_for(told, tree=tree)


def survivors_of(ids: Iterable[ClientId], roster: Sequence[ClientId]) -> Survivors:
    """Return the survivor message for these clients, in ascending order."""
    places = {client_id: at for at, client_id in enumerate(roster)}
    return Survivors(ranks=pack_bitmap([places[each] for each in ids], size=len(roster)))


def signatures_of(signatures: Mapping[ClientId, bytes], roster: Sequence[ClientId]) -> Signatures:
    """Return the signature message of the complete graph."""
    rows = tuple(signatures[each] for each in sorted(signatures))
    tree = MerkleTree.of([hash_leaf(each) for each in rows], keys=None) if rows else None
    return Signatures(
        signed=survivors_of(sorted(signatures), roster).ranks,
        root=tree.root if tree else bytes(32),
        signatures=rows,
        signers=(),
        of_signatures=NO_PROOF,
        of_signers=NO_PROOF,
    )


def signatures_in(message: Signatures, roster: Sequence[ClientId]) -> dict[ClientId, bytes]:
    """Return the signatures of a message by signer, in the complete graph."""
    signed = [each for at, each in enumerate(roster) if message.signed[at // 8] >> at % 8 & 1]
    return dict(zip(signed, message.signatures, strict=True))
