"""A coordinator that lies about a roster of which each client sees only a small part.

It builds its own trees, and each client alone checks the part that it receives. Each lie has its
control next to it. The tests build the tree a second time, from its definition and without the
product's code, with splits that a liar may choose.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlearn.core.messages import ClientId
from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.secagg import keys, messages
from fedlearn.secagg.client_state import ClientState
from fedlearn.secagg.graph import Ring
from fedlearn.secagg.merkle import MerkleTree, Proof, compute_root, hash_leaf
from fedlearn.secagg.messages import Advert, Roster
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.session import build_advert_text, build_leaf, build_terms_text, to_member
from fedlearn.secagg.terms import Terms
from tests.rehearsal import Cast
from tests.security.test_sparse_graph import POLICY, RUN, SMALL, contribution, small_terms

TERMS = small_terms(Adversary.ACTIVE_SERVER, threshold=4)
#: Some of the invited clients are missing.
INVITED = replace(TERMS, num_clients=len(SMALL) + 4, quorum=15)


# --- The tree, from its definition ----------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """Any tree of this shape; its leaves may belong to no client, and its splits may be false.

    Attributes:
        leaves: Hashes of the leaves.
        splits: Split of each node, by the first place below it and the end of its places.
    """

    leaves: Sequence[bytes]
    splits: Mapping[tuple[int, int], int]

    def hash(self, first: int, end: int) -> bytes:
        if end - first == 1:
            return self.leaves[first]
        middle = self.middle(first, end)
        split = self.splits[first, end].to_bytes(8, "little")
        left, right = self.hash(first, middle), self.hash(middle, end)
        return hashlib.sha256(b"\x01" + split + left + right).digest()

    @staticmethod
    def middle(first: int, end: int) -> int:
        """Return the start of the right half: RFC 6962, the largest power of two below the size."""
        return first + (1 << (end - first - 1).bit_length() - 1)

    @property
    def root(self) -> bytes:
        return self.hash(0, len(self.leaves))

    def way(self, place: int) -> list[tuple[int, int]]:
        """Return the nodes above a leaf, starting with the lowest."""
        found, first, end = list[tuple[int, int]](), 0, len(self.leaves)
        while end - first > 1:
            found.insert(0, (first, end))
            middle = self.middle(first, end)
            first, end = (first, middle) if place < middle else (middle, end)
        return found

    def prove(self, place: int) -> Proof:
        """Return the proof that leads from one leaf to the root."""
        hashes, splits = [], []
        for first, end in self.way(place):
            middle = self.middle(first, end)
            hashes.append(self.hash(middle, end) if place < middle else self.hash(first, middle))
            if middle != place:
                splits.append(self.splits[first, end].to_bytes(8, "little"))
        return Proof(hashes=b"".join(hashes), splits=b"".join(splits))


def nodes(first: int, end: int) -> list[tuple[int, int]]:
    if end - first < 2:
        return []
    middle = Tree.middle(first, end)
    return [(first, end), *nodes(first, middle), *nodes(middle, end)]


def true_tree(leaves: Sequence[bytes], ids: Sequence[int]) -> Tree:
    every = nodes(0, len(ids))
    return Tree(leaves, {node: ids[Tree.middle(*node)] for node in every})


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 24, 33])
def test_two_ways_to_build_the_tree_agree(size: int) -> None:
    """Root and proofs agree byte for byte, and several opened places lead to the same root."""
    leaves = [hash_leaf(bytes([each])) for each in range(size)]
    ids = [7 * each + 3 for each in range(size)]
    ours, other = MerkleTree.of(leaves, keys=ids), true_tree(leaves, ids)
    assert ours.root == other.root
    for place in range(size):
        assert ours.prove([place]) == other.prove(place)
    for places in (range(0, size, 2), range(size), [size - 1]):
        opened = {at: leaves[at] for at in places}
        told = [ids[at] for at in places]
        assert compute_root(size, opened, keys=told, proof=ours.prove(list(places))) == other.root


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_key_opens_at_two_places_whatever_the_splits(data: st.DataObject) -> None:
    """Otherwise one corrupted identity could count as many clients."""
    size = data.draw(st.integers(2, 17))
    splits = {node: data.draw(st.integers(0, 8)) for node in nodes(0, size)}
    leaves, key = [hash_leaf(b"an accomplice")] * size, data.draw(st.integers(0, 8))
    tree = Tree(leaves, splits)
    opens = []
    for place in range(size):
        proof = tree.prove(place)
        try:
            opens.append(
                compute_root(size, {place: leaves[place]}, keys=[key], proof=proof) == tree.root
            )
        except ProtocolError:
            opens.append(False)
    assert sum(opens) <= 1


def test_no_entry_stands_for_a_node_of_the_tree() -> None:
    """The inputs of leaf and node hashes may be equal except for the prefix byte."""
    left, right = hash_leaf(b"one"), hash_leaf(b"other")
    for ids, split in (([3, 5], (5).to_bytes(8, "little")), (None, b"")):
        tree = MerkleTree.of([left, right], keys=ids)
        assert tree.root == hashlib.sha256(b"\x01" + split + left + right).digest(), "the control"
        assert hash_leaf(split + left + right) != tree.root


@pytest.mark.parametrize(("places", "split"), [([1, 3], 20), ([5, 7], 60)])
def test_of_several_on_one_side_of_a_split_the_nearest_counts(
    places: list[int], split: int
) -> None:
    """Otherwise the other side could open the same key to another party: 30 right or 50 left."""
    leaves, ids = [hash_leaf(bytes([each])) for each in range(8)], [10 * each for each in range(8)]
    tree = MerkleTree.of(leaves, keys=ids)
    opened, told = {at: leaves[at] for at in places}, [ids[at] for at in places]
    proof = tree.prove(places)
    assert compute_root(8, opened, keys=told, proof=proof) == tree.root, "the control"
    lie = replace(proof, splits=proof.splits[:-8] + split.to_bytes(8, "little"))
    with pytest.raises(ProtocolError, match="does not stand where the tree says"):
        compute_root(8, opened, keys=told, proof=lie)


@pytest.mark.parametrize("field", ["hashes", "splits"])
def test_a_proof_has_one_encoding(field: str) -> None:
    """Nothing may be missing or added. Control: the proof as it was built."""
    size, places = 24, [3, 11, 20]
    leaves, ids = [hash_leaf(bytes([each])) for each in range(size)], range(size)
    tree = MerkleTree.of(leaves, keys=ids)
    proof, opened = tree.prove(places), {at: leaves[at] for at in places}

    def lookup(data: bytes) -> bytes:
        told = replace(proof, **{field: data})
        return compute_root(size, opened, keys=places, proof=told)

    whole, unit = getattr(proof, field), 32 if field == "hashes" else 8
    assert lookup(whole) == tree.root
    for cut in (whole[:-1], whole[:-unit], b""):
        with pytest.raises(ProtocolError, match="early"):
            lookup(cut)
    for longer in (whole + bytes(1), whole + bytes(unit)):
        with pytest.raises(ProtocolError, match="too many"):
            lookup(longer)
    for at in range(0, len(whole), unit):
        bent = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with suppress(ProtocolError):  # an id may now be on the wrong side of a split
            assert lookup(bent) != tree.root


# --- The roster that a client receives ------------------------------------------------------


@dataclass(frozen=True)
class Cohort:
    """Clients that have advertised, and a coordinator that may send them anything.

    Attributes:
        terms: Terms of the session.
        cast: The clients.
        adverts: Their adverts, in the order of ids.
        states: Their states.
    """

    terms: Terms
    cast: Cast
    adverts: Sequence[Advert]
    states: Mapping[ClientId, ClientState]

    @property
    def directory(self) -> Mapping[ClientId, bytes]:
        return self.cast.clients[SMALL[0]].directory

    def leaf(self, advert: Advert) -> bytes:
        return build_leaf(to_member(advert), self.directory[advert.client_id])

    def tell(self, client_id: ClientId, roster: Roster) -> messages.Up:
        """Send a client a roster over the wire format and return its answer."""
        told = messages.decode(messages.encode(roster))
        reply, _ = self.cast.clients[client_id].handle(
            told, self.states[client_id], contribute=lambda _: contribution(client_id)
        )
        return reply


def advertised(terms: Terms) -> Cohort:
    """Return clients that have answered R0."""
    cast = Cast.of(SMALL, policy=replace(POLICY, corruption=0.0), num_threads=1)
    signed = messages.SignedTerms(terms=terms, signature=cast.signer.sign(build_terms_text(terms)))
    fresh = ClientState.fresh(RUN)
    said = {each: client.advertise(signed, fresh) for each, client in cast.clients.items()}
    return Cohort(
        terms,
        cast,
        [advert for advert, _ in said.values()],
        {each: state for each, (_, state) in said.items()},
    )


@pytest.fixture(params=[TERMS, INVITED], ids=["all are there", "some are missing"])
def cohort(request: pytest.FixtureRequest) -> Cohort:
    return advertised(request.param)


@dataclass(frozen=True)
class Lie:
    """A liar's roster: the leaf at each place, and the adverts that it shows for them.

    Attributes:
        cohort: The clients it lies to.
        leaves: The leaf at each place.
        adverts: The advert shown for each place; ``None``: there is none.
        ids: The keys that the splits are made of.
    """

    cohort: Cohort
    leaves: Sequence[bytes]
    adverts: Sequence[Advert | None]
    ids: Sequence[int]

    @classmethod
    def honest(cls, cohort: Cohort) -> "Lie":
        adverts = list(cohort.adverts)
        return cls(
            cohort,
            [cohort.leaf(each) for each in adverts],
            adverts,
            [each.client_id for each in adverts],
        )

    def at(self, place: int, advert: Advert, *, key: int | None = None) -> "Lie":
        """Return a lie with another advert at this place."""
        leaves, adverts, ids = list(self.leaves), list(self.adverts), list(self.ids)
        leaves[place], adverts[place] = self.cohort.leaf(advert), advert
        ids[place] = advert.client_id if key is None else key
        return replace(self, leaves=leaves, adverts=adverts, ids=ids)

    def near(self, rank: int) -> list[int]:
        """Return the places that a client sees; the ring follows from the committed roster."""
        terms, size = self.cohort.terms, len(self.leaves).to_bytes(4, "little")
        session = keys.digest(b"session", terms.session, self.tree.root, size)
        ring = Ring.from_seed(
            len(self.leaves),
            num_neighbors=terms.num_neighbors,
            seed=keys.digest(b"graph", session),
        )
        return sorted([rank, *ring.neighbors(rank).tolist()])

    @property
    def tree(self) -> MerkleTree:
        return MerkleTree.of(self.leaves, keys=self.ids)

    def told(self, client_id: ClientId) -> Roster:
        """Return a client's view; a place without an advert shows another client's."""
        rank = SMALL.index(client_id)
        seen, tree = self.near(rank), self.tree
        return Roster(
            root=tree.root,
            size=len(self.leaves),
            rank=rank,
            adverts=tuple(self.adverts[each] or self.cohort.adverts[0] for each in seen),
            proof=tree.prove(seen),
        )

    def reason(self, client_id: ClientId, roster: Roster | None = None) -> str:
        """Return the reason of a client's refusal, or an empty string if it shares its keys."""
        try:
            self.cohort.tell(client_id, roster or self.told(client_id))
        except (AggregationAborted, ProtocolError) as error:
            return str(error)
        return ""


