r"""Audit of signatures: how a client checks that a quorum signed, from a sample of the signatures.

Against an active server, a client must know that at least q clients signed the set of survivors. In
a sparse graph it does not need to see every signature. The server commits to all of them: it names
the q' clients that signed, and sends the root of a Merkle tree over their signatures. A hash of the
session, the survivors, these names and the root then selects s places without replacement. Only
those are opened: the server shows the signature and its signer.

If only v of the q' signatures are real, all s opened ones are real with P = C(v, s) / C(q', s),
which grows with v; v = q - 1 is the largest v that must be detected. A server may try other roots
and names until it gets a sample that suits it, so s is the smallest number with::

    C(q - 1, s) / C(q', s) <= 2^-(sigma + 2 + 64)

(:func:`~fedlearn.secagg.parameters.risk_bits`, :func:`~fedlearn.secagg.parameters.num_audited`).
This is a small number if nearly all clients signed. If only q signed, all of them are opened.

*Why a root?* A sample that is drawn from the names alone, or by each client in advance, is known
before the signatures exist. A server with only half of the signatures could then name the signers
so that the sample falls into its half, or get signatures from the sampled clients only. The root
fixes the signatures before the sample is known.

In the complete graph q signatures are sent and all of them are opened. A client has all adverts
there, so it needs no proof of who the signers are.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.messages import ClientId
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys
from fedlearn.secagg.graph import Topology, draw_permutation
from fedlearn.secagg.merkle import MerkleTree, Proof, compute_root, hash_leaf
from fedlearn.secagg.messages import Signatures
from fedlearn.secagg.parameters import num_audited, risk_bits
from fedlearn.secagg.session import Session, build_leaf, to_member

_NO_PROOF = Proof(hashes=b"", splits=b"")


def sample(num_signed: int, *, num_audited: int, seed: bytes) -> NDArray[np.int64]:
    """Select the signatures to open: their places, ascending, of shape [s]."""
    return np.sort(draw_permutation(num_signed, seed=seed)[:num_audited])


def show(
    signatures: Mapping[ClientId, bytes],
    session: Session,
    *,
    survivors: bytes,
    tree: MerkleTree,
) -> Signatures:
    """Build the evidence for clients that a quorum signed the survivors (coordinator's side).

    Args:
        signatures: By signer. In the complete graph q of them are sent, else a sample of all.
        session: The coordinator's own view of the session.
        survivors: The bitmap that was signed.
        tree: The Merkle tree over the roster.
    """
    terms, signers = session.terms, sorted(signatures)
    if is_complete := terms.topology is Topology.COMPLETE:
        # All of them are opened in the complete graph, so more than q would only cost bytes.
        signers = signers[: terms.quorum]
    # Commit before sampling: the sample follows from this root.
    committed = MerkleTree.of([hash_leaf(signatures[each]) for each in signers], keys=None)
    signed = session.pack_ranks(signers)
    places = _select_places(
        session, survivors, signed, root=committed.root, num_signed=len(signers)
    )
    opened = [signers[place] for place in places]
    ranks = [session.points[each] - 1 for each in opened]
    return Signatures(
        signed=signed,
        root=committed.root,
        signatures=tuple(signatures[each] for each in opened),
        signers=() if is_complete else tuple(to_member(session.by_id[each]) for each in opened),
        of_signatures=committed.prove(places),
        of_signers=_NO_PROOF if is_complete else tree.prove(ranks),
    )


def check(
    evidence: Signatures,
    session: Session,
    *,
    survivors: bytes,
    directory: Mapping[ClientId, bytes],
) -> None:
    """Check the evidence that a quorum signed the survivors (client's side).

    Args:
        evidence: The evidence that the client received.
        session: The session as this client sees it.
        survivors: The bitmap that this client signed itself.
        directory: Identity keys of the signers when the session began.

    Raises:
        ProtocolError: The evidence does not show it.
    """
    terms = session.terms
    ranks = session.unpack_ranks(evidence.signed, what="who signed the survivors")
    alive = session.unpack_ranks(survivors, what="the survivors")
    # The quorum is a lower bound on the size of the sum only if all signers are part of the sum.
    if strangers := sorted(set(ranks.tolist()) - set(alive.tolist())):
        raise ProtocolError(
            f"position {strangers[0]} in the roster signed, but is not among the survivors"
        )
    if len(ranks) < terms.quorum:
        raise ProtocolError(
            f"{len(ranks)} survivors confirmed the survivors, the quorum is {terms.quorum}"
        )
    places = _select_places(
        session, survivors, evidence.signed, root=evidence.root, num_signed=len(ranks)
    )
    # The client draws the sample itself: the server's choice of signatures would prove nothing.
    if len(evidence.signatures) != len(places):
        raise ProtocolError(
            f"{len(evidence.signatures)} signatures are opened of {len(ranks)}, not {len(places)}"
        )
    # Each opened signature must be real, and one of those that the root committed to.
    opened = ranks[places].tolist()
    signers = _identify_signers(evidence, session, opened, directory)
    for signer, signature in zip(signers, evidence.signatures, strict=True):
        text = session.build_survivors_text(survivors, signer)
        if not keys.verify(directory[signer], signature, text):
            raise ProtocolError(f"client {signer} did not sign these survivors")
    leaves = dict(zip(places.tolist(), map(hash_leaf, evidence.signatures), strict=True))
    if compute_root(len(ranks), leaves, keys=None, proof=evidence.of_signatures) != evidence.root:
        raise ProtocolError("the signatures are not those that the sample was drawn from")


def _identify_signers(
    evidence: Signatures,
    session: Session,
    opened: Sequence[int],
    directory: Mapping[ClientId, bytes],
) -> Sequence[ClientId]:
    """Return the clients at the opened positions; ProtocolError if the roster does not prove it."""
    if session.terms.topology is Topology.COMPLETE:
        if evidence.signers or evidence.of_signers != _NO_PROOF:
            raise ProtocolError(
                "signers are named in the complete graph, where every client knows them"
            )
        return session.find_clients(opened)
    signers = [signer.client_id for signer in evidence.signers]
    if len(signers) != len(opened):
        raise ProtocolError(f"{len(signers)} signers of {len(opened)} signatures")
    if unknown := sorted(set(signers) - directory.keys()):
        raise ProtocolError(f"signer {unknown[0]} is not in the pinned directory")
    leaves = {
        rank: build_leaf(signer, directory[signer.client_id])
        for rank, signer in zip(opened, evidence.signers, strict=True)
    }
    if compute_root(session.size, leaves, keys=signers, proof=evidence.of_signers) != session.root:
        raise ProtocolError("the signers are not those in the roster")
    return signers


def _select_places(
    session: Session, survivors: bytes, signed: bytes, *, root: bytes, num_signed: int
) -> NDArray[np.int64]:
    """Return the places, among those that signed, of the signatures to open."""
    terms = session.terms
    if terms.topology is Topology.COMPLETE:
        return np.arange(num_signed)
    risk = risk_bits(terms.sigma_bits, adversary=terms.adversary)
    audited = num_audited(num_signed, quorum=terms.quorum, risk_bits=risk)
    # The root is hashed in as well, so that the server cannot know the sample before it commits.
    seed = keys.digest(b"audit", session.id, survivors, signed, root)
    return sample(num_signed, num_audited=audited, seed=seed)
