"""Secret randomness from the operating system, which cannot be reproduced.

Reproducible randomness is in :mod:`fedlearn.core.randomness`, which imports torch; this module
does not.
"""

import secrets
from typing import NoReturn


class SecretBytes:
    """Secret bytes: keys, mask seeds, tokens.

    Guarantees:
        :meth:`generate` draws from the operating system's generator. The bytes are never printed
        or pickled, are compared in constant time, and cannot become a :class:`Seed`.

    Example:
        >>> SecretBytes.generate(32)
        SecretBytes(32 bytes)
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def generate(cls, num_bytes: int) -> "SecretBytes":
        """Draw ``num_bytes`` new secret bytes."""
        return cls(secrets.token_bytes(num_bytes))

    def reveal(self) -> bytes:
        """Return the bytes, for the cryptographic primitive that uses them."""
        return self._value

    def __repr__(self) -> str:
        return f"SecretBytes({len(self._value)} bytes)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretBytes) and secrets.compare_digest(self._value, other._value)

    def __hash__(self) -> NoReturn:
        raise TypeError("secrets are not hashed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("secrets are not pickled")


def draw_jitter() -> float:
    """Draw a number in [0, 1) that spreads retries in time and is never reproduced."""
    return secrets.SystemRandom().random()
