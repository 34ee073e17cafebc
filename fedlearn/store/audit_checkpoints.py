"""The signed checkpoints of the audit log in the database."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from fedlearn.core.clock import utc_now
from fedlearn.identity.audit_checks import LogCheckpoint
from fedlearn.identity.signing import SigningKey
from fedlearn.store.audit import AUDIT_LOCK, read_newest
from fedlearn.store.engine import serialize_transactions
from fedlearn.store.schema import AuditCheckpointRow, build_record, build_row


def sign_checkpoint(session: Session, key: SigningKey) -> LogCheckpoint | None:
    """Sign the newest entry and store the checkpoint; ``None`` if the log is empty.

    If the newest entry is signed already, that checkpoint is returned.
    """
    serialize_transactions(session.connection(), AUDIT_LOCK)
    newest = read_newest(session)
    if newest is None:
        return None
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
