"""What secure aggregation costs as a formula, with the coefficients of this machine.

======== ==================================================================================
n k t q  clients, neighbours, threshold, quorum
s        signatures that a client looks at: q in the complete graph, a sample in a sparse one
h        holders of a client's secrets: n in the complete graph, k in a sparse one
P(x)     hashes of a proof of x clients of n; nothing where these are all
S D      clients that sent their vector, clients that shared and then dropped out
d        numbers in the vector; each takes 4 bytes
mask     seconds to fold a byte of a mask, and to set up a mask's cipher
a v      seconds of a key agreement with its key derivation, of a signature's verification
row      seconds to read, keep or write one row of a message: an advert, a packet, a share
others   see :class:`Costs`
======== ==================================================================================

client = (k + 1) (4 d mask + setup) + d quantise + 3 k a + (k + 1 + s) v + (3 k + s + h) row
         + t h share + (P(k + 1) + 2 P(s)) hash

server = (S + D k S/n) (4 d mask + setup) + 4 d S add + d decode
         + D k S/n a + n (v + 3 a) + S v + n (2 k + 2 h + t) row
         + n t combine + (1 set of holders, or n) t^2 interpolate + n log2 n level

upload = 4 d + 92 k + 44 h + what is the same for all
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import keys, masking, merkle, messages, shamir
from fedlearn.secagg.fixed_point import Lane, decode, encode, vector_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.messages import ADVERT
from fedlearn.secagg.parameters import num_audited, num_holders, risk_bits
from fedlearn.secagg.session import Stage
from fedlearn.secagg.terms import Terms

NowS = Callable[[], float]

#: Bytes of an upload that depend on nothing: headers, advert, session ids, signature, weight.
_CONSTANT_BYTES = 390
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The coefficients, in seconds.

    Attributes:
        mask_byte: To expand and add one byte of a mask.
        mask_setup: To begin a mask.
        quantise: Of one number: rounding, its noise, packing.
        decode: Of one number of the sum.
        add_byte: To read and add one byte of a masked vector.
        agree: One key agreement and derivation.
        verify: One signature.
        hash: One hash of a proof, checked.
        level: One level of a tree in a proof, made.
        row: One row of a message, read or written.
        share: One share of a client's two secrets, for each of the t coefficients.
        combine: One secret, for each of t shares that go into it.
        interpolate: The weights of one set of t holders, for each of t**2.
    """

    mask_byte: float
    mask_setup: float
    quantise: float
    decode: float
    add_byte: float
    agree: float
    verify: float
    hash: float
    level: float
    row: float
    share: float
    combine: float
    interpolate: float

    def client(self, terms: Terms) -> float:
        """Return the seconds of one client in a round."""
        n, k, t = terms.num_clients, terms.num_neighbours, terms.threshold
        h, s, size = num_holders(n, k), num_opened(terms), terms.lanes[0].size
        hashes = num_hashes(n, k + 1) + 2 * num_hashes(n, s)
        return (
            (k + 1) * (4 * size * self.mask_byte + self.mask_setup)
            + size * self.quantise
            + 3 * k * self.agree
            + (k + 1 + s) * self.verify
            + (3 * k + s + h) * self.row
            + t * h * self.share
            + (hashes if k < n - 1 else 0.0) * self.hash
        )

    def server(self, terms: Terms, *, num_dropped: int) -> float:
        """Return the seconds of the coordinator in a round."""
        n, k, t = terms.num_clients, terms.num_neighbours, terms.threshold
        h, size, survivors = num_holders(n, k), terms.lanes[0].size, n - num_dropped
        pairs = num_dropped * k * survivors / n
        sets = 1 if terms.topology is Topology.COMPLETE else n
        return (
            (survivors + pairs) * (4 * size * self.mask_byte + self.mask_setup)
            + 4 * size * survivors * self.add_byte
            + size * self.decode
            + (pairs + 3 * n) * self.agree
            + (n + survivors) * self.verify
            + n * (2 * k + 2 * h + t) * self.row
            + n * t * self.combine
            + sets * t * t * self.interpolate
            + n * math.log2(n) * self.level
        )


