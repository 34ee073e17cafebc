"""Fixed-point encoding: real numbers as integers of a fixed width, so that their sum is exact.

A *lane* is a run of numbers that share a step and a modulus: a model delta, a metric, the
weights. Stochastic rounding turns a value y into the level round(y / step), an integer in
[-M, M], and levels are added modulo 2**b. With n clients the sum lies in [-nM, nM]; a lane is
refused unless nM < 2**(b - 1), so the sum cannot wrap.

========== ==============
b          modulus_bits
M          max_level
W          max_weight
========== ==============

References:
    Bonawitz et al., 2017, `Practical Secure Aggregation for Privacy-Preserving Machine
    Learning <https://doi.org/10.1145/3133956.3133982>`_, section 2 (the modular sum).
"""

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.noise import MAX_SIGMA, SecretStream, sample_discrete_gaussian
from fedlearn.errors import ConfigError
from fedlearn.secagg import octets

#: A lane's levels modulo 2**b, in the smallest numpy word that holds b bits.
Words: TypeAlias = NDArray[np.uint16] | NDArray[np.uint32] | NDArray[np.uint64]

#: Widths that a modulus may have, in bits: whole bytes, so that packing is a copy.
MODULUS_BITS = (16, 24, 32, 40, 64)

#: Levels are computed in float64, where integers up to 2**53 are exact.
MAX_LEVEL = (1 << 51) - 1

#: Relative excess over its bound that a value may have: the float32 error of clipping a norm.
BOUND_TOLERANCE = 1e-4

#: Least noise of one client, in levels: below it, a sum of discrete Gaussians is not close to a
#: discrete Gaussian.
MIN_NOISE = 4.0

MAX_NAME_BYTES = 64
MAX_LANE_SIZE = 1 << 36
#: Numbers in the lane of a metric, at most: the client's value, and whether it has one.
METRIC_SIZE = 2

_CHUNK = 1 << 15  # float64 elements that stay in the cache
_FEWEST_LEVELS = 8.0  # smallest ratio of a clipped norm to what rounding may add to it
_FLOAT64_MARGIN = 2.0**-20  # what float64 adds to the norm of an example in exact sums, at most
_TAIL = 14.0  # standard deviations that a sum's noise may reach
_LINE_BYTES = 64  # a cache line: loading a vector register across two lines costs twice


