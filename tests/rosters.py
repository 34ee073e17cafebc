"""What a coordinator tells of any roster, survivors and signatures that it likes.

The trees under it are real, so that a lie gets as far as the check that is meant for it.
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
    """Return the session of a roster; strangers in it get a key of zeros."""
    known = {each.client_id: directory.get(each.client_id, bytes(32)) for each in adverts}
    return Session.of(terms, adverts, directory=known)


def roster_for(
    client_id: ClientId,
    terms: Terms,
    adverts: Iterable[Advert],
    *,
    directory: Mapping[ClientId, bytes],
) -> Roster:
    """Return what a client is told; one that is not in the roster is told what its first is."""
    every = tuple(adverts)
    session, tree = whole(terms, every, directory=directory)
    told = client_id if client_id in session.points else every[0].client_id
    return session.roster_for(told, tree=tree)


def survivors_of(ids: Iterable[ClientId], roster: Sequence[ClientId]) -> Survivors:
    """Return the survivors of a roster of these clients, which ascend."""
    places = {client_id: at for at, client_id in enumerate(roster)}
    return Survivors(ranks=pack_bitmap([places[each] for each in ids], size=len(roster)))


def signatures_of(signatures: Mapping[ClientId, bytes], roster: Sequence[ClientId]) -> Signatures:
    """Return signatures as they are told in the complete graph."""
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
    """Return by signer what was told in the complete graph."""
    signed = [each for at, each in enumerate(roster) if message.signed[at // 8] >> at % 8 & 1]
    return dict(zip(signed, message.signatures, strict=True))
