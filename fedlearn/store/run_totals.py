"""Reads a run's totals and latest values, without reading its rounds one by one."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import case, func, select

from fedlearn.rounds.records import Outcome
from fedlearn.store.runs import Database, find_run_id
from fedlearn.store.schema import MetricRow, RoundRow


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """Totals over all finished rounds of a run.

    Attributes:
        num_finished: Finished rounds.
        num_skipped: Rounds that left the model unchanged.
        num_retries: Retries of all rounds together.
        seconds: Real seconds.
        virtual_s: Virtual seconds; NaN before the first round.
        last_round_s: Real seconds of the last round; NaN before the first.
    """

    num_finished: int
    num_skipped: int
    num_retries: int
    seconds: float
    virtual_s: float
    last_round_s: float


class LatestValue(NamedTuple):
    """A value of a metric, and the number of finished rounds at that time."""

    value: float
    num_finished: int


def read_totals(database: Database, run: str) -> RunTotals:
    """Return the totals of a run.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    row = RoundRow
    with database.reading() as session:
        mine = row.run_id == find_run_id(session, run)
        skipped = func.sum(case((row.outcome == Outcome.SKIPPED, 1), else_=0))
        sums = select(func.count(), skipped, func.sum(row.attempt), func.sum(row.seconds))
        num, num_skipped, num_retries, seconds = session.execute(sums.where(mine)).one()
        last = select(row.virtual_s, row.seconds).where(mine).order_by(row.round_num.desc())
        virtual_s, last_s = session.execute(last.limit(1)).first() or (math.nan, math.nan)
    return RunTotals(
        num_finished=num,
        num_skipped=num_skipped or 0,
        num_retries=num_retries or 0,
        seconds=0.0 if math.isnan(seconds) else seconds,
        virtual_s=virtual_s,
        last_round_s=last_s,
    )


def read_latest(database: Database, run: str) -> dict[str, LatestValue]:
    """Return the latest value of each metric of a run, by name.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    row = MetricRow
    with database.reading() as session:
        mine = row.run_id == find_run_id(session, run), row.value.is_not(None)
        last = (
            select(row.name, func.max(row.round_num).label("round_num"))
            .where(*mine)
            .group_by(row.name)
            .subquery()
        )
        same = (row.name == last.c.name) & (row.round_num == last.c.round_num)
        found = select(row.name, row.value, row.round_num).join(last, same).where(*mine)
        return {name: LatestValue(value, num + 1) for name, value, num in session.execute(found)}


def find_first(database: Database, run: str, metric: str, value: float) -> int | None:
    """Return the number of finished rounds when a metric first had this value.

    ``None`` if it never had it.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    row = MetricRow
    with database.reading() as session:
        mine = row.run_id == find_run_id(session, run), row.name == metric, row.value == value
        found = session.scalar(select(func.min(row.round_num)).where(*mine))
    return None if found is None else found + 1
