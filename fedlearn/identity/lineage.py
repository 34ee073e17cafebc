"""How a client's identity key gives way to a new one: statements that both keys sign.

A *lineage* is the first identity key of a client and the statements that lead from it to the
newest one::

    lineage    = first key 32 | statement | statement | ...
    statement  = signature by the old key 64 | signature by the new key 64 | new key 32

Statement number s (from 1) is signed over the client's id, s, the old and the new key, in a domain
of its own. The last 32 bytes are the newest key, and a key alone is a lineage without statements.
A lineage only ever grows: of two that are valid for one client, one begins with the other, or its
owner (or a thief of a key) signed two successors of one key.

Guarantees:
    Whoever trusts one key of a client, at its place in the lineage, may trust the keys after it.
    Assumed: Ed25519, and that no key was stolen before it was replaced: who steals a key can name
    a successor. A stolen key is revoked, not rotated.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fedlearn.core.messages import ClientId
from fedlearn.errors import ProtocolError
from fedlearn.secagg import keys

#: Most statements in a lineage: a rotation a year for a lifetime.
MAX_SUCCESSIONS = 64

_STATEMENT = struct.Struct(f"{keys.SIGNATURE_BYTES}s{keys.SIGNATURE_BYTES}s{keys.KEY_BYTES}s")
_LABEL = b"succession of identity keys"


@dataclass(frozen=True)
class Succession:
    """The statement that one identity key follows another: both keys' signatures, and the new."""

    by_old: bytes
    by_new: bytes
    new_key: bytes


@dataclass(frozen=True)
class Lineage:
    """The identity keys that a client has had, each named by the one before.

    Example:
        >>> old, old_key = keys.fresh_signer()
        >>> new, new_key = keys.fresh_signer()
        >>> lineage = Lineage(old_key).followed_by(
        ...     new_key, client_id=ClientId(7), old=old, new=new)
        >>> lineage.check(ClientId(7))
        >>> lineage.key == new_key, lineage.num_rotations, lineage.key_after(0) == old_key
        (True, 1, True)

    Attributes:
        first_key: Ed25519 public key, 32 bytes.
        successions: What leads from it to the newest.
    """

    first_key: bytes
    successions: tuple[Succession, ...] = ()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Lineage":
        """Return what :meth:`to_bytes` wrote; no signature is checked.

        Raises:
            ProtocolError: It is of an impossible length.
        """
        num, rest = divmod(len(data) - keys.KEY_BYTES, _STATEMENT.size)
        if rest or not 0 <= num <= MAX_SUCCESSIONS:
            raise ProtocolError(f"{len(data)} bytes are no chain of identity keys")
        statements = _STATEMENT.iter_unpack(data[keys.KEY_BYTES :])
        return cls(data[: keys.KEY_BYTES], tuple(Succession(*each) for each in statements))

    def to_bytes(self) -> bytes:
        """Return the lineage as bytes; the last 32 are the newest key."""
        return self.first_key + b"".join(
            each.by_old + each.by_new + each.new_key for each in self.successions
        )

    @property
    def key(self) -> bytes:
        """The newest key."""
        return self._keys[-1]

    @property
    def num_rotations(self) -> int:
        """How often the key was replaced."""
        return len(self.successions)

    def key_after(self, num_rotations: int) -> bytes | None:
        """Return the key that was the newest after so many rotations; ``None``: it never was."""
        return self._keys[num_rotations] if num_rotations < len(self._keys) else None

    def followed_by(
        self, new_key: bytes, *, client_id: ClientId, old: keys.Signer, new: keys.Signer
    ) -> "Lineage":
        """Return the lineage with one more key; the same each time, since Ed25519 draws nothing.

        Args:
            new_key: The public key of ``new``.
            client_id: Whose lineage it is.
            old: Has the newest private key so far.
            new: Has the next one.
        """
        text = _text(client_id, self.num_rotations + 1, old=self.key, new=new_key)
        statement = Succession(old.sign(text), new.sign(text), new_key)
        return Lineage(self.first_key, (*self.successions, statement))

    def check(self, client_id: ClientId) -> None:
        """Check every statement.

        Raises:
            ProtocolError: One is not signed by both its keys for this client and place, or a key
                comes back.
        """
        if len(set(self._keys)) != len(self._keys):
            raise ProtocolError("an identity key comes twice in a chain")
        steps = zip(pairwise(self._keys), self.successions, strict=True)
        for number, ((old, new), statement) in enumerate(steps, 1):
            text = _text(client_id, number, old=old, new=new)
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
    """Return the newest key of a lineage in bytes."""
    return lineage[-keys.KEY_BYTES :]


def lineage_until(lineage: bytes, key: bytes) -> bytes:
    """Return a lineage in bytes as it was when ``key`` was its newest; whole, if it never was.

    Example:
        >>> old, old_key = keys.fresh_signer()
        >>> new, new_key = keys.fresh_signer()
        >>> lineage = Lineage(old_key).followed_by(
        ...     new_key, client_id=ClientId(7), old=old, new=new)
        >>> lineage_until(lineage.to_bytes(), old_key) == old_key
        True
    """
    for end in range(keys.KEY_BYTES, len(lineage), _STATEMENT.size):
        if lineage[end - keys.KEY_BYTES : end] == key:
            return lineage[:end]
    return lineage


def fingerprint(key: bytes) -> str:
    """Return what people compare an identity key by: 128 bits of its SHA-256.

    Example:
        >>> fingerprint(bytes(32))
        'cd2f-ced6-9218-aab1-d015-fd4f-a730-d26e'
    """
    text = keys.digest(b"fingerprint", key)[:16].hex()
    return "-".join(text[begin : begin + 4] for begin in range(0, len(text), 4))


def _text(client_id: ClientId, number: int, *, old: bytes, new: bytes) -> bytes:
    return keys.signed(_LABEL, struct.pack("<QQ", client_id, number), old, new)
