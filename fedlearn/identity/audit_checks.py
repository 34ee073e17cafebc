"""Signed checkpoints of the audit log, and the check of a log against them.

A checkpoint is signed with Ed25519 over the bytes::

    fedlearn audit checkpoint v1 | 0x00 | canonical JSON of at_utc, hash and position

Guarantees:
    :func:`verify_chain` finds every entry that was changed, removed, inserted or moved, unless all
    hashes after it were computed again, which needs no key. It finds that, too, and the removal of
    the newest entries, against a checkpoint that was signed after the entry and kept elsewhere.
    This assumes that SHA-256 is collision-resistant, that Ed25519 is secure, and that the signing
    key was not stolen. What a replaced key signs after :mod:`its succession
    <fedlearn.identity.succession>` does not count.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fedlearn.core.canonical_json import encode_canonical
from fedlearn.core.files import write_durably
from fedlearn.core.json_files import parse_json
from fedlearn.errors import DeploymentError
from fedlearn.identity.audit import NO_HASH, Action, AuditEntry
from fedlearn.identity.documents import read_document
from fedlearn.identity.signing import SigningKey, is_signed
from fedlearn.identity.succession import KeyChain

_CHECKPOINT = b"fedlearn audit checkpoint v1"
_COMMAND = "fedlearn audit-log --checkpoint"


class _EntryLine(BaseModel):
    """The schema of :meth:`AuditEntry.values`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    position: int
    at_utc: str
    actor: str
    origin: str
    action: str
    subject: str
    details: dict[str, Any]  # Any: JSON
    previous: str
    hash: str


def parse_entry(line: bytes, *, source: str) -> AuditEntry:
    """Parse one line of ``fedlearn audit-log --json-lines``; ``source`` is for error messages.

    Raises:
        DeploymentError: It is no such line.
    """
    found = parse_json(
        line,
        TypeAdapter(_EntryLine),
        source=source,
        raises=DeploymentError,
        holds="an entry of an audit log",
        remedy="export the log again (`fedlearn audit-log --json-lines`)",
    )
    details = encode_canonical(found.details).decode()
    return AuditEntry(**{**found.model_dump(), "details": details})


@dataclass(frozen=True, kw_only=True)
class LogCheckpoint:
    """A signed statement that the entry at ``position`` had this hash at this time.

    Attributes:
        public_key: The key that signed it, hexadecimal.
        signature: Hexadecimal.
    """

    position: int
    hash: str
    at_utc: str
    public_key: str
    signature: str

    @classmethod
    def sign(cls, entry: AuditEntry, key: SigningKey, *, at_utc: str) -> "LogCheckpoint":
        """Sign a checkpoint at ``entry``, the newest of its log."""
        values: dict[str, object] = {
            "position": entry.position,
            "hash": entry.hash,
            "at_utc": at_utc,
        }
        return cls(
            position=entry.position,
            hash=entry.hash,
            at_utc=at_utc,
            public_key=key.public_key.hex(),
            signature=key.sign(_CHECKPOINT, values).hex(),
        )

    def is_signed_by(self, public_key: str) -> bool:
        """Return whether the signature is valid and made with ``public_key``, hexadecimal."""
        values: dict[str, object] = {
            "position": self.position,
            "hash": self.hash,
            "at_utc": self.at_utc,
        }
        try:
            key, signature = bytes.fromhex(public_key), bytes.fromhex(self.signature)
        except ValueError:
            return False
        return self.public_key == public_key and is_signed(
            _CHECKPOINT, values, signature, public_key=key
        )

    def to_json(self) -> str:
        """Format it as the file that sites keep."""
        return json.dumps({"checkpoint": 1, **asdict(self)}, indent=2) + "\n"

    def save(self, path: Path) -> None:
        """Write :meth:`to_json`; raises DeploymentError if the file cannot be written."""
        write_durably(path, self.to_json().encode(), raises=DeploymentError)

    @classmethod
    def load(cls, path: Path) -> "LogCheckpoint":
        """Read a file of :meth:`save`.

        Raises:
            DeploymentError: It is missing, damaged, or of a later version.
        """
        found = read_document(
            path,
            TypeAdapter(_CheckpointFile),
            key="checkpoint",
            versions=(1,),
            noun="a checkpoint of an audit log",
            command=_COMMAND,
            is_secret=False,
        )
        return cls(**found.model_dump(exclude={"checkpoint"}))


