"""A session as both sides derive it from terms and roster: its id, points and neighbors."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.messages import ClientId
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.bitmaps import pack_bitmap, unpack_bitmap
from fedlearn.secagg.graph import Ring, Topology
from fedlearn.secagg.merkle import HASH_BYTES, MerkleTree, hash_leaf
from fedlearn.secagg.messages import ADVERT, Advert, Adverts, Member, Roster
from fedlearn.secagg.parameters import MAX_CLIENTS, Adversary, num_holders
from fedlearn.secagg.terms import Terms

_ID_BYTES = 8
#: Terms within a longer record: prefixed by their length.
OwnTerms: TypeAlias = Annotated[Terms, octets.byte_string(4).map(Terms.to_bytes, Terms.from_bytes)]


class Stage(StrEnum):
    """A stage of the protocol."""

    ADVERTISE = "advertise"
    SHARE = "share"
    MASK = "mask"
    CONFIRM = "confirm"
    UNMASK = "unmask"


@dataclass(frozen=True, eq=False)
class Session:
    """The terms and roster of a session, as far as one party sees the roster.

    The coordinator sees all of it, and so do clients in the complete graph. In a sparse graph a
    client sees only itself and its neighbors, and the methods below know no other clients.

    Attributes:
        terms: Terms of the session.
        root: Root of the tree over the roster.
        size: m: clients in the roster.
        ranks: Positions in the roster of the visible clients, from 0.
        adverts: Adverts of the visible clients.
        identity_keys: Their identity keys when the session began: a client that replaces its key
            signs with the new one from the next session on.
    """

    terms: OwnTerms
    root: Annotated[bytes, octets.raw_bytes(HASH_BYTES)]
    size: int
    ranks: Annotated[
        tuple[int, ...],
        octets.sequence(octets.integer(4), most=MAX_CLIENTS, by=int),
    ]
    adverts: Adverts
    identity_keys: Annotated[Mapping[ClientId, bytes], octets.table(keys.KEY_BYTES)]

    @classmethod
    def of(
        cls, terms: Terms, adverts: Sequence[Advert], *, directory: Mapping[ClientId, bytes]
    ) -> tuple["Session", MerkleTree]:
        """Build the session of a whole roster, and the tree over it.

        Args:
            terms: Terms of the session.
            adverts: Adverts of all clients in the roster, by ascending id.
            directory: Their identity keys.
        """
        ids = [advert.client_id for advert in adverts]
        known = {client_id: directory[client_id] for client_id in ids}
        leaves = [build_leaf(to_member(advert), known[advert.client_id]) for advert in adverts]
        tree = MerkleTree.of(leaves, keys=ids)
        return cls(terms, tree.root, len(ids), tuple(range(len(ids))), tuple(adverts), known), tree

    @classmethod
    def from_roster(
        cls, terms: Terms, roster: Roster, *, directory: Mapping[ClientId, bytes]
    ) -> "Session":
        """Build a client's session from the roster that it received; only its form is checked.

        Args:
            terms: Terms of the session.
            roster: The roster as received.
            directory: The identity keys of all clients.

        Raises:
            ProtocolError: The roster is too small or too large for the terms, the client's position
                is outside it, or there are not as many adverts as a client and its neighbors have.
        """
        size, rank = roster.size, roster.rank
        if size > terms.num_clients:
            raise ProtocolError(
                f"{size} clients in the roster, more than the {terms.num_clients} invited"
            )
        if short := find_shortage(terms, size):
            raise ProtocolError(short)
        if rank >= size:
            raise ProtocolError(f"a position of {rank} in a roster of {size}")
        seen = _find_visible_ranks(rank, terms, root=roster.root, size=size)
        if len(roster.adverts) != len(seen):
            raise ProtocolError(
                f"{len(roster.adverts)} adverts, not the {len(seen)} of this client and its "
                "neighbors"
            )
        ids = [advert.client_id for advert in roster.adverts]
        # Clients outside the directory get no key here; `check_advert` then refuses them.
        known = {client_id: directory[client_id] for client_id in ids if client_id in directory}
        return cls(terms, roster.root, size, seen, roster.adverts, known)

    def roster_for(self, client_id: ClientId, *, tree: MerkleTree) -> Roster:
        """Return a client's view of the whole roster."""
        rank = self.points[client_id] - 1
        seen = sorted([rank, *self._neighbor_ranks(rank)])
        return Roster(
            root=self.root,
            size=self.size,
            rank=rank,
            adverts=tuple(self.adverts[each] for each in seen),
            proof=tree.prove(seen),
        )

    @cached_property
    def id(self) -> bytes:
        """The hash of terms and roster: the salt of every key, and part of later signatures."""
        return _hash_session(self.terms, root=self.root, size=self.size)

    @property
    def is_whole(self) -> bool:
        """Whether the whole roster is visible."""
        return len(self.ranks) == self.size

    @cached_property
    def by_id(self) -> Mapping[ClientId, Advert]:
        """The visible adverts, by client."""
        return {advert.client_id: advert for advert in self.adverts}

    @cached_property
    def points(self) -> Mapping[ClientId, int]:
        """Evaluation points of the clients' shares: their positions in the roster, from 1."""
        # From 1: the share at point 0 would be the secret itself.
        seen = zip(self.adverts, self.ranks, strict=True)
        return {advert.client_id: rank + 1 for advert, rank in seen}

    @cached_property
    def _ids(self) -> Mapping[int, ClientId]:
        return {point - 1: client_id for client_id, point in self.points.items()}

    @cached_property
    def _ring(self) -> Ring:
        return _ring(self.terms, self.id, self.size)

    def _neighbor_ranks(self, rank: int) -> list[int]:
        if self.terms.topology is Topology.COMPLETE:
            return [each for each in range(self.size) if each != rank]
        near: list[int] = self._ring.neighbors(rank).tolist()
        return near

    def neighbors(self, client_id: ClientId) -> list[ClientId]:
        """Return the clients that share masks with a client, by ascending id."""
        return [self._ids[each] for each in self._neighbor_ranks(self.points[client_id] - 1)]

    def holders(self, client_id: ClientId) -> list[ClientId]:
        """Return the clients that keep shares of a client's secrets, by ascending id."""
        complete = self.terms.topology is Topology.COMPLETE
        return list(self.points) if complete else self.neighbors(client_id)

    def pack_ranks(self, client_ids: Iterable[ClientId]) -> bytes:
        """Return the positions of clients as a bitmap."""
        return pack_bitmap((self.points[each] - 1 for each in client_ids), size=self.size)

    def unpack_ranks(self, ranks: bytes, *, what: str) -> NDArray[np.int64]:
        """Return the positions in a bitmap, ascending; ProtocolError if it does not fit the roster.

        Errors call the bitmap ``what``.
        """
        return unpack_bitmap(ranks, size=self.size, what=what)

    def find_clients(self, ranks: Iterable[int]) -> list[ClientId]:
        """Return the visible clients among those at these positions, in the same order."""
        return [self._ids[each] for each in ranks if each in self._ids]

    def build_survivors_text(self, ranks: bytes, client_id: ClientId) -> bytes:
        """Build the text that one client signs to confirm the survivors, a bitmap."""
        return keys.build_signed_text(b"survivors", self.id, ranks, client_id.to_bytes(8, "little"))