def test_an_honest_roster_is_taken(cohort: Cohort) -> None:
    """Control of all lies below: the ring computed here is the one that clients compute."""
    honest = Lie.honest(cohort)
    assert {honest.reason(each) for each in SMALL} == {""}


def test_an_accomplice_that_stands_at_many_places_is_accepted_at_one_of_them_at_most(
    cohort: Cohort,
) -> None:
    """Under its id at each place, or under keys that fit the order."""
    accomplice, places = cohort.adverts[10], [4, 5, 6, 7, 8, 9, 11, 12, 13]
    lie = Lie.honest(cohort)
    for place in places:
        lie = lie.at(place, accomplice, key=place + 1)
    others = [each for each in SMALL if SMALL.index(each) not in {10, *places}]
    for client_id in others:
        rank = SMALL.index(client_id)
        sees = set(lie.near(rank)) & {10, *places}
        reason = lie.reason(client_id)
        assert (reason == "") == (sees <= {10}), (sees, reason)


def test_clients_out_of_order_are_refused_by_who_sees_them(cohort: Cohort) -> None:
    honest = Lie.honest(cohort)
    lie = honest.at(3, cohort.adverts[15]).at(15, cohort.adverts[3])
    refused = 0
    for client_id in SMALL:
        rank = SMALL.index(client_id)
        if rank in (3, 15) or not {3, 15} & set(lie.near(rank)):
            continue
        reason = lie.reason(client_id)
        assert "ascend" in reason or "where the tree says" in reason
        refused += 1
    assert refused