class _CheckpointFile(BaseModel):
    """The schema of :meth:`LogCheckpoint.to_json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    checkpoint: Literal[1]
    position: Annotated[int, Field(ge=0)]
    hash: str
    at_utc: str
    public_key: str
    signature: str


@dataclass(kw_only=True)
class ChainReport:
    """What :func:`verify_chain` found.

    Attributes:
        num_entries: Entries that were read.
        num_checkpoints: Checkpoints that were compared.
        newest: The last entry; ``None`` if there is none.
        signing_key: The key that has replaced others last; ``None`` if none has.
        problems: One sentence for each; empty if the log is as it was written.
    """

    num_entries: int = 0
    num_checkpoints: int = 0
    newest: AuditEntry | None = None
    signing_key: str | None = None
    problems: list[str] = field(default_factory=list)


def verify_chain(
    entries: Iterable[AuditEntry],
    checkpoints: Sequence[tuple[str, LogCheckpoint]],
    *,
    public_key: str | None,
) -> ChainReport:
    """Check the hashes of a log, in order, and compare the log with checkpoints.

    Args:
        entries: All entries by position.
        checkpoints: Each with the name of its source, for messages.
        public_key: A signing key of this log that the caller trusts, hexadecimal; ``None`` if there
            never was one. Keys before and after it are known by the successions in the log.
    """
    report, keys = ChainReport(num_checkpoints=len(checkpoints)), KeyChain()
    due, hashes = {each.position for _, each in checkpoints}, dict[int, str]()
    for entry in entries:
        if (problem := _find_problem(entry, report.newest)) is not None:
            report.problems.append(f"entry {entry.position}: {problem}")
        keys.read(entry)
        if entry.position in due:
            hashes[entry.position] = entry.hash
        report.newest = entry
        report.num_entries += 1
    report.problems += keys.problems
    report.signing_key = keys.newest
    for source, checkpoint in checkpoints:
        problem = _find_difference(checkpoint, hashes, keys, public_key=public_key)
        report.problems += [] if problem is None else [f"{source}: {problem}"]
    return report


def _find_difference(
    checkpoint: LogCheckpoint, hashes: Mapping[int, str], keys: KeyChain, *, public_key: str | None
) -> str | None:
    """Return what is wrong with a checkpoint, or with the log that it is compared with."""
    position = checkpoint.position
    is_ours = public_key is not None and keys.may_sign(
        checkpoint.public_key, position=position, trusted=public_key
    )
    if not is_ours or not checkpoint.is_signed_by(checkpoint.public_key):
        return "it is not signed by this log's key"
    if position not in hashes:
        return f"entry {position} is missing"
    if hashes[position] != checkpoint.hash:
        said = f"entry {position} had another hash when it was signed"
        return f"{said}, so entries up to it were rewritten"
    return None


def _find_problem(entry: AuditEntry, before: AuditEntry | None) -> str | None:
    expected = 0 if before is None else before.position + 1
    if entry.position != expected:
        return f"entry {expected} should be here: entries were removed, added or moved"
    if entry.previous != (NO_HASH if before is None else before.hash):
        return "it does not follow the entry before it"
    if before is None and entry.action != Action.LOG_STARTED:
        return "it is the first, but does not start a log"
    try:
        is_unchanged = entry.compute_hash() == entry.hash
    except ValueError as error:
        return str(error)
    return None if is_unchanged else "it was changed: its hash is another"
