"""Masks: pseudorandom words that are added to a client's levels and removed from the sum.

A mask is the AES-256 counter-mode keystream of a key used for one mask in one session. Lanes
lie end to end in it, each starting at a cipher block, and it is cut into *spans* of 4 MiB; span s
starts at the counter block ``s ‖ 00000002`` (s in 12 bytes, little-endian). Spans can be
expanded in any order, so several threads share a vector without a copy of it.

AES-GCM counts in the same way for the nonce s, so the stream can be computed in two ways: with
plain CTR, or with GCM, whose tag is ignored. Which one is faster depends on the processor: with
AVX-512 OpenSSL's GCM is twice as fast, otherwise its CTR is three times as fast. So each process
times both once, for some milliseconds, and uses the faster one. Both give the same bits.

Words are added modulo their own width: unsigned wrap-around, without a modulo operation.

References:
    NIST SP 800-38A (counter mode), SP 800-38D (the counter blocks of GCM).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from fedlearn.core.clock import Clock, SystemClock
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg.fixed_point import Lane, Words, allocate_aligned

#: Each span needs its own cipher; spans are so long that the setup does not matter.
SPAN_BYTES = 1 << 22
#: Bytes expanded and folded at a time: source, keystream and words stay in the L2 cache.
_BLOCK_BYTES = 1 << 18
#: Most ciphers open at a time: their key schedules stay in the cache as well.
_STREAMS = 128
#: Size of an AES block. ``update_into`` requires a buffer that is one byte short of a block longer.
_AES_BYTES = 16
#: Encrypting zeros gives the keystream itself.
_ZEROS = allocate_aligned(_BLOCK_BYTES).data
_NONCE_BYTES = 12
#: Counter of GCM's first block of text: 1 is used for the tag.
_FIRST_BLOCK = (2).to_bytes(4, "big")
#: How often each way to a stream is timed: other load hardly disturbs the best of so many.
_PROBES = 12

#: Returns the cipher whose output on zeros is one span of a key's mask.
Stream: TypeAlias = Callable[[SecretBytes, int], CipherContext]


@dataclass(frozen=True, eq=False)
class MaskKeys:
    """The keys of the masks to add and of the masks to subtract."""

    plus: Sequence[SecretBytes]
    minus: Sequence[SecretBytes]

    def __len__(self) -> int:
        return len(self.plus) + len(self.minus)

    def inverse(self) -> "MaskKeys":
        """Return the keys that remove these masks again."""
        return MaskKeys(plus=self.minus, minus=self.plus)

    def split(self, num: int) -> list["MaskKeys"]:
        """Deal these masks out to ``num`` parts."""
        return [MaskKeys(self.plus[i::num], self.minus[i::num]) for i in range(num)]


def expand_keystream(key: SecretBytes, num_bytes: int) -> NDArray[np.uint8]:
    """Expand the first ``num_bytes`` of a key's mask."""
    out = allocate_aligned(_round_up_to_blocks(num_bytes) + _AES_BYTES)
    for number, begin in enumerate(range(0, num_bytes, SPAN_BYTES)):
        expand = open_mask_stream(key, number).update_into
        end = min(begin + SPAN_BYTES, num_bytes)
        for at in range(begin, end, _BLOCK_BYTES):
            size = _round_up_to_blocks(min(_BLOCK_BYTES, end - at))
            expand(_ZEROS[:size], out.data[at : at + size + _AES_BYTES - 1])
    return out[:num_bytes]


