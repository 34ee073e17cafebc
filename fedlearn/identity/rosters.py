"""Whose identity key is whose, as a file that people check: the anchor that no server can move.

The coordinator tells clients each other's identity keys; a roster is the same list, carried by
people: an operator exports it, users compare fingerprints, and a client that is given it knows
these clients and nobody else. Nothing in it is secret or signed: it is worth what its way is worth.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedlearn.core.files import write_durably
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
        key: The newest that is known, Ed25519, 32 bytes.
        num_rotations: How often it had been replaced; that never goes back.
        name: As its operator calls it, from a roster; empty: the coordinator alone told of it.
    """

    key: bytes
    num_rotations: int
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class IdentityRoster:
    """The clients of one deployment and their identity keys.

    Attributes:
        coordinator_key: Ed25519, 32 bytes: which deployment.
        clients: By number.
    """

    coordinator_key: bytes
    clients: Mapping[ClientId, KnownKey]

    @classmethod
    def load(cls, path: Path) -> "IdentityRoster":
        """Return the roster in the file ``path``.

        Raises:
            DeploymentError: The file is missing, unreadable, damaged, or of a later version.
        """
        return read_document(
            path,
            _roster,
            key="fedlearn_roster",
            versions=(_FORMAT,),
            noun="a roster of identity keys",
            command="fedlearn roster -o FILE",
        )

    def save(self, path: Path) -> None:
        """Write the roster to the file ``path``; its folder exists.

        Raises:
            DeploymentError: It cannot be written.
        """
        write_durably(path, self._content(), raises=DeploymentError)

    @property
    def digest(self) -> str:
        """SHA-256 of all that is in it, hexadecimal."""
        return sha256(self._content()).hexdigest()

    def _content(self) -> bytes:
        values = {
            "fedlearn_roster": _FORMAT,
            "coordinator_key": self.coordinator_key.hex(),
            "clients": [
                {
                    "client_id": client_id,
                    "name": entry.name,
                    "identity_key": entry.key.hex(),
                    "num_rotations": entry.num_rotations,
                    "fingerprint": fingerprint(entry.key),  # to read; what counts is the key
                }
                for client_id, entry in sorted(self.clients.items())
            ],
        }
        return (json.dumps(values, indent=2) + "\n").encode()


# Any: what JSON holds is checked here, field by field.
def _roster(values: Any) -> IdentityRoster:
    clients: dict[ClientId, KnownKey] = {}
    for row in values["clients"]:
        client_id = ClientId(_number(row["client_id"], at_most=_MAX_ID))
        entry = KnownKey(
            name=str(row["name"]),
            key=_key(row["identity_key"]),
            num_rotations=_number(row["num_rotations"], at_most=MAX_SUCCESSIONS),
        )
        if client_id in clients or entry.key in {each.key for each in clients.values()}:
            raise ValueError(f"client {client_id} or its key is there twice")
        clients[client_id] = entry
    return IdentityRoster(coordinator_key=_key(values["coordinator_key"]), clients=clients)


def _key(text: Any) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{text!r} is no key")
    return key


def _number(value: Any, *, at_most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= at_most:
        raise ValueError(f"{value!r} is no number from 0 to {at_most}")
    return value
