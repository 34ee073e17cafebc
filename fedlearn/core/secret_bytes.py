"""Randomness of the operating system, that nobody can repeat.

What can be repeated is in :mod:`fedlearn.core.randomness`, which needs torch; this does not.
"""

import secrets
from typing import NoReturn


class SecretBytes:
    """Bytes nobody may predict: keys, mask seeds, tokens.

    Guarantees:
        Drawn from the operating system's generator. Neither printed, pickled, compared
        in variable time, nor turned into a :class:`Seed`.

    Example:
        >>> SecretBytes.generate(32)
        SecretBytes(32 bytes)
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def generate(cls, num_bytes: int) -> "SecretBytes":
        """Return ``num_bytes`` fresh secret bytes."""
        return cls(secrets.token_bytes(num_bytes))

    def reveal(self) -> bytes:
        """Return the bytes, for the primitive that consumes them."""
        return self._value

    def __repr__(self) -> str:
        return f"SecretBytes({len(self._value)} bytes)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretBytes) and secrets.compare_digest(self._value, other._value)

    def __hash__(self) -> NoReturn:
        raise TypeError("secrets are not hashed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("secrets are not pickled")


def jitter() -> float:
    """Return a number in [0, 1) that nobody needs to reproduce: it spreads retries in time."""
    return secrets.SystemRandom().random()
