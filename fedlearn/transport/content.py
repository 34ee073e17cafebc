"""What requests and replies are called on the wire: the digest of their bytes, by BLAKE3.

A client signs the digest of its reply, and a coordinator computes that of every upload anew. By
SHA-256 this would take nearly as long as to receive and decrypt it: where a core with AVX-512 and
SHA instructions hashes 1.3 GB/s by SHA-256, it hashes 4.6 GB/s by BLAKE3, and to find a collision
takes 2**128 steps for either.

References:
    O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3: one function, fast everywhere" (2020).
"""

from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

#: Bytes of a digest.
DIGEST_BYTES = 32

#: Bytes of a file that are read at a time.
_STRIDE = 1 << 20


class Digester:
    """Computes the digest of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._hash = blake3()

    def update(self, data: bytes | memoryview) -> None:
        """Go on with ``data``; other threads run meanwhile."""
        self._hash.update(data)

    def update_from(self, stream: BinaryIO) -> None:
        """Go on with what is left in ``stream``.

        Raises:
            OSError: It cannot be read.
        """
        while data := stream.read(_STRIDE):
            self._hash.update(data)

    def digest(self) -> bytes:
        """Return the digest of all that has come."""
        return self._hash.digest()


def digest_of(data: bytes) -> bytes:
    """Return the digest of ``data``.

    Example:
        >>> digest_of(b"").hex()[:16]
        'af1349b9f5f9a1a6'
    """
    return blake3(data).digest()


def file_digest(path: Path) -> bytes:
    """Return the digest of a file's bytes.

    Raises:
        OSError: It cannot be read.
    """
    digester = Digester()
    with path.open("rb", buffering=0) as stream:
        digester.update_from(stream)
    return digester.digest()
