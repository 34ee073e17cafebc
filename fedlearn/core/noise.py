r"""Noise for differential privacy: the discrete Gaussian, from a cryptographic source.

:math:`P[X = x] \propto \exp(-x^2 / 2\sigma^2)` on the integers. Floating-point noise leaks
information through its low bits (Mironov, 2012); integer noise does not. Samples are drawn by
rejection. A proposal is x = s y + r, with y drawn by inversion of a table and r uniformly from
[0, s), where s is a power of two near :math:`\sigma / 8`. It is accepted with probability
:math:`\exp(-(x^2 - x_y^2) / 2\sigma^2)`, where :math:`x_y` is the number nearest to 0 that has
this y. Both steps compare random bits with a bound: 16 or 32 bits are enough for almost every
sample; for the rest, more bits are read until the comparison is decided.

References:
    Canonne, Kamath and Steinke, 2020, `The Discrete Gaussian for Differential Privacy
    <https://arxiv.org/abs/2004.00010>`_.
    Mironov, 2012, `On Significance of the Least Significant Bits for Differential Privacy
    <https://doi.org/10.1145/2382196.2382264>`_.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedlearn.core.secret_bytes import SecretBytes

WordT = TypeVar("WordT", np.uint16, np.uint32, np.uint64)

#: Above this, proposals are not exact in float64, in which acceptance is decided.
MAX_SIGMA = 2.0**40

_BLOCK = 1 << 15  # samples at a time, so that intermediate arrays stay in the cache
_GUIDE_BITS = 16  # of a word
_TABLE_BITS = 128
_TAIL = 14  # standard deviations; the tail beyond has less than 2**-138 of the mass
_UNCLEAR = -1
#: Bounds the float64 error of an acceptance probability: a few roundings of 2**-53.
_ROUNDING = 2.0**-48
_SPARE = 1.08  # proposals per sample; between 97 % and 100 % of them are accepted
_ZEROS = bytes(8 * _BLOCK)


class SecretStream:
    """A cryptographic source of random words: the keystream of AES-256 in counter mode.

    Guarantees:
        As unpredictable as the key, which must not be used for anything else.
    """

    def __init__(self, key: SecretBytes) -> None:
        cipher = Cipher(algorithms.AES256(key.reveal()), modes.CTR(bytes(16)))
        self._encryptor = cipher.encryptor()

    @classmethod
    def fresh(cls) -> "SecretStream":
        """Return a stream with a new key from the operating system's generator."""
        return cls(SecretBytes.generate(32))

    def words(self, dtype: type[WordT], num: int) -> NDArray[WordT]:
        """Return ``num`` uniform words."""
        size = num * np.dtype(dtype).itemsize
        zeros = _ZEROS[:size] if size <= len(_ZEROS) else bytes(size)
        return np.frombuffer(self._encryptor.update(zeros), dtype)

    def bits(self, num: int) -> int:
        """Return an integer of ``num`` uniform bits, a multiple of 8."""
        return int.from_bytes(self._encryptor.update(bytes(num // 8)), "little")


def sample_discrete_gaussian(sigma: float, size: int, *, source: SecretStream) -> NDArray[np.int64]:
    """Return independent samples of the discrete Gaussian.

    Args:
        sigma: The distribution's parameter, in (0, 2**40]. From 1 on it equals the standard
            deviation to 8 digits.
        size: Number of samples.
        source: The source of randomness.

    Returns:
        Shape [size].

    Raises:
        ValueError: ``sigma`` is out of range.

    Guarantees:
        Within 2**-110 of the distribution, in total variation, for each sample: the table of
        proposals is rounded to 128 bits and ends at 14 sigma; the rest is exact.

    Example:
        >>> sample_discrete_gaussian(3.0, 5, source=SecretStream(SecretBytes(bytes(32))))
        array([ 1,  0, -2,  0, -2])
    """
    samples = np.zeros(size, np.int64)
    add_discrete_gaussian(samples, sigma=sigma, source=source)
    return samples


def add_discrete_gaussian(
    numbers: NDArray[np.int32] | NDArray[np.int64], *, sigma: float, source: SecretStream
) -> None:
    """Add independent samples of the discrete Gaussian in place.

    Errors and guarantees are those of :func:`sample_discrete_gaussian`.

    Args:
        numbers: Integers small enough that adding :func:`bound_sample` does not overflow.
        sigma: As in :func:`sample_discrete_gaussian`.
        source: The source of randomness.
    """
    if not 0.0 < sigma <= MAX_SIGMA:
        raise ValueError(f"sigma is {sigma}; give a number above 0, and at most 2**40")
    proposals, begin = build_proposals(sigma), 0
    while begin < len(numbers):
        num = min(_BLOCK, int(_SPARE * (len(numbers) - begin)) + 16)
        accepted = proposals.draw(num, source)[: len(numbers) - begin]
        part = numbers[begin : begin + len(accepted)]
        np.add(part, accepted, out=part, casting="same_kind")
        begin += len(accepted)


def bound_sample(sigma: float) -> int:
    """Return a bound on the magnitude of every sample.

    Example:
        >>> bound_sample(3.0)
        43
    """
    proposals = build_proposals(sigma)
    return -proposals.least << proposals.log_s


@dataclass(frozen=True, eq=False)
class Proposals:
    """The proposal distribution for one parameter sigma.

    Attributes:
        sigma: The parameter.
        log_s: Binary logarithm of s.
        least: The y of the table's first row.
        table: By row, P[y is at most that of the row] in units of 2**-128.
        guide: The row for each value of a draw's first 16 bits, or :data:`_UNCLEAR` if those bits
            do not determine it.
    """

    sigma: float
    log_s: int
    least: int
    table: list[int]
    guide: NDArray[np.int64]

    def draw(self, num: int, source: SecretStream) -> NDArray[np.int64]:
        """Make ``num`` proposals and return the accepted ones."""
        y = self.rows(num, source) + self.least
        if self.log_s == 0:
            return y  # s = 1: the proposal is the target distribution itself
        s = 1 << self.log_s
        offset = _draw_uniform(self.log_s, num, source)
        x = (y << self.log_s) + offset
        # n is the number of this y that is nearest to 0: s y if y >= 0, else s y + s - 1.
        from_nearest = np.where(y < 0, offset - (s - 1), offset)
        product = from_nearest.astype(np.float64)
        product *= 2 * x - from_nearest  # x² - n² = (x - n)(x + n)
        chance = np.exp(product * (-0.5 / self.sigma**2))
        words = source.words(np.uint32, num)
        level = words * 2.0**-32  # the uniform draw lies in [level, level + 2**-32)
        is_accepted = level < chance
        # If the chance lies in or near that interval, decide again with more bits.
        is_unclear = np.abs(level + 2.0**-33 - chance) <= 2.0**-33 + _ROUNDING
        for at in np.flatnonzero(is_unclear).tolist():
            numbers = int(x[at]), int(x[at] - from_nearest[at])
            is_accepted[at] = self.accepts(*numbers, drawn=int(words[at]), source=source)
        return x[is_accepted]

    def rows(self, num: int, source: SecretStream) -> NDArray[np.int64]:
        """Draw rows of the table, by inversion: each with the probability of its y."""
        indices = source.words(np.uint16, num)
        rows = self.guide.take(indices)
        more = _TABLE_BITS - _GUIDE_BITS
        for at in np.flatnonzero(rows == _UNCLEAR).tolist():
            drawn = (int(indices[at]) << more) | source.bits(more)
            # bisect_right, since a row covers the draws below its bound.
            rows[at] = bisect_right(self.table, drawn)
        return rows

    def accepts(self, x: int, nearest: int, *, drawn: int, source: SecretStream) -> bool:
        """Decide with more bits whether a uniform draw is below the acceptance chance of ``x``.

        ``drawn`` has the first 32 bits of the draw.
        """
        num_bits = 32
        while True:
            drawn, num_bits = (drawn << 64) | source.bits(64), num_bits + 64
            with localcontext(prec=num_bits):  # in decimal digits: far more than num_bits bits
                exponent = Decimal(nearest**2 - x**2) / (2 * Decimal(self.sigma) ** 2)
                threshold = exponent.exp() * Decimal(2) ** num_bits
            if abs(Decimal(drawn) + Decimal("0.5") - threshold) > 1:
                return drawn < threshold


def _draw_uniform(num_bits: int, num: int, source: SecretStream) -> NDArray[np.int64]:
    if num_bits <= _GUIDE_BITS:
        return (source.words(np.uint16, num) >> np.uint16(16 - num_bits)).astype(np.int64)
    return (source.words(np.uint64, num) >> np.uint64(64 - num_bits)).astype(np.int64)


@lru_cache(maxsize=64)
def build_proposals(sigma: float) -> Proposals:
    """Build the proposal distribution for ``sigma``; cached, since the table is slow to compute."""
    log_s = max(0, math.frexp(sigma)[1] - 4)  # sigma / s in [8, 16)
    s = 1 << log_s
    reach = math.ceil(_TAIL * sigma / s) + 1
    table, total = list[int](), Decimal(0)
    with localcontext(prec=60):
        two_variances = 2 * Decimal(sigma) ** 2
        chances = [
            # Proportional to P[X = x_y], where x_y is the number nearest to 0 among s y … s y + s -
            # 1.
            (-(Decimal(s * y if y >= 0 else s * y + s - 1) ** 2) / two_variances).exp()
            for y in range(-reach, reach)
        ]
        unit = Decimal(2) ** _TABLE_BITS / sum(chances)
        for chance in chances:
            total += chance
            table.append(int(total * unit))
    # Rounding down must not leave draws above the last bound.
    table[-1] = 1 << _TABLE_BITS
    # A bucket of 16-bit prefixes that lies between two bounds has one row. A bucket with a bound
    # in it stays unclear.
    guide = np.full(1 << _GUIDE_BITS, _UNCLEAR, np.int64)
    begin = 0
    for row, bound in enumerate(table):
        bucket = bound >> (_TABLE_BITS - _GUIDE_BITS)
        guide[begin:bucket] = row
        begin = max(begin, bucket + 1)
    return Proposals(sigma=sigma, log_s=log_s, least=-reach, table=table, guide=guide)
