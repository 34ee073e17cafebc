"""Lists runs page by page, with their progress and best values, without reading their rounds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from fedlearn.rounds.records import RunRecord, RunStatus
from fedlearn.store.paging import Page, contains_text
from fedlearn.store.runs import Database, build_run_record
from fedlearn.store.schema import DeploymentRow, MetricRow, RoundRow, RunRow

#: Whether a process still runs a run is not in the database.
_UNCERTAIN = (RunStatus.RUNNING, RunStatus.LOST)


class RunOrder(StrEnum):
    """Orders of a list of runs."""

    NEWEST = "newest"
    OLDEST = "oldest"
    NAME = "name"
    ROUNDS = "rounds"


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One run in a list.

    Attributes:
        run_id: Its key in the database.
        num_finished: Finished rounds.
        seconds: Real seconds of these rounds.
    """

    run_id: int
    record: RunRecord
    num_finished: int
    seconds: float


class ProgressMark(NamedTuple):
    """How far a run is, for noticing that it has gone on.

    Attributes:
        status: As stored: a run whose process is gone is running.
        beat: Heartbeat of its coordinator; ``None`` if it is not deployed.
    """

    name: str
    num_finished: int
    status: RunStatus
    beat: int | None


def list_runs(
    database: Database,
    *,
    search: str,
    status: RunStatus | None,
    study: str | None = None,
    order: RunOrder | Sequence[int],
    page: int,
    size: int,
) -> Page[RunLine]:
    """Return a page of the runs whose name contains ``search``, of this status if one is given.

    Args:
        database: Where the runs are.
        search: Part of the name.
        status: Status of the runs.
        study: Study of the runs; ``None``: any, or none.
        order: Order of the runs, or the keys of all of them in order: see :func:`find_runs`.
        page: Number of the page, from 1.
        size: Runs on a page.

    Raises:
        StoreError: The database cannot be read.
    """
    finished = _num_finished().label("num_finished")
    keys = {
        RunOrder.NEWEST: RunRow.id.desc(),
        RunOrder.OLDEST: RunRow.id,
        RunOrder.NAME: RunRow.name,
        RunOrder.ROUNDS: finished.desc(),
    }
    first = (page - 1) * size
    statement = select(RunRow, finished, DeploymentRow.run_id).outerjoin(DeploymentRow)
    with database.reading() as session:
        if isinstance(order, RunOrder):
            which = _conditions(session, database, search, status)
            which += [] if study is None else [RunRow.study == study]
            total = session.scalar(select(func.count()).select_from(RunRow).where(*which)) or 0
            ordered = statement.where(*which).order_by(keys[order], RunRow.id.desc())
            found = session.execute(ordered.offset(first).limit(size)).all()
        else:
            total, shown = len(order), {key: at for at, key in enumerate(order[first:][:size])}
            unordered = session.execute(statement.where(RunRow.id.in_(shown))).all()
            found = sorted(unordered, key=lambda each: shown[each[0].id])
        seconds = _sum_seconds(session, [row.id for row, _, _ in found])
        lines = [
            RunLine(
                run_id=row.id,
                record=build_run_record(row, database.runs_dir, is_deployed=deployment is not None),
                num_finished=num_finished,
                seconds=seconds.get(row.id, 0.0),
            )
            for row, num_finished, deployment in found
        ]
    return Page(rows=lines, number=page, size=size, total=total)


def find_runs(database: Database, *, search: str, status: RunStatus | None) -> dict[int, RunRecord]:
    """Return the runs that :func:`list_runs` lists, by key, newest first.

    Raises:
        StoreError: The database cannot be read.
    """
    with database.reading() as session:
        which = _conditions(session, database, search, status)
        rows = session.scalars(select(RunRow).where(*which).order_by(RunRow.id.desc()))
        folder = database.runs_dir
        return {row.id: build_run_record(row, folder, is_deployed=False) for row in rows}


def count_runs(database: Database) -> int:
    """Return the number of runs."""
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(RunRow)) or 0


def read_progress(database: Database, names: Collection[str] = ()) -> list[ProgressMark]:
    """Return the progress of the runs of these names, or of all, oldest first."""
    statement = (
        select(RunRow.name, _num_finished(), RunRow.status, DeploymentRow.beat)
        .outerjoin(DeploymentRow)
        .order_by(RunRow.id)
    )
    if names:
        statement = statement.where(RunRow.name.in_(names))
    with database.reading() as session:
        return [ProgressMark(*row) for row in session.execute(statement)]


def read_extremes(
    database: Database, runs: Mapping[int, Sequence[str]]
) -> dict[tuple[int, str], tuple[float, float]]:
    """Return the lowest and highest value of these metrics by run key and name.

    Args:
        database: Where the runs are.
        runs: Names of metrics by run key.
    """
    row, names = MetricRow, {name for each in runs.values() for name in each}
    statement = (
        select(row.run_id, row.name, func.min(row.value), func.max(row.value))
        .where(row.run_id.in_(runs), row.name.in_(names), row.value.is_not(None))
        .group_by(row.run_id, row.name)
    )
    with database.reading() as session:
        return {(key, name): (low, high) for key, name, low, high in session.execute(statement)}


def _conditions(
    session: Session, database: Database, search: str, status: RunStatus | None
) -> list[ColumnElement[bool]]:
    named = [contains_text(RunRow.name, search)] if search else []
    return named if status is None else [*named, _of_status(session, database, status)]


def _num_finished() -> ColumnElement[int]:
    """Return the number of rounds of a run: rounds are numbered from 0 without a gap."""
    last = select(func.max(RoundRow.round_num)).where(RoundRow.run_id == RunRow.id)
    return func.coalesce(last.correlate(RunRow).scalar_subquery(), -1) + 1


def _sum_seconds(session: Session, run_ids: Sequence[int]) -> dict[int, float]:
    statement = (
        select(RoundRow.run_id, func.sum(RoundRow.seconds))
        .where(RoundRow.run_id.in_(run_ids))
        .group_by(RoundRow.run_id)
    )
    return {run_id: seconds for run_id, seconds in session.execute(statement)}  # noqa: C416 (rows are not tuples to mypy)


def _of_status(session: Session, database: Database, status: RunStatus) -> ColumnElement[bool]:
    if status not in _UNCERTAIN:
        return RunRow.status == status
    running = session.scalars(select(RunRow).where(RunRow.status == RunStatus.RUNNING))
    folder = database.runs_dir
    now = {row.id: build_run_record(row, folder, is_deployed=False).status for row in running}
    return RunRow.id.in_([key for key, each in now.items() if each is status])
