"""Masks: pseudorandom words added to a client's levels and taken out of the sum.

A mask is the AES-256 counter-mode keystream of a key used for one mask in one session. Lanes
lie end to end in it, each from a cipher block on, and it is cut into *spans* of 4 MiB; span s
starts at the counter block ``s ‖ 00000002`` (s in 12 bytes, little-endian). Spans can be
expanded in any order, so several threads share a vector without a copy of it.

That is how AES-GCM counts for the nonce s, so there are two ways to the same stream: plain CTR,
and GCM, whose tag is never used. Which is faster depends on the processor: with AVX-512
OpenSSL's GCM, twice as fast, else its CTR, three times. So a process tries both once, for some
milliseconds, and takes the faster one; the masks are the same bit for bit.

Words are added modulo their own width: unsigned wrap-around, no remainder.

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
from fedlearn.secagg.fixed_point import Lane, Words, aligned

#: A cipher is set up anew for each: long enough that this does not show.
SPAN_BYTES = 1 << 22
#: What is expanded and folded at a time: source, keystream and words stay in the L2 cache.
_BLOCK_BYTES = 1 << 18
#: Ciphers kept open at a time: their key schedules stay in the cache as well.
_STREAMS = 128
#: Bytes of a block of AES; a cipher may write up to one more than it is asked for.
_AES_BYTES = 16
_ZEROS = aligned(_BLOCK_BYTES).data
_NONCE_BYTES = 12
#: What GCM counts from for the text: 1 is the tag's.
_FIRST_BLOCK = (2).to_bytes(4, "big")
#: Blocks that each way to a stream is timed on: the best of so many is hardly disturbed.
_PROBES = 12

#: Returns the cipher whose output on zeros is one span of a key's mask.
Stream: TypeAlias = Callable[[SecretBytes, int], CipherContext]


@dataclass(frozen=True, eq=False)
class MaskKeys:
    """The keys of the masks to add and of those to subtract."""

    plus: Sequence[SecretBytes]
    minus: Sequence[SecretBytes]

    def __len__(self) -> int:
        return len(self.plus) + len(self.minus)

    def inverse(self) -> "MaskKeys":
        """Return what takes these masks out again."""
        return MaskKeys(plus=self.minus, minus=self.plus)

    def split(self, num: int) -> list["MaskKeys"]:
        """Return the same masks dealt out to ``num``."""
        return [MaskKeys(self.plus[i::num], self.minus[i::num]) for i in range(num)]


def keystream(key: SecretBytes, num_bytes: int) -> NDArray[np.uint8]:
    """Return the beginning of a key's mask."""
    out = aligned(_whole_blocks(num_bytes) + _AES_BYTES)
    for number, begin in enumerate(range(0, num_bytes, SPAN_BYTES)):
        expand = mask_stream(key, number).update_into
        end = min(begin + SPAN_BYTES, num_bytes)
        for at in range(begin, end, _BLOCK_BYTES):
            size = _whole_blocks(min(_BLOCK_BYTES, end - at))
            expand(_ZEROS[:size], out.data[at : at + size + _AES_BYTES - 1])
    return out[:num_bytes]


