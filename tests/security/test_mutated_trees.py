"""Rosters and signatures with random mutations are refused with an error, in little memory.

Each message has one encoding: a decoded message is exactly what was sent, and any message that is
not refused is the honest one.
"""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from fedlearn.errors import AggregationAborted, ProtocolError
from fedlearn.secagg import audit, messages
from fedlearn.secagg.messages import Roster, Signatures
from tests.security.test_audit import IDS, VICTIM, Vote
from tests.security.test_rosters import INVITED, Lie, advertised
from tests.security.test_sparse_graph import SMALL

#: Number of mutations; each of the second kind verifies up to 83 signatures.
NUM_ROSTERS, NUM_SIGNATURES = 5_000, 1_000


def mutate(data: bytes, drawn: np.random.Generator) -> bytes:
    """Return mutated bytes: flipped, cut, repeated, replaced, or with a false length."""
    at, size = int(drawn.integers(6, len(data))), int(drawn.integers(1, 64))
    match int(drawn.integers(6)):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << int(drawn.integers(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + data[at + size :]
        case 2:
            return data[:at] + data[at : at + size] + data[at:]
        case 3:
            return data[:at] + drawn.bytes(size) + data[at + size :]
        case 4:
            return data[:at] + b"\xff\xff\xff\x7f" + data[at + 4 :]
        case _:
            other = int(drawn.integers(6, len(data)))
            return data[:at] + data[other : other + size] + data[at + size :]


def all_are_refused(honest: bytes, take: Callable[[messages.Message], object], *, num: int) -> int:
    """Check that all mutations are refused; return how many of them could be decoded."""
    drawn, num_read = np.random.default_rng(7), 0
    for _ in range(num):
        data = mutate(honest, drawn)
        if data == honest:
            continue
        try:
            message = messages.decode(data)
        except ProtocolError:
            continue
        assert messages.encode(message) == data
        num_read += 1
        with pytest.raises((ProtocolError, AggregationAborted)):
            take(message)
    return num_read


def peak_of(honest: bytes, take: Callable[[messages.Message], object]) -> int:
    """Return the peak memory, in bytes, over some mutations."""
    drawn, most = np.random.default_rng(8), 0
    tracemalloc.start()
    try:
        for _ in range(300):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            data = mutate(honest, drawn)
            try:
                take(messages.decode(data))
            except (ProtocolError, AggregationAborted):
                most = max(most, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return most


@pytest.mark.slow
def test_mutated_rosters_are_refused() -> None:
    lie = Lie.honest(advertised(INVITED))
    victim = SMALL[11]
    honest = messages.encode(lie.told(victim))

    def take(message: messages.Message) -> object:
        if not isinstance(message, Roster):
            raise ProtocolError("another kind")
        return lie.cohort.tell(victim, message)

    take(messages.decode(honest))  # control
    assert all_are_refused(honest, take, num=NUM_ROSTERS) > NUM_ROSTERS // 10
    assert peak_of(honest, take) < 400_000 + 100 * len(honest)


@pytest.mark.slow
def test_mutated_signatures_are_refused() -> None:
    vote = Vote.of(sigma_bits=40)
    survivors = vote.session.pack_ranks(IDS)
    honest = messages.encode(vote.show(vote.sign(IDS, survivors), survivors))
    assert IDS[VICTIM] in vote.view.by_id

    def take(message: messages.Message) -> object:
        if not isinstance(message, Signatures):
            raise ProtocolError("another kind")
        audit.check(message, vote.view, survivors=survivors, directory=vote.directory)
        return None

    take(messages.decode(honest))  # control
    assert all_are_refused(honest, take, num=NUM_SIGNATURES) > NUM_SIGNATURES // 10
    assert peak_of(honest, take) < 400_000 + 100 * len(honest)
