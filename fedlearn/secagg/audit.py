r"""How few signatures a client has to see of many, so that enough of them are real.

Against an active server in a sparse graph a client must know that at least q clients signed the
survivors, but not each signature. The server commits to all of them: it names the q' that signed,
and sends the root of a tree over their signatures. Root, session, survivors and names then draw s
places, without replacement, and those alone are opened: signature, and who signed.

If only v of the q' signatures are real, all s are so with P = C(v, s) / C(q', s), which grows with
v; v = q - 1 is the most that must not pass. A server may try other roots and names for a sample
that suits it, so that s is the least with::

    C(q - 1, s) / C(q', s) <= 2^-(sigma + 2 + 64)

(:func:`~fedlearn.secagg.parameters.risk_bits`, :func:`~fedlearn.secagg.parameters.num_audited`). It
is few where nearly all signed, and q where hardly enough did: then nothing is left to chance.

*Why a root?* A sample that is drawn from the names alone, or by each client beforehand, is known
before the signatures are there: who has only half of them names the sampled among its half, or
gets just these to sign. With the root, signatures are fixed before it is known which are asked for.

In the complete graph all are opened: a client has all adverts there, and nothing is drawn.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.messages import ClientId
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys
from fedlearn.secagg.graph import Topology, shuffled
from fedlearn.secagg.merkle import MerkleTree, Proof, leaf_of, root_of
from fedlearn.secagg.messages import Signatures
from fedlearn.secagg.parameters import num_audited, risk_bits
from fedlearn.secagg.session import Session, leaf, member_of

_NO_PROOF = Proof(hashes=b"", splits=b"")


def sample(num_signed: int, *, num_audited: int, seed: bytes) -> NDArray[np.int64]:
    """Return which of the signatures are opened, ascending: shape [s]."""
    return np.sort(shuffled(num_signed, seed=seed)[:num_audited])


def show(
    signatures: Mapping[ClientId, bytes],
    session: Session,
    *,
    survivors: bytes,
    tree: MerkleTree,
) -> Signatures:
    """Return what shows clients that a quorum signed the survivors: the coordinator's part.

    Args:
        signatures: By signer; in the complete graph a quorum of them is shown, else a sample of
            all.
        session: Its own.
        survivors: What was signed.
        tree: Over the roster.
    """
    terms, signers = session.terms, sorted(signatures)
    if is_complete := terms.topology is Topology.COMPLETE:
        signers = signers[: terms.quorum]
    committed = MerkleTree.of([leaf_of(signatures[each]) for each in signers], keys=None)
    signed = session.bitmap(signers)
    places = _places(session, survivors, signed, root=committed.root, num_signed=len(signers))
    opened = [signers[place] for place in places]
    ranks = [session.points[each] - 1 for each in opened]
    return Signatures(
        signed=signed,
        root=committed.root,
        signatures=tuple(signatures[each] for each in opened),
        signers=() if is_complete else tuple(member_of(session.by_id[each]) for each in opened),
        of_signatures=committed.proof(places),
        of_signers=_NO_PROOF if is_complete else tree.proof(ranks),
    )


def check(
    shown: Signatures,
    session: Session,
    *,
    survivors: bytes,
    directory: Mapping[ClientId, bytes],
) -> None:
    """Check that a quorum signed the survivors: a client's part.

    Args:
        shown: What it was told.
        session: As the client sees it.
        survivors: What it signed itself.
        directory: The identity keys of the signers as the session began.

    Raises:
        ProtocolError: It was not shown.
    """
    terms = session.terms
    ranks = session.ranks_in(shown.signed, what="who signed the survivors")
    alive = session.ranks_in(survivors, what="the survivors")
    if strangers := sorted(set(ranks.tolist()) - set(alive.tolist())):
        raise ProtocolError(f"a signature of position {strangers[0]} in the roster, no survivor")
    if len(ranks) < terms.quorum:
        raise ProtocolError(
            f"{len(ranks)} survivors confirmed the survivors, the quorum is {terms.quorum}"
        )
    places = _places(session, survivors, shown.signed, root=shown.root, num_signed=len(ranks))
    if len(shown.signatures) != len(places):
        raise ProtocolError(
            f"{len(shown.signatures)} signatures are opened of {len(ranks)}, not {len(places)}"
        )
    opened = ranks[places].tolist()
    signers = _signers(shown, session, opened, directory)
    for signer, signature in zip(signers, shown.signatures, strict=True):
        text = session.survivors_text(survivors, signer)
        if not keys.verify(directory[signer], signature, text):
            raise ProtocolError(f"client {signer} did not sign these survivors")
    leaves = dict(zip(places.tolist(), map(leaf_of, shown.signatures), strict=True))
    if root_of(len(ranks), leaves, keys=None, proof=shown.of_signatures) != shown.root:
        raise ProtocolError("the signatures are not those that the sample was drawn from")


def _signers(
    shown: Signatures,
    session: Session,
    opened: Sequence[int],
    directory: Mapping[ClientId, bytes],
) -> Sequence[ClientId]:
    """Return who stands at the positions that are opened; ProtocolError if that is not shown."""
    if session.terms.topology is Topology.COMPLETE:
        if shown.signers or shown.of_signers != _NO_PROOF:
            raise ProtocolError("signers are told that are known")
        return session.among(opened)
    signers = [signer.client_id for signer in shown.signers]
    if len(signers) != len(opened):
        raise ProtocolError(f"{len(signers)} signers of {len(opened)} signatures")
    if unknown := sorted(set(signers) - directory.keys()):
        raise ProtocolError(f"signer {unknown[0]} is not in the pinned directory")
    leaves = {
        rank: leaf(signer, directory[signer.client_id])
        for rank, signer in zip(opened, shown.signers, strict=True)
    }
    if root_of(session.size, leaves, keys=signers, proof=shown.of_signers) != session.root:
        raise ProtocolError("the signers are not those in the roster")
    return signers


def _places(
    session: Session, survivors: bytes, signed: bytes, *, root: bytes, num_signed: int
) -> NDArray[np.int64]:
    """Return which of those that signed are looked at, by their order."""
    terms = session.terms
    if terms.topology is Topology.COMPLETE:
        return np.arange(num_signed)
    risk = risk_bits(terms.sigma_bits, adversary=terms.adversary)
    audited = num_audited(num_signed, quorum=terms.quorum, risk_bits=risk)
    seed = keys.digest(b"audit", session.id, survivors, signed, root)
    return sample(num_signed, num_audited=audited, seed=seed)
