r"""The matrix that correlates noise over rounds, so that their sum has less noise.

A model is the sum of all releases so far, so what matters is the noise in prefix sums. A
lower-triangular matrix C spreads one user's contribution over rows of :math:`C x`, to which
independent noise z is added. :math:`C^{-1}` undoes the spreading, and leaves noise
:math:`C^{-1} z`, part of which later rounds cancel. C is banded and Toeplitz: if a user takes part
at most once in b rounds, no two of that user's columns have a row in common.

========================= ==================================================
symbol                    here
========================= ==================================================
:math:`c_0 .. c_{b-1}`    ``diagonals``
:math:`b`                 their number, ``bands``
:math:`n`                 ``num_rounds``
:math:`A`                 prefix sums: the lower-triangular matrix of ones
========================= ==================================================

References:
    Choquette-Choo et al., 2023, `(Amplified) Banded Matrix Factorization: A unified approach to
    private training <https://arxiv.org/abs/2306.08153>`_ (bands and min-separation).
    McKenna, 2024, `Scaling up the Banded Matrix Factorization Mechanism for Differentially Private
    ML <https://arxiv.org/abs/2405.15913>`_ (Toeplitz matrices, and their objective in O(n b)).
    Fichtenberger, Henzinger and Upadhyay, 2023, `Constant Matters: Fine-grained Error Bound on
    Differentially Private Continual Observation <https://arxiv.org/abs/2202.11205>`_ (the square
    root of A, where the search begins).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import dtbsv

#: Integer that the first diagonal is scaled to. A finer one gains nothing, and takes bits in sums.
_FIRST = 1 << 10
#: The search ends when a step lowers the squared error by less than this, relatively.
_CLOSE = 1e-9


@dataclass(frozen=True)
class BandedMatrix:
    """A lower-triangular Toeplitz matrix of integers, whose scale does not matter.

    Attributes:
        diagonals: The numbers on its diagonals, c, from the main one down; the first is above 0.

    Raises:
        ValueError: The first diagonal is missing or below 1.
    """

    diagonals: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.diagonals or self.diagonals[0] < 1:
            raise ValueError(f"diagonals are {self.diagonals}; the first is at least 1")

    @property
    def norm(self) -> float:
        """The L2 norm of a whole column: how far one contribution of norm 1 moves the rows."""
        return math.hypot(*self.diagonals)

    @property
    def reach(self) -> int:
        """The largest absolute value of a row's product with numbers of at most 1."""
        return sum(map(abs, self.diagonals))

    def error(self, num_rounds: int) -> float:
        """Return the noise in prefix sums, relative to one release with the same guarantee.

        It is the root mean square over the noise of ``num_rounds`` prefix sums. Independent noise
        has an error of sqrt((n + 1) / 2).

        Example:
            >>> round(BandedMatrix((1,)).error(199), 6), BandedMatrix((2, 1)).error(199) < 9.0
            (10.0, True)
        """
        reached = np.asarray(self.diagonals[:num_rounds], np.float64)
        squares, _ = _objective(reached, num_rounds)
        # The noise is scaled to a whole column, even if the run is too short to use all of it.
        squared = squares * (self.norm / float(np.linalg.norm(reached))) ** 2
        return math.sqrt(squared / num_rounds)


def find_optimal(*, bands: int, num_rounds: int) -> BandedMatrix:
    r"""Find the matrix with the least noise in the prefix sums of a run, up to rounding.

    It minimizes :math:`\lVert c \rVert^2 \, \lVert A C^{-1} \rVert_F^2`, by L-BFGS from the
    diagonals of the square root of A. The same arguments give the same matrix on one machine.

    Args:
        bands: Most diagonals, b >= 1; capped at the number of rounds.
        num_rounds: Releases, n >= 1.

    Example:
        >>> find_optimal(bands=1, num_rounds=100)
        BandedMatrix(diagonals=(1,))
        >>> best = (find_optimal(bands=each, num_rounds=100) for each in (1, 2, 4, 100))
        >>> [round(each.error(100), 1) for each in best]
        [7.1, 5.2, 3.9, 2.3]
    """
    if bands < 1 or num_rounds < 1:
        raise ValueError(f"bands is {bands}, num_rounds {num_rounds}; both are at least 1")
    if min(bands, num_rounds) == 1:
        return BandedMatrix((1,))
    from scipy.optimize import minimize  # noqa: PLC0415 (takes half a second)

    root_b = _square_root(min(bands, num_rounds))

    def logarithm(rest: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        # The objective does not depend on the scale of c, so c_0 is fixed at 1.
        squared, slope_b = _objective(np.concatenate(([1.0], rest)), num_rounds)
        return math.log(squared), slope_b[1:] / squared

    found = minimize(
        logarithm, root_b[1:], jac=True, method="L-BFGS-B", options={"ftol": _CLOSE, "gtol": 0.0}
    ).x
    rounded = [_FIRST, *(round(_FIRST * float(each)) for each in found)]
    # A zero diagonal would still count as a band, and users need a group for each band.
    while rounded[-1] == 0:
        rounded.pop()
    divisor = math.gcd(*rounded)  # smaller numbers leave more room for sums to be exact
    return BandedMatrix(tuple(each // divisor for each in rounded))


def _square_root(bands: int) -> NDArray[np.float64]:
    # The square root of A has the diagonals binom(2 j, j) / 4**j = prod over i <= j of (1 - 1 / (2
    # i)).
    factors = 1.0 - 0.5 / np.arange(1, bands, dtype=np.float64)
    return np.concatenate(([1.0], np.cumprod(factors)))


def _objective(
    diagonals_b: NDArray[np.float64], num_rounds: int
) -> tuple[float, NDArray[np.float64]]:
    r"""Return :math:`\lVert c \rVert^2 \, \lVert A C^{-1} \rVert_F^2` and its gradient: shape [b].

    :math:`A C^{-1}` is Toeplitz as well; its first column d solves :math:`C d = 1`. Row t holds
    d_0 to d_t, so d_t is in n - t rows. With these counts as w and
    :math:`\lambda = C^{-T} (w \circ d)`, the derivative of :math:`\sum_t w_t d_t^2` by c_j is
    :math:`-2 \sum_t \lambda_t d_{t-j}`.
    """
    column_n = _solve(diagonals_b, np.ones(num_rounds), is_transposed=False)
    weighted_n = np.arange(num_rounds, 0, -1) * column_n
    squares, norm = float(weighted_n @ column_n), float(diagonals_b @ diagonals_b)
    adjoint_n = _solve(diagonals_b, weighted_n, is_transposed=True)
    slope_b = -2.0 * np.array(
        [adjoint_n[j:] @ column_n[: num_rounds - j] for j in range(len(diagonals_b))]
    )
    return norm * squares, 2.0 * diagonals_b * squares + norm * slope_b


def _solve(
    diagonals_b: NDArray[np.float64], right_n: NDArray[np.float64], *, is_transposed: bool
) -> NDArray[np.float64]:
    """Return the solution of C x = right, or of its transpose: shape [n]."""
    bands, num_rounds = len(diagonals_b), len(right_n)
    # Band storage of BLAS, in column-major order: row j holds diagonal j.
    rows_bn = np.empty((bands, num_rounds), order="F")
    rows_bn[:] = diagonals_b[:, None]
    solved: NDArray[np.float64] = dtbsv(bands - 1, rows_bn, right_n, lower=1, trans=is_transposed)
    return solved