def test_a_leaf_that_nobody_stands_behind_is_of_no_use(cohort: Cohort) -> None:
    """Its neighbors receive no valid advert for it, and refuse before they share."""
    honest, place = Lie.honest(cohort), 9
    lie = replace(
        honest,
        leaves=[b"g" * 32 if at == place else each for at, each in enumerate(honest.leaves)],
    )
    for client_id in SMALL:
        if (rank := SMALL.index(client_id)) == place:
            continue
        wanted = "are not those of the roster" if place in lie.near(rank) else ""
        assert wanted in lie.reason(client_id)
        assert bool(wanted) == bool(lie.reason(client_id))
        told = lie.told(client_id)
        if wanted:
            fewer = replace(
                told, adverts=tuple(a for a in told.adverts if a.client_id != SMALL[place])
            )
            assert "6 adverts, not the 7" in lie.reason(client_id, fewer)


def test_another_size_is_another_session(cohort: Cohort) -> None:
    """The positions, and hence the ring, depend on the claimed size."""
    honest, victim = Lie.honest(cohort), SMALL[11]
    told = honest.told(victim)
    for size in (len(SMALL) - 1, len(SMALL) + 1):
        assert honest.reason(victim, replace(told, size=size))
    for size, words in (
        (0, "min_survivors is 18"),
        (17, "min_survivors is 18"),
        (1 << 16, "more than the"),
    ):
        assert words in honest.reason(victim, replace(told, size=size))
    assert "a position of 24" in honest.reason(victim, replace(told, rank=24))


