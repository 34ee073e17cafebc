"""Rosters: files that bind client names to identity keys, independently of the coordinator.

The coordinator sends clients each other's identity keys. A roster is the same list, distributed by
people: an operator exports it, users compare fingerprints, and a client that has it accepts only
the clients on it. A roster is neither secret nor signed, so it is as trustworthy as the channel
that delivered it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Le, Len
from pydantic import AfterValidator, Strict, TypeAdapter

from fedlearn.core.files import write_durably
from fedlearn.core.json_files import HEXADECIMAL
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError
from fedlearn.identity.documents import read_document
from fedlearn.identity.lineage import MAX_SUCCESSIONS, fingerprint
from fedlearn.secagg.keys import KEY_BYTES

_FORMAT = 1
_MAX_ID = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class KnownKey:
    """A client's identity key, as another client knows it.

    Attributes:
        key: The newest known key, Ed25519, 32 bytes.
        num_rotations: Number of rotations before this key; it never decreases.
        name: Name of the client in a roster; empty if only the coordinator vouches for the key.
    """

    key: bytes
    num_rotations: int
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class IdentityRoster:
    """The clients of one deployment and their identity keys.

    Attributes:
        coordinator_key: Ed25519, 32 bytes; identifies the deployment.
        clients: Keys by client id.
    """

    coordinator_key: bytes
    clients: Mapping[ClientId, KnownKey]

    @classmethod
    def load(cls, path: Path) -> "IdentityRoster":
        """Load the roster in the file ``path``.

        Raises:
            DeploymentError: The file is missing, unreadable, damaged, or of a later version.
        """
        return read_document(
            path,
            _DOCUMENT,
            key="fedlearn_roster",
            versions=(_FORMAT,),
            noun="a roster of identity keys",
            command="fedlearn roster -o FILE",
            is_secret=False,
        ).roster()

    def save(self, path: Path) -> None:
        """Write the roster to the file ``path``; its folder must exist.

        Raises:
            DeploymentError: It cannot be written.
        """
        write_durably(path, self._to_bytes(), raises=DeploymentError)

    @property
    def digest(self) -> str:
        """SHA-256 of the roster's file content, hexadecimal."""
        return sha256(self._to_bytes()).hexdigest()

    def _to_bytes(self) -> bytes:
        values = {
            "fedlearn_roster": _FORMAT,
            "coordinator_key": self.coordinator_key.hex(),
            # By id, so that equal rosters have equal digests.
            "clients": [
                {
                    "client_id": client_id,
                    "name": entry.name,
                    "identity_key": entry.key.hex(),
                    "num_rotations": entry.num_rotations,
                    "fingerprint": fingerprint(entry.key),  # for people; clients read the key
                }
                for client_id, entry in sorted(self.clients.items())
            ],
        }
        return (json.dumps(values, indent=2) + "\n").encode()


_Key = Annotated[bytes, Len(KEY_BYTES, KEY_BYTES)]


@dataclass(frozen=True, kw_only=True)
class _RosterEntry:
    """One client in a roster file."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    client_id: Annotated[ClientId, Strict(), Ge(0), Le(_MAX_ID)]
    name: str
    identity_key: _Key
    num_rotations: Annotated[int, Strict(), Ge(0), Le(MAX_SUCCESSIONS)]


def _require_distinct(rows: list[_RosterEntry]) -> list[_RosterEntry]:
    ids, keys = set[ClientId](), set[bytes]()
    for row in rows:
        if row.client_id in ids or row.identity_key in keys:
            raise ValueError(f"client {row.client_id} or its key occurs twice")
        ids.add(row.client_id)
        keys.add(row.identity_key)
    return rows


@dataclass(frozen=True, kw_only=True)
class _RosterDocument:
    """Schema of a roster file."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    coordinator_key: _Key
    clients: Annotated[list[_RosterEntry], AfterValidator(_require_distinct)]

    def roster(self) -> IdentityRoster:
        """Build the roster. The fingerprints are dropped: they are for people only."""
        clients = {
            row.client_id: KnownKey(
                key=row.identity_key, num_rotations=row.num_rotations, name=row.name
            )
            for row in self.clients
        }
        return IdentityRoster(coordinator_key=self.coordinator_key, clients=clients)


_DOCUMENT = TypeAdapter(_RosterDocument)
