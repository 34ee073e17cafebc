"""Lists the audit log page by page, newest first."""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select

from fedlearn.identity.audit import AuditEntry
from fedlearn.store.paging import Page, contains_text
from fedlearn.store.runs import Database
from fedlearn.store.schema import AuditRow, build_record


@dataclass(frozen=True, kw_only=True)
class AuditSearch:
    """Which entries to list; empty strings match everything.

    Attributes:
        kind: First word of an action: ``run``, for example.
        actor: Part of who did it.
        subject: Part of the name of what it was done to.
        since: Earliest day, as ``2026-01-31`` in UTC; ``until`` the latest.
    """

    kind: str = ""
    actor: str = ""
    subject: str = ""
    since: str = ""
    until: str = ""


def list_entries(
    database: Database, search: AuditSearch, *, page: int, size: int
) -> Page[AuditEntry]:
    """Return a page of the entries that match, newest first.

    Raises:
        StoreError: The database cannot be read.
    """
    conditions = _conditions(search)
    newest_first = select(AuditRow).where(*conditions).order_by(AuditRow.position.desc())
    with database.reading() as session:
        total = session.scalar(select(func.count()).select_from(AuditRow).where(*conditions)) or 0
        rows = session.scalars(newest_first.offset((page - 1) * size).limit(size))
        entries = [build_record(row, AuditEntry) for row in rows]
    return Page(rows=entries, number=page, size=size, total=total)


def _conditions(search: AuditSearch) -> list[ColumnElement[bool]]:
    row, found = AuditRow, list[ColumnElement[bool]]()
    if search.kind:
        found.append(row.action.startswith(f"{search.kind}.", autoescape=True))
    if search.actor:
        found.append(contains_text(row.actor, search.actor))
    if search.subject:
        found.append(contains_text(row.subject, search.subject))
    if search.since:
        found.append(row.at_utc >= search.since)
    if search.until:  # the whole day: "T" and a time come after the date
        found.append(row.at_utc < f"{search.until}U")
    return found