def test_a_roster_that_is_padded_with_garbage_only_ends_sessions() -> None:
    """If m is claimed to be larger, neighbors of the garbage refuse and the others continue."""
    honest, padding = Lie.honest(advertised(INVITED)), 3
    lie = replace(
        honest,
        leaves=[*honest.leaves, *([b"g" * 32] * padding)],
        adverts=[*honest.adverts, *([None] * padding)],
        ids=[*honest.ids, *(SMALL[-1] + 1 + each for each in range(padding))],
    )
    reasons = {}
    for client_id in SMALL:
        sees_garbage = max(lie.near(SMALL.index(client_id))) >= len(SMALL)
        reasons[client_id] = lie.reason(client_id)
        assert bool(reasons[client_id]) == sees_garbage
    assert len(set(map(bool, reasons.values()))) == 2


def test_a_root_of_another_roster_is_refused(cohort: Cohort) -> None:
    """Even with its own proof: session and ring follow from the root."""
    honest, victim = Lie.honest(cohort), SMALL[5]
    other = honest.at(20, replace(cohort.adverts[20], nonce=bytes(16)))
    mixed = replace(honest.told(victim), root=other.tree.root)
    assert honest.reason(victim, mixed)
    assert honest.reason(victim, replace(other.told(victim), root=honest.tree.root))


def test_neighbors_are_those_of_the_ring(cohort: Cohort) -> None:
    """Members of the roster with valid proofs are refused if the ring has other neighbors."""
    honest, victim = Lie.honest(cohort), SMALL[5]
    rank = SMALL.index(victim)
    seen = honest.near(rank)
    strangers = [each for each in range(len(SMALL)) if each not in seen]
    chosen = sorted([rank, *strangers[:6]])
    told = replace(
        honest.told(victim),
        adverts=tuple(cohort.adverts[each] for each in chosen),
        proof=honest.tree.prove(chosen),
    )
    assert honest.reason(victim, told)
    assert not honest.reason(victim), "the control"


def test_a_roster_for_one_client_is_none_for_another(cohort: Cohort) -> None:
    honest = Lie.honest(cohort)
    for client_id, other in pairwise(SMALL):
        assert "own advert" in honest.reason(client_id, honest.told(other))


def test_two_clients_are_not_told_two_keys_of_one(cohort: Cohort) -> None:
    """The identity key is in the leaf, so a client that pinned another key gets another root.

    Control: by itself, the advert would be accepted with the key that was sent.
    """
    place = 14
    signer, public = keys.create_signer()
    advert = cohort.adverts[place]
    text = build_advert_text(cohort.terms, advert.encode_signed_part())
    swapped = replace(advert, signature=signer.sign(text))
    honest = Lie.honest(cohort)

    def with_key(key: bytes) -> Lie:
        leaves, adverts = list(honest.leaves), list(honest.adverts)
        leaves[place], adverts[place] = build_leaf(to_member(swapped), key), swapped
        return replace(honest, leaves=leaves, adverts=adverts)

    def believes(client_id: ClientId, lie: Lie) -> str:
        client = cohort.cast.clients[client_id]
        other = replace(client, directory={**client.directory, SMALL[place]: public})
        credulous = replace(cohort.cast, clients={**cohort.cast.clients, client_id: other})
        return replace(lie, cohort=replace(cohort, cast=credulous)).reason(client_id)

    for key, words in ((public, ""), (cohort.directory[SMALL[place]], "not those of the roster")):
        lie = with_key(key)
        near = [each for each in SMALL if place in lie.near(SMALL.index(each))]
        assert len(near) == 7
        for client_id in near:
            if client_id == SMALL[place]:
                continue
            assert "is not signed by it" in lie.reason(client_id), "it has pinned the true key"
            assert words in believes(client_id, lie)
            assert bool(words) == bool(believes(client_id, lie))
