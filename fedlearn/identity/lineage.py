"""Rotation of identity keys: a chain of statements that the old and the new key both sign.

A *lineage* is a client's first identity key, followed by the statements that lead to its newest
one::

    lineage    = first key 32 | statement | statement | ...
    statement  = signature by the old key 64 | signature by the new key 64 | new key 32

Statement number s (from 1) is signed over the client's id, s, the old key and the new key, with
its own domain-separation label. The last 32 bytes are the newest key, and a key alone is a lineage
without statements. A lineage only grows: of two valid lineages of one client, one is a prefix of
the other, unless the owner (or a thief of a key) signed two successors of one key.

Guarantees:
    A peer that trusts one key of a client, at its position in the lineage, may trust all keys after
    it. This assumes that Ed25519 is secure and that no key was stolen before it was replaced, since
    a thief can sign a successor. Revoke a stolen key; do not rotate it.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fedlearn.core.messages import ClientId
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys

#: Most statements in a lineage: one rotation a year for a lifetime.
MAX_SUCCESSIONS = 64

_STATEMENT = struct.Struct(f"{keys.SIGNATURE_BYTES}s{keys.SIGNATURE_BYTES}s{keys.KEY_BYTES}s")
_LABEL = b"succession of identity keys"


@dataclass(frozen=True)
class Succession:
    """The statement that a new identity key replaces an old one, signed by both."""

    by_old: bytes
    by_new: bytes
    new_key: bytes


@dataclass(frozen=True)
class Lineage:
    """A client's identity keys in order, each vouched for by the one before.

    Example:
        >>> old, old_key = keys.create_signer()
        >>> new, new_key = keys.create_signer()
        >>> lineage = Lineage(old_key).extend(
        ...     new_key, client_id=ClientId(7), old=old, new=new)
        >>> lineage.check(ClientId(7))
        >>> lineage.key == new_key, lineage.num_rotations, lineage.key_after(0) == old_key
        (True, 1, True)

    Attributes:
        first_key: Ed25519 public key, 32 bytes.
        successions: The statements that lead from it to the newest key, in order.
    """

    first_key: bytes
    successions: tuple[Succession, ...] = ()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Lineage":
        """Parse the bytes that :meth:`to_bytes` returned, without checking any signature.

        Raises:
            ProtocolError: No lineage has this length.
        """
        num, rest = divmod(len(data) - keys.KEY_BYTES, _STATEMENT.size)
        if rest or not 0 <= num <= MAX_SUCCESSIONS:
            raise ProtocolError(f"{len(data)} bytes are not a chain of identity keys")
        statements = _STATEMENT.iter_unpack(data[keys.KEY_BYTES :])
        return cls(data[: keys.KEY_BYTES], tuple(Succession(*each) for each in statements))

    def to_bytes(self) -> bytes:
        """Serialize the lineage; the last 32 bytes are the newest key."""
        return self.first_key + b"".join(
            each.by_old + each.by_new + each.new_key for each in self.successions
        )

    @property
    def key(self) -> bytes:
        """The newest key."""
        return self._keys[-1]

    @property
    def num_rotations(self) -> int:
        """How many times the key was replaced."""
        return len(self.successions)

    def key_after(self, num_rotations: int) -> bytes | None:
        """Return the key in use after ``num_rotations``, or ``None`` if there were fewer."""
        return self._keys[num_rotations] if num_rotations < len(self._keys) else None

    def extend(
        self, new_key: bytes, *, client_id: ClientId, old: keys.Signer, new: keys.Signer
    ) -> "Lineage":
        """Return the lineage extended by one key.

        The same arguments give the same bytes, since Ed25519 signatures are deterministic.

        Args:
            new_key: The public key of ``new``.
            client_id: The client whose lineage this is.
            old: Signs with the newest private key so far.
            new: Signs with the next one.
        """
        text = _encode_statement(client_id, self.num_rotations + 1, old=self.key, new=new_key)
        statement = Succession(old.sign(text), new.sign(text), new_key)
        return Lineage(self.first_key, (*self.successions, statement))

    def check(self, client_id: ClientId) -> None:
        """Verify every statement.

        Raises:
            ProtocolError: A statement is not signed by both its keys for this client and position,
                or a key occurs twice.
        """
        # Otherwise a chain could lead back to a key that was replaced.
        if len(set(self._keys)) != len(self._keys):
            raise ProtocolError("an identity key occurs twice in a chain")
        steps = zip(pairwise(self._keys), self.successions, strict=True)
        for number, ((old, new), statement) in enumerate(steps, 1):
            text = _encode_statement(client_id, number, old=old, new=new)
            for key, signature in ((old, statement.by_old), (new, statement.by_new)):
                if not keys.verify(key, signature, text):
                    raise ProtocolError(
                        f"statement {number} in a chain of identity keys is not signed by both "
                        f"keys as client {client_id}'s"
                    )

    @cached_property
    def _keys(self) -> tuple[bytes, ...]:
        return (self.first_key, *(each.new_key for each in self.successions))


def newest_key(lineage: bytes) -> bytes:
    """Return the newest key of a serialized lineage."""
    return lineage[-keys.KEY_BYTES :]


def truncate_lineage(lineage: bytes, key: bytes) -> bytes:
    """Truncate a serialized lineage to the point where ``key`` was its newest key.

    A lineage that does not contain ``key``, or ends with it, is returned whole.

    Example:
        >>> old, old_key = keys.create_signer()
        >>> new, new_key = keys.create_signer()
        >>> lineage = Lineage(old_key).extend(
        ...     new_key, client_id=ClientId(7), old=old, new=new)
        >>> truncate_lineage(lineage.to_bytes(), old_key) == old_key
        True
    """
    # A key ends at each of these offsets.
    for end in range(keys.KEY_BYTES, len(lineage), _STATEMENT.size):
        if lineage[end - keys.KEY_BYTES : end] == key:
            return lineage[:end]
    return lineage


def fingerprint(key: bytes) -> str:
    """Return the fingerprint by which people compare identity keys: 128 bits of a SHA-256.

    Example:
        >>> fingerprint(bytes(32))
        'cd2f-ced6-9218-aab1-d015-fd4f-a730-d26e'
    """
    text = keys.digest(b"fingerprint", key)[:16].hex()
    return "-".join(text[begin : begin + 4] for begin in range(0, len(text), 4))


def _encode_statement(client_id: ClientId, number: int, *, old: bytes, new: bytes) -> bytes:
    return keys.build_signed_text(_LABEL, struct.pack("<QQ", client_id, number), old, new)
