"""Any t shares give the secret; t - 1 shares reveal nothing about it."""

from itertools import combinations

import numpy as np
import pytest

from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import shamir
from fedlearn.secagg.shamir import PRIME

SECRETS = [
    SecretBytes(bytes(32)),
    SecretBytes(b"\xff" * 32),
    SecretBytes(bytes(range(32))),
]


def test_any_three_of_six_shares_give_every_secret() -> None:
    """Also for points that are not consecutive. Two shares give something else."""
    points = [1, 2, 5, 9, 40, PRIME - 1]
    shares = shamir.share(SECRETS, threshold=3, points=points)
    for chosen in combinations(range(6), 3):
        at = np.array([[points[i] for i in chosen]] * 3)
        of = shares[list(chosen)].transpose(1, 0, 2)
        assert shamir.combine(at, of) == SECRETS
    at = np.array([[points[0], points[1]]] * 3)
    assert shamir.combine(at, shares[:2].transpose(1, 0, 2)) != SECRETS


def test_owners_with_different_holders_are_combined_together() -> None:
    """As in a sparse graph, where each client has different neighbors."""
    rng = np.random.default_rng(0)
    secrets = [SecretBytes.generate(32) for _ in range(20)]
    rows, chosen = [], []
    for secret in secrets:
        points = [int(p) for p in rng.choice(np.arange(1, 100), 7, replace=False)]
        shares = shamir.share([secret], threshold=4, points=points)[:, 0]
        picked = rng.permutation(7)[:4]
        rows.append([points[i] for i in picked])
        chosen.append(shares[picked])
    assert shamir.combine(np.array(rows), np.stack(chosen)) == secrets


def test_fewer_shares_fit_every_secret_exactly_once() -> None:
    """For two shares of three and any secret there is exactly one polynomial that gives both.

    So with uniform coefficients the two shares have the same probability under every secret:
    they are independent of it. Only the third share tells the secrets apart.
    """
    points, rng = [3, 7, 11], np.random.default_rng(2)
    observed = rng.integers(0, PRIME, 2)
    for limb in (0, 1, (1 << 30) - 1, 12345):
        # Solve limb + c1 x + c2 x^2 = observed at both points, over the integers mod p.
        (x, y), (u, v) = points[:2], ((int(o) - limb) % PRIME for o in observed)
        inverse = pow(x * y * (y - x), PRIME - 2, PRIME)
        c1 = (u * y * y - v * x * x) * inverse % PRIME
        c2 = (v * x - u * y) * inverse % PRIME
        coefficients = np.array([[c1], [c2]], np.uint64)
        shares = shamir.evaluate(np.array([[limb]], np.uint64), coefficients, points=points)
        assert shares[:2, 0, 0].tolist() == observed.tolist()


def solve(matrix: list[list[int]], values: list[int]) -> list[int]:
    """Return the only solution of a linear system modulo p, in whole numbers.

    Raises:
        StopIteration: It has none, or more than one.
    """
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    for column in range(len(rows)):
        pivot = next(at for at in range(column, len(rows)) if rows[at][column] % PRIME)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        inverse = pow(rows[column][column], PRIME - 2, PRIME)
        rows[column] = [each * inverse % PRIME for each in rows[column]]
        for at in range(len(rows)):
            if at != column:
                factor = rows[at][column]
                rows[at] = [
                    (each - factor * own) % PRIME
                    for each, own in zip(rows[at], rows[column], strict=True)
                ]
    return [row[-1] for row in rows]


@pytest.mark.parametrize("threshold", range(2, 13))
def test_t_minus_one_shares_are_independent_of_the_secret(threshold: int) -> None:
    """Any t - 1 shares at any points fit every secret, each by exactly one choice of coefficients.

    x c_1 + ... + x^(t-1) c_(t-1) = share - secret, at t - 1 points, has one solution: its matrix
    holds no secret and can be inverted. So for every secret the uniform coefficients give each
    value of the t - 1 shares with the same probability, p^-(t-1).
    """
    rng = np.random.default_rng(threshold)
    points = [int(x) for x in rng.choice(np.arange(1, 1000), threshold - 1, replace=False)]
    observed = [int(y) for y in rng.integers(0, PRIME, threshold - 1)]
    matrix = [[pow(x, power, PRIME) for power in range(1, threshold)] for x in points]
    seen = set()
    for limb in (0, 1, (1 << 30) - 1, *(int(y) for y in rng.integers(0, 1 << 30, 5))):
        found = solve(matrix, [(each - limb) % PRIME for each in observed])
        coefficients = np.array(found, np.uint64)[:, None]
        shares = shamir.evaluate(np.array([[limb]], np.uint64), coefficients, points=points)
        assert shares[:, 0, 0].tolist() == observed
        seen.add(tuple(found))
    assert len(seen) == 8, "and no choice serves two secrets"