def fold(lanes: Sequence[Words], keys: MaskKeys, *, num_threads: int) -> None:
    """Add masks to contiguous lanes and subtract others, in place, on so many threads.

    No part of a mask serves two lanes. Ciphers and additions release the interpreter lock.
    """
    spans = list(_spans(lanes))
    if num_threads == 1:
        for number, parts in enumerate(spans):
            _fold_span(parts, number, keys)
        return
    # Fewer spans than threads: the masks are dealt out too, each share with a sum of its own.
    shares = keys.split(min(-(-num_threads // max(len(spans), 1)), max(len(keys), 1)))
    with ThreadPoolExecutor(num_threads) as pool:
        first = [pool.submit(_fold_span, parts, s, shares[0]) for s, parts in enumerate(spans)]
        others: list[tuple[list[Words], Future[list[Words]]]] = [
            (parts, pool.submit(_masks, parts, s, share))
            for share in shares[1:]
            for s, parts in enumerate(spans)
        ]
        for done in first:
            done.result()
        for parts, masks in others:
            for words, mask in zip(parts, masks.result(), strict=True):
                np.add(words, mask, out=words)


def _spans(lanes: Sequence[Words]) -> Iterator[list[Words]]:
    """Yield what each span covers of the lanes."""
    parts: list[Words] = []
    room = SPAN_BYTES
    for words in lanes:
        assert words.flags.c_contiguous
        assert words.ndim == 1
        begin = 0
        while begin < words.size:
            part = words[begin : begin + room // words.itemsize]
            parts.append(part)
            begin += part.size
            room -= _whole_blocks(part.nbytes)
            if room == 0:
                yield parts
                parts, room = [], SPAN_BYTES
    if parts:
        yield parts


def _masks(parts: Sequence[Words], number: int, keys: MaskKeys) -> list[Words]:
    """Return the sum of masks over one span."""
    sums: list[Words] = [aligned(words.nbytes).view(words.dtype) for words in parts]
    _fold_span(sums, number, keys)
    return sums


def _fold_span(parts: Sequence[Words], number: int, keys: MaskKeys) -> None:
    signed = [(key, np.add) for key in keys.plus] + [(key, np.subtract) for key in keys.minus]
    buffer = aligned(_BLOCK_BYTES + _AES_BYTES)
    for first in range(0, len(signed), _STREAMS):
        streams = [
            (mask_stream(key, number).update_into, fold_into)
            for key, fold_into in signed[first : first + _STREAMS]
        ]
        for words in parts:
            step = _BLOCK_BYTES // words.itemsize
            for begin in range(0, words.size, step):
                part = words[begin : begin + step]
                size = _whole_blocks(part.nbytes)
                zeros, out = _ZEROS[:size], buffer.data[: size + _AES_BYTES - 1]
                mask = buffer[: part.nbytes].view(part.dtype)
                for expand, fold_into in streams:
                    expand(zeros, out)
                    fold_into(part, mask, part)


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _AES_BYTES) * _AES_BYTES


def mask_stream(key: SecretBytes, span: int) -> CipherContext:
    """Return the cipher whose output on zeros is one span of a key's mask."""
    return fastest_stream()(key, span)


def gcm_stream(key: SecretBytes, span: int) -> CipherContext:
    """Return the cipher of :func:`mask_stream` by way of GCM."""
    nonce = span.to_bytes(_NONCE_BYTES, "little")
    return Cipher(algorithms.AES256(key.reveal()), modes.GCM(nonce)).encryptor()


def ctr_stream(key: SecretBytes, span: int) -> CipherContext:
    """Return the cipher of :func:`mask_stream` by way of plain CTR."""
    first = span.to_bytes(_NONCE_BYTES, "little") + _FIRST_BLOCK
    return Cipher(algorithms.AES256(key.reveal()), modes.CTR(first)).encryptor()


@cache
def fastest_stream() -> Stream:
    """Return the way to masks that is faster here, found once a process in some milliseconds."""
    return faster(STREAMS, clock=SystemClock())


def faster(streams: Sequence[Stream], *, clock: Clock) -> Stream:
    """Return of several ways to one stream the one with the best time; they take turns."""
    out, key = aligned(_BLOCK_BYTES + _AES_BYTES).data[:-1], SecretBytes(bytes(32))
    best_s = dict.fromkeys(streams, math.inf)
    for _ in range(_PROBES):
        for stream in streams:
            expand = stream(key, 0).update_into
            begin_s = clock.now_s()
            expand(_ZEROS, out)
            best_s[stream] = min(best_s[stream], clock.now_s() - begin_s)
    return min(streams, key=best_s.__getitem__)


#: All ways to the stream.
STREAMS: Sequence[Stream] = (gcm_stream, ctr_stream)


def pack(lanes: Sequence[Lane], words: Sequence[Words]) -> bytes:
    """Return the low b bits of every word, lane after lane, little-endian."""
    parts = []
    for lane, values in zip(lanes, words, strict=True):
        wide = values.view(np.uint8).reshape(lane.size, lane.dtype.itemsize)
        parts.append(np.ascontiguousarray(wide[:, : lane.modulus_bits // 8]).data)
    return b"".join(parts)


def add_packed(sums: Sequence[Words], data: bytes | memoryview, *, lanes: Sequence[Lane]) -> None:
    """Add what :func:`pack` returned, in place; ProtocolError if its length is another."""
    expected = sum(lane.num_bytes for lane in lanes)
    if len(data) != expected:
        raise ProtocolError(f"a masked vector of {len(data)} bytes, {expected} were asked for")
    begin = 0
    for lane, total in zip(lanes, sums, strict=True):
        np.add(total, _words(data, begin, lane=lane), out=total)
        begin += lane.num_bytes


def _words(data: bytes | memoryview, begin: int, *, lane: Lane) -> Words:
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
    """Return the empty sum."""
    return tuple(aligned(lane.size * lane.dtype.itemsize).view(lane.dtype) for lane in lanes)