class LaneRole(IntEnum):
    """Kind of numbers in a lane; a long lane must be a vector, whose bound a policy limits."""

    VECTOR = 0
    METRIC = 1
    WEIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A run of numbers with one step and one modulus.

    Attributes:
        name: Name of the lane, unique in the terms.
        role: A vector (bounded by the clip), a metric, or the weight.
        size: How many numbers there are, >= 1.
        step: Distance between two levels, > 0, finite.
        max_level: The largest level M of one client, in [1, 2**51).
        modulus_bits: b, one of :data:`MODULUS_BITS`.
        weighted: Whether each client multiplies its values by w / W before it sends them.
        noise: Standard deviation, in levels, of the noise that each client adds; 0 for none, else
            at least ``MIN_NOISE``.

    Example:
        >>> lane = build_vector_lane(
        ...     "delta", size=3, bound=0.5, modulus_bits=24, num_clients=100, weighted=False
        ... )
        >>> lane.max_level, lane.largest_error(100) == 100 * lane.step
        (65535, True)
    """

    name: Annotated[str, octets.text(1, most=MAX_NAME_BYTES)]
    role: LaneRole
    size: Annotated[int, octets.integer(8, largest=MAX_LANE_SIZE)]
    step: float
    max_level: Annotated[int, octets.integer(8, largest=MAX_LEVEL)]
    modulus_bits: Annotated[int, octets.integer(1)]
    weighted: bool
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.name.encode()) <= MAX_NAME_BYTES:
            raise ConfigError(
                f"a lane's name has 1 to {MAX_NAME_BYTES} bytes, not {len(self.name)}"
            )
        if not 1 <= self.size <= MAX_LANE_SIZE:
            raise ConfigError(f"lane {self.name!r} has {self.size} numbers, not 1 to 2**36")
        # Otherwise a coordinator could call a vector a metric and evade the policy's ``max_clip``.
        most = {LaneRole.METRIC: METRIC_SIZE, LaneRole.WEIGHT: 1}.get(self.role, MAX_LANE_SIZE)
        if self.size > most:
            raise ConfigError(f"lane {self.name!r} has {self.size} numbers, so it is a vector")
        if not (math.isfinite(self.step) and self.step > 0.0):
            raise ConfigError(f"lane {self.name!r} has a step of {self.step}, not above 0")
        if not 1 <= self.max_level <= MAX_LEVEL:
            raise ConfigError(
                f"lane {self.name!r} has levels up to {self.max_level}; they lie in [1, 2**51)"
            )
        if self.modulus_bits not in MODULUS_BITS:
            raise ConfigError(
                f"lane {self.name!r} has a modulus of {self.modulus_bits} bits, not one of "
                f"{MODULUS_BITS}"
            )
        if self.noise != 0.0 and not MIN_NOISE <= self.noise <= MAX_SIGMA:  # a NaN is neither
            raise ConfigError(
                f"lane {self.name!r} has noise of {self.noise} levels, not {MIN_NOISE:g} to 2**40"
            )

    @property
    def norm(self) -> float:
        """The largest L2 norm of one client's levels.

        A vector is clipped to the bound as a whole, and rounding adds less than one level to each
        number. The numbers of a metric or a weight are bounded one by one.
        """
        if self.role is LaneRole.VECTOR:
            return self.max_level + math.sqrt(self.size)
        return self.max_level * math.sqrt(self.size)

    @property
    def sensitivity(self) -> float:
        """The largest L2 distance, in levels, between two contributions of one client.

        The two numbers of a metric are a value in [-M, M] and whether there is one, in [0, M]:
        sqrt(5) M.
        """
        match self.role:
            case LaneRole.VECTOR:
                return 2.0 * self.norm
            case LaneRole.METRIC:
                return self.max_level * math.sqrt(4.0 + (self.size - 1))
            case LaneRole.WEIGHT:
                return float(self.max_level)

    @property
    def bound(self) -> float:
        """The largest absolute value that one client can send."""
        return self.step * self.max_level

    @property
    def num_bytes(self) -> int:
        """Bytes that the lane takes in an upload."""
        return self.size * self.modulus_bits // 8

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32] | np.dtype[np.uint64]:
        """The word in which levels are added, little-endian; bits above b are ignored."""
        if self.modulus_bits == 16:  # noqa: PLR2004 - the width of the word
            return np.dtype("<u2")
        return np.dtype("<u4") if self.modulus_bits <= 32 else np.dtype("<u8")  # noqa: PLR2004

    def largest_sum(self, num_clients: int) -> int:
        """Return the largest level that a sum can reach, noise included."""
        noise = math.ceil(_TAIL * self.noise * math.sqrt(num_clients))
        return num_clients * self.max_level + noise

    def largest_error(self, num_clients: int) -> float:
        """Return a bound on the rounding error of one element of a sum; its rms is lower.

        Each value is rounded by less than one step, without bias and with a variance of at most
        step**2 / 4. So the rms error of the sum is at most sqrt(n) step / 2.
        """
        return num_clients * self.step

    def require_room(self, num_clients: int) -> None:
        """Raise ConfigError if the sum over ``num_clients`` could reach 2**(b - 1) and wrap."""
        if self.largest_sum(num_clients) >= 1 << (self.modulus_bits - 1):
            raise ConfigError(
                f"lane {self.name!r}: {num_clients} clients with levels up to {self.max_level} "
                f"overflow {self.modulus_bits} bits; use fewer levels or a wider modulus"
            )


def build_vector_lane(
    name: str,
    *,
    size: int,
    bound: float,
    modulus_bits: int,
    num_clients: int,
    weighted: bool,
    role: LaneRole = LaneRole.VECTOR,
) -> Lane:
    """Build a lane for values in [-bound, bound], with all levels that a sum of n leaves room for.

    A clip of the L2 norm to C bounds every element by C. A level and its sign have
    b - ceil(log2 n) bits.

    Raises:
        ConfigError: The bound is out of range, or the modulus too narrow for ``num_clients``.
    """
    level_bits = modulus_bits - (num_clients - 1).bit_length()
    if level_bits < 2:  # noqa: PLR2004 - a sign and one level
        raise ConfigError(
            f"lane {name!r}: the sum of {num_clients} clients leaves no level in {modulus_bits} "
            "bits; use a wider modulus"
        )
    max_level = (1 << (level_bits - 1)) - 1
    lane = Lane(
        name=name,
        role=role,
        size=size,
        step=bound / max_level,
        max_level=max_level,
        modulus_bits=modulus_bits,
        weighted=weighted,
    )
    lane.require_room(num_clients)
    return lane


def build_noisy_lane(
    name: str,
    *,
    size: int,
    bound: float,
    modulus_bits: int,
    num_clients: int,
    noise_share: float,
    hidden_norm: float | None = None,
) -> Lane:
    """Build a lane for vectors of an L2 norm up to ``bound``, to which each client adds noise.

    Where one example of a client is hidden, it moves the client's levels by its own norm and what
    rounding adds: less than one level to each number of the sums with and without it.

    Args:
        name: Name of the lane.
        size: Numbers in a vector, d.
        bound: Largest norm, > 0.
        modulus_bits: b.
        num_clients: n.
        noise_share: Standard deviation of one client's noise, divided by the norm of its levels,
            or of those that one of its examples adds, > 0.
        hidden_norm: Largest norm of what one example adds to a vector; ``None``: noise hides the
            client.

    Raises:
        ConfigError: The modulus is too narrow: rounding could add more than an eighth to a norm
            (sqrt(d) levels), or one client's noise would be below ``MIN_NOISE``.
    """
    tail, rounding = _TAIL * noise_share * math.sqrt(num_clients), math.sqrt(size)
    share = 1.0  # of the bound: what is hidden
    if hidden_norm is not None:
        share, rounding = hidden_norm / bound * (1.0 + _FLOAT64_MARGIN), 2.0 * rounding
    # Solve n M + tail (share M + rounding) < 2**(b - 1) for M.
    # Less 2: the noise is rounded up to whole levels, and the inequality is strict.
    room = (1 << (modulus_bits - 1)) - 2 - tail * rounding
    max_level = min(math.floor(room / (num_clients + tail * share)), MAX_LEVEL)
    levels = share * max_level
    if levels < _FEWEST_LEVELS * rounding or noise_share * levels < MIN_NOISE:
        raise ConfigError(
            f"lane {name!r}: {modulus_bits} bits leave {max(math.floor(levels), 0)} levels for "
            f"vectors of {size} numbers next to the noise of {num_clients} clients, and rounding "
            f"alone makes such a vector longer by {rounding:.4g} levels; use a wider modulus"
            f"{'' if hidden_norm is None else ', or a lower bound of a client (max_examples)'}"
        )
    plain = Lane(
        name=name,
        role=LaneRole.VECTOR,
        size=size,
        step=bound / max_level,
        max_level=max_level,
        modulus_bits=modulus_bits,
        weighted=False,
    )
    lane = replace(plain, noise=noise_share * (levels + rounding))
    lane.require_room(num_clients)
    return lane


def build_weight_lane(*, max_weight: int, num_clients: int) -> Lane:
    """Build the lane of the weights: whole numbers in [0, W], 8 bytes; their sum must fit."""
    lane = Lane(
        name="weight",
        role=LaneRole.WEIGHT,
        size=1,
        step=1.0,
        max_level=max_weight,
        modulus_bits=64,
        weighted=False,
    )
    lane.require_room(num_clients)
    return lane


def allocate_aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate zeros that start on a cache line, to be viewed as words."""
    raw = np.zeros(num_bytes + _LINE_BYTES, np.uint8)
    begin = -raw.ctypes.data % _LINE_BYTES
    return raw[begin : begin + num_bytes]


