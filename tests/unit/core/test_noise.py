"""The discrete Gaussian: its distribution, its rare branches, and detection of wrong scales."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from fedlearn.core.noise import (
    MAX_SIGMA,
    SecretStream,
    WordT,
    add_discrete_gaussian,
    bound_sample,
    build_proposals,
    sample_discrete_gaussian,
)
from fedlearn.core.secret_bytes import SecretBytes

SIGMAS = [0.3, 0.7, 1.0, 3.2, 7.99, 16.0, 50.0, 1000.0]


def stream(seed: int = 0) -> SecretStream:
    """Return a reproducible stream."""
    return SecretStream(SecretBytes(seed.to_bytes(32, "little")))


def exact(sigma: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the integers within 14 sigma, and each one's probability by definition."""
    reach = math.ceil(14 * sigma) + 1
    numbers = np.arange(-reach, reach + 1)
    weights = np.exp(-(numbers.astype(np.float64) ** 2) / (2 * sigma**2))
    return numbers, weights / weights.sum()


def fits(samples: NDArray[np.int64], *, sigma: float) -> bool:
    """Tell whether a chi-squared test and the second moment accept samples, within 5 deviations."""
    numbers, chances = exact(sigma)
    expected = chances * len(samples)
    counts = np.bincount(samples - numbers[0], minlength=len(numbers))[: len(numbers)]
    common = expected >= 20
    cells = np.append(expected[common], max(len(samples) - expected[common].sum(), 1.0))
    found = np.append(counts[common], len(samples) - counts[common].sum())
    freedom = len(cells) - 1
    excess = (((found - cells) ** 2 / cells).sum() - freedom) / math.sqrt(2 * freedom)
    squares = numbers.astype(np.float64) ** 2
    variance = squares @ chances
    spread = math.sqrt((squares**2 @ chances - variance**2) / len(samples))
    moment = (samples.astype(np.float64) ** 2).mean()
    return bool(excess < 5) and bool(abs(moment - variance) < 5 * spread)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_samples_follow_the_distribution(sigma: float) -> None:
    """Frequencies match the definition, and so does the second moment."""
    assert fits(sample_discrete_gaussian(sigma, 200_000, source=stream()), sigma=sigma)


@pytest.mark.parametrize(
    ("sigma", "factor"),
    [
        *itertools.product(SIGMAS, [2 / 3, 3 / 2]),
        # For smaller sigma most samples are 0.
        *itertools.product([s for s in SIGMAS if s >= 1.0], [0.98, 1.02]),
    ],
)
def test_noise_of_another_scale_is_caught(sigma: float, factor: float) -> None:
    """The control of the test above: half as much, a third less, and even 2 % are detected."""
    assert not fits(sample_discrete_gaussian(sigma * factor, 200_000, source=stream()), sigma=sigma)


def test_samples_of_a_large_sigma_have_its_moments_and_fill_the_low_bits() -> None:
    """For blocks of at least 2**16 integers: variance, kurtosis, and uniform offsets."""
    sigma, num = 3.0e6, 400_000
    samples = sample_discrete_gaussian(sigma, num, source=stream())
    scaled = samples / sigma
    assert abs(scaled.mean()) < 5 / math.sqrt(num)
    assert abs((scaled**2).mean() - 1) < 5 * math.sqrt(2 / num)
    assert abs((scaled**4).mean() - 3) < 5 * math.sqrt(96 / num)
    offsets = np.bincount(samples & 255, minlength=256) / (num / 256)
    assert abs(((offsets - 1) ** 2).sum() * num / 256 - 255) < 5 * math.sqrt(2 * 255)


def test_no_number_is_left_out_at_the_seam_of_the_signs() -> None:
    """The block y = -1 ends just below 0, so the two sides must mirror each other there."""
    samples = sample_discrete_gaussian(40.0, 2_000_000, source=stream())
    for number in range(1, 9):
        below, above = (samples == -number).sum(), (samples == number).sum()
        assert abs(int(below) - int(above)) < 5 * math.sqrt(below + above)


def test_two_streams_differ_and_one_key_repeats() -> None:
    """A fresh stream draws its own key."""
    draws = [sample_discrete_gaussian(9.0, 64, source=SecretStream.fresh()) for _ in range(2)]
    assert (draws[0] != draws[1]).any()
    again = [sample_discrete_gaussian(9.0, 64, source=stream(7)) for _ in range(2)]
    assert (again[0] == again[1]).all()


