"""Read, sign and verify the audit log of a deployment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedlearn.core.files import explain_disk_errors
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DeploymentError
from fedlearn.identity.audit import Action, AuditEntry
from fedlearn.identity.audit_checks import ChainReport, LogCheckpoint, parse_entry, verify_chain
from fedlearn.identity.signing import SigningKey
from fedlearn.identity.succession import KeySuccession
from fedlearn.store.audit import read_entries, read_newest
from fedlearn.store.audit_checkpoints import (
    read_checkpoints,
    read_successions,
    sign_checkpoint,
)
from fedlearn.store.runs import Database


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    """Which entries to list; empty strings match everything.

    Attributes:
        since_utc: Earliest time, ISO 8601 in UTC.
        action: An :class:`~fedlearn.identity.audit.Action`, or its first word, such as ``run``.
        actor: ``kind:name``, or the kind or the name alone.
    """

    since_utc: str
    action: str
    actor: str

    @classmethod
    def parse(cls, *, since: str, action: str, actor: str) -> "AuditFilter":
        """Check what an operator has typed.

        Raises:
            DeploymentError: The time or the action is not valid.
        """
        known = [*Action, *sorted({each.partition(".")[0] for each in Action})]
        if action and action not in known:
            hint = did_you_mean(action, known)
            raise DeploymentError(
                f"--action {action!r} is no action; {hint}there are {', '.join(Action)}"
            )
        return cls(since_utc=_parse_time(since) if since else "", action=action, actor=actor)

    def matches(self, entry: AuditEntry) -> bool:
        """Return whether to list ``entry``."""
        kind, _, name = entry.actor.partition(":")
        return (
            entry.at_utc >= self.since_utc
            and self.action in ("", entry.action, entry.action.partition(".")[0])
            and self.actor in ("", entry.actor, kind, name)
        )


def list_entries(database: Database, wanted: AuditFilter) -> Iterator[AuditEntry]:
    """Yield the entries that match, in order.

    Raises:
        StoreError: The database cannot be read.
    """
    with database.reading() as session:
        yield from filter(wanted.matches, read_entries(session))


def take_checkpoint(database: Database, folder: Path) -> LogCheckpoint:
    """Sign the newest entry with the key in ``folder``.

    Raises:
        DeploymentError: The log is empty, or the key is damaged.
        StoreError: The database cannot be written.
    """
    with database.writing() as session:
        checkpoint = sign_checkpoint(session, SigningKey(folder))
    if checkpoint is None:
        raise DeploymentError("the audit log is empty; its first entry comes with the first act")
    return checkpoint


def rotate_signing_key(database: Database, folder: Path) -> str:
    """Replace the key in ``folder`` by a new one, which the old one signs; return the new key.

    After a crash in the middle, the same call finishes what was begun.

    Raises:
        DeploymentError: Nothing was signed yet, the folder has an older key than the log, or a file
            cannot be written.
        StoreError: The database cannot be written.
    """
    old = SigningKey.find(folder)
    if old is None:
        raise DeploymentError(f"{folder} has no signing.key; there is nothing to replace")
    new = SigningKey.prepare_successor(folder)
    with database.writing() as session:
        successions = read_successions(session)
        if not successions or successions[-1][1].new != new.public_key.hex():
            # The old key vouches for all entries so far.
            if sign_checkpoint(session, old) is None:
                raise DeploymentError("the audit log is empty, so nothing was signed with the key")
            newest = read_newest(session)
            assert newest is not None
            succession = KeySuccession.sign(old, new, newest=newest)
            session.flush()
            action, details = Action.SIGNING_KEY_ROTATED, succession.details()
            database.record_act(session, action, subject=succession.new, details=details)
    SigningKey.install_successor(folder)
    return new.public_key.hex()


def verify_log(database: Database, folder: Path, kept: Sequence[Path]) -> ChainReport:
    """Check the log in the database against its own checkpoints and those in the files ``kept``.

    Raises:
        DeploymentError: A file cannot be read, or the key is damaged.
        StoreError: The database cannot be read.
    """
    key = SigningKey.find(folder)
    public_key = None if key is None else key.public_key.hex()
    with database.reading() as session:
        stored = [
            (f"stored checkpoint at entry {each.position}", each)
            for each in read_checkpoints(session)
        ]
        report = verify_chain(
            read_entries(session), [*stored, *_load_kept(kept)], public_key=public_key
        )
    if report.signing_key not in (None, public_key):
        report.problems.append(
            f"{folder}: the log names a newer signing key than the one here; finish `fedlearn "
            "rotate-signing-key`, or find out who has replaced it"
        )
    return report


def verify_export(log: Path, kept: Sequence[Path]) -> ChainReport:
    """Check an exported log against checkpoints that were kept, which say whose key is right.

    Raises:
        DeploymentError: A file cannot be read, or there is no checkpoint.
    """
    checkpoints = _load_kept(kept)
    if not checkpoints:
        raise DeploymentError(
            f"{log} alone proves nothing: anyone can compute hashes; name a checkpoint that you "
            "have kept (--kept FILE)"
        )
    with explain_disk_errors(log, raises=DeploymentError, doing="read"), log.open("rb") as lines:
        entries = (
            parse_entry(line, source=f"{log}, line {number}")
            for number, line in enumerate(lines, start=1)
        )
        return verify_chain(entries, checkpoints, public_key=checkpoints[0][1].public_key)


def _load_kept(kept: Sequence[Path]) -> list[tuple[str, LogCheckpoint]]:
    return [(str(path), LogCheckpoint.load(path)) for path in kept]


def _parse_time(text: str) -> str:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise DeploymentError(
            f"--since {text!r} is no time; write 2026-01-31 or 2026-01-31T12:00:00Z (UTC)"
        ) from error
    aware = found if found.tzinfo else found.replace(tzinfo=UTC)
    return aware.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
