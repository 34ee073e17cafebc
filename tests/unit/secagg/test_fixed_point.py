"""Fixed point: rounding is unbiased and bounded, and a sum never overflows its modulus."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedlearn.core.noise import SecretStream
from fedlearn.errors import ConfigError
from fedlearn.secagg.fixed_point import (
    MODULUS_BITS,
    Lane,
    LaneRole,
    add_noise,
    build_noisy_lane,
    build_vector_lane,
    build_weight_lane,
    decode,
    encode,
    read_levels,
)


def lane(modulus_bits: int = 32, *, size: int = 5, max_level: int = 1000) -> Lane:
    return Lane(
        name="delta",
        role=LaneRole.VECTOR,
        size=size,
        step=0.5,
        max_level=max_level,
        modulus_bits=modulus_bits,
        weighted=False,
    )


def draw_rounding_bits(size: int, *, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(seed).integers(0, 1 << 32, size, dtype=np.uint32)


@pytest.mark.parametrize("modulus_bits", MODULUS_BITS)
def test_levels_of_either_sign_survive_every_modulus(modulus_bits: int) -> None:
    """Values on the grid are exact, also in a sum that wraps around zero."""
    values = np.array([-500.0, -0.5, 0.0, 0.5, 500.0])
    words = encode(lane(modulus_bits), values, factor=1.0, rounding_bits=draw_rounding_bits(5))
    assert decode(lane(modulus_bits), words, num_clients=1).tolist() == values.tolist()
    total = words.copy()
    np.add(words, words[::-1], out=total)
    assert read_levels(lane(modulus_bits), total).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("role", "size", "extremes", "in_bounds"),
    [
        (LaneRole.METRIC, 2, ([-500.0, 0.0], [500.0, 500.0]), 5**0.5),
        (LaneRole.METRIC, 1, ([-500.0], [500.0]), 2.0),
        (LaneRole.WEIGHT, 1, ([0.0], [500.0]), 1.0),
        (LaneRole.VECTOR, 1, ([-500.0], [500.0]), 2.002),  # including the room for rounding
    ],
)
def test_the_sensitivity_is_how_far_one_client_can_move_a_lane(
    role: LaneRole, size: int, extremes: tuple[list[float], list[float]], in_bounds: float
) -> None:
    """A metric's second number says whether there is a value, so it is never negative."""
    one = replace(lane(size=size), role=role)
    first, second = (
        read_levels(
            one, encode(one, np.array(values), factor=1.0, rounding_bits=draw_rounding_bits(size))
        )
        for values in extremes
    )
    distance = float(np.linalg.norm(first - second))
    assert distance <= one.sensitivity == pytest.approx(in_bounds * one.max_level)
    assert distance >= 0.998 * one.sensitivity


def test_rounding_is_unbiased_and_off_by_less_than_a_step() -> None:
    """The mean of 100,000 roundings of 0.1 steps is 0.1 steps."""
    many = lane(size=100_000)
    levels = read_levels(
        many,
        encode(many, np.full(100_000, 0.05), factor=1.0, rounding_bits=draw_rounding_bits(100_000)),
    )
    assert set(levels.tolist()) == {0, 1}
    assert abs(levels.mean() - 0.1) < 5 * np.sqrt(0.09 / 100_000)
    nearest = read_levels(
        many,
        encode(
            many,
            np.full(100_000, 0.05),
            factor=1.0,
            rounding_bits=draw_rounding_bits(1).repeat(100_000),
        ),
    )
    assert abs(nearest.mean() - 0.1) > 0.05, "control: the same rounding for all is biased"


def test_float32_values_are_scaled_in_float64() -> None:
    """With more than 24 bits per level, a product in float32 would be off by whole levels."""
    fine = replace(lane(64, size=1000, max_level=1 << 40), step=2.0**-40)
    values = np.random.default_rng(0).random(1000, np.float32)
    words = encode(fine, values, factor=1 / 3, rounding_bits=np.zeros(1000, np.uint32))
    expected = np.floor(values.astype(np.float64) * (2.0**40 / 3))
    assert read_levels(fine, words).tolist() == expected.tolist()
    assert np.any(np.floor(values * np.float32(2.0**40 / 3)) != expected), "control"


