"""Counts who reported, was late or failed, in a window of a run's rounds.

Participations are stored by round, so the time that a query takes grows with the window, not with
the run.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Integer, Select, and_, case, func, select, type_coerce

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import STATUSES, Status
from fedlearn.rounds.records import Outcome
from fedlearn.store.paging import Page
from fedlearn.store.runs import Database, find_run_id
from fedlearn.store.schema import ParticipationRow, RoundRow

#: Code in a :class:`MapCell` of a client that reported in a round that was skipped.
SELECTED = -1


class AttendanceOrder(StrEnum):
    """Orders of the clients of a run; in each, the worst come first."""

    MISSED = "missed"
    SLOWEST = "slowest"
    ASKED = "asked"
    CLIENT = "client"


@dataclass(frozen=True, kw_only=True)
class Window:
    """Rounds of a run, by index: from ``first`` up to, but without, ``end``."""

    first: int
    end: int

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return self.end - self.first


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """What one client did in a window.

    Attributes:
        num_asked: Participations, of any status.
        mean_s: Mean seconds from the broadcast to its reply, NaN if there was none; ``max_s`` the
            longest.
        last_round: Last round that asked it, by index.
    """

    client_id: ClientId
    num_asked: int
    reported: int
    late: int
    failed: int
    stale: int
    mean_s: float
    max_s: float
    last_round: int


class MapCell(NamedTuple):
    """The worst status of a client in a group of rounds: its index in ``STATUSES``."""

    client_id: ClientId
    column: int
    code: int


class Reason(NamedTuple):
    """A reason for failures, and how often and when it occurred last."""

    status: Status
    reason: str
    num_times: int
    num_clients: int
    last_round: int


def list_attendance(
    database: Database,
    run: str,
    window: Window,
    *,
    order: AttendanceOrder,
    clients: Collection[int] | None,
    page: int,
    size: int,
) -> Page[Attendance]:
    """Return a page of the clients that were asked in ``window``; ``clients`` limits them.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    row = ParticipationRow
    with database.reading() as session:
        which = _in_window(find_run_id(session, run), window)
        if clients is not None:
            which = (*which, row.client_id.in_(clients))
        total = session.scalar(select(func.count(row.client_id.distinct())).where(*which)) or 0
        grouped = _group_by_client(order).where(*which).offset((page - 1) * size).limit(size)
        rows = [Attendance(**each._mapping) for each in session.execute(grouped)]  # noqa: SLF001 (public in SQLAlchemy)
    return Page(rows=rows, number=page, size=size, total=total)


def read_cells(
    database: Database,
    run: str,
    window: Window,
    *,
    clients: Collection[int],
    rounds_per_column: int,
) -> list[MapCell]:
    """Return the cells of a map of these clients by groups of rounds, where they were asked.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    row = ParticipationRow
    column = (row.round_num - window.first) // rounds_per_column
    unused = and_(RoundRow.outcome == Outcome.SKIPPED, row.status == Status.REPORTED)
    code = case((unused, SELECTED), else_=type_coerce(row.status, Integer))
    with database.reading() as session:
        which = _in_window(find_run_id(session, run), window)
        cells = (
            select(row.client_id, column, func.max(code))
            .join(RoundRow, _same_round())
            .where(*which, row.client_id.in_(clients))
            .group_by(row.client_id, column)
        )
        return [MapCell(*each) for each in session.execute(cells)]


def list_reasons(database: Database, run: str, window: Window, *, most: int) -> list[Reason]:
    """Return the reasons of failed and stale participations, the most frequent first.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    row, count = ParticipationRow, func.count()
    with database.reading() as session:
        which = _in_window(find_run_id(session, run), window)
        num_clients = func.count(row.client_id.distinct())
        grouped = (
            select(row.status, row.reason, count, num_clients, func.max(row.round_num))
            .where(*which, row.status.in_((Status.FAILED, Status.STALE)))
            .group_by(row.status, row.reason)
            .order_by(count.desc(), row.reason)
            .limit(most)
        )
        return [Reason(*each) for each in session.execute(grouped)]


def _group_by_client(
    order: AttendanceOrder,
) -> Select[*tuple[Any, ...]]:  # Any: columns
    row = ParticipationRow
    counts = {each.value: _count_status(each) for each in STATUSES}
    asked, slowest = func.count(), func.max(row.duration_s)
    missed = asked - counts[Status.REPORTED.value]
    keys: dict[AttendanceOrder, ColumnElement[Any]] = {  # Any: of their own types
        AttendanceOrder.MISSED: missed.desc(),
        AttendanceOrder.SLOWEST: func.coalesce(func.avg(row.duration_s), -1.0).desc(),
        AttendanceOrder.ASKED: asked.desc(),
        AttendanceOrder.CLIENT: row.client_id.asc(),
    }
    return (
        select(
            row.client_id,
            asked.label("num_asked"),
            *(column.label(name) for name, column in counts.items()),
            func.avg(row.duration_s).label("mean_s"),
            slowest.label("max_s"),
            func.max(row.round_num).label("last_round"),
        )
        .group_by(row.client_id)
        .order_by(keys[order], row.client_id)
    )


def _count_status(status: Status) -> ColumnElement[int]:
    return func.sum(case((ParticipationRow.status == status, 1), else_=0))


def _in_window(run_id: int, window: Window) -> tuple[ColumnElement[bool], ...]:
    row = ParticipationRow
    return row.run_id == run_id, row.round_num >= window.first, row.round_num < window.end


def _same_round() -> ColumnElement[bool]:
    row = ParticipationRow
    return and_(RoundRow.run_id == row.run_id, RoundRow.round_num == row.round_num)
