"""The audit log in the database; :mod:`fedlearn.identity.audit` says what it proves.

An entry is added in the transaction of the act that it records, as its last statement: a lock makes
transactions with entries run one after another, and a lock that is taken last cannot end in a
deadlock. Two entries with one position, or after one hash, are refused by the database.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from sqlalchemy import select
from sqlalchemy.orm import Session

from fedlearn.core.clock import utc_now
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.identity.actors import Actor
from fedlearn.identity.audit import Action, AuditEntry, draft_entry
from fedlearn.store.engine import serialize_transactions
from fedlearn.store.schema import (
    AuditRow,
    build_record,
    build_row,
    escape_text,
)

#: Serializes everything that writes to the log.
AUDIT_LOCK = 7_306_087_433
_LOG_ID_BYTES = 16
_BATCH = 1000


def append_entry(
    session: Session,
    action: Action,
    actor: Actor,
    *,
    subject: str,
    details: Mapping[str, object],
) -> AuditEntry:
    """Add an entry in the caller's transaction, in which it must be the last statement.

    Raises:
        ValueError: The details have a number that is not finite.
    """
    serialize_transactions(session.connection(), AUDIT_LOCK)
    draft = draft_entry(action, actor, subject=subject, details=details, at_utc=utc_now())
    newest = read_newest(session)
    if newest is None:
        begin = {"log": SecretBytes.generate(_LOG_ID_BYTES).reveal().hex()}
        start = draft_entry(
            Action.LOG_STARTED, actor, subject="", details=begin, at_utc=draft.at_utc
        )
        newest = _add(session, start, after=None)
    return _add(session, draft, after=newest)


def read_entries(session: Session, *, first: int = 0) -> Iterator[AuditEntry]:
    """Yield all entries from position ``first`` on, in order, a batch in memory at a time."""
    rows = select(AuditRow).where(AuditRow.position >= first).order_by(AuditRow.position)
    for row in session.scalars(rows.execution_options(yield_per=_BATCH)):
        yield build_record(row, AuditEntry)
        session.expunge(row)


def read_newest(session: Session) -> AuditEntry | None:
    """Return the newest entry; ``None`` if the log is empty."""
    row = session.scalar(select(AuditRow).order_by(AuditRow.position.desc()).limit(1))
    return None if row is None else build_record(row, AuditEntry)


def _add(session: Session, draft: AuditEntry, *, after: AuditEntry | None) -> AuditEntry:
    # Escaped before it is hashed: the hash is that of what the database has.
    escaped = replace(
        draft,
        actor=escape_text(draft.actor),
        origin=escape_text(draft.origin),
        subject=escape_text(draft.subject),
    )
    entry = escaped.link(after)
    session.add(build_row(AuditRow, entry))
    session.flush()
    return entry