def test_a_value_at_the_bound_is_never_rounded_beyond_it() -> None:
    """Not even with the largest rounding bits, at the largest level that float64 holds exactly."""
    wide = lane(64, size=2, max_level=(1 << 51) - 1)
    most = np.full(2, 0xFFFFFFFF, np.uint32)
    values = np.array([wide.bound, -wide.bound])
    levels = read_levels(wide, encode(wide, values * (1 + 5e-5), factor=1.0, rounding_bits=most))
    assert levels.max() == wide.max_level
    assert levels.min() >= -wide.max_level


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 500.2, -500.2])
def test_a_value_that_was_not_clipped_is_refused(bad: float) -> None:
    values = np.array([0.0, bad, 0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="not finite or above its bound 500"):
        encode(lane(), values, factor=1.0, rounding_bits=draw_rounding_bits(5))
    encode(lane(), np.zeros(5), factor=1.0, rounding_bits=draw_rounding_bits(5))


@pytest.mark.parametrize(("factor", "size"), [(1.5, 5), (-0.1, 5), (1.0, 4)])
def test_a_factor_or_a_shape_out_of_range_is_refused(factor: float, size: int) -> None:
    with pytest.raises(ValueError, match=r"factor|numbers"):
        encode(lane(), np.zeros(size), factor=factor, rounding_bits=draw_rounding_bits(5))


def test_a_sum_that_the_clients_cannot_reach_is_refused() -> None:
    """Such a sum means that a mask was left in it. Control: one client more can reach it."""
    words = np.array([2001, 0, 0, 0, 0], np.uint32)
    with pytest.raises(ValueError, match="a mask is left in it"):
        decode(lane(), words, num_clients=2)
    assert decode(lane(), words, num_clients=3)[0] == 1000.5


def test_a_lane_that_could_overflow_cannot_be_made() -> None:
    """Control: with one client fewer the lane is accepted."""
    tight = lane(16, max_level=1000)
    tight.require_room(32)
    with pytest.raises(ConfigError, match="33 clients with levels up to 1000 overflow 16 bits"):
        tight.require_room(33)


@pytest.mark.parametrize("num_clients", [1, 2, 3, 100, 128, 129, 1000])
def test_the_modulus_holds_the_largest_sum_exactly(num_clients: int) -> None:
    for bits in MODULUS_BITS[:-1]:
        made = build_vector_lane(
            "delta",
            size=1,
            bound=1.0,
            modulus_bits=bits,
            num_clients=num_clients,
            weighted=False,
        )
        words = encode(made, np.ones(1), factor=1.0, rounding_bits=draw_rounding_bits(1))
        total = words.copy()
        np.copyto(total, words.astype(np.uint64) * np.uint64(num_clients), casting="unsafe")
        assert decode(made, total, num_clients=num_clients)[0] == pytest.approx(num_clients)


def test_a_modulus_without_room_for_a_level_is_refused() -> None:
    """A sign bit and one level for each of 2**14 clients fill all 16 bits."""
    made = partial(build_vector_lane, "delta", size=1, bound=1.0, modulus_bits=16, weighted=False)
    with pytest.raises(ConfigError, match="16385 clients leaves no level in 16 bits"):
        made(num_clients=(1 << 14) + 1)
    assert made(num_clients=1 << 14).max_level == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "x" * 65),
        ("size", 0),
        ("role", LaneRole.METRIC),
        ("step", 0.0),
        ("step", float("nan")),
        ("step", float("inf")),
        ("max_level", 0),
        ("max_level", 1 << 51),
        ("modulus_bits", 2),
        ("modulus_bits", 48),
    ],
)
def test_an_impossible_lane_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        replace(lane(), **{field: value})


def test_weights_are_exact_whole_numbers() -> None:
    weights = build_weight_lane(max_weight=10**6, num_clients=1000)
    words = encode(weights, np.array([123456.0]), factor=1.0, rounding_bits=draw_rounding_bits(1))
    assert decode(weights, words, num_clients=1).tolist() == [123456.0]
    assert weights.num_bytes == 8


