"""Inconsistent terms are refused, and contributions come out of the sum as their mean."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedlearn.errors import ConfigError, ProtocolError
from fedlearn.secagg.fixed_point import LaneRole, build_vector_lane, build_weight_lane
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.masking import zeros
from fedlearn.secagg.parameters import Adversary
from fedlearn.secagg.terms import Contribution, Terms, decode_sum, encode_contribution

DELTA = build_vector_lane(
    "delta",
    size=1000,
    bound=2.0,
    modulus_bits=32,
    num_clients=4,
    weighted=True,
)
LOSS = build_vector_lane(
    "loss",
    size=1,
    bound=10.0,
    modulus_bits=40,
    num_clients=4,
    weighted=True,
    role=LaneRole.METRIC,
)
TERMS = Terms(
    run_id=bytes(16),
    round_num=7,
    attempt=1,
    request_hash=bytes(32),
    adversary=Adversary.ACTIVE_SERVER,
    topology=Topology.COMPLETE,
    num_clients=4,
    num_neighbors=3,
    threshold=3,
    quorum=3,
    min_survivors=3,
    sigma_bits=40,
    max_weight=200,
    lanes=(build_weight_lane(max_weight=200, num_clients=4), DELTA, LOSS),
)
PLAIN = replace(TERMS, max_weight=0, lanes=(replace(DELTA, weighted=False),))


NOISY = replace(PLAIN, lanes=(replace(PLAIN.lanes[0], max_level=1 << 20, noise=100.0),))


@pytest.mark.parametrize("terms", [TERMS, PLAIN, NOISY])
def test_terms_come_back_from_their_bytes(terms: Terms) -> None:
    assert Terms.from_bytes(terms.to_bytes()) == terms
    assert terms.session != replace(terms, attempt=2).session


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_id": b""}, "16 bytes"),
        ({"num_clients": 1}, "1 clients"),
        ({"threshold": 1}, "threshold is 1"),
        ({"threshold": 5}, "threshold is 5"),
        ({"quorum": 1}, "quorum is 1"),
        ({"min_survivors": 1}, "min_survivors is 1"),
        ({"num_neighbors": 0}, "0 neighbors"),
        ({"num_neighbors": 2}, "2 neighbors in a COMPLETE graph"),
        ({"topology": Topology.SPARSE}, "3 neighbors in a SPARSE graph"),
        ({"topology": Topology.SPARSE, "num_clients": 7, "min_survivors": 3}, "an even number"),
        ({"lanes": ()}, "0 lanes"),
        ({"lanes": (DELTA, DELTA)}, "same name"),
        ({"lanes": (DELTA,)}, "weights need one lane"),
        ({"max_weight": 100}, "weights need one lane"),
        ({"max_weight": 0, "lanes": (DELTA,)}, "no weights are sent"),
        ({"lanes": (TERMS.lanes[0], replace(DELTA, modulus_bits=24))}, "overflow 24 bits"),
    ],
)
def test_inconsistent_terms_cannot_be_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TERMS, **change)


def test_inconsistent_terms_cannot_be_read() -> None:
    data = TERMS.to_bytes()
    with pytest.raises(ProtocolError, match="too many"):
        Terms.from_bytes(data + b"\x00")
    with pytest.raises(ProtocolError, match="early"):
        Terms.from_bytes(data[:-1])
    with pytest.raises(ProtocolError, match="impossible terms"):
        Terms.from_bytes(data[:-2] + b"\x02\x01")
    with pytest.raises(ProtocolError, match="not UTF-8"):
        Terms.from_bytes(data.replace(b"delta", b"d\xffcta"))


def test_a_weighted_mean_comes_out_of_the_sum() -> None:
    """Within the reported error, scaled as the mean is."""
    rng = np.random.default_rng(0)
    given = [
        Contribution(
            values={
                "delta": rng.uniform(-2, 2, 1000).astype(np.float32),
                "loss": rng.uniform(0, 10, 1),
            },
            weight=weight,
            request_hash=bytes(32),
        )
        for weight in (3, 200, 0)
    ]
    sums = zeros(TERMS.lanes)
    for at, one in enumerate(given):
        for total, words in zip(
            sums, encode_contribution(TERMS, one, rounding_key=bytes([at] * 32)), strict=True
        ):
            np.add(total, words, out=total)
    released = decode_sum(TERMS, sums, num_clients=3)
    assert released.weight == 203
    for lane in (DELTA, LOSS):
        wanted = np.average([one.values[lane.name] for one in given], axis=0, weights=[3, 200, 0])
        error = np.abs(released.weighted_sum(lane) / released.weight - wanted).max()
        assert 0 < error < 3 * lane.step * 200 / 203


def test_without_weights_all_count_the_same() -> None:
    given = Contribution(values={"delta": np.full(1000, 0.5)}, weight=999, request_hash=bytes(32))
    words = encode_contribution(PLAIN, given, rounding_key=bytes(32))
    total = decode_sum(PLAIN, words, num_clients=1)
    assert total.weight == 1
    assert np.abs(total.weighted_sum(PLAIN.lanes[0]) - 0.5).max() < PLAIN.lanes[0].step


@pytest.mark.parametrize("weight", [-1, 201])
def test_a_weight_out_of_bounds_is_refused(weight: int) -> None:
    values = {"delta": np.zeros(1000), "loss": np.zeros(1)}
    given = Contribution(values=values, weight=weight, request_hash=bytes(32))
    with pytest.raises(ValueError, match="not 0 to 200"):
        encode_contribution(TERMS, given, rounding_key=bytes(32))
    encode_contribution(TERMS, replace(given, weight=200), rounding_key=bytes(32))


def test_rounding_repeats_with_its_key_and_differs_between_lanes() -> None:
    """A reproducible simulation passes its own key."""
    values = {"delta": np.full(1000, 0.123456), "loss": np.array([1.0])}
    given = Contribution(values=values, weight=100, request_hash=bytes(32))
    first, again, other = (
        encode_contribution(TERMS, given, rounding_key=key)
        for key in (bytes(32), bytes(32), b"k" * 32)
    )
    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])


def test_noise_on_some_lanes_alone_is_no_terms() -> None:
    """Lanes without noise would reveal what the noise hides. Control: noise on both lanes."""
    (noisy,) = NOISY.lanes
    other = replace(noisy, name="control")
    assert len(replace(NOISY, lanes=(noisy, other)).lanes) == 2
    with pytest.raises(ConfigError, match="some lanes have noise and others have none"):
        replace(NOISY, lanes=(noisy, replace(other, noise=0.0)))


def test_the_noise_is_in_the_words_and_never_the_same() -> None:
    """Even if the rounding repeats. Control: without noise the words are equal."""
    given = Contribution(values={"delta": np.zeros(1000)}, weight=0, request_hash=bytes(32))
    for terms, is_same in ((NOISY, False), (PLAIN, True)):
        first, second = (
            encode_contribution(terms, given, rounding_key=bytes(32))[0] for _ in range(2)
        )
        assert np.array_equal(first, second) == is_same
