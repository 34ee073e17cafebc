"""Finds false shares of a secret: shares are a Reed-Solomon code word and are decoded as one.

The shares of one limb are the values of a polynomial of degree below t at M points. If at most
(M - t) / 2 holders send other values, there is exactly one such polynomial that passes through all
the rest, and Gao's algorithm finds it in O(M²). A share counts as false if any of its limbs is, so
it is enough to decode one random combination of the limbs: a false share lies on the polynomial of
the combination, and goes unnoticed, with probability 1 / p.

References:
    Gao, 2003, `A New Algorithm for Decoding Reed-Solomon Codes
    <https://doi.org/10.1007/978-1-4757-3789-9_5>`_.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedlearn.secagg.shamir import PRIME, Field, draw_uniform, invert, reduce

_P = np.uint64(PRIME)


def find_false_shares(
    points: Sequence[int], shares_ML: NDArray[np.uint32], *, threshold: int
) -> list[int] | None:
    """Find the places of the false shares; ``None`` if there are too many to tell.

    Args:
        points: Evaluation points of the shares: M of them, distinct and in [1, p).
        shares_ML: The shares, each of L limbs below p.
        threshold: t.

    Example:
        >>> from fedlearn.core.secret_bytes import SecretBytes
        >>> from fedlearn.secagg.shamir import share
        >>> points = [1, 2, 3, 4, 5, 6]
        >>> shares = share([SecretBytes.generate(32)], threshold=2, points=points)[:, 0]
        >>> shares[[1, 4]] = 7
        >>> find_false_shares(points, shares, threshold=2)
        [1, 4]
    """
    x_M = np.array(points, np.uint64)
    limbs_ML = shares_ML.astype(np.uint64)
    # Drawn after the shares have arrived: with known weights, a liar could let the errors of its
    # limbs cancel.
    weights_L = draw_uniform((limbs_ML.shape[1],))
    y_M = reduce(reduce(limbs_ML * weights_L).sum(axis=1))
    polynomial = _decode(x_M, y_M, threshold=threshold)
    if polynomial is None:
        return None
    return np.flatnonzero(_evaluate(polynomial, x_M) != y_M).tolist()


def _decode(x_M: Field, y_M: Field, *, threshold: int) -> Field | None:
    """Return the polynomial of degree below t through all but (M - t) / 2 values, if there is one.

    Here and below, coefficients start with the constant and have no zeros at the end.
    """
    master = _build_vanishing(x_M)
    before, now = master, _interpolate(x_M, y_M, master)
    u_before, u_now = np.zeros(0, np.uint64), np.ones(1, np.uint64)
    # Gao's step 2: stop at the first remainder of degree below (M + t) / 2.
    # The extended Euclidean algorithm, stopped halfway; now = u_now * interpolated (mod master).
    while 2 * (len(now) - 1) >= len(x_M) + threshold:
        quotient, rest = _divide(before, now)
        before, now = now, rest
        u_before, u_now = u_now, _subtract(u_before, _multiply(quotient, u_now))
    polynomial, rest = _divide(now, u_now)
    return polynomial if not len(rest) and len(polynomial) <= threshold else None


def _build_vanishing(x_M: Field) -> Field:
    """Return the product of (X - x) over all x."""
    product = np.zeros(len(x_M) + 1, np.uint64)
    product[0] = 1
    for degree, x in enumerate(x_M):
        # Times X: the top coefficient is still 0, so the roll puts a 0 in front.
        shifted = np.roll(product[: degree + 2], 1)
        product[: degree + 2] = reduce(shifted + reduce(product[: degree + 2] * (_P - x)))
    return product


def _interpolate(x_M: Field, y_M: Field, master: Field) -> Field:
    """Return the polynomial of degree below M through all values.

    By Lagrange it is the sum of y / master'(x) times master / (X - x). Horner's rule divides for
    all x at once.
    """
    quotients_M, slopes_M = np.zeros_like(x_M), np.zeros_like(x_M)
    rows = []
    # Leave out the constant: Horner's rule would give the remainder there, which is 0.
    for coefficient in master[:0:-1]:
        quotients_M = reduce(quotients_M * x_M + coefficient)
        slopes_M = reduce(slopes_M * x_M + quotients_M)
        rows.append(quotients_M)
    weights_M = reduce(y_M * invert(slopes_M))
    sums = [reduce(reduce(row * weights_M).sum(keepdims=True))[0] for row in reversed(rows)]
    return _trim(np.array(sums, np.uint64))


def _evaluate(polynomial: Field, x_M: Field) -> Field:
    found = np.zeros_like(x_M)
    for coefficient in polynomial[::-1]:
        found = reduce(found * x_M + coefficient)
    return found


def _divide(numerator: Field, denominator: Field) -> tuple[Field, Field]:
    # Long division; the denominator must not be zero.
    rest, size = numerator.copy(), len(denominator)
    quotient = np.zeros(max(len(numerator) - size + 1, 0), np.uint64)
    lead = invert(denominator[-1:])
    for at in range(len(quotient) - 1, -1, -1):
        factor = reduce(rest[at + size - 1] * lead)
        quotient[at : at + 1] = factor
        rest[at : at + size] = reduce(rest[at : at + size] + reduce(denominator * (_P - factor)))
    return quotient, _trim(rest[: size - 1])


def _multiply(a: Field, b: Field) -> Field:
    product = np.zeros(max(len(a) + len(b) - 1, 0), np.uint64)
    for at, factor in enumerate(a):
        product[at : at + len(b)] = reduce(product[at : at + len(b)] + reduce(b * factor))
    return product


def _subtract(a: Field, b: Field) -> Field:
    difference = np.zeros(max(len(a), len(b)), np.uint64)
    difference[: len(a)] = a
    difference[: len(b)] = reduce(difference[: len(b)] + _P - b)
    return _trim(difference)


def _trim(polynomial: Field) -> Field:
    """Drop zero coefficients above the polynomial's degree; the zero polynomial is empty."""
    return (
        polynomial[: int(np.flatnonzero(polynomial)[-1]) + 1]
        if polynomial.any()
        else polynomial[:0]
    )
