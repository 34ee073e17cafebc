"""Tells which kinds of records a database has, so that pages offer no empty lists."""

from typing import NamedTuple

from sqlalchemy import exists, select

from fedlearn.store.runs import Database
from fedlearn.store.schema import AuditRow, ChargeRow, ClientRow, QueueRow, ReleaseRow, StudyRow


class Contents(NamedTuple):
    """Whether a database has any of these records."""

    clients: bool = False
    queue: bool = False
    studies: bool = False
    releases: bool = False
    charges: bool = False
    audit_log: bool = False


def read_contents(database: Database) -> Contents:
    """Return which records there are.

    Raises:
        StoreError: The database cannot be read.
    """
    tables = (ClientRow, QueueRow, StudyRow, ReleaseRow, ChargeRow, AuditRow)
    names = Contents._fields
    found = select(
        *(exists(select(each)).label(name) for name, each in zip(names, tables, strict=True))
    )
    with database.reading() as session:
        return Contents(**session.execute(found).one()._asdict())