def fold(lanes: Sequence[Words], keys: MaskKeys, *, num_threads: int) -> None:
    """Add masks to contiguous lanes and subtract others, in place, on ``num_threads`` threads.

    No part of a mask serves two lanes. Ciphers and additions release the interpreter lock.
    """
    spans = list(_split_spans(lanes))
    if num_threads == 1:
        for number, parts in enumerate(spans):
            _fold_span(parts, number, keys)
        return
    # With fewer spans than threads, deal out the masks too: each further share has its own sum.
    shares = keys.split(min(-(-num_threads // max(len(spans), 1)), max(len(keys), 1)))
    with ThreadPoolExecutor(num_threads) as pool:
        first = [pool.submit(_fold_span, parts, s, shares[0]) for s, parts in enumerate(spans)]
        others: list[tuple[list[Words], Future[list[Words]]]] = [
            (parts, pool.submit(_sum_masks, parts, s, share))
            for share in shares[1:]
            for s, parts in enumerate(spans)
        ]
        # Wait for the in-place sums before other shares are added to the same words.
        for done in first:
            done.result()
        for parts, masks in others:
            for words, mask in zip(parts, masks.result(), strict=True):
                np.add(words, mask, out=words)


def _split_spans(lanes: Sequence[Words]) -> Iterator[list[Words]]:
    parts: list[Words] = []
    room = SPAN_BYTES
    for words in lanes:
        assert words.flags.c_contiguous
        assert words.ndim == 1
        begin = 0
        while begin < words.size:
            # A slice is a view: masks are folded into the caller's words.
            part = words[begin : begin + room // words.itemsize]
            parts.append(part)
            begin += part.size
            room -= _round_up_to_blocks(part.nbytes)
            if room == 0:
                yield parts
                parts, room = [], SPAN_BYTES
    if parts:
        yield parts


def _sum_masks(parts: Sequence[Words], number: int, keys: MaskKeys) -> list[Words]:
    sums: list[Words] = [allocate_aligned(words.nbytes).view(words.dtype) for words in parts]
    _fold_span(sums, number, keys)
    return sums


def _fold_span(parts: Sequence[Words], number: int, keys: MaskKeys) -> None:
    signed = [(key, np.add) for key in keys.plus] + [(key, np.subtract) for key in keys.minus]
    buffer = allocate_aligned(_BLOCK_BYTES + _AES_BYTES)
    for first in range(0, len(signed), _STREAMS):
        streams = [
            (open_mask_stream(key, number).update_into, fold_into)
            for key, fold_into in signed[first : first + _STREAMS]
        ]
        # Streams in the inner loop: a block of words stays in the cache for all its masks.
        for words in parts:
            step = _BLOCK_BYTES // words.itemsize
            for begin in range(0, words.size, step):
                part = words[begin : begin + step]
                size = _round_up_to_blocks(part.nbytes)
                zeros, out = _ZEROS[:size], buffer.data[: size + _AES_BYTES - 1]
                mask = buffer[: part.nbytes].view(part.dtype)
                for expand, fold_into in streams:
                    expand(zeros, out)
                    fold_into(part, mask, part)


def _round_up_to_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _AES_BYTES) * _AES_BYTES


def open_mask_stream(key: SecretBytes, span: int) -> CipherContext:
    """Return the cipher whose output on zeros is one span of a key's mask."""
    return choose_stream()(key, span)


def open_gcm_stream(key: SecretBytes, span: int) -> CipherContext:
    """Return the cipher of :func:`open_mask_stream`, computed with GCM."""
    nonce = span.to_bytes(_NONCE_BYTES, "little")
    return Cipher(algorithms.AES256(key.reveal()), modes.GCM(nonce)).encryptor()


def open_ctr_stream(key: SecretBytes, span: int) -> CipherContext:
    """Return the cipher of :func:`open_mask_stream`, computed with plain CTR."""
    first = span.to_bytes(_NONCE_BYTES, "little") + _FIRST_BLOCK
    return Cipher(algorithms.AES256(key.reveal()), modes.CTR(first)).encryptor()


@cache
def choose_stream() -> Stream:
    """Return the faster way to expand masks here, timed once per process in some milliseconds."""
    return choose_fastest(STREAMS, clock=SystemClock())


def choose_fastest(streams: Sequence[Stream], *, clock: Clock) -> Stream:
    """Time several ways to the same stream, in turns, and return the fastest."""
    out, key = allocate_aligned(_BLOCK_BYTES + _AES_BYTES).data[:-1], SecretBytes(bytes(32))
    best_s = dict.fromkeys(streams, math.inf)
    for _ in range(_PROBES):
        for stream in streams:
            expand = stream(key, 0).update_into
            begin_s = clock.now_s()
            expand(_ZEROS, out)
            best_s[stream] = min(best_s[stream], clock.now_s() - begin_s)
    return min(streams, key=best_s.__getitem__)


#: All ways to the stream.
STREAMS: Sequence[Stream] = (open_gcm_stream, open_ctr_stream)


def pack(lanes: Sequence[Lane], words: Sequence[Words]) -> bytes:
    """Pack the low b bits of every word, lane after lane, little-endian."""
    parts = []
    for lane, values in zip(lanes, words, strict=True):
        wide = values.view(np.uint8).reshape(lane.size, lane.dtype.itemsize)
        parts.append(np.ascontiguousarray(wide[:, : lane.modulus_bits // 8]).data)
    return b"".join(parts)


def add_packed(sums: Sequence[Words], data: bytes | memoryview, *, lanes: Sequence[Lane]) -> None:
    """Add the output of :func:`pack` to ``sums``, in place; ProtocolError if its length differs."""
    expected = sum(lane.num_bytes for lane in lanes)
    if len(data) != expected:
        raise ProtocolError(
            f"a masked vector has {len(data)} bytes, not the {expected} that the terms require"
        )
    begin = 0
    for lane, total in zip(lanes, sums, strict=True):
        np.add(total, _unpack(data, begin, lane=lane), out=total)
        begin += lane.num_bytes


def _unpack(data: bytes | memoryview, begin: int, *, lane: Lane) -> Words:
    packed = np.frombuffer(data, np.uint8, lane.num_bytes, begin)
    width = lane.modulus_bits // 8
    if width == lane.dtype.itemsize:
        narrow: Words = packed.view(lane.dtype)
        return narrow
    wide = np.zeros((lane.size, lane.dtype.itemsize), np.uint8)
    wide[:, :width] = packed.reshape(lane.size, width)
    words: Words = wide.reshape(-1).view(lane.dtype)
    return words


def zeros(lanes: Sequence[Lane]) -> tuple[Words, ...]:
    """Return zero words for all lanes: the sum of no vectors."""
    return tuple(
        allocate_aligned(lane.size * lane.dtype.itemsize).view(lane.dtype) for lane in lanes
    )
