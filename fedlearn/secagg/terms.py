"""The terms of a session of secure aggregation: the round's configuration, signed.

The coordinator signs the terms, a client's policy judges them, and their hash is part of every key
and signature that follows. Two clients that received different terms reject each other's adverts,
so their session ends before any update is sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.noise import SecretStream
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ConfigError, ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.fixed_point import (
    MAX_LEVEL,
    Lane,
    LaneRole,
    Words,
    add_noise,
    decode,
    encode,
)
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.masking import expand_keystream
from fedlearn.secagg.parameters import MAX_CLIENTS, Adversary, Parameters, num_assured

MAX_LANES = 256
RUN_BYTES = 16
_HASH_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The configuration of one session.

    Attributes:
        run_id: Id of the run, 16 bytes.
        request_hash: SHA-256 of the request whose replies this session aggregates.
        round_num: Round index, from 0.
        attempt: Number of earlier attempts at this round.
        adversary: The adversary that the session withstands.
        topology: The mask graph.
        num_clients: n, the number of invited clients.
        num_neighbors: k.
        threshold: t.
        quorum: q.
        min_survivors: Fewest clients in a released sum.
        sigma_bits: sigma of a sparse graph, for which k, t and the opened signatures were chosen.
        max_weight: W; 0 if all clients count the same and no weights are sent.
        lanes: The lanes of the sum, in this order.
    """

    run_id: Annotated[bytes, octets.raw_bytes(RUN_BYTES)]
    request_hash: Annotated[bytes, octets.raw_bytes(_HASH_BYTES)]
    round_num: Annotated[int, octets.integer(8, largest=(1 << 63) - 1)]
    attempt: int
    adversary: Adversary
    topology: Topology
    num_clients: Annotated[int, octets.integer(4, largest=MAX_CLIENTS)]
    num_neighbors: int
    threshold: int
    quorum: int
    min_survivors: int
    sigma_bits: Annotated[int, octets.integer(2)]
    max_weight: Annotated[int, octets.integer(8, largest=MAX_LEVEL)]
    lanes: Annotated[
        tuple[Lane, ...], octets.sequence(octets.record(Lane), most=MAX_LANES, count_bytes=2)
    ]

    def __post_init__(self) -> None:
        if len(self.run_id) != RUN_BYTES or len(self.request_hash) != _HASH_BYTES:
            raise ConfigError("a run id has 16 bytes and a request hash 32")
        if not 2 <= self.num_clients <= MAX_CLIENTS:  # noqa: PLR2004 - a sum of one is no sum
            raise ConfigError(f"{self.num_clients} clients, not 2 to {MAX_CLIENTS}")
        for name in ("threshold", "quorum", "min_survivors"):
            if not 2 <= (value := int(getattr(self, name))) <= self.num_clients:  # noqa: PLR2004
                raise ConfigError(f"{name} is {value}, not 2 to {self.num_clients} clients")
        if self.sigma_bits < 1:
            raise ConfigError(f"sigma_bits is {self.sigma_bits}, not 1 or more")
        if not 1 <= self.num_neighbors < self.num_clients:
            raise ConfigError(f"{self.num_neighbors} neighbors among {self.num_clients} clients")
        # Both must agree: some parts of the protocol ask for k, others for the topology.
        complete = self.num_neighbors == self.num_clients - 1
        if complete != (self.topology is Topology.COMPLETE):
            raise ConfigError(f"{self.num_neighbors} neighbors in a {self.topology.name} graph")
        if not complete and self.num_neighbors % 2:
            raise ConfigError(f"{self.num_neighbors} neighbors on a ring; give an even number")
        self._check_lanes()

    def _check_lanes(self) -> None:
        if not 1 <= len(self.lanes) <= MAX_LANES:
            raise ConfigError(f"{len(self.lanes)} lanes, not 1 to {MAX_LANES}")
        if len({lane.name for lane in self.lanes}) != len(self.lanes):
            raise ConfigError("two lanes have the same name")
        # One lane of weights if weights are sent, else none.
        weights = [lane for lane in self.lanes if lane.role is LaneRole.WEIGHT]
        if [(w.max_level, w.size, w.step) for w in weights] != (
            [(self.max_weight, 1, 1.0)] if self.max_weight else []
        ):
            raise ConfigError(
                "weights need one lane of their own, of whole numbers up to max_weight"
            )
        for lane in self.lanes:
            lane.require_room(self.num_clients)
            if lane.weighted and not self.max_weight:
                raise ConfigError(f"lane {lane.name!r} is weighted, but no weights are sent")
        if any(lane.noise for lane in self.lanes) and not all(lane.noise for lane in self.lanes):
            raise ConfigError(
                "some lanes have noise and others have none, which would reveal their values"
            )

    @property
    def num_bytes(self) -> int:
        """Size of one client's masked vector, in bytes."""
        return sum(lane.num_bytes for lane in self.lanes)

    @property
    def num_assured(self) -> int:
        """Least number of clients in a released sum, even if the coordinator lies."""
        return num_assured(
            self.adversary,
            self.topology,
            quorum=self.quorum,
            min_survivors=self.min_survivors,
        )

    @property
    def is_evaluation(self) -> bool:
        """Whether the session sums only metrics, as in an evaluation, where nothing is trained."""
        return all(lane.role is LaneRole.METRIC for lane in self.lanes)

    @cached_property
    def session(self) -> bytes:
        """The hash under which every advert is signed."""
        return keys.digest(b"terms", self.to_bytes())

    def to_bytes(self) -> bytes:
        """Encode these terms; each value has exactly one encoding."""
        return _TERMS.to_bytes(self)

    @classmethod
    def from_bytes(cls, data: octets.Buffer) -> "Terms":
        """Decode terms; ProtocolError if they are truncated, out of range or inconsistent."""
        try:
            return _TERMS.from_bytes(data, what="the terms")
        # Terms check themselves; from a peer, a bad value is a breach of the protocol.
        except ConfigError as error:
            raise ProtocolError(f"impossible terms: {error}") from error