def num_opened(terms: Terms) -> int:
    """Return s: how many signatures a client looks at where a tenth of the clients is missing."""
    if terms.topology is Topology.COMPLETE:
        return terms.quorum
    risk = risk_bits(terms.sigma_bits, adversary=terms.adversary)
    signed = terms.num_clients - terms.num_clients // 10
    return num_audited(signed, quorum=terms.quorum, risk_bits=risk)


def num_hashes(size: int, num_opened: int) -> float:
    """Return how many hashes open so many places of a tree, if these are drawn at random.

    Of a node without an opened place nothing is sent, of one with such places on one side alone a
    hash.
    """
    total, nodes, reached = 0.0, float(size), float(num_opened)
    while nodes > 1.0:
        nodes /= 2.0
        places = size / nodes  # under a node of the level above
        above = nodes * (1.0 - math.exp(num_opened * math.log1p(-min(places / size, 1.0 - 1e-12))))
        total, reached = total + 2.0 * above - reached, above
    return total


def download_bytes(terms: Terms) -> dict[Stage, float]:
    """Return what one client is sent, by stage, where a tenth of the clients is missing."""
    n, k, s = terms.num_clients, terms.num_neighbours, num_opened(terms)
    is_whole = terms.topology is Topology.COMPLETE
    bitmap, signed = 4 + n / 8, n - n // 10
    roster = 52.0 + ADVERT.num_bytes * (k + 1)
    signatures = bitmap + 32 + 4 + keys.SIGNATURE_BYTES * s + 4 + 16
    if not is_whole:
        roster += 40 * num_hashes(n, k + 1)  # of splits there are hardly fewer than hashes
        signatures += 40 * s + 40 * num_hashes(n, s) + 32 * num_hashes(signed, s)
    bodies = {
        Stage.ADVERTISE: keys.SIGNATURE_BYTES + len(terms.to_bytes()),
        Stage.SHARE: roster,
        Stage.MASK: 4 + (8 + messages.PACKET_BYTES) * k,
        Stage.CONFIRM: bitmap,
        Stage.UNMASK: signatures,
    }
    return {stage: messages.HEADER_BYTES + body for stage, body in bodies.items()}


