"""Masks: pseudorandom words added to a client's levels and taken out of the sum.

A mask is the AES-256 counter-mode keystream of a key used for one mask in one session. It is
cut into *spans* of 1 MiB; span s starts at the counter block ``s ‖ 00000002`` (s in 12 bytes,
little-endian). That is how AES-GCM counts for the nonce s, and GCM's is the fastest counter
mode that OpenSSL has: the stream is the same as plain CTR's, its tag is never used. Spans can
be expanded in any order, so several threads share a vector without a copy of it.

Words are added modulo their own width: unsigned wrap-around, no remainder.

References:
    NIST SP 800-38A (counter mode), SP 800-38D (the counter blocks of GCM).
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from fedlearn.core.randomness import SecretBytes
from fedlearn.errors import ProtocolError
from fedlearn.secagg.fixed_point import Lane, Words

SPAN_BYTES = 1 << 20
#: What is expanded and folded at a time: source, keystream and words stay in the L2 cache.
_BLOCK_BYTES = 1 << 17
#: Ciphers kept open at a time: their key schedules stay in the cache as well.
_STREAMS = 128
#: A cipher writes up to a block more than it is asked for.
_SLACK = 16
_ZEROS = memoryview(bytes(_BLOCK_BYTES))


@dataclass(frozen=True, eq=False)
class MaskKeys:
    """The keys of the masks to add and of those to subtract."""

    plus: Sequence[SecretBytes]
    minus: Sequence[SecretBytes]

    def inverse(self) -> "MaskKeys":
        """Return what takes these masks out again."""
        return MaskKeys(plus=self.minus, minus=self.plus)


def keystream(key: SecretBytes, num_bytes: int) -> NDArray[np.uint8]:
    """Return the beginning of a key's mask."""
    out = np.zeros(-(-num_bytes // 8), np.uint64)
    fold([out], MaskKeys(plus=[key], minus=[]), num_threads=1)
    return out.view(np.uint8)[:num_bytes]


def fold(lanes: Sequence[Words], keys: MaskKeys, *, num_threads: int) -> None:
    """Add and subtract masks, in place.

    Each lane begins at a span of its own: no part of a mask serves two lanes.

    Args:
        lanes: Contiguous and little-endian; changed in place.
        keys: Each of 32 bytes.
        num_threads: Threads to expand on; ciphers and additions release the interpreter lock.
    """
    spans = list(_spans(lanes))
    if num_threads == 1 or len(spans) == 1:
        for number, words in spans:
            _fold_span(words, number, keys)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(_fold_span, words, number, keys) for number, words in spans]:
            done.result()


def _spans(lanes: Sequence[Words]) -> Iterator[tuple[int, Words]]:
    number = 0
    for words in lanes:
        assert words.flags.c_contiguous
        assert words.ndim == 1
        step = SPAN_BYTES // words.itemsize
        for begin in range(0, words.size, step):
            yield number, words[begin : begin + step]
            number += 1


def _fold_span(words: Words, number: int, keys: MaskKeys) -> None:
    signed = [(key, np.add) for key in keys.plus] + [(key, np.subtract) for key in keys.minus]
    buffer = np.empty(_BLOCK_BYTES + _SLACK, np.uint8)
    view, mask = buffer.data, buffer[:_BLOCK_BYTES].view(words.dtype)
    step = _BLOCK_BYTES // words.itemsize
    for first in range(0, len(signed), _STREAMS):
        streams = [
            (mask_stream(key, number).update_into, fold)
            for key, fold in signed[first : first + _STREAMS]
        ]
        for begin in range(0, words.size, step):
            part = words[begin : begin + step]
            zeros, out = _ZEROS[: part.nbytes], view[: part.nbytes + _SLACK - 1]
            for expand, fold_into in streams:
                expand(zeros, out)
                fold_into(part, mask[: part.size], out=part)


def mask_stream(key: SecretBytes, span: int) -> CipherContext:
    """Return the cipher whose output on zeros is one span of a key's mask."""
    nonce = span.to_bytes(12, "little")
    return Cipher(algorithms.AES256(key.reveal()), modes.GCM(nonce)).encryptor()


def pack(lanes: Sequence[Lane], words: Sequence[Words]) -> bytes:
    """Return the low b bits of every word, lane after lane, little-endian."""
    parts = []
    for lane, values in zip(lanes, words, strict=True):
        wide = values.view(np.uint8).reshape(lane.size, lane.dtype.itemsize)
        parts.append(wide[:, : lane.modulus_bits // 8].tobytes())
    return b"".join(parts)


def add_packed(sums: Sequence[Words], data: bytes | memoryview, *, lanes: Sequence[Lane]) -> None:
    """Add what :func:`pack` returned, in place.

    Raises:
        ProtocolError: ``data`` is not as long as the lanes.
    """
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
    return tuple(np.zeros(lane.size, lane.dtype) for lane in lanes)