def find_shortage(terms: Terms, size: int) -> str | None:
    """Explain why a roster is too small for the terms; ``None`` if it is not."""
    if size < terms.min_survivors:
        return f"{size} clients in the roster, min_survivors is {terms.min_survivors}"
    if terms.adversary is Adversary.ACTIVE_SERVER and size < terms.quorum:
        return f"{size} clients in the roster, the quorum is {terms.quorum}"
    # A complete graph shrinks with the roster; a sparse one may not become complete.
    k = min(terms.num_neighbors, size - 1)
    if terms.topology is Topology.SPARSE and k == size - 1:
        return f"{size} clients are too few for a sparse graph with {k} neighbors"
    if num_holders(size, k) < terms.threshold:
        return f"{num_holders(size, k)} holders, the threshold is {terms.threshold}"
    return None


def to_member(advert: Advert) -> Member:
    """Reduce an advert to its sender and a hash of the rest."""
    rest = ADVERT.to_bytes(advert)[_ID_BYTES:]
    return Member(client_id=advert.client_id, advert_hash=hashlib.sha256(rest).digest())


def build_leaf(member: Member, identity_key: bytes) -> bytes:
    """Return a client's leaf in the tree over the roster.

    It includes the identity key, so that within one session all clients see the same key of a
    client.
    """
    client_id = member.client_id.to_bytes(_ID_BYTES, "little")
    return hash_leaf(client_id + identity_key + member.advert_hash)


def _hash_session(terms: Terms, *, root: bytes, size: int) -> bytes:
    # The size, too: the root does not say how many leaves it is over.
    return keys.digest(b"session", terms.session, root, size.to_bytes(4, "little"))


def _ring(terms: Terms, session_id: bytes, size: int) -> Ring:
    # Seeded by the session's id: to get another ring, a server must show another roster.
    seed, k = keys.digest(b"graph", session_id), terms.num_neighbors
    return Ring.from_seed(size, num_neighbors=k, seed=seed)


def _find_visible_ranks(rank: int, terms: Terms, *, root: bytes, size: int) -> tuple[int, ...]:
    if terms.topology is Topology.COMPLETE:
        return tuple(range(size))
    near = _ring(terms, _hash_session(terms, root=root, size=size), size).neighbors(rank)
    return tuple(sorted([rank, *near.tolist()]))


def build_advert_text(terms: Terms, body: bytes) -> bytes:
    """Build the text that a client signs for its advert."""
    return keys.build_signed_text(b"advert", terms.session, body)


def build_terms_text(terms: Terms) -> bytes:
    """Build the text that the coordinator signs for its terms."""
    return keys.build_signed_text(b"terms", terms.to_bytes())
