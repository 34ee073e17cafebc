"""Lists studies and their clients page by page."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import InstrumentedAttribute

from fedlearn.rounds.scheduling import QueueState
from fedlearn.store.paging import Page, contains_text
from fedlearn.store.runs import Database
from fedlearn.store.schema import (
    QueueRow,
    RunRow,
    StudyMemberRow,
    StudyRow,
    build_record,
)
from fedlearn.store.studies import Consent, NewStudy, StudyMember


@dataclass(frozen=True, kw_only=True)
class StudyLine(NewStudy):
    """A study in a list.

    Attributes:
        created_by: Who created it.
        created_utc: When it was created, ISO 8601.
        closed_utc: When it was closed; empty if it is open.
        num_members: Clients that are invited to it.
        num_consenting: Those of them whose owner consents.
        num_runs: Its runs that have started.
        num_waiting: Its runs that wait in the queue.
    """

    created_by: str
    created_utc: str
    closed_utc: str
    num_members: int
    num_consenting: int
    num_runs: int
    num_waiting: int


def list_studies(database: Database, *, page: int, size: int) -> Page[StudyLine]:
    """Return a page of the studies, by name.

    Raises:
        StoreError: The database cannot be read.
    """
    with database.reading() as session:
        total = session.scalar(select(func.count()).select_from(StudyRow)) or 0
        rows = session.scalars(
            select(StudyRow).order_by(StudyRow.name).offset((page - 1) * size).limit(size)
        ).all()
        return Page(rows=_build(session, rows), number=page, size=size, total=total)


def read_studies(database: Database, names: Collection[str]) -> dict[str, StudyLine]:
    """Return the studies of these names; one that does not exist is left out.

    Raises:
        StoreError: The database cannot be read.
    """
    with database.reading() as session:
        rows = session.scalars(select(StudyRow).where(StudyRow.name.in_(names))).all()
        return {each.name: each for each in _build(session, rows)}


def list_members(
    database: Database, study: str, *, search: str, consent: Consent | None, page: int, size: int
) -> Page[StudyMember]:
    """Return a page of the clients that are invited to a study, by name.

    Args:
        database: Where the study is.
        study: Its name.
        search: Part of a client's name.
        consent: What the clients have last said; ``None``: anything.
        page: Number of the page, from 1.
        size: Clients on a page.

    Raises:
        StoreError: The database cannot be read.
    """
    row = StudyMemberRow
    which = [row.study == study]
    which += [contains_text(row.client, search)] if search else []
    which += [row.consent == consent] if consent else []
    with database.reading() as session:
        total = session.scalar(select(func.count()).select_from(row).where(*which)) or 0
        found = select(row).where(*which).order_by(row.client)
        rows = session.scalars(found.offset((page - 1) * size).limit(size))
        members = [build_record(each, StudyMember) for each in rows]
    return Page(rows=members, number=page, size=size, total=total)


def _build(session: Session, rows: Sequence[StudyRow]) -> list[StudyLine]:
    names = [each.name for each in rows]
    members = _count(session, StudyMemberRow.study, names)
    consenting = _count(
        session, StudyMemberRow.study, names, StudyMemberRow.consent == Consent.GIVEN
    )
    runs = _count(session, RunRow.study, names)
    waiting = _count(session, QueueRow.study, names, QueueRow.state == QueueState.QUEUED)
    return [
        build_record(
            each,
            StudyLine,
            num_members=members.get(each.name, 0),
            num_consenting=consenting.get(each.name, 0),
            num_runs=runs.get(each.name, 0),
            num_waiting=waiting.get(each.name, 0),
        )
        for each in rows
    ]


def _count(
    session: Session,
    study: InstrumentedAttribute[str],
    names: Collection[str],
    *which: ColumnElement[bool],
) -> dict[str, int]:
    """Return the number of rows of each study."""
    counted = select(study, func.count()).where(study.in_(names), *which).group_by(study)
    return {name: num for name, num in session.execute(counted)}  # noqa: C416 (rows are not tuples to mypy)