def whole_download_bytes(terms: Terms) -> float:
    """Return what one client was sent when it was sent the roster, survivors and q signatures."""
    n, k, q = terms.num_clients, terms.num_neighbours, terms.quorum
    bodies = (
        keys.SIGNATURE_BYTES + len(terms.to_bytes()),
        4 + ADVERT.num_bytes * n,
        4 + (8 + messages.PACKET_BYTES) * k,
        4 + 8 * (n - n // 10),
        4 + (8 + keys.SIGNATURE_BYTES) * q,
    )
    return sum(messages.HEADER_BYTES + body for body in bodies)


def upload_bytes(terms: Terms) -> int:
    """Return what one client sends in a round, in all its messages."""
    k = terms.num_neighbours
    rows = messages.PACKET_BYTES * k + (8 + shamir.SHARE_BYTES) * num_holders(terms.num_clients, k)
    return 4 * terms.lanes[0].size + rows + _CONSTANT_BYTES


def measure(now_s: NowS, *, size: int) -> Costs:
    """Measure each coefficient by itself: the median of a few runs.

    Args:
        now_s: The watch.
        size: Numbers in the vector: what fits the cache costs less for each number.
    """

    def cost(action: Callable[[], object], num: float) -> float:
        seconds = []
        for _ in range(_REPEATS):
            before_s = now_s()
            action()
            seconds.append(now_s() - before_s)
        return float(np.median(seconds)) / num

    lane = _lane(size)
    rng = Seed(0).numpy()
    values, noise = rng.random(size) - 0.5, rng.integers(0, 1 << 32, size, np.uint32)
    words = encode(lane, values, factor=0.5, noise=noise)
    packed = messages.encode(
        messages.MaskedVector(session=bytes(32), packed=masking.pack([lane], [words]))
    )
    sums = masking.zeros([lane])
    many = [SecretBytes.generate(32) for _ in range(20)]
    masks = masking.MaskKeys(plus=many[:10], minus=many[10:])
    tiny = np.zeros(1, np.uint32)
    setup = cost(lambda: masking.fold([tiny], masks, num_threads=1), len(many))

    def quantise() -> None:
        drawn = masking.keystream(many[0], 4 * size).view(np.uint32)
        fixed = encode(lane, values, factor=0.5, noise=drawn)
        sent = masking.pack([lane], [fixed])
        messages.encode(messages.MaskedVector(session=bytes(32), packed=sent))

    def add() -> None:
        vector = messages.decode(packed)
        assert isinstance(vector, messages.MaskedVector)
        masking.add_packed(sums, vector.packed, lanes=[lane])

    folded = cost(lambda: masking.fold(sums, masks, num_threads=1), len(many))
    return Costs(
        mask_byte=(folded - setup) / (4 * size),
        mask_setup=setup,
        quantise=cost(quantise, size),
        decode=cost(lambda: decode(lane, words, num_clients=100), size),
        add_byte=cost(add, 4 * size),
        **_of_keys(cost),
        **_of_shares(cost),
    )


def _lane(size: int) -> Lane:
    return vector_lane(
        "delta",
        size=size,
        bound=8.0,
        modulus_bits=32,
        num_clients=100,
        weighted=True,
    )


def _of_keys(cost: Callable[[Callable[[], object], float], float]) -> dict[str, float]:
    num = 50
    agreement = keys.KeyAgreement(SecretBytes.generate(32))
    theirs = keys.KeyAgreement(SecretBytes.generate(32)).public_key
    signer, public = keys.fresh_signer()
    signature = signer.sign(bytes(64))
    pair = (ClientId(1), ClientId(2))

    def agree() -> None:
        for _ in range(num):
            keys.pair_mask_key(agreement, theirs, session=bytes(32), pair=pair)

    def verify() -> None:
        for _ in range(num):
            keys.verify(public, signature, bytes(64))

    rows = {ClientId(i): SecretBytes(bytes(shamir.SHARE_BYTES)) for i in range(1000)}
    table = messages.Release(session=bytes(32), shares=rows)
    return {
        "agree": cost(agree, num),
        "verify": cost(verify, num),
        **_of_trees(cost),
        "row": cost(lambda: messages.decode(messages.encode(table)), 2 * len(rows)),
    }


def _of_trees(cost: Callable[[Callable[[], object], float], float]) -> dict[str, float]:
    size, places = 1 << 12, list(range(0, 1 << 12, 20))
    entries = [merkle.leaf_of(at.to_bytes(8, "little")) for at in range(size)]
    tree = merkle.MerkleTree.of(entries, keys=range(size))
    proof = tree.proof(places)
    opened = {at: entries[at] for at in places}
    num = len(proof.hashes) / merkle.HASH_BYTES
    return {
        "hash": cost(lambda: merkle.root_of(size, opened, keys=places, proof=proof), num),
        "level": cost(lambda: tree.proof(places), math.log2(size)),
    }


def _of_shares(cost: Callable[[Callable[[], object], float], float]) -> dict[str, float]:
    holders, threshold, secrets = 100, 67, 100
    both = [SecretBytes.generate(32) for _ in range(2)]
    points = range(1, holders + 1)
    shares = shamir.share(both, threshold=threshold, points=points)[:threshold, 0]
    shares_MTL = np.broadcast_to(shares, (secrets, *shares.shape))
    same_MT = np.broadcast_to(np.arange(1, threshold + 1), (secrets, threshold))
    other_MT = same_MT + np.arange(secrets)[:, None]

    def one_set() -> object:
        return shamir.combine(same_MT, shares_MTL)

    of_one = cost(one_set, 1)
    of_many = cost(lambda: shamir.combine(other_MT, shares_MTL), 1)
    return {
        "share": cost(
            lambda: shamir.share(both, threshold=threshold, points=points), threshold * holders
        ),
        "combine": of_one / (secrets * threshold),
        "interpolate": (of_many - of_one) / (secrets * threshold**2),
    }
