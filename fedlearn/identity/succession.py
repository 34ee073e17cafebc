"""Replacement of the signing key: the old key signs the new one, and the audit log has the proof.

A succession is a statement, signed with Ed25519 by both keys, over the bytes::

    fedlearn signing key succession v1 | 0x00 | canonical JSON of hash, new, old and position

``position`` and ``hash`` are those of the newest entry of the audit log before the entry that has
the succession. So a statement fits one place in one log. What the old key signs later is not valid.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fedlearn.identity.audit import Action, AuditEntry
from fedlearn.identity.signing import SigningKey, is_signed

_LABEL = b"fedlearn signing key succession v1"


@dataclass(frozen=True, kw_only=True)
class KeySuccession:
    """A signed statement that a key replaces another one.

    Attributes:
        old: The key that is replaced, hexadecimal.
        new: The key that replaces it.
        position: Position of the last entry of the log for which the old key vouches.
        hash: Hash of that entry.
        signed_by_old: Signature of the old key, hexadecimal.
        signed_by_new: Signature of the new key: its owner has the private half.
    """

    old: str
    new: str
    position: int
    hash: str
    signed_by_old: str
    signed_by_new: str

    @classmethod
    def sign(cls, old: SigningKey, new: SigningKey, *, newest: AuditEntry) -> "KeySuccession":
        """Sign that ``new`` replaces ``old`` after the entry ``newest``."""
        values = _values(old.public_key.hex(), new.public_key.hex(), newest.position, newest.hash)
        return cls(
            old=old.public_key.hex(),
            new=new.public_key.hex(),
            position=newest.position,
            hash=newest.hash,
            signed_by_old=old.sign(_LABEL, values).hex(),
            signed_by_new=new.sign(_LABEL, values).hex(),
        )

    def details(self) -> dict[str, object]:
        """Return the details of its entry in the audit log."""
        return asdict(self)

    @classmethod
    def of(cls, entry: AuditEntry) -> "KeySuccession | None":
        """Return the succession in an entry; ``None`` if it has none, or a malformed one."""
        if entry.action != Action.SIGNING_KEY_ROTATED:
            return None
        try:
            values = entry.values()["details"]
        except ValueError:
            return None
        names = {"old", "new", "hash", "signed_by_old", "signed_by_new"}
        if not isinstance(values, Mapping) or set(values) != names | {"position"}:
            return None
        if not all(isinstance(values[name], str) for name in names):
            return None
        return cls(**values) if isinstance(values["position"], int) else None

    def find_problem(self, entry: AuditEntry) -> str | None:
        """Return what is wrong with the succession in ``entry``, if anything."""
        if (self.position, self.hash) != (entry.position - 1, entry.previous):
            return "its succession of keys is for another place or another log"
        values = _values(self.old, self.new, self.position, self.hash)
        for key, signature in ((self.old, self.signed_by_old), (self.new, self.signed_by_new)):
            try:
                public_key, signed = bytes.fromhex(key), bytes.fromhex(signature)
            except ValueError:
                return "its succession of keys is damaged"
            if not is_signed(_LABEL, values, signed, public_key=public_key):
                return f"the key {key[:12]}… has not signed its succession of keys"
        return None


def _values(old: str, new: str, position: int, entry_hash: str) -> dict[str, object]:
    return {"old": old, "new": new, "position": position, "hash": entry_hash}


class KeyChain:
    """The signing keys of an audit log, as its entries introduce them.

    Attributes:
        problems: What is wrong with the entries that :meth:`read` was given.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._successions: list[KeySuccession] = []

    def read(self, entry: AuditEntry) -> None:
        """Take the succession in an entry, if it has one; entries come in order."""
        if entry.action != Action.SIGNING_KEY_ROTATED:
            return
        found = KeySuccession.of(entry)
        problem = (
            "its succession of keys is damaged" if found is None else found.find_problem(entry)
        )
        if found is not None and problem is None and self.newest not in (None, found.old):
            problem = "it replaces a key that was not the newest one"
        if found is None or problem is not None:
            self.problems.append(f"entry {entry.position}: {problem}")
        else:
            self._successions.append(found)

    @property
    def newest(self) -> str | None:
        """The newest key; ``None`` if no key was replaced yet."""
        return self._successions[-1].new if self._successions else None

    def may_sign(self, key: str, *, position: int, trusted: str) -> bool:
        """Whether ``key`` was the signing key when the entry at ``position`` was the newest.

        Args:
            key: The key, hexadecimal.
            position: Position of the entry.
            trusted: A key of this log that the caller trusts; without replacements, the only one.
        """
        if not self._successions:
            return key == trusted
        keys = [self._successions[0].old, *(each.new for each in self._successions)]
        if trusted not in keys or key not in keys:
            return False
        place = keys.index(key)
        first = self._successions[place - 1].position + 1 if place else 0
        is_last = place == len(self._successions)
        return position >= first and (is_last or position <= self._successions[place].position)
