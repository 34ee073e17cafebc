r"""A Merkle tree: one hash over a list, against which a few of its entries can be opened.

The tree has the shape of RFC 6962: nodes are paired level by level, and an odd last node moves up
unchanged. The hash input starts with ``0x00`` for a leaf and with ``0x01`` for a node::

    leaf = SHA-256(0x00 ‖ entry)
    node = SHA-256(0x01 ‖ split ‖ left ‖ right)

In a tree whose entries have ascending keys, ``split`` is the smallest key on the right, in eight
bytes; a tree without keys leaves it out. To verify an opened entry, a party checks on the path to
the root that the entry's key is below each split that it is left of, and not below any that it is
right of. Therefore two entries that open at different places have different keys, even if they are
opened to different parties: where their paths part, one key is below the split and the other is
not. Nothing else is assumed about entries that are not opened.

Guarantees:
    Under one root and for one list size, each place opens to one leaf only, and no key opens at two
    places. This assumes that SHA-256 has no collisions.

References:
    Laurie, Langley and Kasper, 2013, `RFC 6962: Certificate Transparency
    <https://www.rfc-editor.org/rfc/rfc6962>`_, section 2.1.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from fedlearn.errors import ProtocolError
from fedlearn.secagg import octets
from fedlearn.secagg.parameters import MAX_CLIENTS

HASH_BYTES = 32
_KEY_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Hashes and splits that lead from opened entries to the root, level by level, by place.

    The size and the places determine how long both lists are. They repeat nothing that follows from
    the opened entries.

    Attributes:
        hashes: Hashes of the siblings of nodes on the paths, 32 bytes each.
        splits: Splits of nodes on the paths, where the split is not an opened key, 8 bytes each.
    """

    hashes: Annotated[bytes, octets.byte_string(4, most=HASH_BYTES * MAX_CLIENTS)]
    splits: Annotated[bytes, octets.byte_string(4, most=_KEY_BYTES * MAX_CLIENTS)]


def hash_leaf(entry: bytes) -> bytes:
    """Hash an entry to its leaf."""
    return hashlib.sha256(b"\x00" + entry).digest()


def _hash_node(split: bytes, left: bytes, right: bytes) -> bytes:
    # The first byte keeps a node from passing for a leaf (RFC 6962, second preimages).
    return hashlib.sha256(b"\x01" + split + left + right).digest()


@dataclass(frozen=True, eq=False)
class MerkleTree:
    """The whole tree, for the party that builds it.

    Attributes:
        levels: Hashes from the leaves to the root: shape [nodes, 32] each.
        keys: Keys of the leaves, ascending; ``None``: they have none.

    Example:
        >>> entries = [b"a", b"b", b"c"]
        >>> tree = MerkleTree.of([hash_leaf(each) for each in entries], keys=[2, 5, 9])
        >>> proof = tree.prove([2])
        >>> tree.root == compute_root(3, {2: hash_leaf(b"c")}, keys=[9], proof=proof)
        True
    """

    levels: Sequence[NDArray[np.uint8]]
    keys: NDArray[np.uint64] | None

    @classmethod
    def of(cls, leaves: Sequence[bytes], *, keys: Sequence[int] | None) -> "MerkleTree":
        """Build the tree over one or more leaves."""
        below, level = list(leaves), 0
        splits = None if keys is None else np.array(keys, "<u8")
        levels = [_to_rows(below)]
        while len(below) > 1:
            above = [
                # The split of a node is the key of the first leaf below its right child.
                _hash_node(
                    b"" if splits is None else splits[(2 * at + 1) << level].tobytes(),
                    below[2 * at],
                    below[2 * at + 1],
                )
                for at in range(len(below) // 2)
            ]
            below, level = above + below[2 * len(above) :], level + 1
            levels.append(_to_rows(below))
        return cls(levels, splits)

    @property
    def root(self) -> bytes:
        """The hash over the whole list, 32 bytes."""
        return self.levels[-1].tobytes()

    def prove(self, places: Sequence[int] | NDArray[np.int64]) -> Proof:
        """Return the proof that opens the leaves at ``places``, which must ascend strictly."""
        at = np.asarray(places, np.int64)
        is_opened = np.zeros(len(self.levels[0]), bool)
        is_opened[at] = True
        hashes, splits = [], []
        for level, nodes in enumerate(self.levels[:-1]):
            is_on_the_way = np.zeros(len(nodes), bool)
            is_on_the_way[at] = True
            siblings = at ^ 1
            siblings = siblings[siblings < len(nodes)]
            hashes.append(nodes[siblings[~is_on_the_way[siblings]]].tobytes())
            above = at >> 1
            # Drop duplicate parents; places ascend, so duplicates are adjacent.
            at = above[np.flatnonzero(np.diff(above, prepend=-1))]
            if self.keys is not None:
                # A split that is an opened key is not repeated: the verifier has the key.
                first = (2 * at[2 * at + 1 < len(nodes)] + 1) << level
                splits.append(self.keys[first[~is_opened[first]]].tobytes())
        return Proof(hashes=b"".join(hashes), splits=b"".join(splits))


def compute_root(
    size: int, leaves: Mapping[int, bytes], *, keys: Sequence[int] | None, proof: Proof
) -> bytes:
    """Compute the root of a list of ``size`` entries from the opened ones and their proof.

    Args:
        size: Entries of the list, >= 1.
        leaves: Opened leaves by place, ascending; at least one.
        keys: Keys of the opened entries, in order; ``None``: the tree has none.
        proof: Hashes and splits that lead to the root.

    Raises:
        ProtocolError: The proof is longer or shorter than it has to be, or a key is on the wrong
            side of a split.
    """
    known = dict(zip(leaves, keys, strict=True)) if keys is not None else {}
    hashes = octets.Reader(proof.hashes, what="a proof")
    splits = octets.Reader(proof.splits, what="a proof")
    nodes, level = dict(leaves), 0
    spans = {at: (key, key) for at, key in known.items()}
    while size > 1:
        above, wider = dict[int, bytes](), dict[int, tuple[int, int]]()
        # Distinct parents in ascending order: the order in which `prove` lists hashes and splits.
        for parent in dict.fromkeys(at >> 1 for at in nodes):
            left, right = 2 * parent, 2 * parent + 1
            found = [spans[each] for each in (left, right) if each in spans]
            if found:
                wider[parent] = found[0][0], found[-1][1]
            if right == size:  # an odd last node moves up unchanged
                above[parent] = nodes[left]
                continue
            split = b""
            if keys is not None:
                split = _read_split(known.get(right << level), splits)
                _check_split(split, spans.get(left), spans.get(right))
            # Siblings that are opened themselves are not in the proof.
            pair = [nodes.get(each) or hashes.take(HASH_BYTES) for each in (left, right)]
            above[parent] = _hash_node(split, *pair)
        nodes, spans, size, level = above, wider, -(-size // 2), level + 1
    hashes.finish()
    splits.finish()
    return nodes[0]


def _read_split(opened: int | None, splits: octets.Reader) -> bytes:
    return splits.take(_KEY_BYTES) if opened is None else opened.to_bytes(_KEY_BYTES, "little")


def _check_split(split: bytes, left: tuple[int, int] | None, right: tuple[int, int] | None) -> None:
    """Check the split against the least and the largest opened key on either side."""
    border = int.from_bytes(split, "little")
    if (left is not None and left[1] >= border) or (right is not None and right[0] < border):
        raise ProtocolError("a key does not stand where the tree says")


def _to_rows(hashes: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), HASH_BYTES)
