"""Pinned identity keys of other clients, and the rules for changing them.

A key is pinned when it is first seen, or earlier from a roster. After that it changes in one way:
through a chain of signed statements from the pinned key to a new one
(:mod:`fedlearn.identity.lineage`). Any other key that a coordinator sends is refused until this
client's user accepts it, with ``fedlearn pins FOLDER --forget ID`` or a new roster.

A client with a folder keeps its pins there for as long as it is enrolled, across runs
(:class:`PinFile`). A client without one keeps them in its state of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import structlog
from pydantic import TypeAdapter, ValidationError

from fedlearn.core.files import write_private
from fedlearn.core.json_files import HEXADECIMAL, read_json
from fedlearn.core.messages import ClientId
from fedlearn.errors import DeploymentError, PolicyViolation, ProtocolError
from fedlearn.identity.lineage import Lineage, fingerprint, newest_key
from fedlearn.identity.rosters import IdentityRoster, KnownKey

RULE = "pinned identity keys"


@dataclass(frozen=True, kw_only=True)
class Pins:
    """The identity keys of other clients that this client has pinned.

    Attributes:
        clients: Pinned keys by client.
        roster: Digest of the roster that the pins come from; clients outside the roster are then
            refused. If empty, there is no roster, and a new client is pinned when first seen.
    """

    clients: Mapping[ClientId, KnownKey] = field(default_factory=dict)
    roster: str = ""

    @classmethod
    def of(cls, roster: IdentityRoster) -> "Pins":
        """Return the pins of exactly the clients of a roster."""
        return cls(clients=roster.clients, roster=roster.digest)

    @property
    def keys(self) -> dict[ClientId, bytes]:
        """The trusted key of each client."""
        return {client_id: pin.key for client_id, pin in self.clients.items()}

    def follow(self, lineages: Mapping[ClientId, bytes]) -> "Pins":
        """Return the pins updated with the encoded lineages that a coordinator sent.

        Raises:
            PolicyViolation: A client's chain is invalid or does not start from its pinned key, its
                key is older than the pinned one, or the client is not in the roster. The error
                names the client.
        """
        # All lineages are checked before any pin changes.
        found = {
            client_id: self._follow_lineage(client_id, data) for client_id, data in lineages.items()
        }
        return replace(self, clients={**self.clients, **found})

    def forget(self, client_id: ClientId) -> "Pins":
        """Return the pins without one client's, so that its next key is pinned when seen.

        If the pins come from a roster, the client is refused from then on instead.

        Raises:
            DeploymentError: No key of this client is pinned.
        """
        if client_id not in self.clients:
            known = ", ".join(map(str, sorted(self.clients))) or "none"
            raise DeploymentError(f"no key of client {client_id} is pinned; pinned are: {known}")
        others = {each: pin for each, pin in self.clients.items() if each != client_id}
        return replace(self, clients=others)

    def to_bytes(self) -> bytes:
        """Encode the pins for a client's state."""
        return _RECORD.dump_json(_PinRecord(roster=self.roster, clients=self.clients))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Pins":
        """Decode the output of :meth:`to_bytes`; ProtocolError if it is of another version."""
        try:
            return _RECORD.validate_json(data).pins() if data else cls()
        except ValidationError as error:
            raise ProtocolError(f"{len(data)} bytes of pins are of another version") from error

    def _follow_lineage(self, client_id: ClientId, data: bytes) -> KnownKey:
        pin = self.clients.get(client_id)
        if pin is None and self.roster:
            raise PolicyViolation(
                rule=RULE,
                asked=f"client {client_id}, which is not in the roster",
                limit="clients in it; ask the operator for a new one (`fedlearn roster`)",
            )
        try:
            lineage = Lineage.from_bytes(data)
            if pin == _newest_key_of(lineage, name=pin.name if pin else ""):
                return pin  # the usual case: nothing to check
            lineage.check(client_id)
        except ProtocolError as error:
            raise self._build_violation(client_id, newest_key(data), because=str(error)) from error
        if pin is None:
            return _newest_key_of(lineage, name="")
        # The chain must pass through the pinned key; a valid chain from elsewhere proves nothing.
        if lineage.key_after(pin.num_rotations) != pin.key:
            earlier = lineage.num_rotations < pin.num_rotations
            because = "it is older than the pinned one" if earlier else "no chain leads to it"
            raise self._build_violation(client_id, lineage.key, because=because)
        return _newest_key_of(lineage, name=pin.name)

    def _build_violation(self, client_id: ClientId, key: bytes, *, because: str) -> PolicyViolation:
        pin = self.clients.get(client_id)
        if pin is None:
            asked = f"a key of client {client_id}, {fingerprint(key)}: {because}"
            return PolicyViolation(rule=RULE, asked=asked, limit="a key, or a valid chain of keys")
        named = f" ({pin.name})" if pin.name else ""
        remedy = "a new roster" if self.roster else f"`fedlearn pins FOLDER --forget {client_id}`"
        return PolicyViolation(
            rule=RULE,
            asked=f"another key of client {client_id}{named}, {fingerprint(key)}: {because}",
            limit=f"{fingerprint(pin.key)}, or a chain from there; if its owner confirms that the "
            f"client joined with new keys, accept them: {remedy}",
        )