def encode(
    lane: Lane, values: NDArray[np.floating], *, factor: float, rounding_bits: NDArray[np.uint32]
) -> Words:
    """Quantize ``factor * values`` to levels, rounded up or down at random.

    Guarantees:
        The expected level is factor * value / step (to 2**-32), the error is below one step,
        and every level lies in [-M, M].

    Args:
        lane: The lane of the values.
        values: Shape [lane.size].
        factor: In [0, 1]: w / W, or 1.
        rounding_bits: Uniform and independent 32-bit numbers, one per value, which decide whether
            it is rounded up or down.

    Raises:
        ValueError: A value is not finite or above the bound, or shapes differ.
    """
    if values.shape != (lane.size,) or rounding_bits.shape != (lane.size,):
        raise ValueError(
            f"lane {lane.name!r} has {lane.size} numbers, not shapes {values.shape} and "
            f"{rounding_bits.shape}"
        )
    if not 0.0 <= factor <= 1.0:
        raise ValueError(f"a factor lies in [0, 1], not {factor}")
    words: Words = allocate_aligned(lane.size * lane.dtype.itemsize).view(lane.dtype)
    # A level below 2**(b - 1) fits the signed word, whose bits are those of the level mod 2**b.
    signed = words.view(f"<i{lane.dtype.itemsize}")
    limit = lane.bound * (1.0 + BOUND_TOLERANCE)
    scaled, shift = np.empty(min(_CHUNK, lane.size)), np.empty(min(_CHUNK, lane.size))
    for begin in range(0, lane.size, _CHUNK):
        part = values[begin : begin + _CHUNK]
        level, up = scaled[: part.size], shift[: part.size]
        if not (float(part.max()) <= limit and float(part.min()) >= -limit):  # a NaN is neither
            raise ValueError(
                f"lane {lane.name!r} holds a value that is not finite or above its bound "
                f"{lane.bound:g}; clip it first"
            )
        # floor(y + u) with u uniform in [0, 1) rounds y stochastically.
        np.multiply(part, factor / lane.step, out=level, dtype=np.float64)
        np.multiply(rounding_bits[begin : begin + _CHUNK], 2.0**-32, out=up, dtype=np.float64)
        np.floor(np.add(level, up, out=level), out=level)
        # A value at its bound may be rounded up beyond M.
        np.clip(level, -lane.max_level, lane.max_level, out=level)
        # Exact: levels are whole numbers of at most 2**51.
        np.copyto(signed[begin : begin + _CHUNK], level, casting="unsafe")
    return words


