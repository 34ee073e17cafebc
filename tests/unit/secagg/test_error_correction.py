"""False shares among true ones are found: up to (M - t) / 2 of them, with any false values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.secagg import shamir
from fedlearn.secagg.error_correction import find_false_shares
from fedlearn.secagg.shamir import PRIME


@pytest.mark.slow
@given(data=st.data())
def test_as_many_liars_as_can_be_told_are_found_and_nobody_else(data: st.DataObject) -> None:
    """For any points and any false values, each in some limb of the share."""
    threshold = data.draw(st.integers(1, 12))
    num_shares = threshold + data.draw(st.integers(0, 12))
    points = data.draw(
        st.lists(st.integers(1, PRIME - 1), min_size=num_shares, max_size=num_shares, unique=True)
    )
    secret = SecretBytes(data.draw(st.binary(min_size=32, max_size=32)))
    shares = shamir.share([secret], threshold=threshold, points=points)[:, 0]
    most = (num_shares - threshold) // 2
    liars = data.draw(st.sets(st.integers(0, num_shares - 1), max_size=most))
    for liar in liars:
        limb = data.draw(st.integers(0, shamir.NUM_LIMBS - 1))
        offset = data.draw(st.integers(1, PRIME - 1))
        shares[liar, limb] = (int(shares[liar, limb]) + offset) % PRIME
    assert find_false_shares(points, shares, threshold=threshold) == sorted(liars)


def test_one_liar_more_is_not_guessed_at() -> None:
    """Three of nine with t = 4, which lie independently, are too many; two of them are found."""
    points = list(range(1, 10))
    true = shamir.share([SecretBytes.generate(32)], threshold=4, points=points)[:, 0]
    for liars, found in (([0, 5], [0, 5]), ([0, 5, 7], None)):
        shares = true.copy()
        shares[liars] = np.arange(len(liars) * shamir.NUM_LIMBS).reshape(len(liars), -1)
        assert find_false_shares(points, shares, threshold=4) == found


def test_a_lie_that_adds_up_to_nothing_over_the_limbs_is_found() -> None:
    """The limbs are combined with random weights, so a liar cannot make its errors cancel."""
    points = [1, 2, 3, 4]
    shares = shamir.share([SecretBytes.generate(32)], threshold=2, points=points)[:, 0]
    shares[2, 0] = (int(shares[2, 0]) + 1) % PRIME
    shares[2, 1] = (int(shares[2, 1]) + PRIME - 1) % PRIME
    assert find_false_shares(points, shares, threshold=2) == [2]


@pytest.mark.parametrize("limbs", [[0] * 9, [PRIME - 1] * 9])
def test_a_limb_below_p_is_canonical_and_p_is_not(limbs: list[int]) -> None:
    data = np.array(limbs, "<u4").tobytes()
    assert shamir.is_canonical(data)
    assert not shamir.is_canonical(data[:-4] + PRIME.to_bytes(4, "little"))
