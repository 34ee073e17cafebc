"""Reads curves of a run, down-sampled by the database to what a screen can show.

Each bucket of rounds gives its mean, lowest and highest value, so no spike is lost.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from fedlearn.core.participations import Status
from fedlearn.store.runs import Database, find_run_id
from fedlearn.store.schema import MetricRow, ParticipationRow, RoundRow

#: Columns of a round that are drawn like metrics.
ROUND_CURVES = {"train_loss": RoundRow.train_loss, "seconds": RoundRow.seconds}


@dataclass(kw_only=True)
class Curve:
    """A metric over rounds, as columns of equal length.

    Attributes:
        rounds: Last round of each bucket, from 1.
        means: Mean value in each bucket.
        lows: Lowest value in each bucket; ``highs`` the highest.
    """

    rounds: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)

    def add(self, last_round: int, mean: float, low: float, high: float) -> None:
        """Append a bucket."""
        self.rounds.append(last_round)
        self.means.append(mean)
        self.lows.append(low)
        self.highs.append(high)


def list_metrics(database: Database, run: str) -> list[str]:
    """Return the names of all metrics that a run has recorded, in alphabetical order.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    with database.reading() as session:
        mine = MetricRow.run_id == find_run_id(session, run)
        return sorted(session.scalars(select(MetricRow.name).where(mine).distinct()))


def read_curves(
    database: Database, run: str, names: Collection[str], *, rounds_per_bucket: int
) -> dict[str, Curve]:
    """Return curves by metric; a metric without a finite value has none.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    found = dict[str, Curve]()
    with database.reading() as session:
        run_id = find_run_id(session, run)
        row = MetricRow
        bucket = row.round_num // rounds_per_bucket
        statement = (
            select(row.name, func.max(row.round_num), *_aggregate(row.value))
            .where(row.run_id == run_id, row.name.in_(names), row.value.is_not(None))
            .group_by(row.name, bucket)
            .order_by(row.name, bucket)
        )
        for name, last, *values in session.execute(statement):
            found.setdefault(name, Curve()).add(last + 1, *values)
        for name in ROUND_CURVES.keys() & set(names):
            curve = _read_round_curve(session, run_id, name, rounds_per_bucket=rounds_per_bucket)
            if curve.rounds:
                found[name] = curve
    return found


def read_participation(database: Database, run: str, *, rounds_per_bucket: int) -> dict[str, Curve]:
    """Return the mean number of clients a round by status.

    Raises:
        UnknownRun: There is no such run.
        StoreError: The database cannot be read.
    """
    row = ParticipationRow
    with database.reading() as session:
        run_id = find_run_id(session, run)
        counts = [func.count().filter(row.status == each).label(each.name) for each in Status]
        # By round first, in the order of the primary key: to group a million rows by another key
        # takes the database twice as long.
        by_round = (
            select(row.round_num, *counts)
            .where(row.run_id == run_id)
            .group_by(row.run_id, row.round_num)
            .subquery()
        )
        bucket = by_round.c.round_num // rounds_per_bucket
        sums = [func.sum(by_round.c[each.name]) for each in Status]
        found = {
            place: nums for place, *nums in session.execute(select(bucket, *sums).group_by(bucket))
        }
        lasts = select(func.max(RoundRow.round_num)).where(RoundRow.run_id == run_id)
        last = session.scalar(lasts)
    if last is None:
        return {}
    curves = dict[str, Curve]()
    none = [0] * len(Status)
    for index, status in enumerate(Status):
        if not any(nums[index] for nums in found.values()):
            continue
        curve = curves[status.value] = Curve()
        for place in range(last // rounds_per_bucket + 1):
            end = min((place + 1) * rounds_per_bucket, last + 1)
            mean = int(found.get(place, none)[index]) / (end - place * rounds_per_bucket)
            curve.add(end, mean, mean, mean)
    return curves


def _read_round_curve(session: Session, run_id: int, name: str, *, rounds_per_bucket: int) -> Curve:
    column, bucket = ROUND_CURVES[name], RoundRow.round_num // rounds_per_bucket
    statement = (
        select(func.max(RoundRow.round_num), *_aggregate(column))
        .where(RoundRow.run_id == run_id, column.is_not(None))
        .group_by(bucket)
        .order_by(bucket)
    )
    curve = Curve()
    for last, *values in session.execute(statement):
        curve.add(last + 1, *values)
    return curve


def _aggregate(column: InstrumentedAttribute[float]) -> tuple[ColumnElement[float], ...]:
    return func.avg(column), func.min(column), func.max(column)