def add_noise(lane: Lane, words: Words, *, source: SecretStream) -> None:
    """Add a client's share of the noise to its levels, in place, modulo the word."""
    for begin in range(0, lane.size, _CHUNK):
        part = words[begin : begin + _CHUNK]
        samples = sample_discrete_gaussian(lane.noise, part.size, source=source)
        # The cast wraps negative samples modulo the word, a multiple of 2**b, so the sum modulo
        # 2**b stays right.
        np.add(part, samples.astype(lane.dtype), out=part)


def read_levels(lane: Lane, words: Words) -> NDArray[np.int64]:
    """Read sums modulo 2**b as signed integers: int64, shape [size]."""
    unused = np.uint64(64 - lane.modulus_bits)
    # Shift the sign to the top bit, then back: the second shift is arithmetic and extends it.
    shifted = (words.astype(np.uint64) << unused).view(np.int64)
    levels: NDArray[np.int64] = shifted >> np.int64(unused)
    return levels


def decode(lane: Lane, words: Words, *, num_clients: int) -> NDArray[np.float64]:
    """Decode the sum of clients' values, shape [size]; ValueError if they cannot reach it."""
    reach = lane.largest_sum(num_clients)
    values = np.empty(lane.size)
    for begin in range(0, lane.size, _CHUNK):
        levels = read_levels(lane, words[begin : begin + _CHUNK])
        if int(levels.max()) > reach or int(levels.min()) < -reach:
            raise ValueError(
                f"lane {lane.name!r} holds a sum that {num_clients} clients cannot reach: "
                "a mask is left in it"
            )
        np.multiply(levels, lane.step, out=values[begin : begin + _CHUNK])
    return values
