"""Masks cancel exactly, for any width, length and number of threads."""

import itertools
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import CipherContext

from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg.fixed_point import MODULUS_BITS, Lane, LaneRole, Words
from fedlearn.secagg.masking import (
    SPAN_BYTES,
    STREAMS,
    MaskKeys,
    Stream,
    add_packed,
    choose_fastest,
    choose_stream,
    expand_keystream,
    fold,
    pack,
    zeros,
)

KEYS = [SecretBytes.generate(32) for _ in range(5)]


def lane(modulus_bits: int, size: int) -> Lane:
    return Lane(
        name=f"{modulus_bits}",
        role=LaneRole.VECTOR,
        size=size,
        step=1.0,
        max_level=1,
        modulus_bits=modulus_bits,
        weighted=False,
    )


def draw_words(lanes: list[Lane], *, seed: int) -> tuple[Words, ...]:
    rng = np.random.default_rng(seed)
    words = zeros(lanes)
    for one, into in zip(lanes, words, strict=True):
        raw = rng.integers(0, (1 << one.modulus_bits) - 1, one.size, np.uint64, endpoint=True)
        np.copyto(into, raw, casting="unsafe")
    return words


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 65_537, SPAN_BYTES // 4 + 5, SPAN_BYTES // 2 + 3])
def test_masks_added_and_subtracted_leave_nothing(size: int, num_threads: int) -> None:
    lanes = [lane(64, 1), lane(16, 3), lane(32, size)]
    words = draw_words(lanes, seed=0)
    before = [one.copy() for one in words]
    keys = MaskKeys(plus=KEYS[:3], minus=KEYS[3:])
    fold(words, keys, num_threads=num_threads)
    assert not np.array_equal(words[2], before[2])
    fold(words, keys.inverse(), num_threads=1)
    assert all(np.array_equal(one, other) for one, other in zip(words, before, strict=True))


@pytest.mark.parametrize("span", [0, 1, 255, 1 << 40])
def test_every_way_to_a_mask_gives_the_same_bits(span: int) -> None:
    """Up to the end of a span, where a counter of fewer bits would have wrapped around."""
    zeros_ = bytes(SPAN_BYTES)
    first, *others = (stream(KEYS[0], span).update(zeros_) for stream in STREAMS)
    assert others
    assert all(other == first for other in others)


@dataclass
class Stopwatch:
    """A clock that only moves when a stream is expanded, by a set time per stream."""

    now: float = 0.0

    def now_s(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("slow", STREAMS)
def test_the_faster_way_is_taken_however_it_is_disturbed(slow: Stream) -> None:
    """Each stream counts by its best block, although every third call is slowed down."""
    clock, count = Stopwatch(), itertools.count()

    def timed(stream: Stream) -> Stream:
        @dataclass
        class Timed:
            cipher: CipherContext

            def update_into(self, data: bytes, out: memoryview) -> int:
                clock.sleep((2.0 if stream is slow else 1.0) + 10.0 * (next(count) % 3 == 0))
                return self.cipher.update_into(data, out)

        return lambda key, span: cast(CipherContext, Timed(stream(key, span)))

    fast, held = (stream for stream in STREAMS if stream is not slow), timed(slow)
    candidates = [held, *map(timed, fast)]
    assert choose_fastest(candidates, clock=clock) is candidates[1]
    assert choose_fastest(candidates[::-1], clock=clock) is candidates[1]


def test_the_way_is_found_once_a_process() -> None:
    assert choose_stream() is choose_stream()
    assert choose_stream() in STREAMS


def test_a_mask_is_no_constant_and_lanes_have_their_own() -> None:
    """Spans do not repeat each other either."""
    lanes = zeros([lane(32, SPAN_BYTES // 2), lane(32, SPAN_BYTES // 2)])
    fold(lanes, MaskKeys(plus=KEYS[:1], minus=[]), num_threads=2)
    assert np.count_nonzero(np.diff(np.sort(lanes[0]))) > 0.99 * SPAN_BYTES / 2
    step = SPAN_BYTES // 4
    parts = [part.tobytes() for words in lanes for part in np.split(words, len(words) // step)]
    assert len(set(parts)) == len(parts) == 4


def test_lanes_lie_end_to_end_in_a_mask_each_from_a_block_on() -> None:
    """Each lane starts at a new 16-byte block, and a span may end in the middle of a lane."""
    lanes = zeros([lane(16, 3), lane(64, 1), lane(32, SPAN_BYTES // 4), lane(16, 5)])
    fold(lanes, MaskKeys(plus=KEYS[:1], minus=[]), num_threads=2)
    stream = expand_keystream(KEYS[0], SPAN_BYTES + 48).tobytes()
    assert lanes[0].tobytes() == stream[:6]
    assert lanes[1].tobytes() == stream[16:24]
    assert lanes[2].tobytes() == stream[32 : 32 + SPAN_BYTES]
    assert lanes[3].tobytes() == stream[32 + SPAN_BYTES : 42 + SPAN_BYTES]


def test_more_masks_than_are_open_at_a_time_are_all_folded() -> None:
    keys = [SecretBytes.generate(32) for _ in range(300)]
    total, expected = zeros([lane(32, 10)]), np.zeros(10, np.uint32)
    fold(total, MaskKeys(plus=keys, minus=[]), num_threads=1)
    for key in keys:
        expected += expand_keystream(key, 40).view(np.uint32)
    assert np.array_equal(total[0], expected)


def test_every_bit_of_a_key_matters() -> None:
    """If a cipher used fewer bits of the key, streams would repeat: 32 bits are guessed quickly."""
    key = bytes(range(32))
    streams = {expand_keystream(SecretBytes(key), 64).tobytes()}
    for bit in range(256):
        flipped = (int.from_bytes(key) ^ (1 << bit)).to_bytes(32)
        streams.add(expand_keystream(SecretBytes(flipped), 64).tobytes())
    assert len(streams) == 257


def test_masked_zeros_look_uniform() -> None:
    stream = expand_keystream(KEYS[0], 1 << 20)
    counts = np.bincount(stream, minlength=256)
    assert ((counts - 4096) ** 2 / 4096).sum() < 255 + 6 * np.sqrt(510)


def test_packed_words_add_up_in_every_modulus() -> None:
    """An upload has exactly b bits per number."""
    lanes = [lane(bits, 9) for bits in MODULUS_BITS]
    first, second = draw_words(lanes, seed=1), draw_words(lanes, seed=2)
    packed = pack(lanes, first)
    assert len(packed) == sum(9 * bits // 8 for bits in MODULUS_BITS)
    sums = zeros(lanes)
    add_packed(sums, packed, lanes=lanes)
    add_packed(sums, pack(lanes, second), lanes=lanes)
    for bits, total, one, other in zip(MODULUS_BITS, sums, first, second, strict=True):
        modulus = 1 << bits
        expected = [(int(a) + int(b)) % modulus for a, b in zip(one, other, strict=True)]
        assert [int(word) % modulus for word in total] == expected


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_vector_of_another_length_is_refused(extra: int) -> None:
    lanes = [lane(24, 4)]
    with pytest.raises(ProtocolError, match="not the 12 that the terms"):
        add_packed(zeros(lanes), bytes(12 + extra), lanes=lanes)