@dataclass(frozen=True, kw_only=True)
class _PinRecord:
    """Pins as JSON; every field is required, or a damaged file could be mistaken for empty."""

    __pydantic_config__: ClassVar = HEXADECIMAL

    roster: str
    clients: Mapping[ClientId, KnownKey]

    def pins(self) -> Pins:
        return Pins(clients=self.clients, roster=self.roster)


@dataclass(frozen=True, kw_only=True)
class _PinDocument(_PinRecord):
    format: Literal[1]
    coordinator_key: bytes


_RECORD, _DOCUMENT = TypeAdapter(_PinRecord), TypeAdapter(_PinDocument)


@dataclass(frozen=True, kw_only=True)
class PinFile:
    """The pin file of a client that has a folder, kept while it is enrolled with a coordinator.

    Attributes:
        path: The file; its folder must exist by the time it is written.
        coordinator_key: The coordinator's identity. Pins made under another coordinator are
            ignored, because its client numbers refer to other clients.
    """

    path: Path
    coordinator_key: bytes

    def read(self) -> Pins:
        """Read the pins; empty if there is no file yet.

        Raises:
            DeploymentError: The file cannot be read or is damaged. It is never treated as empty.
        """
        found = read_json(
            self.path,
            _DOCUMENT,
            raises=DeploymentError,
            holds="pinned keys",
            remedy="restore a copy, or remove it to pin the keys that come next, or those of a "
            "roster (`fedlearn join FILE --roster ROSTER`)",
        )
        if found is None or found.coordinator_key != self.coordinator_key:
            return Pins()
        return found.pins()

    def write(self, pins: Pins) -> None:
        """Write the pins durably, mode 0600.

        Raises:
            DeploymentError: The file cannot be written.
        """
        content = _PinDocument(
            format=1,
            coordinator_key=self.coordinator_key,
            roster=pins.roster,
            clients=dict(sorted(pins.clients.items())),
        )
        write_private(self.path, _DOCUMENT.dump_json(content, indent=1) + b"\n")

    def take(self, roster: IdentityRoster, *, client_id: ClientId, lineage: Lineage) -> None:
        """Replace all pins by the keys in a roster, unless they already come from this roster.

        ``client_id`` and ``lineage`` are this client's own.

        Raises:
            DeploymentError: The roster is from another coordinator, lists a wrong key for this
                client, or the pins cannot be written.
        """
        if roster.coordinator_key != self.coordinator_key:
            raise DeploymentError(
                "the roster belongs to another coordinator than this client's; ask the operator "
                "for the right one (`fedlearn roster`)"
            )
        entry = roster.clients.get(client_id)
        if entry is not None and lineage.key_after(entry.num_rotations) != entry.key:
            raise DeploymentError(
                f"the roster has {fingerprint(entry.key)} for client {client_id} ({entry.name}), "
                f"this client, whose key is {fingerprint(lineage.key)}; with this roster, clients "
                "would trust another key as this client's: do not use it, and tell the operator"
            )
        before = self.read()
        if before.roster == roster.digest:
            return  # keep its pins, including the key rotations that were accepted since
        pins = Pins.of(roster)
        self.write(pins)
        moved = [each for each, key in before.keys.items() if pins.keys.get(each, key) != key]
        num_clients, log = len(pins.clients), structlog.get_logger(__name__)
        log.info("roster_pinned", num_clients=num_clients, other_keys_for=moved)


def _newest_key_of(lineage: Lineage, *, name: str) -> KnownKey:
    return KnownKey(key=lineage.key, num_rotations=lineage.num_rotations, name=name)
