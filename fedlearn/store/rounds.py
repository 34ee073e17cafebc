"""Store rounds with their participations and metrics: bulk inserts, records, and counts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, TypedDict, cast

from sqlalchemy import ColumnElement, Connection, func, insert, select
from sqlalchemy.orm import Session

from fedlearn.core.messages import ClientId
from fedlearn.core.participations import Participation, Participations, Status
from fedlearn.rounds.records import Outcome, RoundRecord
from fedlearn.store.schema import (
    Base,
    MetricRow,
    ParticipationRow,
    RoundRow,
    build_record,
    escape_text,
)

if TYPE_CHECKING:  # commands that list clients must not wait for NumPy to import
    import numpy as np
    from numpy.typing import NDArray

_BATCH_ROWS = 500

_ROUND_COLUMNS = [each.name for each in RoundRow.__table__.columns if each.name != "run_id"]

#: Prefix of stored training metrics; no evaluation metric has a name with it.
_TRAINING = "train/"

#: Prefix of stored staleness counts, which are stored like metrics.
_STALENESS = "staleness/"


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """A :class:`~fedlearn.rounds.records.RoundRecord` with counts in place of participations.

    Attributes:
        counts: Number of clients with each status, zeros included.
    """

    round_num: int
    attempt: int
    outcome: Outcome
    counts: Mapping[Status, int]
    train_loss: float
    duration_s: float
    virtual_s: float
    seconds: float
    metrics: Mapping[str, float]
    train_metrics: Mapping[str, float]
    staleness: Mapping[int, int]


def insert_rounds(connection: Connection, run_id: int, records: Sequence[RoundRecord]) -> None:
    """Insert all records with bulk statements, without an ORM object per row."""
    rounds = (
        {"run_id": run_id} | {name: getattr(record, name) for name in _ROUND_COLUMNS}
        for record in records
    )
    # Rounds first: the other rows refer to them.
    _insert_all(connection, "rounds", rounds)
    _insert_participations(connection, run_id, records)
    metrics = (
        {"run_id": run_id, "round_num": record.round_num, "name": name, "value": value}
        for record in records
        for name, value in _name_metrics(record)
    )
    _insert_all(connection, "metrics", metrics)


def read_rounds(session: Session, run_id: int) -> list[RoundRecord]:
    """Return the record of every round, in order."""
    participations = _read_participations(session, run_id)
    metrics = _read_metrics(session, run_id, first=0)
    return [
        build_record(
            row,
            RoundRecord,
            participations=Participations.of(participations[row.round_num]),
            clients=None,
            **metrics[row.round_num],
        )
        for row in session.scalars(
            select(RoundRow).where(RoundRow.run_id == run_id).order_by(RoundRow.round_num)
        )
    ]


def summarize_rounds(session: Session, run_id: int, *, last: int) -> list[RoundSummary]:
    """Return summaries of the ``last`` rounds, in order; the database does the counting."""
    rows = session.scalars(
        select(RoundRow)
        .where(RoundRow.run_id == run_id)
        .order_by(RoundRow.round_num.desc())
        .limit(last)
    ).all()
    if not rows:
        return []
    first = rows[-1].round_num
    counts = _count_statuses(session, run_id, first=first)
    metrics = _read_metrics(session, run_id, first=first)
    return [
        build_record(row, RoundSummary, counts=counts[row.round_num], **metrics[row.round_num])
        for row in reversed(rows)
    ]


def read_missed(session: Session, run_id: int, *, first: int) -> dict[int, list[Participation]]:
    """Return the missed participations (not reported) by round, from round ``first`` on."""
    row = ParticipationRow
    missed = row.round_num >= first, row.status != Status.REPORTED
    return dict(_read_participations(session, run_id, *missed))


def count_by_client(
    session: Session, run_id: int, *which: ColumnElement[bool]
) -> dict[ClientId, dict[Status, int]]:
    """Count participations by client and status, for the clients that were ever asked."""
    row, found = ParticipationRow, dict[ClientId, dict[Status, int]]()
    for client_id, status, count in session.execute(
        select(row.client_id, row.status, func.count())
        .where(row.run_id == run_id, *which)
        .group_by(row.client_id, row.status)
    ):
        found.setdefault(ClientId(client_id), dict.fromkeys(Status, 0))[status] = count
    return found


def read_failing(session: Session, run_id: int) -> dict[ClientId, tuple[int, str]]:
    """Return the number of failures since each client's last report, and the latest reason.

    Failures are counted once a round. Rounds in which no client reported do not count.
    """
    row, found = ParticipationRow, dict[ClientId, tuple[int, str]]()
    reported = select(row.client_id, row.round_num).where(
        row.run_id == run_id, row.status == Status.REPORTED
    )
    of_client = reported.subquery()
    last = (
        select(of_client.c.client_id, func.max(of_client.c.round_num).label("round_num"))
        .group_by(of_client.c.client_id)
        .subquery()
    )
    failed = (
        select(row.client_id, row.round_num, row.reason)
        .outerjoin(last, last.c.client_id == row.client_id)
        .where(
            row.run_id == run_id,
            row.status == Status.FAILED,
            row.round_num > func.coalesce(last.c.round_num, -1),
            # A round in which no client reported says more about the coordinator than about its
            # clients.
            row.round_num.in_(select(of_client.c.round_num)),
        )
        .order_by(row.round_num)
    )
    counted = set[tuple[int, int]]()  # an asynchronous round may ask a failed client again
    for number, round_num, reason in session.execute(failed):
        num_before, _ = found.get(ClientId(number), (0, ""))
        is_first = (number, round_num) not in counted
        counted.add((number, round_num))
        found[ClientId(number)] = num_before + is_first, reason
    return found


def _insert_all(connection: Connection, table: str, rows: Iterable[dict[str, object]]) -> None:
    # In small batches: holding all dicts at once would trigger the garbage collector.
    statement = insert(Base.metadata.tables[table])
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH_ROWS)):
        connection.execute(statement, batch)


def _insert_participations(
    connection: Connection, run_id: int, records: Iterable[RoundRecord]
) -> None:
    """Insert one row per client through the driver, which skips SQLAlchemy's per-value work.

    These are most of the rows written. The values must equal what the columns' types would bind.
    """
    columns = ", ".join(column.name for column in ParticipationRow.__table__.columns)
    mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    marks = ", ".join([mark] * len(ParticipationRow.__table__.columns))
    rows = chain.from_iterable(_build_participation_rows(run_id, record) for record in records)
    statement = f"INSERT INTO participations ({columns}) VALUES ({marks})"  # noqa: S608 - names of our own columns
    while batch := list(islice(rows, _BATCH_ROWS)):
        connection.exec_driver_sql(statement, batch)


def _build_participation_rows(run_id: int, record: RoundRecord) -> Iterable[tuple[object, ...]]:
    each = record.participations
    reasons = [""] * len(each)
    for place, reason in each.reasons.items():
        # As `_PlainText` does, which this statement bypasses.
        reasons[place] = escape_text(reason)
    # One `zip` over columns, instead of a Python loop over clients.
    return zip(
        repeat(run_id),
        repeat(record.round_num),
        range(len(each)),
        each.client_ids.tolist(),
        each.codes.tolist(),
        _nan_to_none(each.durations_s),
        each.num_examples.tolist(),
        _nan_to_none(each.losses),
        reasons,
        strict=False,  # `repeat` is infinite
    )


def _nan_to_none(column: "NDArray[np.float64]") -> list[float | None]:
    if not (column != column).any():  # noqa: PLR0124 - NaN
        return cast("list[float | None]", column.tolist())
    return [None if value != value else value for value in column.tolist()]  # noqa: PLR0124 - NaN


def _read_participations(
    session: Session, run_id: int, *which: ColumnElement[bool]
) -> defaultdict[int, list[Participation]]:
    row = ParticipationRow
    found: defaultdict[int, list[Participation]] = defaultdict(list)
    columns = [getattr(row, name) for name in ("round_num", *Participation._fields)]
    of_run = select(*columns).where(row.run_id == run_id, *which)
    by_arrival = of_run.order_by(row.round_num, row.position)
    for round_num, *values in session.execute(by_arrival):
        found[round_num].append(Participation(*values))
    return found


def _count_statuses(
    session: Session, run_id: int, *, first: int
) -> defaultdict[int, dict[Status, int]]:
    row = ParticipationRow
    found: defaultdict[int, dict[Status, int]] = defaultdict(lambda: dict.fromkeys(Status, 0))
    for round_num, status, count in session.execute(
        select(row.round_num, row.status, func.count())
        .where(row.run_id == run_id, row.round_num >= first)
        .group_by(row.round_num, row.status)
    ):
        found[round_num][status] = count
    return found


def _name_metrics(record: RoundRecord) -> Iterator[tuple[str, float]]:
    yield from record.metrics.items()
    for name, value in record.train_metrics.items():
        yield f"{_TRAINING}{name}", value
    for staleness, number in record.staleness.items():
        yield f"{_STALENESS}{staleness}", float(number)


class _RoundMetrics(TypedDict):
    metrics: dict[str, float]
    train_metrics: dict[str, float]
    staleness: dict[int, int]


def _read_metrics(session: Session, run_id: int, *, first: int) -> defaultdict[int, _RoundMetrics]:
    row = MetricRow
    found: defaultdict[int, _RoundMetrics] = defaultdict(
        lambda: {"metrics": {}, "train_metrics": {}, "staleness": {}}
    )
    for round_num, name, value in session.execute(
        select(row.round_num, row.name, row.value).where(
            row.run_id == run_id, row.round_num >= first
        )
    ):
        measured = found[round_num]
        if name.startswith(_STALENESS):
            measured["staleness"][int(name.removeprefix(_STALENESS))] = int(value)
        elif name.startswith(_TRAINING):
            measured["train_metrics"][name.removeprefix(_TRAINING)] = value
        else:
            measured["metrics"][name] = value
    for measured in found.values():
        # As text, "10" comes before "2".
        measured["staleness"] = dict(sorted(measured["staleness"].items()))
    return found
