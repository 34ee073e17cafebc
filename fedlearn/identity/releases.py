"""Signed records of released models.

A release is a file of weights and a statement about it: JSON values that say which run made it,
after which round, with which metrics and privacy. Its id is SHA-256, and its signature Ed25519,
over the bytes::

    fedlearn release v1 | 0x00 | canonical JSON of the statement

The statement has the file's SHA-256, so the signature covers the weights, too.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from fedlearn.core.canonical_json import encode_canonical, label_canonical
from fedlearn.errors import StoreError
from fedlearn.identity.signing import SigningKey, is_signed

_LABEL = b"fedlearn release v1"
#: At least this much of an id names a release, and no tag looks like it.
_ID_PREFIX = re.compile(r"[0-9a-f]{6,64}")
_TAG = re.compile(r"[a-z][a-z0-9._-]{0,63}")

#: How many characters of an id are shown.
SHORT = 12


@dataclass(frozen=True, kw_only=True)
class SignedRelease:
    """A statement about released weights, and its signature.

    Attributes:
        id: Hexadecimal; it changes with every character of the statement.
        statement: Canonical JSON.
        public_key: The key that signed it, hexadecimal.
        signature: Hexadecimal.
    """

    id: str
    statement: str
    public_key: str
    signature: str

    @classmethod
    def sign(cls, facts: Mapping[str, object], key: SigningKey) -> "SignedRelease":
        """Sign a statement; ValueError if a number in it is not finite."""
        return cls(
            id=sha256(label_canonical(_LABEL, facts)).hexdigest(),
            statement=encode_canonical(facts).decode(),
            public_key=key.public_key.hex(),
            signature=key.sign(_LABEL, facts).hex(),
        )

    @property
    def facts(self) -> dict[str, Any]:  # Any: JSON
        """The statement's values; StoreError if it is damaged."""
        try:
            found: dict[str, Any] = json.loads(self.statement)
        except ValueError as error:
            raise StoreError(
                f"the record of release {self.id[:SHORT]} is damaged; restore it from a backup, or "
                f"remove it: `fedlearn models remove {self.id[:SHORT]}`"
            ) from error
        return found

    def find_problem(self, *, public_key: str) -> str | None:
        """Return what is wrong with the record, if anything, for one who trusts ``public_key``."""
        try:
            facts = self.facts
            key, signature = bytes.fromhex(public_key), bytes.fromhex(self.signature)
        except (StoreError, ValueError):
            return "its record is damaged"
        if sha256(label_canonical(_LABEL, facts)).hexdigest() != self.id:
            return "its record was changed"
        if self.public_key != public_key:
            return f"it is signed with another key ({self.public_key[:SHORT]}…)"
        if not is_signed(_LABEL, facts, signature, public_key=key):
            return "its signature is not valid"
        return None


def check_tag(tag: str) -> None:
    """Check that ``tag`` may name a release; raises StoreError if not."""
    if not _TAG.fullmatch(tag) or is_id_prefix(tag):
        raise StoreError(
            f"{tag!r} cannot be a tag: use up to 64 lower-case letters, digits, '.', '_' and '-', "
            "beginning with a letter, that do not look like a release's id"
        )


def is_id_prefix(reference: str) -> bool:
    """Return whether ``reference`` may be the beginning of an id."""
    return _ID_PREFIX.fullmatch(reference) is not None
