"""What secure aggregation costs as a formula, with the coefficients of this machine.

======== ==================================================================================
n k t q  clients, neighbours, threshold, quorum
h        holders of a client's secrets: n in the complete graph, k in a sparse one
S D      clients that sent their vector, clients that shared and then dropped out
d        numbers in the vector; each takes 4 bytes
mask     seconds to fold a byte of a mask, and to set up a mask's cipher
a v      seconds of a key agreement with its key derivation, of a signature's verification
row      seconds to read, keep or write one row of a message: an advert, a packet, a share
others   see :class:`Costs`
======== ==================================================================================

client = (k + 1) (4 d mask + setup) + d quantise + 3 k a + (n + q) v + (n + 2 k + q + h) row
         + t h share

server = (S + D k S/n) (4 d mask + setup) + 4 d S add + d decode
         + D k S/n a + n (v + 3 a) + S v + n (2 k + 2 h + t) row
         + n t combine + (1 set of holders, or n) t^2 interpolate

upload = 4 d + 92 k + 44 h + what is the same for all
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import Seed
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import keys, masking, messages, shamir
from fedlearn.secagg.fixed_point import Lane, decode, encode, vector_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.parameters import num_holders
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
    row: float
    share: float
    combine: float
    interpolate: float

    def client(self, terms: Terms) -> float:
        """Return the seconds of one client in a round."""
        n, k, t, q = terms.num_clients, terms.num_neighbours, terms.threshold, terms.quorum
        h, size = num_holders(n, k), terms.lanes[0].size
        return (
            (k + 1) * (4 * size * self.mask_byte + self.mask_setup)
            + size * self.quantise
            + 3 * k * self.agree
            + (n + q) * self.verify
            + (n + 2 * k + q + h) * self.row
            + t * h * self.share
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
        )


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
        "row": cost(lambda: messages.decode(messages.encode(table)), 2 * len(rows)),
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