def test_the_reported_error_bounds_the_measured_one() -> None:
    made = build_vector_lane(
        "delta",
        size=20_000,
        bound=1.0,
        modulus_bits=16,
        num_clients=30,
        weighted=False,
    )
    rng = np.random.default_rng(1)
    values = rng.uniform(-1, 1, (30, 20_000))
    total = np.zeros(20_000, made.dtype)
    for row, one in enumerate(values):
        total += encode(made, one, factor=1.0, rounding_bits=draw_rounding_bits(20_000, seed=row))
    error = decode(made, total, num_clients=30) - values.sum(axis=0)
    rms = np.sqrt(30) * made.step / 2
    assert np.abs(error).max() < made.largest_error(30)
    assert 0.7 * rms < np.sqrt((error**2).mean()) < rms


@pytest.mark.parametrize("modulus_bits", [24, 32, 40])
@pytest.mark.parametrize("num_clients", [2, 7, 100])
@pytest.mark.parametrize("noise_share", [0.003, 0.3, 40.0])
def test_a_noisy_lane_holds_its_clients_and_their_noise(
    modulus_bits: int, num_clients: int, noise_share: float
) -> None:
    """Noise is relative to the longest rounded vector; 14 deviations of the sum's noise fit in."""
    made = build_noisy_lane(
        "delta",
        size=1000,
        bound=0.7,
        modulus_bits=modulus_bits,
        num_clients=num_clients,
        noise_share=noise_share,
    )
    longest = made.max_level + np.sqrt(1000)
    assert made.noise == pytest.approx(noise_share * longest)
    assert made.bound == pytest.approx(0.7)
    largest = num_clients * made.max_level + 14 * made.noise * np.sqrt(num_clients)
    assert 0.99 * 2 ** (modulus_bits - 1) < largest <= 2 ** (modulus_bits - 1)


def test_no_rounded_vector_is_longer_than_noise_is_measured_by() -> None:
    """Vectors at the bound, dense and nearly sparse, become longer when rounded, but not beyond."""
    made = build_noisy_lane(
        "delta", size=400, bound=1.0, modulus_bits=24, num_clients=1000, noise_share=0.01
    )
    rng, longest = np.random.default_rng(0), 0.0
    for seed in range(200):
        row = rng.normal(size=400) ** rng.choice([1, 3, 9])
        row /= np.linalg.norm(row)
        words = encode(
            replace(made, noise=0.0),
            row,
            factor=1.0,
            rounding_bits=draw_rounding_bits(400, seed=seed),
        )
        longest = max(longest, float(np.linalg.norm(read_levels(made, words))))
    assert made.max_level < longest <= made.norm


def test_the_noise_of_a_sum_is_that_of_its_clients() -> None:
    """Its variance is n times one client's; 2/3 or 3/2 of the noise would be noticed."""
    made = build_noisy_lane(
        "delta", size=40_000, bound=1.0, modulus_bits=32, num_clients=10, noise_share=0.5
    )
    total = np.zeros(made.size, made.dtype)
    for _ in range(10):
        add_noise(made, total, source=SecretStream.fresh())
    levels = read_levels(made, total).astype(np.float64)
    excess = [
        float((levels**2).mean()) / (10 * (scale * made.noise) ** 2) - 1.0
        for scale in (1.0, 2 / 3, 3 / 2)
    ]
    tolerance = 5.0 * np.sqrt(2.0 / made.size)
    assert abs(excess[0]) < tolerance
    assert min(abs(excess[1]), abs(excess[2])) > 10 * tolerance
    assert abs(levels.mean()) < 5.0 * made.noise * np.sqrt(10 / made.size)


def test_a_modulus_in_which_rounding_would_cost_noise_is_refused() -> None:
    make = partial(
        build_noisy_lane, "delta", size=10**6, bound=1.0, num_clients=100, noise_share=0.1
    )
    with pytest.raises(ConfigError, match="longer by 1000 levels; use a wider modulus"):
        make(modulus_bits=16)
    made = make(modulus_bits=24)
    assert made.norm / made.max_level < 1.125


@pytest.mark.parametrize("value", [-1.0, 3.9, float("nan"), float("inf"), 2.0**41])
def test_noise_that_could_not_be_drawn_or_added_up_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="has noise of"):
        replace(lane(40), noise=value)
    assert replace(lane(40), noise=4.0).largest_sum(100) == 100 * 1000 + 14 * 4 * 10