def propose(
    parameters: Parameters,
    *,
    run_id: bytes,
    round_num: int,
    attempt: int,
    request_hash: bytes,
    max_weight: int,
    lanes: tuple[Lane, ...],
) -> Terms:
    """Build terms with the derived k, t and q; ConfigError if something does not fit."""
    return Terms(
        run_id=run_id,
        round_num=round_num,
        attempt=attempt,
        request_hash=request_hash,
        adversary=parameters.assumptions.adversary,
        topology=parameters.assumptions.topology,
        num_clients=parameters.num_clients,
        num_neighbors=parameters.num_neighbors,
        threshold=parameters.threshold,
        quorum=parameters.quorum,
        min_survivors=parameters.min_survivors,
        sigma_bits=parameters.assumptions.sigma_bits,
        max_weight=max_weight,
        lanes=lanes,
    )


_TERMS = octets.record(Terms)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contribution:
    """One client's addition to the sum, in the clear: it never leaves the client.

    Attributes:
        values: Values by lane, except for the weight.
        weight: w in [0, W]; ignored if no weights are sent.
        request_hash: SHA-256 of the request that it answers.
        clipped: Lanes whose vector was scaled down to its bound.
        capped: Numbers that were cut off at their bound: ``weight``, and lanes of metrics.
    """

    values: Mapping[str, NDArray[np.floating]]
    weight: int
    request_hash: bytes
    clipped: tuple[str, ...] = ()
    capped: tuple[str, ...] = ()


def encode_contribution(
    terms: Terms, contribution: Contribution, *, rounding_key: bytes
) -> tuple[Words, ...]:
    """Encode a contribution in fixed point, lane by lane, with the noise that the terms require.

    The noise is secret even if ``rounding_key`` is not.

    Args:
        terms: Terms of the session.
        contribution: Already clipped: no value is above its lane's bound.
        rounding_key: 32 bytes that seed stochastic rounding. A client draws them
            (``SecretBytes``); a simulation that must be reproducible hashes them from its seed.

    Raises:
        ValueError: Lanes are missing or unknown, or a value or the weight is out of bounds.
    """
    wanted = {lane.name for lane in terms.lanes if lane.role is not LaneRole.WEIGHT}
    if contribution.values.keys() != wanted:
        raise ValueError(f"values for {sorted(contribution.values)}, not {sorted(wanted)}")
    if terms.max_weight and not 0 <= contribution.weight <= terms.max_weight:
        raise ValueError(f"a weight of {contribution.weight}, not 0 to {terms.max_weight}")
    total = sum(lane.size for lane in terms.lanes)
    # Uniform numbers that decide the rounding; the noise for privacy is added below.
    rounding_bits = expand_keystream(SecretBytes(rounding_key), 4 * total).view(np.uint32)
    words, begin = [], 0
    for lane in terms.lanes:
        values: NDArray[np.floating]
        if lane.role is LaneRole.WEIGHT:
            values = np.array([contribution.weight], np.float64)
        else:
            values = contribution.values[lane.name]
        # The client weights its own values: the server never sees them apart.
        factor = contribution.weight / terms.max_weight if lane.weighted else 1.0
        own_bits = rounding_bits[begin : begin + lane.size]
        levels = encode(lane, values, factor=factor, rounding_bits=own_bits)
        if lane.noise:
            # Never drawn from rounding_key, which a simulation derives from its public seed.
            add_noise(lane, levels, source=SecretStream.fresh())
        words.append(levels)
        # Each lane has its own part of the stream: shared numbers would correlate the rounding.
        begin += lane.size
    return tuple(words)


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """The released sum.

    Attributes:
        sums: By lane: Σ x w/W if the lane is weighted, else Σ x; without the weight.
        weight: Σ w, or the number of clients if no weights are sent.
        max_weight: W, or 1.
    """

    sums: Mapping[str, NDArray[np.float64]]
    weight: int
    max_weight: int

    def weighted_sum(self, lane: Lane) -> NDArray[np.float64]:
        """Return Σ x w of a lane if it is weighted, else Σ x."""
        return self.sums[lane.name] * (self.max_weight if lane.weighted else 1)


def decode_sum(terms: Terms, words: tuple[Words, ...], *, num_clients: int) -> Total:
    """Decode the sum of ``num_clients`` contributions; ValueError if a mask is left in it."""
    sums, weight = {}, num_clients
    for lane, values in zip(terms.lanes, words, strict=True):
        decoded = decode(lane, values, num_clients=num_clients)
        if lane.role is LaneRole.WEIGHT:
            weight = int(decoded[0])
        else:
            sums[lane.name] = decoded
    if terms.max_weight and weight < 0:
        raise ValueError("the weights add up to less than 0: a mask is left in the sum")
    return Total(sums=sums, weight=weight, max_weight=terms.max_weight or 1)
