"""Shamir's secret sharing over GF(p), p = 2**31 - 1.

A secret of 32 bytes is cut into nine limbs of 30 bits, and each limb is shared separately: any
t shares give the secret, and t - 1 shares are independent of it (for any number of holders
below p). The shares of all secrets for all holders are one exact matrix product.

References:
    Shamir, 1979, `How to share a secret <https://doi.org/10.1145/359168.359176>`_.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.secret_bytes import SecretBytes

#: A Mersenne prime: products of two elements fit uint64, and shifts and additions reduce them.
PRIME = (1 << 31) - 1
SECRET_BYTES = 32
#: Below p whatever the secret's bits are: 31 bits could be p itself, which equals 0.
LIMB_BITS = 30
NUM_LIMBS = -(-SECRET_BYTES * 8 // LIMB_BITS)
#: One holder's share of one secret.
SHARE_BYTES = 4 * NUM_LIMBS

#: Largest t: a product sums t terms below 2**32, and float64 is exact up to 2**53.
MAX_THRESHOLD = 1 << 16

_P = np.uint64(PRIME)
_31, _16, _32 = np.uint64(31), np.uint64(16), np.uint64(32)
_LOW = np.uint64(0xFFFF)

Field: TypeAlias = NDArray[np.uint64]


def share(
    secrets: Sequence[SecretBytes], *, threshold: int, points: Sequence[int]
) -> NDArray[np.uint32]:
    """Compute every holder's shares of every 32-byte secret: shape [holders, secrets, limbs].

    Raises:
        ValueError: The threshold is not 1 to the number of holders, or their points are not
            distinct and in [1, p).

    Guarantees:
        Any t shares of a secret determine it; any t - 1 are uniform, whatever it is.
    """
    if not 1 <= threshold <= min(len(points), MAX_THRESHOLD):
        raise ValueError(f"a threshold of {threshold} with {len(points)} holders")
    limbs = np.stack([_to_limbs(secret) for secret in secrets])
    coefficients = draw_uniform((threshold - 1, limbs.size))
    return evaluate(limbs, coefficients, points=points)


def evaluate(limbs: Field, coefficients: Field, *, points: Sequence[int]) -> NDArray[np.uint32]:
    """Evaluate the polynomials with constants ``limbs``, shape [secrets, limbs], at ``points``.

    ``coefficients`` are those of x, x**2, …: shape [t - 1, secrets * limbs], below p.
    """
    x = _require_points(points)
    rows = np.concatenate([limbs.reshape(1, -1), coefficients])
    powers = np.ones((x.size, len(rows)), np.uint64)
    for degree in range(1, len(rows)):
        powers[:, degree] = reduce(powers[:, degree - 1] * x)
    return _matmul(powers, rows).astype(np.uint32).reshape(x.size, *limbs.shape)


def combine(
    points_MT: NDArray[np.int64], shares_MTL: NDArray[np.uint32]
) -> list[SecretBytes | None]:
    """Recover, for each of M rows, the secret that the shares of t holders give at their points.

    The shares must be canonical: below p. A secret is ``None`` if it does not fit 32 bytes, which
    shows that one of its shares is false.
    """
    # Many rows have the same holders: compute the weights of each distinct row only once.
    rows, which = np.unique(points_MT, axis=0, return_inverse=True)
    weights = _lagrange_at_zero(rows)[which.reshape(-1)]
    terms = reduce(weights[:, :, None] * shares_MTL.astype(np.uint64))
    return [_from_limbs(limbs) for limbs in reduce(terms.sum(axis=1))]


def to_bytes(shares: NDArray[np.uint32]) -> bytes:
    """Encode limbs as little-endian bytes."""
    return shares.astype("<u4").tobytes()


def from_bytes(data: bytes) -> NDArray[np.uint32]:
    """Decode the limbs in ``data``; they need not be shares of any secret."""
    return np.frombuffer(data, "<u4").astype(np.uint32)


def is_canonical(data: bytes) -> bool:
    """Return whether all limbs in ``data`` are elements of the field, below p."""
    return bool((np.frombuffer(data, "<u4") < PRIME).all())


def draw_uniform(shape: tuple[int, ...]) -> Field:
    """Draw secret uniform elements of the field, by rejection sampling."""
    size = int(np.prod(shape))
    found = np.empty(0, np.uint32)
    while found.size < size:
        # 8 spare numbers: one draw is nearly always enough.
        fresh = SecretBytes.generate(4 * (size - found.size + 8)).reveal()
        # 31 random bits, of which only p itself is rejected; taking p as 0 would favour 0.
        drawn = np.frombuffer(fresh, np.uint32) & np.uint32(PRIME)
        found = np.concatenate([found, drawn[drawn < PRIME]])
    return found[:size].astype(np.uint64).reshape(shape)


def _require_points(points: Sequence[int]) -> Field:
    if len(set(points)) != len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError("evaluation points are distinct and in [1, 2**31 - 1)")
    return np.array(points, np.uint64)


def _to_limbs(secret: SecretBytes) -> Field:
    number = int.from_bytes(secret.reveal(), "little")
    if len(secret.reveal()) != SECRET_BYTES:
        raise ValueError(f"a shared secret has {SECRET_BYTES} bytes")
    mask = (1 << LIMB_BITS) - 1
    return np.array([(number >> LIMB_BITS * i) & mask for i in range(NUM_LIMBS)], np.uint64)


def _from_limbs(limbs: Field) -> SecretBytes | None:
    values = [int(limb) for limb in limbs]
    number = sum(value << LIMB_BITS * i for i, value in enumerate(values))
    # Shares of a true secret always combine to limbs of 30 bits.
    if max(values) >> LIMB_BITS or number >> SECRET_BYTES * 8:
        return None
    return SecretBytes(number.to_bytes(SECRET_BYTES, "little"))


def reduce(x: Field) -> Field:
    """Return x mod p for x < 2**64."""
    # 2**31 = 1 (mod p), so the high bits are added to the low ones; twice leaves less than 2 p.
    x = (x & _P) + (x >> _31)
    x = (x & _P) + (x >> _31)
    return np.where(x >= _P, x - _P, x)


def _matmul(a: Field, b: Field) -> Field:
    # Four products of 16-bit halves are exact in float64, and run in BLAS; numpy multiplies integer
    # matrices without it.
    a_low, a_high = (a & _LOW).astype(np.float64), (a >> _16).astype(np.float64)
    b_low, b_high = (b & _LOW).astype(np.float64), (b >> _16).astype(np.float64)
    low = reduce((a_low @ b_low).astype(np.uint64))
    high = reduce((a_high @ b_high).astype(np.uint64))
    middle = reduce((a_low @ b_high + a_high @ b_low).astype(np.uint64))
    # low + 2**16 middle + 2**32 high; all are below 2**31, so the shifts stay in uint64.
    return reduce(low + reduce(middle << _16) + reduce(high << _32))


def _lagrange_at_zero(x_MT: NDArray[np.int64]) -> Field:
    # At 0, the polynomial through the points (x_i, y_i) is the sum of w_i y_i, with
    # w_i = prod_{j != i} x_j / (x_j - x_i). All rows at once: [M, T].
    x = x_MT.astype(np.uint64)
    numerator, denominator = np.ones_like(x), np.ones_like(x)
    for j in range(x.shape[1]):
        others = np.arange(x.shape[1]) != j
        other = x[:, j : j + 1]
        numerator = np.where(others, reduce(numerator * other), numerator)
        difference = reduce(other + _P - x)
        denominator = np.where(others, reduce(denominator * difference), denominator)
    return reduce(numerator * invert(denominator))


def invert(x: Field) -> Field:
    """Return 1 / x mod p, computed as x**(p - 2) by Fermat's little theorem."""
    result, square, exponent = np.ones_like(x), x, PRIME - 2
    while exponent:
        if exponent & 1:
            result = reduce(result * square)
        square = reduce(square * square)
        exponent >>= 1
    return result
