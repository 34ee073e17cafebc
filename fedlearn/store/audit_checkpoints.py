"""The signed checkpoints of the audit log in the database."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from fedlearn.core.clock import utc_now
from fedlearn.errors import DeploymentError
from fedlearn.identity.audit import Action, AuditEntry
from fedlearn.identity.audit_checks import LogCheckpoint
from fedlearn.identity.releases import SignedRelease
from fedlearn.identity.signing import SigningKey
from fedlearn.identity.succession import KeyChain, KeySuccession
from fedlearn.store.audit import AUDIT_LOCK, read_newest
from fedlearn.store.engine import serialize_transactions
from fedlearn.store.schema import AuditCheckpointRow, AuditRow, build_record, build_row


def sign_checkpoint(session: Session, key: SigningKey) -> LogCheckpoint | None:
    """Sign the newest entry and store the checkpoint; ``None`` if the log is empty.

    If the newest entry is signed already, that checkpoint is returned.

    Raises:
        DeploymentError: Another key has replaced this one.
    """
    serialize_transactions(session.connection(), AUDIT_LOCK)
    newest = read_newest(session)
    if newest is None:
        return None
    require_current(session, key)
    row = session.get(AuditCheckpointRow, newest.position)
    if row is not None:
        known = build_record(row, LogCheckpoint)
        if known.hash == newest.hash and known.is_signed_by(key.public_key.hex()):
            return known
    checkpoint = LogCheckpoint.sign(newest, key, at_utc=utc_now())
    if row is None:  # a row that is wrong stays, as evidence
        session.add(build_row(AuditCheckpointRow, checkpoint))
    return checkpoint


def read_checkpoints(session: Session) -> list[LogCheckpoint]:
    """Return all stored checkpoints by position."""
    rows = session.scalars(select(AuditCheckpointRow).order_by(AuditCheckpointRow.position))
    return [build_record(row, LogCheckpoint) for row in rows]


def require_current(session: Session, key: SigningKey) -> None:
    """Check that no other key has replaced this one.

    Raises:
        DeploymentError: One has; the message says what to do.
    """
    successions = read_successions(session)
    if successions and successions[-1][1].new != key.public_key.hex():
        raise DeploymentError(
            f"the signing key {key.public_key.hex()[:12]}… was replaced by "
            f"{successions[-1][1].new[:12]}…: finish the replacement (`fedlearn "
            "rotate-signing-key`), or copy signing.key from the coordinator where it was done"
        )


def read_successions(session: Session) -> list[tuple[AuditEntry, KeySuccession]]:
    """Return the well-formed successions of keys in the log, in order, each with its entry."""
    found = ((each, KeySuccession.of(each)) for each in _read_rotations(session))
    return [(entry, succession) for entry, succession in found if succession is not None]


def find_signer(session: Session, signed: SignedRelease, *, trusted: str) -> str:
    """Return the key that must have signed a release, for one who trusts a key of this log.

    Without replaced keys it is ``trusted``. Otherwise it is the release's own key if that was the
    signing key when the release was recorded in the log, and empty if not.
    """
    keys = KeyChain()
    for entry in _read_rotations(session):
        keys.read(entry)
    if keys.newest is None:
        return trusted
    exported = (AuditRow.action == Action.RELEASE_EXPORTED.value, AuditRow.subject == signed.id)
    position = session.scalar(select(func.min(AuditRow.position)).where(*exported))
    key = signed.public_key
    is_its_time = position is not None and keys.may_sign(key, position=position, trusted=trusted)
    return key if is_its_time else ""


def _read_rotations(session: Session) -> list[AuditEntry]:
    rotated = AuditRow.action == Action.SIGNING_KEY_ROTATED.value
    rows = session.scalars(select(AuditRow).where(rotated).order_by(AuditRow.position))
    return [build_record(row, AuditEntry) for row in rows]
