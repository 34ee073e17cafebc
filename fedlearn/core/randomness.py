"""Public, reproducible randomness: seeds, hashes and generators.

:class:`Seed` is public and reproducible. :class:`~fedlearn.core.secret_bytes.SecretBytes` comes
from the operating system and is for keys and masks. Neither converts to the other, neither has a
default, and nothing here draws from a global generator.
"""

import hashlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedlearn.core.ranges import is_whole

_MASK = (1 << 63) - 1
_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
#: Constants of SplitMix64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Seed:
    """A public seed. Each use derives its own seed by a label, so that no two uses coincide.

    Attributes:
        value: In [0, 2**63).

    Example:
        >>> Seed(0).derive("cohort", 3) == Seed(0).derive("cohort", 3)
        True
        >>> Seed(0).derive("cohort", 3) == Seed(0).derive("shuffle", 3)
        False
    """

    value: int

    def __post_init__(self) -> None:
        if not is_whole(self.value) or not 0 <= self.value <= _MASK:
            raise ValueError(f"seed is {self.value!r}; give a whole number >= 0 and < 2**63")

    def derive(self, *labels: str | int) -> "Seed":
        """Derive the seed for one labeled use."""
        text = repr((self.value, *labels)).encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return Seed(int.from_bytes(digest, "little") & _MASK)

    def at(self, index: int) -> "Seed":
        """Derive the seed for one of many numbered uses; cheaper than :meth:`derive`."""
        return Seed(self.hash(index).item() & _MASK)

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator."""
        return np.random.default_rng(self.value)

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a fresh torch generator on ``device``."""
        return torch.Generator(device).manual_seed(self.value)

    def hash(self, *labels: NDArray[np.int64] | int) -> NDArray[np.uint64]:
        """Return one 64-bit hash per element of the broadcast ``labels``.

        This is random access into a stream: the hash of (client, round, …) does not depend on
        which others are computed, so a million clients need no table.

        References:
            Steele, Lea and Flood, 2014, `Fast Splittable Pseudorandom Number Generators
            <https://doi.org/10.1145/2714064.2660195>`_ (the mixing function).
        """
        prefix, rest = _mix_int(self.value), list(labels)
        while rest and isinstance(label := rest[0], int):  # cheaper than arrays of one element
            prefix = _mix_int(prefix ^ (label & _MASK_64))
            rest.pop(0)
        if len(rest) == 1 and np.ndim(rest[0]):  # the usual case: as below, but not broadcast
            return _mix(np.uint64(prefix) ^ np.asarray(rest[0], np.int64).view(np.uint64))
        state = np.full(1, prefix, np.uint64)
        for label in rest:
            state = _mix(state ^ np.asarray(label, np.int64).view(np.uint64))
        return state.reshape(np.broadcast_shapes(*(np.shape(label) for label in labels)))

    @staticmethod
    def hash_each(seeds: "Sequence[Seed]", labels_N: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return :meth:`hash` of the same labels for each seed, one row per seed: shape [S, N].

        Example:
            >>> labels = np.arange(3)
            >>> rows = Seed.hash_each([Seed(4), Seed(5)], labels)
            >>> bool((rows[1] == Seed(5).hash(labels)).all())
            True
        """
        prefixes = np.asarray([_mix_int(seed.value) for seed in seeds], np.uint64)
        return _mix(prefixes[:, None] ^ labels_N.view(np.uint64))

    def uniform(self, *labels: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """Return one number in (0, 1) per element of the broadcast ``labels``.

        Example:
            >>> Seed(0).uniform(np.arange(3)).shape
            (3,)
        """
        # 53 bits fill a float64; half a step more, so that 0 never occurs. The largest number
        # would round to 1.
        steps = (self.hash(*labels) >> np.uint64(11)).astype(np.float64) + 0.5
        return np.minimum(steps, 2.0**53 - 1.0) * 2.0**-53

    def normal(self, *labels: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """Return one standard normal per element of the broadcast ``labels``.

        Box-Muller on the two halves of a hash: 32 bits reach 6.7 standard deviations.
        """
        halves = (self.hash(*labels)[..., None].view(np.uint32) + 0.5) * 2.0**-32
        radius, angle = halves[..., 1], halves[..., 0]
        normal: NDArray[np.float64] = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
        return normal


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Arrays wrap modulo 2**64 silently, as intended; NumPy scalars would warn.
    state = state + _GOLDEN
    state = (state ^ (state >> _30)) * _MIX_1
    state = (state ^ (state >> _27)) * _MIX_2
    return state ^ (state >> _31)


def _mix_int(state: int) -> int:
    """Mix one number, with the same result as :func:`_mix`."""
    state = (state + int(_GOLDEN)) & _MASK_64
    state = ((state ^ (state >> 30)) * int(_MIX_1)) & _MASK_64
    state = ((state ^ (state >> 27)) * int(_MIX_2)) & _MASK_64
    return state ^ (state >> 31)


#: All threads share the global generators, so a thread holds this lock from seeding to its last
#: draw.
_TURN = threading.RLock()
if sys.platform != "win32":
    # A forked process has only the forking thread. If another thread held the lock, no one could
    # ever release it there, so the fork takes the lock first.
    os.register_at_fork(
        before=_TURN.acquire, after_in_parent=_TURN.release, after_in_child=_TURN.release
    )


def lock_global_generators() -> AbstractContextManager[bool]:
    """Give this thread exclusive use of the global generators in the block.

    Other threads that want them wait, so the block must not wait for those threads.
    """
    return _TURN


def seed_global_generators(seed: Seed) -> None:
    """Seed Python's, numpy's and torch's global generators, for code that draws from them.

    Call it in a :func:`lock_global_generators`.
    """
    random.seed(seed.value)
    # NumPy's global generator takes seeds of 32 bits only.
    np.random.seed(seed.value & _MASK_32)  # noqa: NPY002 - the old one
    if torch.accelerator.is_available():
        torch.manual_seed(seed.value)
    else:  # without the stack that is formatted for each kind of accelerator, in up to 0.5 ms
        torch.default_generator.manual_seed(seed.value)


@contextmanager
def preserve_global_generators() -> Iterator[Callable[[], bool]]:
    """Restore Python's and numpy's global generators after the block.

    Yields a function that returns whether they have been used since. Other threads wait: see
    :func:`lock_global_generators`.

    Example:
        >>> with preserve_global_generators() as have_moved:
        ...     print(have_moved(), random.random() < 1, have_moved())
        False True True
        >>> have_moved()
        False
    """
    with lock_global_generators():
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the old one

        def have_moved() -> bool:
            now = np.random.get_state()  # noqa: NPY002 - as above
            same = all(np.array_equal(a, b) for a, b in zip(now, of_numpy, strict=True))
            return random.getstate() != of_python or not same

        try:
            yield have_moved
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002 - as above


@contextmanager
def reseed_by_key() -> Iterator[Callable[[int], Callable[[], bool]]]:
    """Reseed the global generators of Python, numpy and torch (CPU) by key within a block.

    Yields a function that takes a 32-bit key and seeds all three, so that later draws depend on
    the key alone. It returns a function, to be called once, which returns whether the block has
    drawn since. All three generators are restored at the end. Other threads wait: see
    :func:`lock_global_generators`.

    Example:
        >>> with reseed_by_key() as set_key:
        ...     has_drawn = set_key(7)
        ...     print(has_drawn())
        ...     has_drawn = set_key(7)
        ...     print(random.random() < 1, has_drawn())
        False
        True True
    """
    generator = torch.default_generator

    def next_bits() -> tuple[object, ...]:
        # A draw costs 2 µs; numpy takes 100 µs to show its state.
        of_numpy = np.random.bytes(8)  # noqa: NPY002 - the generator that datasets draw from
        return random.getrandbits(64), of_numpy, generator.get_state().numpy().tobytes()

    def seed(key: int) -> None:
        random.seed(key)
        np.random.seed(key)  # noqa: NPY002 - as above
        generator.manual_seed(key)

    def set_key(key: int) -> Callable[[], bool]:
        seed(key)
        # Remember the first draw of this key, then seed again: a different next draw shows that
        # others drew.
        first = next_bits()
        seed(key)
        return lambda: next_bits() != first

    with preserve_global_generators():  # which also holds the lock of `lock_global_generators`
        before = generator.get_state()
        try:
            yield set_key
        finally:
            generator.set_state(before)
