"""The matrix that correlates noise: its error matches explicit matrices, and is minimal."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from fedlearn.privacy.banded_matrix import BandedMatrix, find_optimal


def explicit(diagonals: Sequence[float], num_rounds: int) -> NDArray[np.float64]:
    """Return the matrix C: shape [n, n]."""
    column = np.zeros(num_rounds)
    column[: len(diagonals)] = diagonals[:num_rounds]
    made: NDArray[np.float64] = toeplitz(column, np.zeros(num_rounds))
    return made


def error_by_matrices(diagonals: Sequence[float], num_rounds: int) -> float:
    """Return the error by its definition, from explicit matrices."""
    inverse = np.linalg.inv(explicit(diagonals, num_rounds))
    prefix = np.tril(np.ones((num_rounds, num_rounds)))
    sensitivity = math.hypot(*diagonals)
    return float(np.linalg.norm(prefix @ inverse)) * sensitivity / math.sqrt(num_rounds)


@pytest.mark.parametrize("num_rounds", [1, 2, 7, 40])
@pytest.mark.parametrize("diagonals", [(1,), (7,), (4, 3), (1024, 500, 400, -30), (9, 0, 5)])
def test_the_error_is_that_of_the_matrices(diagonals: tuple[int, ...], num_rounds: int) -> None:
    """Computed by numpy from A times the inverse of C."""
    found = BandedMatrix(diagonals).error(num_rounds)
    assert found == pytest.approx(error_by_matrices(diagonals, num_rounds), rel=1e-10)


@pytest.mark.parametrize("num_rounds", [2, 3, 6])
def test_no_two_or_three_diagonals_have_less_error(num_rounds: int) -> None:
    """Compared with all values in steps of 1/64."""
    steps = np.arange(-16, 80) / 64.0
    two = min(error_by_matrices((1.0, second), num_rounds) for second in steps)
    assert find_optimal(bands=2, num_rounds=num_rounds).error(num_rounds) <= two * (1.0 + 1e-6)
    assert find_optimal(bands=2, num_rounds=num_rounds).error(num_rounds) >= two * (1.0 - 1e-3)
    three = min(
        error_by_matrices((1.0, second, third)[:num_rounds], num_rounds)
        for second in steps[16::2]
        for third in steps[::2]
    )
    assert find_optimal(bands=3, num_rounds=num_rounds).error(num_rounds) <= three * (1.0 + 1e-6)


@pytest.mark.parametrize(("bands", "num_rounds"), [(4, 50), (16, 200), (40, 40)])
def test_no_diagonal_a_little_larger_or_smaller_has_less_error(bands: int, num_rounds: int) -> None:
    """The diagonals are rounded, so the optimum holds up to that precision."""
    matrix = find_optimal(bands=bands, num_rounds=num_rounds)
    scale = 1024 // matrix.diagonals[0]
    best, diagonals = matrix.error(num_rounds), [scale * each for each in matrix.diagonals]
    for place, change in [(each, sign) for each in range(1, len(diagonals)) for sign in (-8, 8)]:
        moved = [*diagonals[:place], diagonals[place] + change, *diagonals[place + 1 :]]
        assert replace(matrix, diagonals=tuple(moved)).error(num_rounds) > best


@pytest.mark.parametrize("num_rounds", [16, 128, 1024])
def test_with_all_diagonals_it_is_close_to_what_no_mechanism_can_beat(num_rounds: int) -> None:
    """The nuclear norm of A, from its singular values 1 / (2 sin((2 j - 1) π / (4 n + 2)))."""
    angles = (2.0 * np.arange(1, num_rounds + 1) - 1.0) * math.pi / (4.0 * num_rounds + 2.0)
    least = float((0.5 / np.sin(angles)).sum()) / num_rounds
    found = find_optimal(bands=num_rounds, num_rounds=num_rounds).error(num_rounds)
    assert least < found < 1.09 * least


def test_more_bands_have_less_error() -> None:
    """Down from the root of (n + 1) / 2, the error of independent noise."""
    errors = [
        find_optimal(bands=bands, num_rounds=199).error(199) for bands in (1, 2, 4, 8, 16, 32)
    ]
    assert errors[0] == pytest.approx(10.0, rel=1e-12)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 3.0


def test_one_band_is_independent_noise() -> None:
    """So is one round, or the first of more bands than rounds."""
    assert (
        find_optimal(bands=1, num_rounds=50)
        == find_optimal(bands=9, num_rounds=1)
        == BandedMatrix((1,))
    )
    assert len(find_optimal(bands=9, num_rounds=3).diagonals) == 3
    assert find_optimal(bands=5, num_rounds=60) == find_optimal(bands=5, num_rounds=60)


def test_norm_and_reach_are_those_of_a_column_and_of_a_row() -> None:
    """The norm bounds one participation, the reach bounds a row."""
    rows = explicit((4, -3, 2), 9)
    assert BandedMatrix((4, -3, 2)).norm == pytest.approx(np.linalg.norm(rows[:, 0]))
    assert BandedMatrix((4, -3, 2)).reach == np.abs(rows).sum(axis=1).max()


def test_what_cannot_be_inverted_is_refused() -> None:
    """The error has the value."""
    for diagonals in [(), (0, 1), (-2, 1)]:
        with pytest.raises(ValueError, match="the first is at least 1"):
            BandedMatrix(diagonals)
    with pytest.raises(ValueError, match=r"bands is 0, num_rounds 5"):
        find_optimal(bands=0, num_rounds=5)
    with pytest.raises(ValueError, match=r"bands is 2, num_rounds 0"):
        find_optimal(bands=2, num_rounds=0)