def test_a_holder_that_stands_twice_would_tell_of_the_secret() -> None:
    """Control: two equal points make the matrix singular."""
    with pytest.raises(StopIteration):
        solve([[3, 9], [3, 9]], [1, 2])


@pytest.mark.parametrize("threshold", range(2, 7))
def test_any_t_of_six_shares_give_the_secret_and_fewer_do_not(threshold: int) -> None:
    """For every choice of t, and of t - 1, shares at points that are not consecutive."""
    points = [2, 3, 7, 50, 1001, PRIME - 1]
    shares = shamir.share(SECRETS, threshold=threshold, points=points)
    for size, is_enough in ((threshold, True), (threshold - 1, False)):
        for chosen in combinations(range(6), size):
            at = np.array([[points[i] for i in chosen]] * len(SECRETS))
            found = shamir.combine(at, shares[list(chosen)].transpose(1, 0, 2))
            assert (found == SECRETS) is is_enough


def test_shares_below_the_threshold_look_alike_for_unlike_secrets() -> None:
    """Compares pairs of shares of two secrets, counted in 16 x 16 cells, by chi-squared."""

    def counts(secret: SecretBytes, threshold: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        shares = shamir.share([secret] * 4000, threshold=threshold, points=[1, 2, 3, 4])
        cells = (shares[0, :, 0] >> 27).astype(np.int64) * 16 + (shares[1, :, 0] >> 27)
        return np.bincount(cells, minlength=256)

    def distance(threshold: int) -> float:
        zeros, ones = counts(SECRETS[0], threshold), counts(SECRETS[1], threshold)
        seen = zeros + ones > 0
        return float(((zeros - ones)[seen] ** 2 / (zeros + ones)[seen]).sum())

    mean, deviation = 255.0, np.sqrt(2 * 255.0)
    assert distance(3) < mean + 6 * deviation
    assert distance(2) > mean + 6 * deviation, "control: two shares of a threshold of two"


def test_uniform_elements_fill_the_field_evenly() -> None:
    drawn = shamir.draw_uniform((200_000,))
    assert int(drawn.max()) < PRIME
    counts = np.bincount((drawn >> np.uint64(27)).astype(np.int64), minlength=16)
    assert abs(counts - 12_500).max() < 6 * np.sqrt(12_500)


def test_products_are_exact_at_the_largest_elements() -> None:
    """Compared with Python's integers."""
    rng = np.random.default_rng(3)
    b = rng.integers(PRIME - 3, PRIME, (600, 5), np.uint64)
    points, degree = [PRIME - 1, PRIME - 2], 599
    limbs, coefficients = b[:1], b[1:]
    got = shamir.evaluate(limbs, coefficients, points=points)
    for x, row in zip(points, got, strict=True):
        for column in range(5):
            expected = sum(int(b[i, column]) * pow(x, i, PRIME) for i in range(degree + 1)) % PRIME
            assert int(row[0, column]) == expected


def test_false_shares_give_no_secret_or_another_one() -> None:
    shares = shamir.share([SECRETS[2]], threshold=2, points=[1, 2])
    false = shares.copy()
    false[0, 0, 0] ^= np.uint32(1)
    at = np.array([[1, 2]])
    assert shamir.combine(at, shares.transpose(1, 0, 2)) == [SECRETS[2]]
    assert shamir.combine(at, false.transpose(1, 0, 2)) != [SECRETS[2]]
    huge = np.full((1, 2, shamir.NUM_LIMBS), 0xFFFFFFFF, np.uint32)
    shamir.combine(at, huge)  # arbitrary bytes give a wrong secret or none, but raise no error


@pytest.mark.parametrize(
    ("threshold", "points"), [(0, [1, 2]), (3, [1, 2]), (2, [1, 1]), (2, [0, 1]), (2, [1, PRIME])]
)
def test_impossible_sharings_are_refused(threshold: int, points: list[int]) -> None:
    with pytest.raises(ValueError, match=r"threshold|points"):
        shamir.share(SECRETS, threshold=threshold, points=points)


def test_a_share_takes_36_bytes() -> None:
    shares = shamir.share(SECRETS[:1], threshold=2, points=[1, 2])
    assert len(shamir.to_bytes(shares[0])) == 36
    assert np.array_equal(shamir.from_bytes(shamir.to_bytes(shares[0])), shares[0, 0])
