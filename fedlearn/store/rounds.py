"""Rounds, their participations and metrics: written in bulk, read as records or as counts."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import cast

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, func, insert, select
from sqlalchemy.orm import Session

from fedlearn.core.collecting import Participation, Participations, Status
from fedlearn.core.messages import ClientId
from fedlearn.rounds.records import Outcome, RoundRecord
from fedlearn.store.schema import Base, MetricRow, ParticipationRow, RoundRow, plain

_BATCH_ROWS = 500


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """A round without its participations one by one.

    Attributes:
        round_num: Index, from 0.
        attempt: How often it was retried before this outcome.
        outcome: Whether the model moved.
        counts: How many clients ended with each status; 0 where none did.
        train_loss: Mean training loss of the reports, weighted by examples; NaN if none.
        duration_s: Seconds from broadcast to close, all attempts together.
        seconds: Real seconds the round took, evaluation included.
        metrics: Evaluation after the round by name.
    """

    round_num: int
    attempt: int
    outcome: Outcome
    counts: Mapping[Status, int]
    train_loss: float
    duration_s: float
    seconds: float
    metrics: Mapping[str, float]


def insert_rounds(connection: Connection, run_id: int, records: Sequence[RoundRecord]) -> None:
    """Insert all records: three bulk statements without an object a row."""
    _insert_all(
        connection,
        "rounds",
        (
            {
                "run_id": run_id,
                "round_num": record.round_num,
                "attempt": record.attempt,
                "outcome": record.outcome,
                "train_loss": record.train_loss,
                "duration_s": record.duration_s,
                "virtual_s": record.virtual_s,
                "seconds": record.seconds,
            }
            for record in records
        ),
    )
    _insert_participations(connection, run_id, records)
    _insert_all(
        connection,
        "metrics",
        (
            {"run_id": run_id, "round_num": record.round_num, "name": name, "value": value}
            for record in records
            for name, value in record.metrics.items()
        ),
    )


def read_rounds(session: Session, run_id: int) -> list[RoundRecord]:
    """Return the record of every round, in order."""
    participations = _participations(session, run_id)
    metrics = _metrics(session, run_id, first=0)
    return [
        RoundRecord(
            round_num=row.round_num,
            attempt=row.attempt,
            outcome=row.outcome,
            participations=Participations.of(participations[row.round_num]),
            train_loss=row.train_loss,
            duration_s=row.duration_s,
            virtual_s=row.virtual_s,
            seconds=row.seconds,
            metrics=metrics[row.round_num],
        )
        for row in session.scalars(
            select(RoundRow).where(RoundRow.run_id == run_id).order_by(RoundRow.round_num)
        )
    ]


def summarise_rounds(session: Session, run_id: int, *, last: int) -> list[RoundSummary]:
    """Return the ``last`` rounds, in order; the database counts their participations."""
    rows = session.scalars(
        select(RoundRow)
        .where(RoundRow.run_id == run_id)
        .order_by(RoundRow.round_num.desc())
        .limit(last)
    ).all()
    if not rows:
        return []
    first = rows[-1].round_num
    counts = _counts(session, run_id, first=first)
    metrics = _metrics(session, run_id, first=first)
    return [
        RoundSummary(
            round_num=row.round_num,
            attempt=row.attempt,
            outcome=row.outcome,
            counts=counts[row.round_num],
            train_loss=row.train_loss,
            duration_s=row.duration_s,
            seconds=row.seconds,
            metrics=metrics[row.round_num],
        )
        for row in reversed(rows)
    ]


def _insert_all(connection: Connection, table: str, rows: Iterable[dict[str, object]]) -> None:
    """Insert in small batches: all at once, so many dicts set off the garbage collector."""
    statement = insert(Base.metadata.tables[table])
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH_ROWS)):
        connection.execute(statement, batch)


def _insert_participations(
    connection: Connection, run_id: int, records: Iterable[RoundRecord]
) -> None:
    """Insert a row a client: most of what is written, so past SQLAlchemy's per-value work.

    The values are those that the columns' types would bind.
    """
    columns = ", ".join(column.name for column in ParticipationRow.__table__.columns)
    mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    marks = ", ".join([mark] * len(ParticipationRow.__table__.columns))
    rows = chain.from_iterable(_participation_rows(run_id, record) for record in records)
    statement = f"INSERT INTO participations ({columns}) VALUES ({marks})"  # noqa: S608 - names of our own columns
    while batch := list(islice(rows, _BATCH_ROWS)):
        connection.exec_driver_sql(statement, batch)


def _participation_rows(run_id: int, record: RoundRecord) -> Iterable[tuple[object, ...]]:
    """Return the rows of one round, put together by ``zip`` alone."""
    each = record.participations
    reasons = [""] * len(each)
    for place, reason in each.reasons.items():
        reasons[place] = plain(reason)
    return zip(
        repeat(run_id),
        repeat(record.round_num),
        range(len(each)),
        each.client_ids.tolist(),
        each.codes.tolist(),
        _with_nulls(each.durations_s),
        each.num_examples.tolist(),
        _with_nulls(each.losses),
        reasons,
        strict=False,  # the repeated ones have no end
    )


def _with_nulls(column: NDArray[np.float64]) -> list[float | None]:
    """Return the numbers, ``None`` for NaN."""
    missing = np.isnan(column)
    if not missing.any():
        return cast("list[float | None]", column.tolist())
    return [None if value != value else value for value in column.tolist()]  # noqa: PLR0124 - NaN


def _participations(session: Session, run_id: int) -> defaultdict[int, list[Participation]]:
    row = ParticipationRow
    found: defaultdict[int, list[Participation]] = defaultdict(list)
    for round_num, client_id, status, duration_s, num_examples, loss, reason in session.execute(
        select(
            row.round_num,
            row.client_id,
            row.status,
            row.duration_s,
            row.num_examples,
            row.loss,
            row.reason,
        )
        .where(row.run_id == run_id)
        .order_by(row.round_num, row.position)
    ):
        found[round_num].append(
            Participation(ClientId(client_id), status, duration_s, num_examples, loss, reason)
        )
    return found


def _counts(session: Session, run_id: int, *, first: int) -> defaultdict[int, dict[Status, int]]:
    row = ParticipationRow
    found: defaultdict[int, dict[Status, int]] = defaultdict(lambda: dict.fromkeys(Status, 0))
    for round_num, status, count in session.execute(
        select(row.round_num, row.status, func.count())
        .where(row.run_id == run_id, row.round_num >= first)
        .group_by(row.round_num, row.status)
    ):
        found[round_num][status] = count
    return found


def _metrics(session: Session, run_id: int, *, first: int) -> defaultdict[int, dict[str, float]]:
    row = MetricRow
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for round_num, name, value in session.execute(
        select(row.round_num, row.name, row.value).where(
            row.run_id == run_id, row.round_num >= first
        )
    ):
        found[round_num][name] = value
    return found
