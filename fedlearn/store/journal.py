"""The journal of a deployed run's open rounds, in the store's database."""

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from fedlearn.errors import StoreError
from fedlearn.rounds.journal import OpenRound
from fedlearn.rounds.records import RunStatus
from fedlearn.store.runs import Database, Guard, find_run_id
from fedlearn.store.schema import OpenRoundRow, RunRow, build_record, build_row


class StoredJournal:
    """A :class:`fedlearn.rounds.journal.RoundJournal` for the run called ``name``.

    Raises:
        StoreError: There is no such run, or the database cannot be read.
    """

    def __init__(self, database: Database, name: str, *, guard: Guard) -> None:
        self._database = database
        self._guard = guard
        with database.reading() as session:
            self._run_id = find_run_id(session, name)

    def find(self, round_num: int, attempt: int) -> OpenRound | None:
        """Return the round as it was opened."""
        with self._database.reading() as session:
            return self._find(session, round_num, attempt)

    def open(self, opened: OpenRound) -> None:
        """Record a round as open and mark the run as running, in one transaction.

        It must be one transaction: a coordinator that finds the run running resumes the attempts in
        the journal, and one that finds it failed starts new attempts.
        """
        with self._database.writing() as session:
            self._guard(session)
            known = self._find(session, opened.round_num, opened.attempt)
            if known is not None and known.cohort != opened.cohort:
                raise StoreError(
                    f"round {opened.round_num}, attempt {opened.attempt}, is open with another "
                    f"cohort: {len(known.cohort)} clients, not these {len(opened.cohort)}; use "
                    "the cohort in the journal"
                )
            # A retry after a commit whose answer was lost.
            if known is not None:
                return
            session.add(build_row(OpenRoundRow, opened, run_id=self._run_id))
            session.execute(
                update(RunRow)
                .where(RunRow.id == self._run_id)
                .values(status=RunStatus.RUNNING, error="")
            )

    def last(self) -> OpenRound | None:
        """Return the latest attempt of the latest round."""
        with self._database.reading() as session:
            row = session.scalar(
                select(OpenRoundRow)
                .where(OpenRoundRow.run_id == self._run_id)
                .order_by(OpenRoundRow.round_num.desc(), OpenRoundRow.attempt.desc())
                .limit(1)
            )
            return None if row is None else build_record(row, OpenRound)

    def forget(self, before_round: int) -> None:
        """Remove the rounds before ``before_round``."""
        with self._database.writing() as session:
            self._guard(session)
            mine = OpenRoundRow.run_id == self._run_id
            session.execute(delete(OpenRoundRow).where(mine, OpenRoundRow.round_num < before_round))

    def _find(self, session: Session, round_num: int, attempt: int) -> OpenRound | None:
        row = session.get(OpenRoundRow, (self._run_id, round_num, attempt))
        return None if row is None else build_record(row, OpenRound)
