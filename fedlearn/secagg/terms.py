"""What a session of secure aggregation is about: the round's configuration, signed.

The coordinator signs it, a client's policy judges it, and its hash is part of every key and
signature that follows: two clients that were told different terms do not understand each
other, and their session ends before anything is sent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.randomness import SecretBytes
from fedlearn.errors import ConfigError, ProtocolError
from fedlearn.secagg import keys, octets
from fedlearn.secagg.fixed_point import (
    MAX_LANE_SIZE,
    MAX_LEVEL,
    MAX_NAME_BYTES,
    Lane,
    LaneRole,
    Words,
    decode,
    encode,
)
from fedlearn.secagg.graph import Topology
from fedlearn.secagg.masking import keystream, zeros
from fedlearn.secagg.parameters import MAX_CLIENTS, Adversary, Parameters

MAX_LANES = 256
RUN_BYTES = 16
_HASH_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The configuration of one session.

    Attributes:
        run_id: Of the run, 16 bytes.
        round_num: Round index, from 0.
        attempt: How often this round was tried before.
        request_hash: SHA-256 of the training request that this session aggregates.
        adversary: Whom it holds against.
        topology: The mask graph.
        num_clients: n, how many were invited.
        num_neighbours: k.
        threshold: t.
        quorum: q.
        min_survivors: Fewest clients in a released sum.
        max_weight: W; 0 if clients count the same and no weights are sent.
        lanes: What is summed, in this order.
    """

    run_id: bytes
    round_num: int
    attempt: int
    request_hash: bytes
    adversary: Adversary
    topology: Topology
    num_clients: int
    num_neighbours: int
    threshold: int
    quorum: int
    min_survivors: int
    max_weight: int
    lanes: tuple[Lane, ...]

    def __post_init__(self) -> None:
        if len(self.run_id) != RUN_BYTES or len(self.request_hash) != _HASH_BYTES:
            raise ConfigError("a run id has 16 bytes and a request hash 32")
        if not 2 <= self.num_clients <= MAX_CLIENTS:  # noqa: PLR2004 - a sum of one is no sum
            raise ConfigError(f"{self.num_clients} clients, not 2 to {MAX_CLIENTS}")
        for name in ("threshold", "quorum", "min_survivors"):
            if not 2 <= (value := int(getattr(self, name))) <= self.num_clients:  # noqa: PLR2004
                raise ConfigError(f"{name} is {value}, not 2 to {self.num_clients} clients")
        if not 1 <= self.num_neighbours < self.num_clients:
            raise ConfigError(f"{self.num_neighbours} neighbours among {self.num_clients} clients")
        complete = self.num_neighbours == self.num_clients - 1
        if complete != (self.topology is Topology.COMPLETE):
            raise ConfigError(f"{self.num_neighbours} neighbours in a {self.topology.name} graph")
        if not complete and self.num_neighbours % 2:
            raise ConfigError(f"{self.num_neighbours} neighbours on a ring are not even")
        self._check_lanes()

    def _check_lanes(self) -> None:
        if not 1 <= len(self.lanes) <= MAX_LANES:
            raise ConfigError(f"{len(self.lanes)} lanes, not 1 to {MAX_LANES}")
        if len({lane.name for lane in self.lanes}) != len(self.lanes):
            raise ConfigError("two lanes have one name")
        weights = [lane for lane in self.lanes if lane.role is LaneRole.WEIGHT]
        if [(w.max_level, w.size, w.step) for w in weights] != (
            [(self.max_weight, 1, 1.0)] if self.max_weight else []
        ):
            raise ConfigError("weights travel in one lane of their own, whole and up to max_weight")
        for lane in self.lanes:
            lane.require_room(self.num_clients)
            if lane.weighted and not self.max_weight:
                raise ConfigError(f"lane {lane.name!r} is weighted, but no weights are sent")

    @property
    def num_bytes(self) -> int:
        """Size of one client's masked vector."""
        return sum(lane.num_bytes for lane in self.lanes)

    @cached_property
    def session(self) -> bytes:
        """The hash that every advert is signed under."""
        return keys.digest(b"terms", self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the one encoding of these terms."""
        whole = (
            (self.round_num, 8),
            (self.attempt, 4),
            (self.adversary, 1),
            (self.topology, 1),
            (self.num_clients, 4),
            (self.num_neighbours, 4),
            (self.threshold, 4),
            (self.quorum, 4),
            (self.min_survivors, 4),
            (self.max_weight, 8),
            (len(self.lanes), 2),
        )
        head = b"".join(octets.integer(int(value), width) for value, width in whole)
        lanes = b"".join(_lane_bytes(lane) for lane in self.lanes)
        return self.run_id + self.request_hash + head + lanes

    @classmethod
    def from_bytes(cls, data: bytes) -> "Terms":
        """Return the terms in ``data``.

        Raises:
            ProtocolError: They are truncated, out of range or inconsistent.
        """
        reader = octets.Reader(data, what="the terms")
        try:
            terms = cls(
                run_id=reader.take(RUN_BYTES),
                request_hash=reader.take(_HASH_BYTES),
                round_num=reader.integer(8, largest=(1 << 63) - 1),
                attempt=reader.integer(4),
                adversary=Adversary(reader.integer(1, largest=max(Adversary))),
                topology=Topology(reader.integer(1, largest=max(Topology))),
                num_clients=reader.integer(4, largest=MAX_CLIENTS),
                num_neighbours=reader.integer(4),
                threshold=reader.integer(4),
                quorum=reader.integer(4),
                min_survivors=reader.integer(4),
                max_weight=reader.integer(8, largest=MAX_LEVEL),
                lanes=tuple(
                    _read_lane(reader) for _ in range(reader.integer(2, largest=MAX_LANES))
                ),
            )
        except ConfigError as error:
            raise ProtocolError(f"impossible terms: {error}") from error
        reader.finish()
        return terms


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
    """Return terms with the k, t and q that were derived.

    Raises:
        ConfigError: Something does not fit, such as a lane that could overflow.
    """
    return Terms(
        run_id=run_id,
        round_num=round_num,
        attempt=attempt,
        request_hash=request_hash,
        adversary=parameters.assumptions.adversary,
        topology=parameters.assumptions.topology,
        num_clients=parameters.num_clients,
        num_neighbours=parameters.num_neighbours,
        threshold=parameters.threshold,
        quorum=parameters.quorum,
        min_survivors=parameters.min_survivors,
        max_weight=max_weight,
        lanes=lanes,
    )


def _lane_bytes(lane: Lane) -> bytes:
    name = lane.name.encode()
    return b"".join(
        (
            octets.integer(len(name), 1),
            name,
            octets.integer(lane.role, 1),
            octets.integer(lane.size, 8),
            octets.number(lane.step),
            octets.integer(lane.max_level, 8),
            octets.integer(lane.modulus_bits, 1),
            octets.integer(lane.weighted, 1),
        )
    )


def _read_lane(reader: octets.Reader) -> Lane:
    name = reader.take(reader.integer(1, largest=MAX_NAME_BYTES))
    try:
        text = name.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("a lane's name is no UTF-8") from error
    return Lane(
        name=text,
        role=LaneRole(reader.integer(1, largest=max(LaneRole))),
        size=reader.integer(8, largest=MAX_LANE_SIZE),
        step=reader.number(),
        max_level=reader.integer(8, largest=MAX_LEVEL),
        modulus_bits=reader.integer(1),
        weighted=bool(reader.integer(1, largest=1)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Contribution:
    """What one client adds to the sum, in the clear: it stays with the client.

    Attributes:
        values: By lane; all but the weight.
        weight: w in [0, W]; ignored if no weights are sent.
        request_hash: SHA-256 of the training request that it answers.
    """

    values: Mapping[str, NDArray[np.floating]]
    weight: int
    request_hash: bytes


def to_words(terms: Terms, contribution: Contribution, *, rounding_key: bytes) -> tuple[Words, ...]:
    """Return a contribution in fixed point, lane by lane.

    Args:
        terms: Of the session.
        contribution: Clipped: no value above its lane's bound.
        rounding_key: 32 bytes that seed stochastic rounding. A client draws them
            (``SecretBytes``); a simulation that must repeat hashes them from its seed.

    Raises:
        ValueError: Lanes are missing or unknown, or a value or the weight is out of bounds.
    """
    wanted = {lane.name for lane in terms.lanes if lane.role is not LaneRole.WEIGHT}
    if contribution.values.keys() != wanted:
        raise ValueError(f"values for {sorted(contribution.values)}, not {sorted(wanted)}")
    if terms.max_weight and not 0 <= contribution.weight <= terms.max_weight:
        raise ValueError(f"a weight of {contribution.weight}, not 0 to {terms.max_weight}")
    total = sum(lane.size for lane in terms.lanes)
    noise = keystream(SecretBytes(rounding_key), 4 * total).view(np.uint32)
    words, begin = [], 0
    for lane in terms.lanes:
        values: NDArray[np.floating]
        if lane.role is LaneRole.WEIGHT:
            values = np.array([contribution.weight], np.float64)
        else:
            values = contribution.values[lane.name]
        factor = contribution.weight / terms.max_weight if lane.weighted else 1.0
        words.append(encode(lane, values, factor=factor, noise=noise[begin : begin + lane.size]))
        begin += lane.size
    return tuple(words)


def modular_sum(terms: Terms, given: Iterable[tuple[Contribution, bytes]]) -> "Total":
    """Return the sum of contributions without masks: the same numbers, and no protection.

    For simulated cohorts too large for the protocol itself.

    Args:
        terms: Whose lanes are summed.
        given: Each client's contribution and rounding key.

    Raises:
        ValueError: As :func:`to_words`.
    """
    sums, num_clients = zeros(terms.lanes), 0
    for contribution, rounding_key in given:
        words = to_words(terms, contribution, rounding_key=rounding_key)
        for total, added in zip(sums, words, strict=True):
            np.add(total, added, out=total)
        num_clients += 1
    return from_words(terms, sums, num_clients=num_clients)


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """The released sum.

    Attributes:
        sums: By lane: Σ x w/W where the lane is weighted, Σ x where not; the weight apart.
        weight: Σ w, or the number of clients if no weights are sent.
        max_weight: W, or 1.
    """

    sums: Mapping[str, NDArray[np.float64]]
    weight: int
    max_weight: int

    def mean(self, lane: Lane) -> NDArray[np.float64]:
        """Return the mean of a lane: Σ (x w/W) W / Σ w, or Σ x / n.

        Raises:
            ValueError: Every client had weight 0.
        """
        if self.weight <= 0:
            raise ValueError("the weights add up to 0, so there is no mean")
        scale = self.max_weight if lane.weighted else 1
        return self.sums[lane.name] * (scale / self.weight)


def from_words(terms: Terms, words: tuple[Words, ...], *, num_clients: int) -> Total:
    """Return the sum of ``num_clients`` contributions.

    Raises:
        ValueError: They cannot reach it: a mask is left in it.
    """
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