def test_samples_are_added_to_what_is_there() -> None:
    """In int32 and int64, and for more than one block; control: another key adds other samples."""
    samples = sample_discrete_gaussian(1000.0, 70_000, source=stream())
    assert (samples != sample_discrete_gaussian(1000.0, 70_000, source=stream(1))).any()
    before = np.arange(70_000) - 35_000
    narrow, wide = before.astype(np.int32), before.astype(np.int64)
    add_discrete_gaussian(narrow, sigma=1000.0, source=stream())
    add_discrete_gaussian(wide, sigma=1000.0, source=stream())
    assert (narrow == before + samples).all()
    assert (wide == before + samples).all()


@pytest.mark.parametrize("sigma", [1e-3, 0.7, 3.2, 1000.0, 2.0**21])
def test_no_sample_is_beyond_the_largest(sigma: float) -> None:
    """Both ends of the table are within it, and the far end equals it."""
    proposals, largest = build_proposals(sigma), bound_sample(sigma)
    s, rows = 1 << proposals.log_s, len(proposals.table)
    lowest, highest = s * proposals.least, s * (proposals.least + rows - 1) + s - 1
    assert -lowest == largest >= highest
    assert largest >= 14 * sigma


class Told(SecretStream):
    """A stream of given values, to reach branches that random bits almost never take."""

    def __init__(self, *bits: int) -> None:
        self._told = list(bits)

    def bits(self, num: int) -> int:
        """Return the next given value."""
        return self._told.pop(0)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [3.2, pytest.param(50.0, marks=pytest.mark.slow)])
def test_the_table_says_the_distribution_to_128_bits(sigma: float) -> None:
    """Compared with rational arithmetic on 200 terms of the exponential series."""

    def exponential(minus_x: Fraction) -> Fraction:
        halved, total, term = minus_x / 1024, Fraction(0), Fraction(1)
        for k in range(1, 40):
            total, term = total + term, term * halved / k
        return _round_half_even(_round_half_even(total) ** 1024)

    proposals = build_proposals(sigma)
    s, rows = 1 << proposals.log_s, range(len(proposals.table))
    near = [s * y if y >= 0 else s * y + s - 1 for y in (row + proposals.least for row in rows)]
    weights = [exponential(Fraction(-(x**2)) / (2 * Fraction(sigma) ** 2)) for x in near]
    total, below = sum(weights), Fraction(0)
    for weight, bound in zip(weights, proposals.table, strict=True):
        below += weight / total
        assert abs(below - Fraction(bound, 1 << 128)) < Fraction(1, 1 << 120)


def _round_half_even(value: Fraction) -> Fraction:
    return Fraction(round(value * (1 << 400)), 1 << 400)


def test_a_draw_that_the_guide_leaves_open_is_settled_by_the_table() -> None:
    """One unit of 2**-128 to either side of a boundary."""
    proposals = build_proposals(3.2)
    row = int(np.argmax(np.diff(np.array(proposals.table, dtype=float))))
    bound, more = proposals.table[row], 112

    class OneBucket(Told):
        def words(self, dtype: type[WordT], num: int) -> NDArray[WordT]:
            return np.full(num, bound >> more, dtype)

    low = (1 << more) - 1
    rows = proposals.rows(2, OneBucket((bound - 1) & low, bound & low))
    assert rows.tolist() == [row, row + 1]


def test_a_proposal_that_32_bits_leave_open_is_settled_by_more() -> None:
    """Just below the probability it is accepted, just above it is not; a tie draws more bits."""
    proposals = build_proposals(50.0)
    x, nearest = 102, 100
    chance = math.exp(-(x**2 - nearest**2) / (2 * 50.0**2))
    level = int(chance * 2**32)
    assert proposals.accepts(x, nearest, drawn=level, source=Told(0))
    assert not proposals.accepts(x, nearest, drawn=level, source=Told((1 << 64) - 1))
    assert proposals.accepts(x, nearest, drawn=level - 1, source=Told((1 << 64) - 1))
    assert not proposals.accepts(x, nearest, drawn=level + 1, source=Told(0))


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 2 * MAX_SIGMA])
def test_a_sigma_out_of_range_is_refused(sigma: float) -> None:
    """The error has the value."""
    with pytest.raises(ValueError, match="sigma is"):
        sample_discrete_gaussian(sigma, 1, source=stream())
